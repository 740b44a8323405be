"""Files and folders of objects: names, versions, errors, locks, temporary files, durable changes.

The lock is on the folder itself, so that it leaves no file behind, and ends with the process.
"""

import errno
import fcntl
import os
import random
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import batched
from typing import Final, Self
from urllib.parse import unquote_to_bytes

from app.errors import (
    BadKeyError,
    ConflictError,
    StorageDeniedError,
    StorageTimeoutError,
    StorageUnavailableError,
    UnwritableError,
)
from app.model import ETag, ObjectRef
from app.storage.contract import TEMPORARY

NOT_FOUND: Final = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ENXIO}
"""Error numbers that mean that there is no such file."""

_DENIED: Final = {errno.EACCES, errno.EPERM}
_IN_THE_WAY: Final = {errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST}


@contextmanager
def translated(ref: ObjectRef) -> Iterator[None]:
    """Raise `StorageError` in place of `OSError`."""
    try:
        yield
    except TimeoutError as error:
        raise StorageTimeoutError(ref, str(error) or "the disk is silent") from error
    except OSError as error:
        reason = error.strerror or type(error).__name__
        if error.errno in _DENIED:
            raise StorageDeniedError(ref, reason) from error
        raise StorageUnavailableError(ref, reason, lasting=True) from error


@contextmanager
def translated_write(ref: ObjectRef) -> Iterator[None]:
    """Raise the error of a write in place of `OSError`."""
    with translated(ref):
        try:
            yield
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise BadKeyError(f"{ref.key!r} is too long for a file name") from error
            if error.errno in _IN_THE_WAY:
                raise ConflictError(f"{ref}: a file or folder is in the way") from error
            if error.errno == errno.EROFS:
                raise UnwritableError(f"{ref}: {error.strerror}") from error
            raise


def check_folder(root: ObjectRef) -> None:
    """Return if the folder that is the bucket of *root* exists. Raises: `StorageError`."""
    with translated(root):
        os.close(os.open(folder_of(root.bucket), os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY))


@lru_cache(maxsize=1024)
def folder_of(bucket: str) -> bytes:
    """Return the path of the folder that is the bucket."""
    return unquote_to_bytes(bucket.partition("://")[2])


def name_of(key: str) -> bytes | None:
    """Return the path of *key* in its folder, `None` if it can name no file there."""
    if "\0" in key or (key and any(part in ("", ".", "..") for part in key.split("/"))):
        return None
    try:
        return key.encode()
    except UnicodeEncodeError:
        return None


def file_version(status: os.stat_result) -> ETag:
    """Return the version of a file, made of its inode, size and modification time in ns."""
    return ETag(f'"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"')


def object_store_version(status: os.stat_result) -> ETag:
    """Return the ETag that object_store, so Icechunk too, gives to a local file."""
    modified_us = max(0, status.st_mtime_ns // 1000)
    return ETag(f'"{status.st_ino:x}-{modified_us:x}-{status.st_size:x}"')


_FOLDER: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY
_FILE: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
_NEW: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_UNNAMED: Final = os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC
_LOCK_TIMEOUT_S: Final = 30.0
_PAUSE_S: Final = 0.01
_PREFIX: Final = TEMPORARY.encode()
_NO_UNNAMED: Final = {
    errno.EISDIR,
    errno.EINVAL,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EPERM,  # ext4, of a folder that has been removed
}
_NO_LINKS: Final = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.ENOENT}
_IOV_MAX: Final = 1024
_COARSE_NS: Final = 2 * 10**9
"""A step that file systems with times in whole or every other second can represent."""


class Folder:
    """An open folder."""

    def __init__(self, path: bytes, fd: int) -> None:
        self.path = path
        self.fd = fd

    @classmethod
    @contextmanager
    def opened(cls, path: bytes) -> Iterator[Self]:
        """Open the folder *path*, following links; an empty path is the root."""
        fd = os.open(path or b"/", _FOLDER)
        try:
            yield cls(path, fd)
        finally:
            os.close(fd)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the advisory lock of the folder; raise `OSError` if there are no such locks."""
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while not try_lock(self.fd):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the folder was locked for {_LOCK_TIMEOUT_S:g} s")
            time.sleep(random.uniform(0, _PAUSE_S))  # noqa: S311  not a secret
        try:
            yield
        finally:
            fcntl.flock(self.fd, fcntl.LOCK_UN)

    def status(self, name: bytes) -> os.stat_result | None:
        """Return the status of a regular file, `None` if absent; raise `IsADirectoryError` else."""
        try:
            status = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, "not a regular file", os.fsdecode(name))
        return status

    def has(self, name: bytes) -> bool:
        try:
            os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    @contextmanager
    def reading(self, name: bytes) -> Iterator[int]:
        fd = os.open(name, _FILE, dir_fd=self.fd)
        try:
            yield fd
        finally:
            os.close(fd)

    def sync(self) -> None:
        os.fsync(self.fd)

    def sweep(self) -> None:
        """Remove the temporary files of writers that have died."""
        with os.scandir(self.fd) as entries:
            names = [os.fsencode(entry.name) for entry in entries]
        for name in names:
            if name.startswith(_PREFIX):
                with suppress(OSError), self.reading(name) as fd:
                    if try_lock(fd):
                        os.unlink(name, dir_fd=self.fd)


class NewFile:
    """A temporary file, open for writing."""

    def __init__(self, folder: Folder, fd: int) -> None:
        self.folder = folder
        self.fd = fd

    def set_time(self, old: os.stat_result | None) -> None:
        """Set the modification time to now, and later than *old*: inode numbers are reused."""
        before_ns = 0 if old is None else old.st_mtime_ns
        now_ns = max(time.time_ns(), before_ns + 1)
        os.utime(self.fd, ns=(now_ns, now_ns))
        if old is not None and self.status().st_mtime_ns <= before_ns:
            later_ns = before_ns + _COARSE_NS
            os.utime(self.fd, ns=(later_ns, later_ns))

    def status(self) -> os.stat_result:
        return os.fstat(self.fd)

    def link(self, name: bytes) -> bool | None:
        """Link the file to a name; return whether it was free, `None` if links are impossible."""
        source = b"/proc/self/fd/%d" % self.fd
        try:
            os.link(source, name, dst_dir_fd=self.folder.fd, follow_symlinks=True)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return None
        return True


class UnnamedFile(NewFile):
    """A temporary file without a name; it vanishes unless it is linked."""

    @classmethod
    @contextmanager
    def made(cls, folder: Folder) -> Iterator[Self | None]:
        """Create a file in *folder*; `None` if the file system has no unnamed files."""
        try:
            fd = os.open(b".", _UNNAMED, 0o666, dir_fd=folder.fd)
        except OSError as error:
            if error.errno not in _NO_UNNAMED:
                raise
            yield None
            return
        try:
            yield cls(folder, fd)
        finally:
            os.close(fd)

    def write(self, pieces: Sequence[bytes]) -> None:
        """Write all of *pieces*; a system call may write less."""
        for some in batched(pieces, _IOV_MAX):
            left = sum(map(len, some)) - os.writev(self.fd, some)
            rest = memoryview(b"".join(some) if left else b"")[-left:]
            while rest:
                rest = rest[os.write(self.fd, rest) :]


class NamedFile(NewFile):
    """A temporary file that replaces another one; it is locked while its writer lives."""

    def __init__(self, folder: Folder, name: bytes, fd: int) -> None:
        super().__init__(folder, fd)
        self.name = name

    @classmethod
    @contextmanager
    def made(cls, folder: Folder) -> Iterator[Self]:
        """Create a file in *folder*, which is removed unless it was renamed."""
        new = cls._make(folder)
        try:
            yield new
        finally:
            try:
                with suppress(FileNotFoundError):
                    os.unlink(new.name, dir_fd=folder.fd)
            finally:
                os.close(new.fd)

    @classmethod
    def _make(cls, folder: Folder) -> Self:
        """Create and lock a file, again if a sweep removed it before it was locked."""
        while True:
            name = _PREFIX + secrets.token_hex(8).encode()
            fd = os.open(name, _NEW, 0o666, dir_fd=folder.fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                if os.fstat(fd).st_nlink:
                    return cls(folder, name, fd)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def rename(self, name: bytes) -> None:
        os.rename(self.name, name, src_dir_fd=self.folder.fd, dst_dir_fd=self.folder.fd)


def make_folders(folder: bytes, names: list[bytes]) -> None:
    """Create the nested folders *names* below *folder*, durably."""
    for name in names:
        above, folder = folder, folder + b"/" + name
        if not os.path.isdir(folder):  # noqa: PTH112  paths are bytes
            with suppress(FileExistsError):
                os.mkdir(folder)  # noqa: PTH102
            with Folder.opened(above) as opened:
                opened.sync()


def remove_empty_folders(folder: bytes, names: Sequence[bytes]) -> None:
    """Remove the innermost of nested folders, and its parents that are then empty, durably."""
    while names:
        try:
            os.rmdir(b"/".join((folder, *names)))  # noqa: PTH106
        except FileNotFoundError:  # removed by another process
            pass
        except OSError:  # most often not empty
            break
        names = names[:-1]
    sync_nearest(folder, names)


def sync_nearest(folder: bytes, names: Sequence[bytes]) -> None:
    """Make a removal in nested folders durable; raise `FileNotFoundError` if *folder* is gone."""
    while True:
        try:
            with Folder.opened(b"/".join((folder, *names))) as opened:
                return opened.sync()
        except (FileNotFoundError, NotADirectoryError):
            if not names:
                raise
        names = names[:-1]


def remove_if_empty(path: bytes) -> bool:
    """Remove a folder of only folders and temporary files; raise `OSError` for one in use."""
    folders = [path]
    for folder in folders:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif not entry.name.startswith(_PREFIX):
                    return False
    for folder in reversed(folders):
        with Folder.opened(folder) as opened:
            opened.sweep()
        os.rmdir(folder)  # noqa: PTH106  paths are bytes
    return True


def try_lock(fd: int) -> bool:
    """Lock an open file or folder; return `False` if it is locked already."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
