"""Atomic and durable writes of files: at any moment a name has the old file or the new one.

A new file is written and made durable, and then gets its name. Where an old one may be replaced,
that happens under a lock of the folder, if the old one is in the expected version. Where there is
none no lock is taken. Links are followed: their target is replaced or removed.

A folder is removed with its last file, and an empty one is replaced by a file of its name. A writer
whose folder was removed before it has put a file there creates it again.
"""

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import BinaryIO, Final, NamedTuple

from cachetools import TTLCache

from app.errors import BadKeyError, RangeNotSatisfiedError, ShardgateError, UnwritableError
from app.model import ByteRange, ETag, ObjectRef, Piece
from app.storage.contract import CONFLICT, Absent, Conflict, Expected, is_as_expected
from app.storage.local_files import (
    Folder,
    NamedFile,
    UnnamedFile,
    check_folder,
    file_version,
    folder_of,
    make_folders,
    name_of,
    remove_empty_folders,
    remove_if_empty,
    sync_nearest,
    translated_write,
    try_lock,
)

_TRIES: Final = 32
_SWEPT: Final = 4096
_SWEEP_S: Final = 60
_BUFFER_NBYTES: Final = 128 * 1024
_COPY_NBYTES: Final = 1024**2
_NO_COPY: Final = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}


class NewObject(NamedTuple):
    """A file to be created."""

    ref: ObjectRef
    pieces: Sequence[bytes]
    expected: Absent | None


type Created = ETag | ShardgateError | None
"""Version of a new file, the reason why there is none, or `None` if it must be replaced instead."""


class LocalWriter:
    """Writes files; its methods block."""

    def __init__(self) -> None:
        self._swept: TTLCache[bytes, bool] = TTLCache(_SWEPT, _SWEEP_S)
        self._lock = threading.Lock()

    def create(self, wanted: Sequence[NewObject]) -> list[Created]:
        """Create *wanted* durably, each folder synced once; `None` for those to `replace`."""
        with ExitStack() as stack:
            folders = _OpenFolders(stack, self._sweep)
            files = [_FileCreation(each, folders, stack) for each in wanted]
            kind = _FileCreation
            for step in (kind.begin, kind.flush, kind.link, kind.settle):
                for file in files:
                    file.attempt(step)
            return [file.created for file in files]

    def replace(
        self, ref: ObjectRef, pieces: Sequence[Piece], expected: Expected
    ) -> ETag | Conflict:
        tries = 0
        with translated_write(ref):
            while True:
                tries += 1
                try:
                    return self._replace(ref, pieces, expected)
                except FileNotFoundError:
                    if isinstance(expected, str):
                        check_folder(ref)
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
            self._sweep(place.folder)
            old = place.folder.status(place.name)
            if not _is_as_expected(old, expected):
                return CONFLICT
            with NamedFile.made(place.folder) as new:
                if not _fill(ref, new.fd, pieces, place, expected):
                    return CONFLICT
                if old is not None:
                    os.fchmod(new.fd, stat.S_IMODE(old.st_mode))
                new.set_time(old)
                os.fsync(new.fd)
                return place.swap(new, expected)

    def remove(self, ref: ObjectRef, expected: ETag | None) -> bool | Conflict:
        root = folder_of(ref.bucket)
        *folders, _ = _path(ref).removeprefix(root + b"/").split(b"/")
        with translated_write(ref):
            try:
                with _place(ref, is_new=False) as place:
                    removed = place.remove(expected)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                check_folder(ref)  # an unmounted disk is not absence
                removed = False if expected is None else CONFLICT
            if removed is True:
                remove_empty_folders(root, folders)
            elif removed is False:  # another process may be about to make that durable
                sync_nearest(root, folders)
        return CONFLICT if isinstance(removed, Conflict) else True

    def _sweep(self, folder: Folder) -> None:
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
    with translated_write(root), Folder.opened(path) as folder:
        try:
            with folder.locked(), Folder.opened(path) as other:
                is_exclusive = not try_lock(other.fd)
        except (PermissionError, TimeoutError):
            raise
        except OSError as error:
            reason = f"the file system cannot lock folders: {error.strerror}"
            raise UnwritableError(f"{root}: {reason}") from error
        if not is_exclusive:
            raise UnwritableError(f"{root}: locks of the file system are not exclusive")
        with NamedFile.made(folder):
            pass


class _OpenFolders:
    def __init__(self, stack: ExitStack, sweep: Callable[[Folder], None]) -> None:
        self._stack = stack
        self._sweep = sweep
        self._opened: dict[bytes, Folder] = {}
        self._synced: dict[bytes, OSError | None] = {}

    def open(self, root: bytes, path: bytes) -> Folder:
        whole = root + b"/" + path if path else root
        if (known := self._opened.get(whole)) is not None:
            return known
        try:
            folder = self._stack.enter_context(Folder.opened(whole))
        except FileNotFoundError:
            make_folders(root, path.split(b"/") if path else [])
            folder = self._stack.enter_context(Folder.opened(whole))
        self._sweep(folder)
        self._opened[whole] = folder
        return folder

    def sync(self, folder: Folder) -> None:
        """Make the names durable; the system reports a failure once, here all files hear it."""
        if folder.path not in self._synced:
            self._synced[folder.path] = None
            try:
                folder.sync()
            except OSError as error:
                self._synced[folder.path] = error
        if (failure := self._synced[folder.path]) is not None:
            raise failure


class _FileCreation:
    def __init__(self, wanted: NewObject, folders: _OpenFolders, stack: ExitStack) -> None:
        self.created: Created = None
        self._wanted = wanted
        self._folders = folders
        self._stack = stack
        self._name = b""
        self._file: UnnamedFile | None = None

    def attempt(self, step: Callable[["_FileCreation"], None]) -> None:
        if self.created is None:
            try:
                with translated_write(self._wanted.ref):
                    step(self)
            except ShardgateError as error:
                self.created = error

    def begin(self) -> None:
        """Write the bytes to an unnamed file, unless the name is known to exist."""
        ref, pieces, expected = self._wanted
        if not (path := name_of(ref.key)):
            raise BadKeyError(f"{ref.key!r} cannot be the name of a file")
        above, _, self._name = path.rpartition(b"/")
        with suppress(FileNotFoundError):  # the folder was empty, and another process removed it
            folder = self._folders.open(folder_of(ref.bucket), above)
            if expected is None and folder.has(self._name):
                return
            self._file = self._stack.enter_context(UnnamedFile.made(folder))
        if self._file is not None:
            self._file.write(pieces)
            self._file.set_time(None)

    def flush(self) -> None:
        if self._file is not None:
            os.fsync(self._file.fd)

    def link(self) -> None:
        if self._file is not None and not self._file.link(self._name):
            self._file = None

    def settle(self) -> None:
        if self._file is not None:
            self._folders.sync(self._file.folder)
            self.created = file_version(self._file.status())


class _FilePlace(NamedTuple):
    folder: Folder
    name: bytes
    is_linked: bool

    def swap(self, new: NamedFile, expected: Expected) -> ETag | Conflict:
        with self.folder.locked():
            old = self.folder.status(self.name)
            if not _is_as_expected(old, expected):
                return CONFLICT
            if old is not None and old.st_mtime_ns >= new.status().st_mtime_ns:
                new.set_time(old)
                os.fsync(new.fd)
            # Files are created without a lock, so that there may be one by now.
            is_linked = new.link(self.name) if old is None else None
            if is_linked is False and isinstance(expected, Absent):
                return CONFLICT
            if not is_linked:
                new.rename(self.name)
        self.folder.sync()
        return file_version(new.status())

    def remove(self, expected: ETag | None) -> bool | Conflict:
        with self.folder.locked():
            old = self.folder.status(self.name)
            if not _is_as_expected(old, expected):
                return CONFLICT
            if old is not None:
                os.unlink(self.name, dir_fd=self.folder.fd)
        if self.is_linked:
            self.folder.sync()
        return old is not None


def _path(ref: ObjectRef) -> bytes:
    if not (name := name_of(ref.key)):
        raise BadKeyError(f"{ref.key!r} cannot be the name of a file")
    return folder_of(ref.bucket) + b"/" + name


@contextmanager
def _place(ref: ObjectRef, *, is_new: bool) -> Iterator[_FilePlace]:
    """Open the folder of the file of *ref*; create it if *is_new*."""
    path = wanted = _path(ref)
    if is_linked := os.path.islink(wanted):  # noqa: PTH114  paths are bytes
        path = os.path.realpath(wanted)
    above, _, last = path.rpartition(b"/")
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(Folder.opened(above))
        except FileNotFoundError:
            if not is_new:
                raise
            root = folder_of(ref.bucket)
            make_folders(root, wanted.removeprefix(root + b"/").split(b"/")[:-1])
            folder = stack.enter_context(Folder.opened(above))
        yield _FilePlace(folder, last, is_linked)


def _is_as_expected(old: os.stat_result | None, expected: Expected) -> bool:
    return is_as_expected(None if old is None else file_version(old), expected)


def _fill(
    ref: ObjectRef, fd: int, pieces: Sequence[Piece], place: _FilePlace, expected: Expected
) -> bool:
    """Write *pieces*; return whether the file that ranges refer to is still in place."""
    with ExitStack() as stack:
        target = stack.enter_context(open(fd, "wb", _BUFFER_NBYTES, closefd=False))
        source = None
        for piece in pieces:
            if isinstance(piece, bytes):
                target.write(piece)
                continue
            if source is None:
                try:
                    source = stack.enter_context(place.folder.reading(place.name))
                except FileNotFoundError:
                    return False
                if file_version(os.fstat(source)) != expected:
                    return False
            _copy(ref, source, target, piece)
    return True


def _copy(ref: ObjectRef, source: int, target: BinaryIO, piece: ByteRange) -> None:
    """Copy *piece* within the file system, which may share its blocks."""
    target.flush()
    at = piece.start
    while at < piece.stop:
        copied = _copy_some(source, target, at, piece.stop - at)
        if not copied:
            raise RangeNotSatisfiedError(ref, os.fstat(source).st_size)
        at += copied


def _copy_some(source: int, target: BinaryIO, at: int, nbytes: int) -> int:
    try:
        if copied := os.copy_file_range(source, target.fileno(), nbytes, offset_src=at):
            return copied
    except OSError as error:
        if error.errno not in _NO_COPY:
            raise
    data = os.pread(source, min(nbytes, _COPY_NBYTES), at)
    target.write(data)
    target.flush()
    return len(data)
