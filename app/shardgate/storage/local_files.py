"""Names, versions and errors of files as objects."""

import errno
import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Final, Self
from urllib.parse import unquote_to_bytes

from shardgate.errors import (
    BadKeyError,
    ConflictError,
    StorageDeniedError,
    StorageTimeoutError,
    StorageUnavailableError,
    UnwritableError,
)
from shardgate.model import Bucket, ETag, ObjectRef

NOT_FOUND: Final = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ENXIO}
"""Error numbers that mean that there is no such file."""

CODED: Final = {".gz": "gzip", ".br": "br", ".zstd": "zstd"}
"""Endings that cloud-volume gives to the names of files that it compresses, and their codings."""
LEADS_OUT: Final = "a link leads out of the folder, which follow_links = true would allow"


class FollowingBucket(Bucket):
    """Bucket of the folder at *url*, whose links may lead out of it."""

    __slots__ = ()

    def __new__(cls, url: str) -> Self:
        return super().__new__(cls, f"links+{url}", url)


@contextmanager
def translated(ref: ObjectRef, *, is_write: bool = False) -> Iterator[None]:
    """Raise `StorageError`, or an error of a write, in place of `OSError`."""
    try:
        yield
    except TimeoutError as error:
        raise StorageTimeoutError(ref, str(error) or "the disk is silent") from error
    except OSError as error:
        reason = error.strerror or type(error).__name__
        if is_write and error.errno == errno.ENAMETOOLONG:
            raise BadKeyError(f"{ref.key!r} is too long for a file name") from error
        in_the_way = {errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST}
        if is_write and error.errno in in_the_way:
            raise ConflictError(f"{ref}: a file or folder is in the way") from error
        if is_write and error.errno == errno.EROFS:
            raise UnwritableError(f"{ref}: {reason}") from error
        if error.errno in {errno.EACCES, errno.EPERM, errno.ELOOP}:
            raise StorageDeniedError(ref, reason) from error
        raise StorageUnavailableError(ref, reason) from error


def check_folder(root: ObjectRef) -> None:
    """Return if the folder that is the bucket of *root* exists. Raises: `StorageError`."""
    with translated(root):
        os.close(os.open(folder_of(root.bucket), os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY))


@lru_cache(maxsize=1024)
def folder_of(bucket: str) -> bytes:
    """Return the path of the folder that is the bucket."""
    return unquote_to_bytes(bucket.partition("://")[2])


def path_of(fd: int) -> bytes:
    """Return the path of an open file or folder, without links."""
    if sys.platform == "darwin":  # has no /proc
        return fcntl.fcntl(fd, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0")
    try:
        return os.readlink(b"/proc/self/fd/%d" % fd)  # noqa: PTH115  paths are bytes
    except OSError as error:  # must not be taken for absence
        raise PermissionError(errno.EACCES, "/proc does not tell where links lead") from error


def is_within(root: bytes, path: bytes) -> bool:
    """Return whether *path* is *root* or lies below; neither has links."""
    return path == root or path.startswith(root.rstrip(b"/") + b"/")


def may_lead(bucket: str, path: bytes) -> bool:
    """Return whether links in the folder that is *bucket* may lead to *path*, without links."""
    if isinstance(bucket, FollowingBucket):
        return True
    return is_within(os.path.realpath(folder_of(bucket)), path)


def name_of(key: str) -> bytes | None:
    """Return the path of *key* in its folder, `None` if it can name no file there."""
    if "\0" in key or (key and not {"", ".", ".."}.isdisjoint(key.split("/"))):
        return None
    try:
        return key.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return None


def coded_ending(path: bytes) -> str:
    """Return the ending of the coded file in place of the missing file *path*, empty if none."""
    if not path.endswith(tuple(map(str.encode, CODED))):  # nothing is coded twice
        for ending in CODED:
            if os.path.exists(path + ending.encode()):  # noqa: PTH110  paths are bytes
                return ending
    return ""


def file_version(status: os.stat_result) -> ETag:
    """Return the version of a file, made of its inode, size and modification time in ns."""
    return ETag(f'"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"')


def object_store_version(status: os.stat_result) -> ETag:
    """Return the ETag that object_store, so Icechunk too, gives to a local file."""
    modified_us = max(0, status.st_mtime_ns // 1000)
    return ETag(f'"{status.st_ino:x}-{modified_us:x}-{status.st_size:x}"')
