"""Objects in a folder of this machine."""

import asyncio
import errno
import os
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Final
from urllib.parse import unquote_to_bytes

from app.errors import StorageDeniedError, StorageUnavailableError, VersionChangedError
from app.model import ByteRange, ByteRequest, Condition, ETag, ObjectRef
from app.storage.conditions import demand
from app.storage.contract import NOT_MODIFIED, Found, Listed, NotModified, Stat
from app.storage.ranges import clamp
from app.storage.warm_files import WarmFiles, file_version, foreign_version

TEMPORARY: Final = ".shardgate-"
"""How the names of our own unfinished files begin; listings leave them out."""

_PIECE_BYTES: Final = 1024**2
_TRIES: Final = 3
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_ABSENT: Final = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ENXIO}
_DENIED: Final = {errno.EACCES, errno.EPERM}


type OpenFile = Callable[[bytes, bytes], int]
"""Opens the file of a name in a folder for reading; a pipe must not block it."""


def _open_file(folder: bytes, name: bytes) -> int:
    return os.open(folder + b"/" + name, _FLAGS)


class LocalStore:
    """Reads files in threads of its own, so that a slow disk never holds up the event loop.

    Only what lies in the page cache for certain is read without a thread. *open_file* may refuse
    to follow links.
    """

    def __init__(self, *, threads: int = 16, open_file: OpenFile = _open_file) -> None:
        self._open_file = open_file
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="local-store")
        self._warm = WarmFiles()

    async def get(
        self,
        ref: ObjectRef,
        request: ByteRequest | None = None,
        *,
        if_match: Condition | None = None,
        if_none_match: ETag | None = None,
    ) -> Found | NotModified | None:
        """Read the file between two looks at its version."""
        if (
            isinstance(if_match, str)
            and isinstance(request, ByteRange)
            and (found := self._warm.read(ref, request, if_match)) is not None
        ):
            return found
        return await self._run(self._read, ref, request, if_match, if_none_match)

    @asynccontextmanager
    async def stream(
        self, ref: ObjectRef, byte_range: ByteRange, *, if_match: Condition | None
    ) -> AsyncGenerator[AsyncIterator[bytes]]:
        """Read piece after piece, each pinned, with no file held open in between."""
        begin, end = byte_range
        first = await self._piece(ref, ByteRange(begin, min(begin + _PIECE_BYTES, end)), if_match)
        if first.size < end:
            raise VersionChangedError(ref)

        async def pieces() -> AsyncIterator[bytes]:
            if first.data:
                yield first.data
            for start in range(begin + _PIECE_BYTES, end, _PIECE_BYTES):
                piece = ByteRange(start, min(start + _PIECE_BYTES, end))
                yield (await self._piece(ref, piece, first.etag)).data

        yield pieces()

    async def _piece(
        self, ref: ObjectRef, byte_range: ByteRange, if_match: Condition | None
    ) -> Found:
        found = await self.get(ref, byte_range, if_match=if_match)
        if not isinstance(found, Found) or found.byte_range != byte_range:
            raise VersionChangedError(ref)
        return found

    async def stat(self, ref: ObjectRef) -> Stat | None:
        """Ask the file system."""
        return await self._run(_stat, self._open_file, ref)

    async def list(self, prefix: ObjectRef, *, delimiter: str = "") -> AsyncIterator[Listed]:
        """Walk folder by folder, in the order of whole keys.

        Common prefixes are folders, empty ones too; a link to a folder that holds it is left out.
        """
        if delimiter not in ("", "/"):
            raise ValueError(f"folders cannot be rolled up by {delimiter!r}")
        waiting = [iter(await self._run(_entries, prefix))]
        while waiting:
            if (entry := next(waiting[-1], None)) is None:
                waiting.pop()
            elif entry.size is None and not delimiter:
                waiting.append(iter(await self._run(_entries, entry.ref)))
            else:
                yield entry

    async def reach(self, root: ObjectRef) -> None:
        """Look for the folder."""
        await self._run(_reach, root)

    async def aclose(self) -> None:
        """Let the threads end, and close the files."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._warm.clear()

    def _read(
        self,
        ref: ObjectRef,
        request: ByteRequest | None,
        if_match: Condition | None,
        if_none_match: ETag | None,
    ) -> Found | NotModified | None:
        for _ in range(_TRIES):
            with _opened(ref, self._open_file) as fd:
                if fd is None or not stat.S_ISREG((status := os.fstat(fd)).st_mode):
                    if if_match is not None:
                        raise VersionChangedError(ref)
                    return None
                etag = file_version(status)
                if if_match != foreign_version(status):
                    demand(ref, if_match, etag, status.st_mtime_ns // 10**9)
                if etag == if_none_match:
                    return NOT_MODIFIED
                byte_range = clamp(ref, request, status.st_size, if_match)
                data = _read_range(fd, byte_range)
                if len(data) == byte_range.length and file_version(os.fstat(fd)) == etag:
                    if isinstance(if_match, str):
                        self._warm.keep(ref, if_match, fd)
                    return Found(data, byte_range, status.st_size, etag)
            if if_match is not None:
                break
        raise VersionChangedError(ref)

    async def _run[*Ts, T](self, call: Callable[[*Ts], T], *args: *Ts) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)


def _read_range(fd: int, byte_range: ByteRange) -> bytes:
    """Read what there is of *byte_range*; one call gives 2 GiB at most, and may be short."""
    data = os.pread(fd, byte_range.length, byte_range.start)
    while (missing := byte_range.length - len(data)) and (
        more := os.pread(fd, missing, byte_range.start + len(data))
    ):
        data += more
    return data


def _stat(open_file: OpenFile, ref: ObjectRef) -> Stat | None:
    with _opened(ref, open_file) as fd:
        if fd is None or not stat.S_ISREG((status := os.fstat(fd)).st_mode):
            return None
        return Stat(status.st_size, file_version(status))


def _reach(root: ObjectRef) -> None:
    with _translated(root):
        os.close(os.open(_folder(root.bucket), _FLAGS | os.O_DIRECTORY))


def _entries(prefix: ObjectRef) -> list[Listed]:
    """List one folder by key; a folder's name counts with its slash, as it does in keys."""
    listed: list[Listed] = []
    with _translated(prefix):
        try:
            if (name := _name(prefix.key.removesuffix("/"))) is not None:
                with os.scandir(_folder(prefix.bucket) + b"/" + name) as entries:
                    listed += filter(None, (_listed(prefix, entry) for entry in entries))
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            _reach(prefix)
    return sorted(listed, key=lambda each: each.ref.key.encode())


def _listed(prefix: ObjectRef, entry: os.DirEntry[bytes]) -> Listed | None:
    """Describe *entry* unless it is ours, special, broken, or no UTF-8."""
    try:
        name = entry.name.decode()
        status = entry.stat()
    except (OSError, UnicodeDecodeError):
        return None
    if name.startswith(TEMPORARY):
        return None
    ref = ObjectRef(prefix.bucket, f"{prefix.key}{name}")
    if stat.S_ISREG(status.st_mode):
        return Listed(ref, status.st_size)
    if stat.S_ISDIR(status.st_mode) and not (entry.is_symlink() and _holds(status, entry.path)):
        return Listed(ObjectRef(ref.bucket, f"{ref.key}/"), None)
    return None


def _holds(folder: os.stat_result, path: bytes) -> bool:
    """Tell whether *folder* is one of those above *path*: a walk would go round in it."""
    above = Path(os.fsdecode(path)).parents
    return any(os.path.samestat(folder, parent.stat()) for parent in above)


@contextmanager
def _opened(ref: ObjectRef, open_file: OpenFile) -> Iterator[int | None]:
    """Open the file of *ref*, or give `None` if there is none; a pipe does not block us."""
    fd = None
    with _translated(ref):
        if (name := _name(ref.key)) is not None:
            try:
                fd = open_file(_folder(ref.bucket), name)
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
        if fd is None:
            _reach(ref)  # an unmounted disk is not absence
            yield None
            return
        try:
            yield fd
        finally:
            os.close(fd)


@contextmanager
def _translated(ref: ObjectRef) -> Iterator[None]:
    """Turn the system's errors into ours."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        if error.errno in _DENIED:
            raise StorageDeniedError(ref, reason) from error
        raise StorageUnavailableError(ref, reason, lasting=True) from error


@lru_cache(maxsize=1024)
def _folder(bucket: str) -> bytes:
    return unquote_to_bytes(bucket.partition("://")[2])


def _name(key: str) -> bytes | None:
    """Name the file of *key* in its folder; what leads elsewhere names nothing."""
    if "\0" in key or (key and any(part in ("", ".", "..") for part in key.split("/"))):
        return None
    try:
        return key.encode()
    except UnicodeEncodeError:
        return None
