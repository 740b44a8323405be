"""Replaces files by compare-and-swap, so that whatever happens there is the old one or the new.

A new file is written and made durable, and then gets its name: under a lock of the folder, if the
old file still is in the version that was expected. Where there is none that takes no lock. Links
are followed: what is replaced or removed is what they lead to.

A folder is removed with its last file, and an empty one gives way to a file of its name. A writer
whose folder is removed before it has put a file there makes it again.
"""

import errno
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import BinaryIO, Final, NamedTuple

from cachetools import TTLCache

from app.errors import BadKeyError, RangeNotSatisfiedError, UnwritableError
from app.model import ByteRange, ETag, ObjectRef, Piece
from app.storage.contract import CONFLICT, Absent, Conflict, Expected
from app.storage.directories import (
    Directory,
    make_folders,
    remove_empty_folders,
    sync_nearest,
    try_lock,
)
from app.storage.local_creating import Created, New, create_each
from app.storage.local_names import folder_of, name_of, reach, translated_write
from app.storage.temporary_files import NamedFile, remove_if_empty, sweep
from app.storage.warm_files import file_version
from app.storage.writes import is_as_expected

_TRIES: Final = 32
"""Attempts of a write whose folder is removed or made by others at the same time."""
_SWEPT: Final = 4096
_SWEEP_S: Final = 60
_BUFFER_BYTES: Final = 128 * 1024
_COPY_BYTES: Final = 1024**2
_NO_COPY: Final = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}


class LocalWriter:
    """Writes files; its methods wait for the disk."""

    def __init__(self) -> None:
        self._swept: TTLCache[bytes, bool] = TTLCache(_SWEPT, _SWEEP_S)
        self._lock = threading.Lock()

    def create(self, wanted: Sequence[New]) -> list[Created]:
        """Do what `ObjectWriter.put` promises, for all of *wanted*; see `create_each`."""
        return create_each(wanted, self._sweep)

    def replace(
        self, ref: ObjectRef, pieces: Sequence[Piece], expected: Expected
    ) -> ETag | Conflict:
        """Do what `ObjectWriter.put` promises."""
        tries = 0
        with translated_write(ref):
            while True:
                tries += 1
                try:
                    return self._replace(ref, pieces, expected)
                except FileNotFoundError:
                    if isinstance(expected, str):
                        reach(ref)
                        return CONFLICT
                    if tries == _TRIES:
                        raise
                except IsADirectoryError:
                    with suppress(FileNotFoundError):  # removed by another process
                        if tries == _TRIES or not remove_if_empty(_path(ref)):
                            raise

    def _replace(
        self, ref: ObjectRef, pieces: Sequence[Piece], expected: Expected
    ) -> ETag | Conflict:
        with _place(ref, is_new=not isinstance(expected, str)) as place:
            self._sweep(place.directory)
            old = place.look()
            if not _is_as_expected(old, expected):
                return CONFLICT
            with NamedFile.made(place.directory) as new:
                if not _fill(ref, new.fd, pieces, place, expected):
                    return CONFLICT
                if old is not None:
                    os.fchmod(new.fd, stat.S_IMODE(old.st_mode))
                new.date(old)
                os.fsync(new.fd)
                return place.take(new, expected)

    def remove(self, ref: ObjectRef, expected: ETag | None) -> bool | Conflict:
        """Do what `ObjectWriter.delete` promises."""
        root = folder_of(ref.bucket)
        *folders, _ = _path(ref).removeprefix(root + b"/").split(b"/")
        with translated_write(ref):
            try:
                with _place(ref, is_new=False) as place:
                    removed = place.empty(expected)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                reach(ref)  # an unmounted disk is not absence
                removed = False if expected is None else CONFLICT
            if removed is True:
                remove_empty_folders(root, folders)
            elif removed is False:  # another process may be about to make that durable
                sync_nearest(root, folders)
        return CONFLICT if isinstance(removed, Conflict) else True

    def _sweep(self, directory: Directory) -> None:
        """Clean up in *directory*, once in a while."""
        with self._lock:
            if directory.path in self._swept:
                return
            self._swept[directory.path] = True
        sweep(directory)


def demand_locks(root: ObjectRef) -> None:
    """Raise unless the folder of *root* can be locked and files be made there."""
    reach(root)
    path = os.path.realpath(folder_of(root.bucket) + b"/" + (name_of(root.key.rstrip("/")) or b""))
    while not os.path.isdir(path):  # noqa: PTH112  paths are bytes
        path = os.path.dirname(path)  # noqa: PTH120
    with translated_write(root), Directory.opened(path) as directory:
        _demand_lock(root, path, directory)
        with NamedFile.made(directory):
            pass


def _demand_lock(root: ObjectRef, path: bytes, directory: Directory) -> None:
    try:
        with directory.locked(), Directory.opened(path) as other:
            keeps_out = not try_lock(other.fd)
    except (PermissionError, TimeoutError):
        raise
    except OSError as error:
        reason = f"the file system cannot lock folders: {error.strerror}"
        raise UnwritableError(f"{root}: {reason}") from error
    if not keeps_out:
        raise UnwritableError(f"{root}: the locks of the file system keep nobody out")


class _Place(NamedTuple):
    """The name of a file in its folder, where links have led."""

    directory: Directory
    name: bytes
    is_linked: bool

    def look(self) -> os.stat_result | None:
        return self.directory.look(self.name)

    def take(self, new: NamedFile, expected: Expected) -> ETag | Conflict:
        """Give the name to *new*."""
        with self.directory.locked():
            old = self.look()
            if not _is_as_expected(old, expected):
                return CONFLICT
            if old is not None and old.st_mtime_ns >= new.status().st_mtime_ns:
                new.date(old)
                os.fsync(new.fd)
            # Who makes a file takes no lock, so that there may be one by now.
            has_it = new.link(self.name) if old is None else None
            if has_it is False and isinstance(expected, Absent):
                return CONFLICT
            if not has_it:
                new.rename(self.name)
        self.directory.sync()
        return file_version(new.status())

    def empty(self, expected: ETag | None) -> bool | Conflict:
        """Remove the file, if there is one, and return whether there was."""
        with self.directory.locked():
            old = self.look()
            if not _is_as_expected(old, expected):
                return CONFLICT
            if old is not None:
                os.unlink(self.name, dir_fd=self.directory.fd)
        if self.is_linked:
            self.directory.sync()
        return old is not None


def _path(ref: ObjectRef) -> bytes:
    if not (name := name_of(ref.key)):
        raise BadKeyError(f"{ref.key!r} can be the name of no file")
    return folder_of(ref.bucket) + b"/" + name


@contextmanager
def _place(ref: ObjectRef, *, is_new: bool) -> Iterator[_Place]:
    """Open the folder in which the file of *ref* is, or is to be."""
    path = wanted = _path(ref)
    if is_linked := os.path.islink(wanted):  # noqa: PTH114  paths are bytes
        path = os.path.realpath(wanted)
    above, _, last = path.rpartition(b"/")
    with ExitStack() as stack:
        try:
            directory = stack.enter_context(Directory.opened(above or b"/"))
        except FileNotFoundError:
            if not is_new:
                raise
            folder = folder_of(ref.bucket)
            make_folders(folder, wanted.removeprefix(folder + b"/").split(b"/")[:-1])
            directory = stack.enter_context(Directory.opened(above or b"/"))
        yield _Place(directory, last, is_linked)


def _is_as_expected(old: os.stat_result | None, expected: Expected) -> bool:
    return is_as_expected(None if old is None else file_version(old), expected)


def _fill(
    ref: ObjectRef, fd: int, pieces: Sequence[Piece], place: _Place, expected: Expected
) -> bool:
    """Write *pieces*; tell whether what ranges are of is still in place."""
    with ExitStack() as stack:
        target = stack.enter_context(open(fd, "wb", _BUFFER_BYTES, closefd=False))
        source = None
        for piece in pieces:
            if isinstance(piece, bytes):
                target.write(piece)
                continue
            if source is None:
                try:
                    source = stack.enter_context(place.directory.reading(place.name))
                except FileNotFoundError:
                    return False
                if file_version(os.fstat(source)) != expected:
                    return False
            _copy(ref, source, target, piece)
    return True


def _copy(ref: ObjectRef, source: int, target: BinaryIO, piece: ByteRange) -> None:
    """Let the file system copy *piece*, which may share its blocks instead."""
    target.flush()
    at = piece.start
    while at < piece.stop:
        copied = _copied(source, target, at, piece.stop - at)
        if not copied:
            raise RangeNotSatisfiedError(ref, os.fstat(source).st_size)
        at += copied


def _copied(source: int, target: BinaryIO, at: int, nbytes: int) -> int:
    try:
        if copied := os.copy_file_range(source, target.fileno(), nbytes, offset_src=at):
            return copied
    except OSError as error:
        if error.errno not in _NO_COPY:
            raise
    data = os.pread(source, min(nbytes, _COPY_BYTES), at)
    target.write(data)
    target.flush()
    return len(data)
