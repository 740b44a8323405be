"""Files of objects: paths, versions, errors, opening within a folder, and files kept open."""

import errno
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Final
from urllib.parse import unquote_to_bytes

from cachetools import TTLCache

from app.errors import (
    BadKeyError,
    ConflictError,
    StorageDeniedError,
    StorageTimeoutError,
    StorageUnavailableError,
    UnwritableError,
)
from app.model import ByteRange, ETag, ObjectRef
from app.storage.contract import Found

NOT_FOUND: Final = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ENXIO}
"""Error numbers that mean that there is no such file."""

_DENIED: Final = {errno.EACCES, errno.EPERM}
_IN_THE_WAY: Final = {errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST}
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_FOLDER: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_TRIES: Final = 3
_FILES: Final = 128
_KEPT_S: Final = 30
_INLINE_NBYTES: Final = 512 * 1024


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


def open_file(folder: bytes, name: bytes) -> int:
    """Open a file for reading; a pipe does not block."""
    return os.open(folder + b"/" + name, _FLAGS)


def open_within(folder: bytes, name: bytes) -> int:
    """Open the regular file *name* of *folder*; symbolic links may not lead out of the folder.

    Links are resolved first. The result is opened component by component without following any
    link, so that one that is swapped in between is noticed. *folder* itself may be a link.

    Raises: `PermissionError` if a link leads out, and `OSError`.
    """
    for _ in range(_TRIES):
        root = os.path.realpath(folder)
        found = os.path.realpath(root + b"/" + name)
        if os.path.commonpath([root, found]) != root:
            raise PermissionError(errno.EACCES, "a link leads out of the folder")
        try:
            return _open_without_links(root, os.path.relpath(found, root).split(b"/"))
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
    raise PermissionError(errno.EACCES, "a link changes, or leads in a circle")


def _open_without_links(root: bytes, segments: list[bytes]) -> int:
    folder = os.open(root, _FOLDER)
    try:
        for segment in segments[:-1]:
            outer, folder = folder, _open_folder(folder, segment)
            os.close(outer)
        if not stat.S_ISREG(_mode(folder, segments[-1])):
            raise OSError(errno.ENXIO, "not a regular file")
        return os.open(segments[-1], _FLAGS | os.O_NOFOLLOW, dir_fd=folder)
    finally:
        os.close(folder)


def _open_folder(folder: int, segment: bytes) -> int:
    if not stat.S_ISDIR(_mode(folder, segment)):
        raise NotADirectoryError(errno.ENOTDIR, "not a folder")
    try:
        return os.open(segment, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except NotADirectoryError:  # it has been replaced by a link
        raise OSError(errno.ELOOP, "a link") from None


def _mode(folder: int, segment: bytes) -> int:
    mode = os.stat(segment, dir_fd=folder, follow_symlinks=False).st_mode
    if stat.S_ISLNK(mode):
        raise OSError(errno.ELOOP, "a link")
    return mode


class WarmFiles:
    """Open files by name and version, from which the page cache is read without a thread.

    A thread costs a 64 KiB read 100 µs, the read itself 10. ``RWF_NOWAIT`` makes the kernel refuse
    to wait; network file systems refuse always, so that their files are not kept.
    """

    def __init__(self) -> None:
        self._files: TTLCache[tuple[ObjectRef, ETag], _OpenFile] = TTLCache(_FILES, _KEPT_S)
        self._lock = threading.Lock()

    def keep(self, ref: ObjectRef, etag: ETag, fd: int) -> None:
        """Keep a duplicate of *fd* if it can be read without waiting; called in any thread."""
        if (ref, etag) in self._files:
            return
        with suppress(OSError):
            os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT)
            file = _OpenFile(os.dup(fd))
            with self._lock:
                self._files[ref, etag] = file

    def read(self, ref: ObjectRef, byte_range: ByteRange, etag: ETag) -> Found | None:
        """Read *byte_range* from memory, `None` if it is not all there in that version."""
        if not 0 < byte_range.length <= _INLINE_NBYTES:
            return None
        with self._lock:
            file = self._files.get((ref, etag))
        if file is None:
            return None
        data = bytearray(byte_range.length)
        try:
            nbytes = os.preadv(file.fd, [data], byte_range.start, os.RWF_NOWAIT)
            status = os.fstat(file.fd)
        except (OSError, OverflowError):  # no file reaches past 2^63
            return None
        version = file_version(status)
        if not status.st_nlink or (etag != version and etag != object_store_version(status)):
            with self._lock:
                self._files.pop((ref, etag), None)
            return None
        if nbytes < byte_range.length:
            return None
        modified_s = status.st_mtime_ns // 10**9
        return Found(bytes(data), byte_range, status.st_size, version, modified_s=modified_s)

    def forget(self, ref: ObjectRef) -> None:
        with self._lock:
            for known in [known for known in self._files if known[0] == ref]:
                self._files.pop(known, None)

    def clear(self) -> None:
        with self._lock:
            self._files.clear()


class _OpenFile:
    """Closes a descriptor when neither the cache nor a reader needs it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)
