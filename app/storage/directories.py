"""Folders that are written: what is in them is looked at and replaced under a lock.

The lock is on the folder itself, so that it leaves no file about, and ends with the process.
"""

import errno
import fcntl
import os
import random
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, Self

_FOLDER: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY
_FILE: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
_PATIENCE_S: Final = 30.0
_PAUSE_S: Final = 0.01


class Directory:
    """An open folder."""

    def __init__(self, path: bytes, fd: int) -> None:
        self.path = path
        self.fd = fd

    @classmethod
    @contextmanager
    def opened(cls, path: bytes) -> Iterator[Self]:
        """Open the folder *path*, which links may lead to."""
        fd = os.open(path, _FOLDER)
        try:
            yield cls(path, fd)
        finally:
            os.close(fd)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep all others who lock the folder out; files in it can be read and made all the same.

        Raises: `TimeoutError`, `OSError` where the file system has no such locks.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while not try_lock(self.fd):
            if time.monotonic() > deadline:
                raise TimeoutError("another writer does not let go of the folder")
            time.sleep(random.uniform(0, _PAUSE_S))  # noqa: S311  it keeps nothing secret
        try:
            yield
        finally:
            fcntl.flock(self.fd, fcntl.LOCK_UN)

    def look(self, name: bytes) -> os.stat_result | None:
        """Look at the file *name*.

        Raises: `IsADirectoryError` where no file is, but something else.
        """
        try:
            status = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(status.st_mode):
            raise _no_file(name)
        return status

    def has(self, name: bytes) -> bool:
        """Tell whether anything is called *name*, be it a link that leads nowhere."""
        try:
            os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    @contextmanager
    def reading(self, name: bytes) -> Iterator[int]:
        """Open the file *name*."""
        fd = os.open(name, _FILE, dir_fd=self.fd)
        try:
            yield fd
        finally:
            os.close(fd)

    def sync(self) -> None:
        """Make the names in it durable."""
        os.fsync(self.fd)


def make_folders(folder: bytes, names: list[bytes]) -> None:
    """Make the folders *names*, one in the other, below *folder*, and make that durable."""
    for name in names:
        above, folder = folder, folder + b"/" + name
        if not os.path.isdir(folder):  # noqa: PTH112  paths are bytes
            with suppress(FileExistsError):
                os.mkdir(folder)  # noqa: PTH102
            with Directory.opened(above) as opened:
                opened.sync()


def remove_empty_folders(folder: bytes, names: Sequence[bytes]) -> None:
    """Remove the innermost of the folders *names* and those around it that are empty as well.

    *folder*, which they are in, stays, and so does a link. What was removed is durable.
    """
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
    """Make it durable that something is gone from the folders *names*, of which some may be gone.

    Raises: `FileNotFoundError` if *folder*, which they are in, is gone too.
    """
    while True:
        try:
            with Directory.opened(b"/".join((folder, *names)) or b"/") as directory:
                return directory.sync()
        except (FileNotFoundError, NotADirectoryError):
            if not names:
                raise
        names = names[:-1]


def try_lock(fd: int) -> bool:
    """Lock an open file or folder unless somebody else has."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _no_file(name: bytes) -> IsADirectoryError:
    return IsADirectoryError(errno.EISDIR, "no file", os.fsdecode(name))
