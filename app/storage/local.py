"""Objects in a folder of this machine."""

import asyncio
import os
import stat
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from itertools import batched
from pathlib import Path
from typing import Final, cast

from app.errors import VersionChangedError
from app.model import ByteRange, ByteRequest, Condition, ETag, ObjectRef, Piece
from app.storage.conditions import demand
from app.storage.contract import (
    NO_HEADERS,
    NOT_MODIFIED,
    TEMPORARY,
    Conflict,
    Expected,
    Found,
    Listed,
    NotModified,
    ObjectHeaders,
    Stat,
)
from app.storage.local_creating import New
from app.storage.local_names import ABSENT, folder_of, name_of, reach, translated
from app.storage.local_writing import LocalWriter, demand_locks
from app.storage.ranges import clamp
from app.storage.together import Together
from app.storage.warm_files import WarmFiles, file_version, foreign_version
from app.storage.writes import demand_writable, given_nbytes

_PIECE_BYTES: Final = 1024**2
_TRIES: Final = 3
_WRITING: Final = 8
"""Threads that write; more of them fight for the interpreter more than they write."""
_CREATING: Final = 4
"""So many of them create small files, which they take together."""
_TOGETHER: Final = 16
_SMALL_NBYTES: Final = 1024**2
"""What is larger would hold the others up."""
_LOOKED_INTO: Final = 64
"""Folders that are looked into at a time: a page of a listing may need no more."""
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


type OpenFile = Callable[[bytes, bytes], int]
"""Opens the file of a name in a folder for reading; a pipe must not block it."""


def _open_file(folder: bytes, name: bytes) -> int:
    return os.open(folder + b"/" + name, _FLAGS)


class LocalStore:
    """Reads and writes files in threads of its own: a slow disk never holds up the event loop.

    Only what lies in the page cache for certain is read without a thread. Writes have threads apart
    from those of reads. *open_file* may refuse to follow links.
    """

    def __init__(self, *, threads: int = 16, open_file: OpenFile = _open_file) -> None:
        self._open_file = open_file
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="local-store")
        self._writing = ThreadPoolExecutor(_WRITING, thread_name_prefix="local-writes")
        self._warm = WarmFiles()
        self._writer = LocalWriter()
        self._together: defaultdict[str, Together[New, ETag | None]] = defaultdict(
            lambda: Together(self._writing, self._writer.create, at_once=_CREATING, most=_TOGETHER)
        )
        """By buckets: one may be on a disk that is slow."""
        self._safe: set[ObjectRef] = set()

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

    async def list(
        self, prefix: ObjectRef, *, delimiter: str = "", after: str = ""
    ) -> AsyncIterator[Listed]:
        """Walk folder by folder, in the order of whole keys.

        Common prefixes are folders with a file somewhere below; a link to a folder that holds it
        is left out.
        """
        if delimiter not in ("", "/"):
            raise ValueError(f"folders cannot be rolled up by {delimiter!r}")
        entries = iter(await self._run(_entries, prefix))
        if delimiter:
            behind = (entry for entry in entries if entry.ref.key > after)
            for some in batched(behind, _LOOKED_INTO):
                for each in await self._run(_without_empty, some):
                    yield each
            return
        waiting = [entries]
        while waiting:
            if (entry := next(waiting[-1], None)) is None:
                waiting.pop()
            elif entry.size is None:
                if entry.ref.key > after or after.startswith(entry.ref.key):
                    waiting.append(iter(await self._run(_entries, entry.ref)))
            elif entry.ref.key > after:
                yield entry

    async def reach(self, root: ObjectRef) -> None:
        """Look for the folder."""
        await self._run(reach, root)

    async def demand_safety(self, root: ObjectRef) -> None:
        """Look once whether the folder can be locked."""
        if root not in self._safe:
            await self._write(demand_locks, root)
            self._safe.add(root)

    def keeps_headers(self, ref: ObjectRef) -> bool:  # noqa: ARG002  the contract's argument
        """Say no: a file has no headers."""
        return False

    async def put(
        self,
        ref: ObjectRef,
        pieces: Sequence[Piece],
        *,
        expected: Expected,
        headers: ObjectHeaders = NO_HEADERS,
    ) -> ETag | Conflict:
        """Write a file beside the old one, and let it take its name."""
        if headers != NO_HEADERS:
            raise ValueError(f"{ref}: a file has no headers")
        demand_writable(ref, pieces, expected)
        written: ETag | Conflict | None = None
        if not isinstance(expected, str):
            written = await self._create(New(ref, cast("Sequence[bytes]", pieces), expected))
        if written is None:
            written = await self._write(self._writer.replace, ref, pieces, expected)
        self._warm.forget(ref)
        return written

    async def delete(self, ref: ObjectRef, *, expected: ETag | None) -> bool | Conflict:
        """Remove the file, and the folders that are empty without it."""
        demand_writable(ref, (), expected)
        removed = await self._write(self._writer.remove, ref, expected)
        self._warm.forget(ref)
        return removed

    async def aclose(self) -> None:
        """Let the threads end, and close the files."""
        for each in self._together.values():
            each.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._writing.shutdown(wait=False, cancel_futures=True)
        self._warm.clear()

    async def _create(self, new: New) -> ETag | None:
        """Create a file; small ones together."""
        if given_nbytes(new.pieces) <= _SMALL_NBYTES:
            return await self._together[new.ref.bucket].do(new)
        (created,) = await self._write(self._writer.create, [new])
        if isinstance(created, Exception):
            raise created
        return created

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
                modified_s = status.st_mtime_ns // 10**9
                if if_match != foreign_version(status):
                    demand(ref, if_match, etag, modified_s)
                if etag == if_none_match:
                    return NOT_MODIFIED
                byte_range = clamp(ref, request, status.st_size, if_match)
                data = _read_range(fd, byte_range)
                if len(data) == byte_range.length and file_version(os.fstat(fd)) == etag:
                    if isinstance(if_match, str):
                        self._warm.keep(ref, if_match, fd)
                    return Found(data, byte_range, status.st_size, etag, modified_s=modified_s)
            if if_match is not None:
                break
        raise VersionChangedError(ref)

    async def _run[*Ts, T](self, call: Callable[[*Ts], T], *args: *Ts) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)

    async def _write[*Ts, T](self, call: Callable[[*Ts], T], *args: *Ts) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writing, call, *args)


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
        modified_s = status.st_mtime_ns // 10**9
        return Stat(status.st_size, file_version(status), modified_s=modified_s)


def _entries(prefix: ObjectRef) -> list[Listed]:
    """List what of one folder begins like *prefix*, by key: a folder's name ends in a slash."""
    path, _, start = prefix.key.rpartition("/")
    folder = ObjectRef(prefix.bucket, path).prefix
    begins = start.encode(errors="surrogatepass")
    listed: list[Listed] = []
    with translated(prefix):
        try:
            if (name := name_of(path)) is not None:
                with os.scandir(folder_of(prefix.bucket) + b"/" + name) as entries:
                    wanted = (entry for entry in entries if entry.name.startswith(begins))
                    listed += filter(None, (_listed(folder, entry) for entry in wanted))
        except OSError as error:
            if error.errno not in ABSENT:
                raise
            reach(prefix)
    return sorted(listed, key=lambda each: each.ref.key.encode())


def _without_empty(entries: Sequence[Listed]) -> list[Listed]:
    """Leave out folders that have no file below."""
    return [each for each in entries if each.size is not None or _has_file(each.ref)]


def _has_file(folder: ObjectRef) -> bool:
    """Return whether anything below *folder* would be listed, or cannot be looked for.

    Stops at the first file.
    """
    waiting = [folder]
    while waiting:
        prefix = waiting.pop()
        try:
            path = folder_of(prefix.bucket) + b"/" + prefix.key.encode()
            with os.scandir(path) as entries:
                for listed in filter(None, (_listed(prefix, entry) for entry in entries)):
                    if listed.size is not None:
                        return True
                    waiting.append(listed.ref)
        except (FileNotFoundError, NotADirectoryError):  # it was there a moment ago
            continue
        except OSError:
            return True
    return False


def _listed(prefix: ObjectRef, entry: os.DirEntry[bytes]) -> Listed | None:
    """Describe *entry* unless it is ours, special, broken, or no UTF-8."""
    try:
        name = entry.name.decode()
        status = entry.stat()
    except (OSError, UnicodeDecodeError):
        return None
    if TEMPORARY in name:
        return None
    ref = ObjectRef(prefix.bucket, f"{prefix.key}{name}")
    if stat.S_ISREG(status.st_mode):
        return Listed(ref, status.st_size, file_version(status), status.st_mtime_ns / 10**9)
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
    with translated(ref):
        if (name := name_of(ref.key)) is not None:
            try:
                fd = open_file(folder_of(ref.bucket), name)
            except OSError as error:
                if error.errno not in ABSENT:
                    raise
        if fd is None:
            reach(ref)  # an unmounted disk is not absence
            yield None
            return
        try:
            yield fd
        finally:
            os.close(fd)
