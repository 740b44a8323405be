"""Atomic and durable writes of files: at any moment a name has the old file or the new one.

A new file is made durable under a temporary name. It gets its name under a lock of the folder, if
the old file is in the expected version. The lock is on the folder itself, so that it leaves no file
behind, and ends with the process. Links are followed where reads follow them: their target is
replaced or removed.

A folder is removed with its last file, and an empty one is replaced by a file of its name. A writer
whose folder was removed before it has put a file there creates it again.
"""

import errno
import fcntl
import os
import random
import secrets
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Self

from cachetools import TTLCache

from shardgate.errors import BadKeyError, ConflictError, RangeNotSatisfiedError, UnwritableError
from shardgate.model import ByteRange, ETag, ObjectRef, Piece
from shardgate.storage.contract import CONFLICT, TEMPORARY, Absent, Conflict, Expected
from shardgate.storage.local_files import (
    LEADS_OUT,
    check_folder,
    coded_ending,
    file_version,
    folder_of,
    may_lead,
    name_of,
    path_of,
    translated,
)

_TRIES: Final = 32  # of a write whose folder others remove or create at the same time
_COPY_NBYTES: Final = 1024**2
_LOCK_TIMEOUT_S: Final = 30.0
_PREFIX: Final = TEMPORARY.encode()


class LocalWriter:
    """Writes files; its methods block."""

    def __init__(self) -> None:
        self._swept: TTLCache[bytes, bool] = TTLCache(4096, ttl=60)
        self._lock = threading.Lock()

    def put(self, ref: ObjectRef, pieces: Sequence[Piece], expected: Expected) -> ETag | Conflict:
        tries = 0
        with translated(ref, is_write=True):
            while True:
                tries += 1
                try:
                    return self._put(ref, pieces, expected)
                except FileNotFoundError:
                    if isinstance(expected, str):
                        check_folder(ref)  # an unmounted disk is not absence
                        return CONFLICT
                    if tries == _TRIES:
                        raise
                except IsADirectoryError:
                    with suppress(FileNotFoundError):  # removed by another process
                        if tries == _TRIES or not _remove_if_empty(_path(ref)):
                            raise

    def _put(self, ref: ObjectRef, pieces: Sequence[Piece], expected: Expected) -> ETag | Conflict:
        path = _path(ref)
        with _place(ref.bucket, path, is_new=not isinstance(expected, str)) as (folder, name):
            self._sweep(folder)
            old = folder.status(name)
            if old is None:
                _check_plain(ref, path)
            if not _is_as_expected(old, expected):
                return CONFLICT
            with NewFile.made(folder) as new:
                if not new.fill(ref, name, pieces, expected):
                    return CONFLICT
                if old is not None:
                    os.fchmod(new.fd, stat.S_IMODE(old.st_mode))
                new.set_time(old)
                os.fsync(new.fd)  # before the rename, which may reach the disk earlier
                return new.swap(name, expected)

    def remove(self, ref: ObjectRef, expected: ETag | None) -> bool | Conflict:
        root = folder_of(ref.bucket)
        path = _path(ref)
        *folders, _ = path.removeprefix(root + b"/").split(b"/")
        is_removed = False
        with translated(ref, is_write=True):
            try:
                with _place(ref.bucket, path, is_new=False) as (folder, name):
                    with folder.locked():
                        old = folder.status(name)
                        if old is None:
                            _check_plain(ref, path)
                        if not _is_as_expected(old, expected):
                            return CONFLICT
                        if old is not None:
                            os.unlink(name, dir_fd=folder.fd)
                            is_removed = True
                    os.fsync(folder.fd)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                check_folder(ref)  # an unmounted disk is not absence
                if expected is not None:
                    return CONFLICT
            _settle(root, folders, removes=is_removed)
        return True

    def _sweep(self, folder: "Folder") -> None:
        with self._lock:
            if folder.path in self._swept:
                return
            self._swept[folder.path] = True
        folder.sweep()


def verify_locks(root: ObjectRef) -> None:
    """Return if the folder of *root* can be locked, and files be created there."""
    check_folder(root)
    path = os.path.realpath(folder_of(root.bucket) + b"/" + (name_of(root.key.rstrip("/")) or b""))
    while not os.path.isdir(path):  # noqa: PTH112  paths are bytes
        path = os.path.dirname(path)  # noqa: PTH120
    with translated(root, is_write=True), Folder.opened(path, root.bucket) as folder:
        try:
            # The lock belongs to the open folder: opened twice, it stands for another process.
            with folder.locked(), Folder.opened(path) as other:
                is_exclusive = not _try_lock(other.fd)
        except (PermissionError, TimeoutError):
            raise
        except OSError as error:
            reason = f"the file system cannot lock folders: {error.strerror}"
            raise UnwritableError(f"{root}: {reason}") from error
        if not is_exclusive:
            raise UnwritableError(f"{root}: locks of the file system are not exclusive")
        with NewFile.made(folder):
            pass


@dataclass(frozen=True, slots=True)
class Folder:
    """An open folder."""

    path: bytes
    fd: int

    @classmethod
    @contextmanager
    def opened(cls, path: bytes, bucket: str | None = None) -> Iterator[Self]:
        """Open the folder *path*, following links; an empty path is the root.

        Raise `PermissionError` if links in *bucket* may not lead there. Links that change
        afterwards do not matter to work in the open folder.
        """
        fd = os.open(path or b"/", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
        try:
            if bucket is not None and not may_lead(bucket, path_of(fd)):
                raise PermissionError(errno.EACCES, LEADS_OUT)
            yield cls(path, fd)
        finally:
            os.close(fd)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the advisory lock of the folder; raise `OSError` if there are no such locks."""
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while not _try_lock(self.fd):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the folder was locked for {_LOCK_TIMEOUT_S:g} s")
            time.sleep(random.uniform(0, 0.01))  # noqa: S311  not a secret
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

    @contextmanager
    def reading(self, name: bytes) -> Iterator[int]:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
        fd = os.open(name, flags, dir_fd=self.fd)
        try:
            yield fd
        finally:
            os.close(fd)

    def sweep(self) -> None:
        """Remove the temporary files of writers that have died."""
        with os.scandir(self.fd) as entries:
            names = [os.fsencode(entry.name) for entry in entries]
        for name in names:
            if name.startswith(_PREFIX):
                with suppress(OSError), self.reading(name) as fd:
                    if _try_lock(fd):  # a writer that lives holds it
                        os.unlink(name, dir_fd=self.fd)


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file with a temporary name, open for writing; it is locked while its writer lives."""

    folder: Folder
    name: bytes
    fd: int

    @classmethod
    @contextmanager
    def made(cls, folder: Folder) -> Iterator[Self]:
        """Create a file in *folder*, whose temporary name is removed at the end."""
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
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        while True:
            name = _PREFIX + secrets.token_hex(8).encode()
            fd = os.open(name, flags, 0o666, dir_fd=folder.fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                if os.fstat(fd).st_nlink:  # not swept
                    return cls(folder, name, fd)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def set_time(self, old: os.stat_result | None) -> None:
        """Set the modification time to now, and later than *old*: inode numbers are reused."""
        before_ns = 0 if old is None else old.st_mtime_ns
        now_ns = max(time.time_ns(), before_ns + 1)
        os.utime(self.fd, ns=(now_ns, now_ns))
        if old is not None and os.fstat(self.fd).st_mtime_ns <= before_ns:
            later_ns = before_ns + 2 * 10**9  # of file systems that keep every other second only
            os.utime(self.fd, ns=(later_ns, later_ns))

    def link(self, name: bytes) -> bool:
        """Link the file to *name* unless that exists; return whether it did not.

        Programs without locks may create a file of that name at any moment. Where links are
        impossible it is renamed.
        """
        folder = self.folder.fd
        try:
            os.link(self.name, name, src_dir_fd=folder, dst_dir_fd=folder)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}:
                raise
            self.rename(name)
        return True

    def rename(self, name: bytes) -> None:
        os.rename(self.name, name, src_dir_fd=self.folder.fd, dst_dir_fd=self.folder.fd)

    def fill(
        self, ref: ObjectRef, name: bytes, pieces: Sequence[Piece], expected: Expected
    ) -> bool:
        """Write *pieces*; return whether *name*, which ranges refer to, is as *expected*."""
        with ExitStack() as stack:
            target = stack.enter_context(open(self.fd, "wb", _COPY_NBYTES, closefd=False))
            source = None
            for piece in pieces:
                if isinstance(piece, bytes):
                    target.write(piece)
                    continue
                if source is None:
                    try:
                        source = stack.enter_context(self.folder.reading(name))
                    except FileNotFoundError:
                        return False
                    if file_version(os.fstat(source)) != expected:
                        return False
                target.writelines(_read(ref, source, piece))
        return True

    def swap(self, name: bytes, expected: Expected) -> ETag | Conflict:
        """Rename the file to *name*, durably, if the old one is still as *expected*."""
        with self.folder.locked():
            old = self.folder.status(name)
            if not _is_as_expected(old, expected):
                return CONFLICT
            # Another writer may have replaced it since the time was set.
            if old is not None and old.st_mtime_ns >= os.fstat(self.fd).st_mtime_ns:
                self.set_time(old)
                os.fsync(self.fd)
            if not isinstance(expected, Absent):
                self.rename(name)
            elif not self.link(name):
                return CONFLICT
        os.fsync(self.folder.fd)
        return file_version(os.fstat(self.fd))


def _path(ref: ObjectRef) -> bytes:
    if not (name := name_of(ref.key)):
        raise BadKeyError(f"{ref.key!r} cannot be the name of a file")
    return folder_of(ref.bucket) + b"/" + name


@contextmanager
def _place(bucket: str, wanted: bytes, *, is_new: bool) -> Iterator[tuple[Folder, bytes]]:
    """Open the folder of the file *wanted*, and return its name; create the folder if *is_new*."""
    path = wanted
    if os.path.islink(wanted):  # noqa: PTH114  paths are bytes
        path = os.path.realpath(wanted)
    above, _, name = path.rpartition(b"/")
    if is_new and not os.path.isdir(above):  # noqa: PTH112
        _make_folders(bucket, wanted)
    with Folder.opened(above, bucket) as folder:
        yield folder, name


def _check_plain(ref: ObjectRef, path: bytes) -> None:
    """Raise `ConflictError` if a coded file is in place of *path*, which a plain one would hide."""
    if ending := coded_ending(path):
        raise ConflictError(f"{ref}: is stored as {ref.key}{ending}; write or delete that key")


def _is_as_expected(old: os.stat_result | None, expected: Expected) -> bool:
    if not isinstance(expected, str):
        return expected is None or old is None
    return old is not None and file_version(old) == expected


def _read(ref: ObjectRef, source: int, piece: ByteRange) -> Iterator[bytes]:
    at = piece.start
    while at < piece.stop:
        if not (data := os.pread(source, min(piece.stop - at, _COPY_NBYTES), at)):
            raise RangeNotSatisfiedError(ref, os.fstat(source).st_size)
        yield data
        at += len(data)


def _make_folders(bucket: str, path: bytes) -> None:
    """Create the folders of the file *path*, durably."""
    above = folder_of(bucket)
    for name in path.removeprefix(above + b"/").split(b"/")[:-1]:
        folder = above + b"/" + name
        if not os.path.isdir(folder):  # noqa: PTH112  paths are bytes
            with Folder.opened(above, bucket) as opened:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=opened.fd)
                os.fsync(opened.fd)
        above = folder


def _settle(folder: bytes, names: Sequence[bytes], *, removes: bool) -> None:
    """Make a removal in nested folders durable, of another process too.

    Empty folders are removed if *removes*, the innermost first. Raises: `FileNotFoundError` if
    *folder* is gone.
    """
    while True:
        path = b"/".join((folder, *names))
        try:
            if not (removes and names):
                with Folder.opened(path) as opened:
                    return os.fsync(opened.fd)
            os.rmdir(path)  # noqa: PTH106
        except (FileNotFoundError, NotADirectoryError):  # removed by another process
            if not names:
                raise
        except OSError:
            if not removes:
                raise
            removes = False  # most often not empty
            continue
        names = names[:-1]


def _remove_if_empty(path: bytes) -> bool:
    """Remove a folder of only folders and temporary files; raise `OSError` for one in use."""
    folders = [path]
    for folder in folders:  # grows while it is walked
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


def _try_lock(fd: int) -> bool:
    """Lock an open file or folder; return `False` if it is locked already."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
