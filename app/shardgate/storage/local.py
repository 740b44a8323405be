"""Objects in a folder of this machine."""

import asyncio
import errno
import os
import stat
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import lru_cache
from itertools import batched
from pathlib import Path
from typing import Final

from cachetools import TTLCache

from shardgate.errors import VersionChangedError
from shardgate.model import ByteRange, ByteRequest, Condition, ETag, GuardedBucket, ObjectRef, Piece
from shardgate.storage.contract import (
    NO_HEADERS,
    NOT_MODIFIED,
    OBJECT,
    TEMPORARY,
    Absent,
    Conflict,
    Expected,
    Found,
    Listed,
    NotModified,
    ObjectHeaders,
    Stat,
    check_condition,
    check_write,
    clamp,
    read_exactly,
)
from shardgate.storage.local_files import (
    CODED,
    LEADS_OUT,
    NOT_FOUND,
    FollowingBucket,
    check_folder,
    coded_ending,
    file_version,
    folder_of,
    is_within,
    may_lead,
    name_of,
    object_store_version,
    path_of,
    translated,
)
from shardgate.storage.local_write import Folder, LocalWriter, verify_locks

_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # opening a pipe would wait for a writer
# Linux finds a file without opening it; macOS has no such flag, and opens it.
_FINDING: Final = getattr(os, "O_PATH", _FLAGS) | os.O_CLOEXEC
_NO_WAIT: Final[int] = getattr(os, "RWF_NOWAIT", 0)
"""Flag of a read that fails where it would have to wait for the disk; 0 where there is none."""

type OpenFile = Callable[[str, bytes], int]
"""Opens the file of a name in the folder of a bucket for reading; must not block on a pipe."""


def open_file(bucket: str, name: bytes) -> int:
    """Open a file for reading; links lead out of the folder only if *bucket* allows that.

    A file that is no link costs one more call of the system, which tells its path.
    """
    folder = folder_of(bucket)
    path = folder + b"/" + name
    if isinstance(bucket, FollowingBucket):
        return os.open(path, _FLAGS)
    try:
        fd = os.open(path, _FLAGS | os.O_NOFOLLOW)
    except OSError as error:
        is_absent = error.errno == errno.ENOENT
        # What is absent behind a link that leads out is denied.
        if is_absent and _real_folder_of(path).startswith(_real_prefix(folder)):
            raise
        return open_within(bucket, name, LEADS_OUT)
    try:
        real_path = path_of(fd)
    except OSError:
        os.close(fd)
        raise
    if real_path.startswith(_real_prefix(folder)):
        return fd
    os.close(fd)
    _real_prefix.cache_clear()  # the folder itself may be a link that has changed
    return open_within(bucket, name, LEADS_OUT)


def _real_folder_of(path: bytes) -> bytes:
    """Return the folder of *path* without links."""
    folder = os.path.dirname(path)  # noqa: PTH120  paths are bytes
    try:
        # The system tells it at once, however deep it is; `realpath` looks at each folder above.
        fd = os.open(folder, _FINDING)
        try:
            return path_of(fd) + b"/"
        finally:
            os.close(fd)
    except OSError:
        return os.path.realpath(folder) + b"/"


@lru_cache(maxsize=1024)
def _real_prefix(folder: bytes) -> bytes:
    return os.path.realpath(folder).rstrip(b"/") + b"/"


def open_within(bucket: str, name: bytes, reason: str = "a link leads out of the folder") -> int:
    """Open the regular file *name* of a folder; symbolic links may not lead out of the folder.

    The file is found without opening it, and opened only if the system says that it lies in the
    folder, so that a link that is swapped in between leads nowhere. The folder may be a link, too.

    Raises: `PermissionError` with *reason* if a link leads out, and `OSError`.
    """
    root = os.path.realpath(folder_of(bucket))
    path = root + b"/" + name
    try:
        found = os.open(path, _FINDING)
    except OSError as error:
        if not is_within(root, os.path.realpath(path)):
            raise PermissionError(errno.EACCES, reason) from None
        if error.errno == errno.ELOOP:
            raise PermissionError(errno.EACCES, "a link leads in a circle") from None
        raise
    try:
        if not is_within(root, path_of(found)):
            raise PermissionError(errno.EACCES, reason)
        if not stat.S_ISREG(os.fstat(found).st_mode):
            raise OSError(errno.ENXIO, "not a regular file")
        # By its name another file could be opened by now.
        return os.open(b"/dev/fd/%d" % found, _FLAGS)
    finally:
        os.close(found)


class WarmFiles:
    """Open files by name and version, from which the page cache is read without a thread.

    A thread costs a 64 KiB read 100 µs, the read itself 10. ``RWF_NOWAIT`` makes the kernel refuse
    to wait; network file systems refuse always, so that their files are not kept.
    """

    def __init__(self) -> None:
        self._files: TTLCache[tuple[ObjectRef, ETag], _OpenFile] = TTLCache(128, ttl=30)
        self._lock = threading.Lock()

    def keep(self, ref: ObjectRef, etag: ETag, fd: int, status: os.stat_result) -> None:
        """Keep a duplicate of *fd* if it can be read without waiting; called in any thread.

        *etag* is a version of the file in the state *status*.
        """
        if not _NO_WAIT or (ref, etag) in self._files:
            return
        with suppress(OSError):
            os.preadv(fd, [bytearray(1)], 0, _NO_WAIT)
            file = _OpenFile(os.dup(fd), status)
            with self._lock:
                self._files[ref, etag] = file

    def read(self, ref: ObjectRef, byte_range: ByteRange, etag: ETag) -> Found | None:
        """Read *byte_range* from memory, `None` if it is not all there in that version."""
        start, stop = byte_range
        if not 0 < stop - start <= 512 * 1024:  # copying more would hold up the event loop
            return None
        with self._lock:
            file = self._files.get((ref, etag))
        if file is None:
            return None
        data = bytearray(stop - start)
        try:
            nbytes = os.preadv(file.fd, [data], start, _NO_WAIT)
            status = os.fstat(file.fd)
        except (OSError, OverflowError):  # no file reaches past 2^63
            return None
        if not status.st_nlink or (status.st_size, status.st_mtime_ns) != file.state:
            with self._lock:
                self._files.pop((ref, etag), None)
            return None
        if nbytes < len(data):
            return None
        modified_s = status.st_mtime_ns // 10**9
        return Found(bytes(data), byte_range, status.st_size, file.etag, modified_s=modified_s)

    def forget(self, ref: ObjectRef) -> None:
        with self._lock:
            for known in [known for known in self._files if known[0] == ref]:
                self._files.pop(known, None)

    def clear(self) -> None:
        with self._lock:
            self._files.clear()


class _OpenFile:
    """Closes a descriptor when neither the cache nor a reader needs it."""

    def __init__(self, fd: int, status: os.stat_result) -> None:
        self.fd = fd
        self.etag = file_version(status)
        self.state = status.st_size, status.st_mtime_ns

    def __del__(self) -> None:
        os.close(self.fd)


class LocalStore:
    """Reads and writes files in threads of its own: a slow disk never holds up the event loop.

    Only data that is certainly in the page cache is read without a thread. Writes and reads have
    separate threads. Links lead out of a folder only if its bucket is called ``links+file://…``.
    Where there is no file ``name``, ``name.gz``, ``.br`` or ``.zstd`` is the object, coded, as
    cloud-volume writes it; virtual references name files as they are.
    """

    def __init__(self, *, open_file: OpenFile = open_file) -> None:
        self._open_file = open_file
        self._readers = ThreadPoolExecutor(16, thread_name_prefix="local-store")
        # More threads contend for the interpreter more than they write.
        self._writers = ThreadPoolExecutor(8, thread_name_prefix="local-writes")
        self._warm = WarmFiles()
        self._writer = LocalWriter()
        self._last_file = "", b""
        """Bucket and path of the file that showed last that a folder is not empty."""

    async def get(
        self,
        ref: ObjectRef,
        request: ByteRequest | None = None,
        *,
        if_match: Condition | None = None,
        if_none_match: ETag | None = None,
        kind: str = OBJECT,  # noqa: ARG002  the contract's argument
    ) -> Found | NotModified | None:
        # So chunks are read; their bytes are mostly in the page cache.
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
        """Read 1 MiB at a time with the version as condition; no file stays open in between."""
        begin, end = byte_range
        step = 1024**2
        piece = ByteRange(begin, min(begin + step, end))
        first = await read_exactly(self, ref, piece, if_match)
        if first.size < end:
            raise VersionChangedError(ref)

        async def pieces() -> AsyncIterator[bytes]:
            if first.data:
                yield first.data
            for start in range(begin + step, end, step):
                piece = ByteRange(start, min(start + step, end))
                yield (await read_exactly(self, ref, piece, first.etag)).data

        yield pieces()

    async def stat(self, ref: ObjectRef) -> Stat | None:
        return await self._run(self._stat, ref)

    async def list(
        self, prefix: ObjectRef, *, delimiter: str = "", after: str = ""
    ) -> AsyncGenerator[Listed]:
        """Walk folder by folder, in the order of whole keys.

        Common prefixes are folders with a file somewhere below. Links that lead out are left out,
        and links to a folder that contains them. A coded file has its plain name, if that has no
        dot: ``brain.nii.gz`` is no chunk.
        """
        entries = iter(await self._run(_entries, prefix))
        if delimiter:
            behind = (entry for entry in entries if entry.ref.key > after)
            for some in batched(behind, 64):  # a page of a listing may need no more
                for each in await self._run(self._without_empty, some):
                    yield each
            return
        waiting = [entries]
        while waiting:
            if (entry := next(waiting[-1], None)) is None:
                waiting.pop()
            elif entry.size is None:
                # A folder before *after* is walked if *after* lies in it.
                if entry.ref.key > after or after.startswith(entry.ref.key):
                    waiting.append(iter(await self._run(_entries, entry.ref)))
            elif entry.ref.key > after:
                yield entry

    async def check_reachable(self, root: ObjectRef) -> None:
        await self._run(check_folder, root)

    async def verify_conditional_writes(self, root: ObjectRef) -> None:
        await self._write(verify_locks, root)

    def keeps_headers(self, ref: ObjectRef) -> bool:  # noqa: ARG002  the contract's argument
        return False

    async def put(
        self,
        ref: ObjectRef,
        pieces: Sequence[Piece],
        *,
        expected: Expected,
        headers: ObjectHeaders = NO_HEADERS,
    ) -> ETag | Conflict:
        if headers != NO_HEADERS:
            raise ValueError(f"{ref}: a file cannot be stored with headers")
        check_write(ref, pieces, expected)
        written = await self._write(self._writer.put, ref, pieces, expected)
        self._warm.forget(ref)
        return written

    async def delete(self, ref: ObjectRef, *, expected: Expected) -> bool | Conflict:
        """Remove the file, and the folders that are empty without it."""
        check_write(ref, (), expected)
        if isinstance(expected, Absent):
            return True
        removed = await self._write(self._writer.remove, ref, expected)
        self._warm.forget(ref)
        return removed

    async def aclose(self) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._writers.shutdown(wait=False, cancel_futures=True)
        self._warm.clear()

    def _read(
        self,
        ref: ObjectRef,
        request: ByteRequest | None,
        if_match: Condition | None,
        if_none_match: ETag | None,
    ) -> Found | NotModified | None:
        for _ in range(3):  # a file can be changed in place while it is read
            with self._opened(ref) as opened:
                if opened is None:
                    check_condition(ref, if_match)
                    return None
                fd, status, coding = opened
                etag = file_version(status)
                modified_s = status.st_mtime_ns // 10**9
                if if_match is not None and if_match != object_store_version(status):
                    check_condition(ref, if_match, etag, modified_s)
                if etag == if_none_match:
                    return NOT_MODIFIED
                byte_range = clamp(ref, request, status.st_size, if_match)
                data = _read_range(fd, byte_range)
                if len(data) == byte_range.length and file_version(os.fstat(fd)) == etag:
                    if isinstance(if_match, str) and not coding:
                        self._warm.keep(ref, if_match, fd, status)
                    return Found(data, byte_range, status.st_size, etag, coding, modified_s)
            if if_match is not None:
                break
        raise VersionChangedError(ref)

    def _stat(self, ref: ObjectRef) -> Stat | None:
        with self._opened(ref) as opened:
            if opened is None:
                return None
            _, status, coding = opened
            modified_s = status.st_mtime_ns // 10**9
            return Stat(status.st_size, file_version(status), coding, modified_s)

    @contextmanager
    def _opened(self, ref: ObjectRef) -> Iterator[tuple[int, os.stat_result, str] | None]:
        """Open the file of *ref*, or the coded one in its place; yield its status and coding."""
        fd = None
        ending = ""
        with translated(ref):
            if name := name_of(ref.key):
                fd = self._try_open(ref.bucket, name)
                if fd is None and not isinstance(ref.bucket, GuardedBucket):
                    ending = coded_ending(folder_of(ref.bucket) + b"/" + name)
                if ending:
                    fd = self._try_open(ref.bucket, name + ending.encode())
            if fd is None:
                check_folder(ref)  # an unmounted disk is not absence
                yield None
                return
            try:
                status = os.fstat(fd)
                coding = CODED.get(ending, "")
                yield (fd, status, coding) if stat.S_ISREG(status.st_mode) else None
            finally:
                os.close(fd)

    def _try_open(self, bucket: str, name: bytes) -> int | None:
        try:
            return self._open_file(bucket, name)
        except OSError as error:
            if error.errno not in NOT_FOUND:
                raise
            return None

    def _without_empty(self, entries: Sequence[Listed]) -> Sequence[Listed]:
        return [each for each in entries if each.size is not None or self._has_file(each.ref)]

    def _has_file(self, folder: ObjectRef) -> bool:
        """Return whether a file below *folder* would be listed, or the folder cannot be searched.

        A walk asks for each folder on the way to a file, so the last file is looked at first.
        """
        bucket, file = self._last_file
        if bucket == folder.bucket and file.startswith(_path(folder)) and os.path.isfile(file):  # noqa: PTH113
            return True
        waiting = [folder]
        while waiting:
            prefix = waiting.pop()
            try:
                with os.scandir(_path(prefix)) as entries:
                    for entry in entries:
                        if (listed := _listed(prefix, entry)) is None:
                            continue
                        if listed.size is not None:
                            self._last_file = prefix.bucket, entry.path
                            return True
                        waiting.append(listed.ref)
            except (FileNotFoundError, NotADirectoryError):  # removed since it was listed
                continue
            except OSError:
                return True  # listing the folder itself will give the reason
        return False

    async def _run[*Ts, T](self, call: Callable[[*Ts], T], *args: *Ts) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, call, *args)

    async def _write[*Ts, T](self, call: Callable[[*Ts], T], *args: *Ts) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writers, call, *args)


def _read_range(fd: int, byte_range: ByteRange) -> bytes:
    """Read up to the end of the file; one system call returns 2 GiB at most, and may be short."""
    data = os.pread(fd, byte_range.length, byte_range.start)
    while (missing := byte_range.length - len(data)) and (
        more := os.pread(fd, missing, byte_range.start + len(data))
    ):
        data += more
    return data


def _path(ref: ObjectRef) -> bytes:
    return folder_of(ref.bucket) + b"/" + ref.key.encode()


def _entries(prefix: ObjectRef) -> list[Listed]:
    """List the entries of one folder that start with *prefix*, by key: folders end in a slash."""
    path, _, start = prefix.key.rpartition("/")
    folder = ObjectRef(prefix.bucket, path).prefix
    start_of_name = start.encode(errors="surrogatepass")
    listed: list[Listed] = []
    with translated(prefix):
        try:
            if (name := name_of(path)) is not None:
                where = folder_of(prefix.bucket) + b"/" + name
                with Folder.opened(where, prefix.bucket), os.scandir(where) as entries:
                    for entry in entries:
                        # Before `_listed`, which asks the system for the status of each.
                        if not entry.name.startswith(start_of_name):
                            continue
                        if (found := _listed(folder, entry)) is not None:
                            listed.append(found)
        except OSError as error:
            if error.errno not in NOT_FOUND:
                raise
            check_folder(prefix)
    # The key of a coded file lacks the ending of its name, which may be in the prefix.
    wanted = (each for each in listed if each.ref.key.startswith(prefix.key))
    return sorted(wanted, key=lambda each: each.ref.key.encode())


def _listed(prefix: ObjectRef, entry: os.DirEntry[bytes]) -> Listed | None:
    try:
        name = entry.name.decode()
        status = entry.stat()
    except (OSError, UnicodeDecodeError):
        return None
    if TEMPORARY in name:
        return None
    if entry.is_symlink() and not may_lead(prefix.bucket, os.path.realpath(entry.path)):
        return None
    if stat.S_ISREG(status.st_mode):
        plain, dot, ending = name.partition(".")
        is_coded = f"{dot}{ending}" in CODED and _is_coded(entry.path, f"{dot}{ending}")
        ref = ObjectRef(prefix.bucket, f"{prefix.key}{plain if is_coded else name}")
        return Listed(ref, status.st_size, file_version(status), status.st_mtime_ns / 10**9)
    if stat.S_ISDIR(status.st_mode) and not (entry.is_symlink() and _contains(status, entry.path)):
        return Listed(ObjectRef(prefix.bucket, f"{prefix.key}{name}/"), None)
    return None


def _is_coded(path: bytes, ending: str) -> bool:
    """Return whether the file *path* is the object of its name without *ending*."""
    plain = path.removesuffix(ending.encode())
    return not os.path.exists(plain) and coded_ending(plain) == ending  # noqa: PTH110


def _contains(folder: os.stat_result, path: bytes) -> bool:
    """Return whether *folder* is one of the parents of *path*, so that a walk would not end."""
    above = Path(os.fsdecode(path)).parents
    return any(os.path.samestat(folder, parent.stat()) for parent in above)
