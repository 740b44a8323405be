"""Files that are not finished.

What is new has no name until it is whole, where the file system knows such files. All others have
names of ours, and are locked by who writes them, as long as that lives.
"""

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import batched
from typing import Final, Self

from app.storage.contract import TEMPORARY
from app.storage.directories import Directory, try_lock

_NEW: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_PREFIX: Final = TEMPORARY.encode()
_UNNAMED: Final = os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC
_NONE_UNNAMED: Final = {
    errno.EISDIR,
    errno.EINVAL,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EPERM,  # ext4, of a folder that has been removed
}
_NO_LINKS: Final = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.ENOENT}
_WRITTEN_AT_ONCE: Final = 1024
"""No call of the system takes more pieces."""
_COARSE_NS: Final = 2 * 10**9
"""File systems that count whole seconds, some of them every other, see this as later."""


class NewFile:
    """A new file, open for writing."""

    def __init__(self, directory: Directory, fd: int) -> None:
        self.directory = directory
        self.fd = fd

    def date(self, old: os.stat_result | None) -> None:
        """Give it a time of its own, after that of *old*.

        Numbers of files are used again; no two that have been under one name get the same version.
        """
        before_ns = 0 if old is None else old.st_mtime_ns
        now_ns = max(time.time_ns(), before_ns + 1)
        os.utime(self.fd, ns=(now_ns, now_ns))
        if old is not None and self.status().st_mtime_ns <= before_ns:
            later_ns = before_ns + _COARSE_NS
            os.utime(self.fd, ns=(later_ns, later_ns))

    def status(self) -> os.stat_result:
        """Look at the file."""
        return os.fstat(self.fd)

    def link(self, name: bytes) -> bool | None:
        """Give it the name *name* if no file has that, which takes no lock.

        Tells whether it has it; `None` where it cannot be given any.
        """
        source, folder = b"/proc/self/fd/%d" % self.fd, self.directory.fd
        try:
            os.link(source, name, dst_dir_fd=folder, follow_symlinks=True)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return None
        return True


class UnnamedFile(NewFile):
    """A file that is gone in the end unless it was given a name."""

    @classmethod
    @contextmanager
    def made(cls, directory: Directory) -> Iterator[Self | None]:
        """Make a file in *directory*; `None` where there are no files without names."""
        try:
            fd = os.open(b".", _UNNAMED, 0o666, dir_fd=directory.fd)
        except OSError as error:
            if error.errno not in _NONE_UNNAMED:
                raise
            yield None
            return
        try:
            yield cls(directory, fd)
        finally:
            os.close(fd)

    def write(self, pieces: Sequence[bytes]) -> None:
        """Write all of *pieces*; one call of the system may take less."""
        for some in batched(pieces, _WRITTEN_AT_ONCE):
            left = sum(map(len, some)) - os.writev(self.fd, some)
            rest = memoryview(b"".join(some) if left else b"")[-left:]
            while rest:
                rest = rest[os.write(self.fd, rest) :]


class NamedFile(NewFile):
    """A file that is to take the name of another one."""

    def __init__(self, directory: Directory, name: bytes, fd: int) -> None:
        super().__init__(directory, fd)
        self.name = name

    @classmethod
    @contextmanager
    def made(cls, directory: Directory) -> Iterator[Self]:
        """Make a file in *directory*, which is gone in the end unless it was renamed."""
        new = cls._make(directory)
        try:
            yield new
        finally:
            try:
                with suppress(FileNotFoundError):
                    os.unlink(new.name, dir_fd=directory.fd)
            finally:
                os.close(new.fd)

    @classmethod
    def _make(cls, directory: Directory) -> Self:
        """Make and lock; whoever cleans up may have been faster, so that there is no name left."""
        while True:
            name = _PREFIX + secrets.token_hex(8).encode()
            fd = os.open(name, _NEW, 0o666, dir_fd=directory.fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                if os.fstat(fd).st_nlink:
                    return cls(directory, name, fd)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def rename(self, name: bytes) -> None:
        """Put it in the place of *name*."""
        os.rename(self.name, name, src_dir_fd=self.directory.fd, dst_dir_fd=self.directory.fd)


def sweep(directory: Directory) -> None:
    """Remove the files of writers that live no more."""
    with os.scandir(directory.fd) as entries:
        names = [name for entry in entries if (name := os.fsencode(entry.name)).startswith(_PREFIX)]
    for name in names:
        with suppress(OSError), directory.reading(name) as fd:
            if try_lock(fd):
                os.unlink(name, dir_fd=directory.fd)


def remove_if_empty(path: bytes) -> bool:
    """Remove the folder *path* if no file but unfinished ones is below; stop at the first that is.

    Raises: `OSError` where one of these is being written, or *path* is no folder.
    """
    folders = [path]
    for folder in folders:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif not entry.name.startswith(_PREFIX):
                    return False
    for folder in reversed(folders):
        with Directory.opened(folder) as directory:
            sweep(directory)
        os.rmdir(folder)  # noqa: PTH106  paths are bytes
    return True
