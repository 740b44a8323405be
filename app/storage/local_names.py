"""Where the files of objects are, and what the system says of them, as our errors."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Final
from urllib.parse import unquote_to_bytes

from app.errors import (
    BadKeyError,
    ConflictError,
    StorageDeniedError,
    StorageTimeoutError,
    StorageUnavailableError,
    UnwritableError,
)
from app.model import ObjectRef

ABSENT: Final = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ENXIO}
"""What the system says where there is no such file."""

_DENIED: Final = {errno.EACCES, errno.EPERM}
_IN_THE_WAY: Final = {errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST}


@contextmanager
def translated(ref: ObjectRef) -> Iterator[None]:
    """Turn the system's errors into ours."""
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
    """Turn what the system says of a write into our errors."""
    with translated(ref):
        try:
            yield
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise BadKeyError(f"{ref.key!r} is too long for a file") from error
            if error.errno in _IN_THE_WAY:
                raise ConflictError(f"{ref}: a file or folder is in the way") from error
            if error.errno == errno.EROFS:
                raise UnwritableError(f"{ref}: {error.strerror}") from error
            raise


def reach(root: ObjectRef) -> None:
    """Return if the folder of the bucket of *root* is there."""
    with translated(root):
        os.close(os.open(folder_of(root.bucket), os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY))


@lru_cache(maxsize=1024)
def folder_of(bucket: str) -> bytes:
    """Tell the path of the folder that is the bucket."""
    return unquote_to_bytes(bucket.partition("://")[2])


def name_of(key: str) -> bytes | None:
    """Name the file of *key* in its folder; what leads elsewhere names nothing."""
    if "\0" in key or (key and any(part in ("", ".", "..") for part in key.split("/"))):
        return None
    try:
        return key.encode()
    except UnicodeEncodeError:
        return None
