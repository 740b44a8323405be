"""Files kept open, to read what the page cache holds without a thread.

A thread costs a 64 KiB read 100 µs, the read itself 10. ``RWF_NOWAIT`` makes the kernel refuse
instead of wait; a network file system refuses always, so that such files are not kept at all.
"""

import os
import threading
from contextlib import suppress
from typing import Final

from cachetools import TTLCache

from app.model import ByteRange, ETag, ObjectRef
from app.storage.contract import Found

_FILES: Final = 128
_KEPT_S: Final = 30
_INLINE_BYTES: Final = 512 * 1024
_NOWAIT: Final[int | None] = getattr(os, "RWF_NOWAIT", None)
"""Linux has it."""


class WarmFiles:
    """A bounded set of open files by name and version."""

    def __init__(self) -> None:
        self._files: TTLCache[tuple[ObjectRef, ETag], _File] = TTLCache(_FILES, _KEPT_S)
        self._lock = threading.Lock()

    def keep(self, ref: ObjectRef, etag: ETag, fd: int) -> None:
        """Remember what *fd* opened, a file known as *etag*; any thread may ask.

        It is kept if it can be read without waiting.
        """
        if _NOWAIT is None or (ref, etag) in self._files:
            return
        with suppress(OSError):
            os.preadv(fd, [bytearray(1)], 0, _NOWAIT)
            file = _File(os.dup(fd))
            with self._lock:
                self._files[ref, etag] = file

    def read(self, ref: ObjectRef, byte_range: ByteRange, etag: ETag) -> Found | None:
        """Read all of *byte_range* from memory, or nothing."""
        if _NOWAIT is None or not 0 < byte_range.length <= _INLINE_BYTES:
            return None
        with self._lock:
            file = self._files.get((ref, etag))
        if file is None:
            return None
        data = bytearray(byte_range.length)
        try:
            nbytes = os.preadv(file.fd, [data], byte_range.start, _NOWAIT)
            status = os.fstat(file.fd)
        except (OSError, OverflowError):  # no file reaches past 2^63
            return None
        version = file_version(status)
        if not status.st_nlink or etag not in (version, foreign_version(status)):
            with self._lock:
                self._files.pop((ref, etag), None)
            return None
        if nbytes < byte_range.length:
            return None
        modified_s = status.st_mtime_ns // 10**9
        return Found(bytes(data), byte_range, status.st_size, version, modified_s=modified_s)

    def forget(self, ref: ObjectRef) -> None:
        """Close the files of *ref*, which may live on under other names."""
        with self._lock:
            for known in [known for known in self._files if known[0] == ref]:
                self._files.pop(known, None)

    def clear(self) -> None:
        """Close all files."""
        with self._lock:
            self._files.clear()


class _File:
    """Closes a descriptor once neither the set nor a reader needs it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


def file_version(status: os.stat_result) -> ETag:
    """Tell the version of a file: another inode, size or time is another one."""
    return ETag(f'"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"')


def foreign_version(status: os.stat_result) -> ETag:
    """Tell what object_store, so icechunk too, takes for the version of a local file."""
    modified_us = max(0, status.st_mtime_ns // 1000)
    return ETag(f'"{status.st_ino:x}-{modified_us:x}-{status.st_size:x}"')
