"""Objects stored for sessions: one document per session, one journal entry per changed chunk.

They lie in the folder ``sessions/`` of the repository, which Icechunk's own library
ignores: the document is ``{session id}.session``, an entry is
``{session id}/{node id}/{folder}/{coords}``. Both are replaced in place, so the store orders
concurrent writes of one chunk. New inner chunks are in ``{session id}/fragments/{file id}``.
"""

import asyncio
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple
from zlib import crc32

from shardgate.concurrency import (
    Backoff,
    SingleFlight,
    bounded_gather,
    retry_conflicts,
    run_in_thread,
)
from shardgate.errors import DamagedError
from shardgate.formats.compression import zstd_capacity
from shardgate.formats.icechunk.ids import NODE_ID_NBYTES, decode_id, encode_id
from shardgate.formats.icechunk.manifest import InlineChunk
from shardgate.formats.reading import DecodeError
from shardgate.icechunk.sessions.document import (
    ChunkAddress,
    SessionDocument,
    decode_session,
    encode_session,
)
from shardgate.icechunk.sessions.entries import (
    GONE_NBYTES,
    Fragmented,
    JournalEntry,
    decode_entry,
    encode_entry,
    parse_coords,
    spell_coords,
)
from shardgate.model import ETag, ObjectRef
from shardgate.read.metadata_cache import SizedLRUCache
from shardgate.storage.contract import Conflict, Expected, Found, Listed, NotModified, ObjectStore

_SESSIONS: Final = "sessions/"
_FRAGMENTS: Final = "fragments/"
_DOCUMENT_NAME: Final = re.compile(r"([0-9A-Z]{20})\.session")
_BACKOFF: Final = Backoff(first_s=0.04, longest_s=0.4)
type DocumentEdit = Callable[[SessionDocument | None], SessionDocument | None]
"""Return the new document, or `None` to keep the old one. It may raise, and be called again."""


class SessionLocation(NamedTuple):
    """Names of the objects of one session."""

    directory: ObjectRef
    session_id: str

    @property
    def document(self) -> ObjectRef:
        return self.directory.join(f"{_SESSIONS}{self.session_id}.session")

    def entries(self, node_id: bytes | None = None, name: str = "") -> ObjectRef:
        below = "" if node_id is None else f"{encode_id(node_id)}/{name}"
        return self.directory.join(f"{_SESSIONS}{self.session_id}/{below}")

    def fragments(self, file_id: bytes) -> ObjectRef:
        """Return the name of a file of new inner chunks."""
        return self.directory.join(f"{_SESSIONS}{self.session_id}/{_FRAGMENTS}{encode_id(file_id)}")


async def list_sessions(
    store: ObjectStore, directory: ObjectRef
) -> AsyncIterator[tuple[str, float | None]]:
    """Yield the ids of the sessions of a repository that have a document, with its modification
    time in seconds since 1970 by the store's clock, if the store says it.
    """
    folder = directory.join(_SESSIONS)
    async for each in store.list(folder, delimiter="/"):
        found = _DOCUMENT_NAME.fullmatch(each.ref.key.removeprefix(folder.key))
        if found is not None and decode_id(found[1]) is not None:
            yield found[1], each.modified_s


class SessionDocumentStore:
    """Reads and replaces one session document, one operation at a time.

    A caller that arrives during a read waits for the next one, so the result is never older than
    the call.
    """

    def __init__(self, store: ObjectStore, ref: ObjectRef, limit_nbytes: int) -> None:
        self._store = store
        self._ref = ref
        self._limit_nbytes = limit_nbytes
        self.known: SessionDocument | None = None
        """The document as last read or written; `None` if it does not exist."""
        self.nbytes = 0
        """Estimated bytes of memory of the known document."""
        self._etag: ETag | None = None
        self._lock = asyncio.Lock()
        self._flights = SingleFlight[int]()
        self._reads = 0

    async def read(self) -> SessionDocument | None:
        """Read the current document; return `None` if it does not exist."""
        if not self._lock.locked():  # no other caller waits for the same read
            return await self._read_locked()
        return await self._flights.run(self._reads, self._read_locked)

    async def edit(self, edit: DocumentEdit) -> SessionDocument | None:
        """Replace the document by the result of *edit*, which is called again after a lost race."""
        async with self._lock:
            if self.known is None:
                await self._read()
            swap = partial(self._swap, edit)
            return await retry_conflicts(swap, Conflict, self._ref, backoff=_BACKOFF)

    async def _read_locked(self) -> SessionDocument | None:
        async with self._lock:
            self._reads += 1
            await self._read()
            return self.known

    async def _read(self) -> None:
        # Unchanged, it takes no decoding: each request to the session asks.
        found = await self._store.get(self._ref, if_none_match=self._etag)
        if found is None:
            self._keep(None, None)
        elif not isinstance(found, NotModified):
            self._keep(await self._decode(found), found.etag)

    def _keep(self, document: SessionDocument | None, etag: ETag | None) -> None:
        self.known, self._etag = document, etag
        self.nbytes = 0 if document is None else document.nbytes

    async def _decode(self, found: Found) -> SessionDocument:
        try:
            # More than one block of zstd would hold up the event loop.
            is_long = zstd_capacity(found.data, self._limit_nbytes) > 128 * 1024
            return await run_in_thread(
                decode_session, found.data, self._limit_nbytes, is_long=is_long
            )
        except DecodeError as error:
            raise DamagedError(self._ref, str(error)) from error

    async def _swap(self, edit: DocumentEdit) -> SessionDocument | Conflict | None:
        document = edit(self.known)
        if self.known is None or document is None or document is self.known:
            return self.known
        is_long = document.nbytes > 64 * 1024  # about a millisecond
        data = await run_in_thread(encode_session, document, self._limit_nbytes, is_long=is_long)
        etag = await self._store.put(self._ref, [data], expected=self._etag)
        if isinstance(etag, Conflict):
            await self._read()
            return etag
        self._keep(document, etag)
        return document


class StoredEntry(NamedTuple):
    """Journal entry and its version in the store."""

    entry: JournalEntry
    etag: ETag


class ListedEntry(NamedTuple):
    """Journal entry as listed, without its content."""

    is_deletion: bool
    etag: ETag | None
    modified_s: float | None
    """Time of its write in seconds since 1970, if the store says it."""


type Entries = dict[tuple[int, ...], ListedEntry]
"""Entries of one array, by coords."""

type EntryCache = SizedLRUCache[ObjectRef, StoredEntry]


@dataclass(frozen=True, slots=True)
class SessionJournal:
    """Journal entries of one session; every read is revalidated by ETag."""

    _store: ObjectStore
    _location: SessionLocation
    _cache: EntryCache

    def ref(self, address: ChunkAddress) -> ObjectRef:
        name = spell_coords(address.coords)
        # A local store locks one folder for a write: four let writes run side by side.
        folder = crc32(name.encode()) % 4
        return self._location.entries(address.node.node_id, f"{folder:x}/{name}")

    async def get(self, address: ChunkAddress, etag: ETag | None = None) -> StoredEntry | None:
        """Read an entry; *etag* is its current version if that was just listed."""
        ref = self.ref(address)
        known = self._cache.get(ref)
        if known is not None and known.etag == etag:
            return known
        found = await self._store.get(ref, if_none_match=known and known.etag)
        if isinstance(found, NotModified):
            return known
        if found is None:
            return None
        try:
            stored = StoredEntry(decode_entry(found.data), found.etag)
        except DecodeError as error:
            raise DamagedError(ref, str(error)) from error
        self._cache.put(ref, stored)
        return stored

    async def put(
        self, address: ChunkAddress, entry: JournalEntry, *, expected: Expected
    ) -> Conflict | None:
        """Replace an entry whose version is *expected*."""
        ref = self.ref(address)
        etag = await self._store.put(ref, [encode_entry(entry)], expected=expected)
        if isinstance(etag, Conflict):
            return etag
        self._cache.put(ref, StoredEntry(entry, etag))
        return None

    async def remove(self, address: ChunkAddress) -> None:
        """Delete an entry, so that the chunk is that of the parent."""
        await self._store.delete(self.ref(address), expected=None)

    async def all_entries(self) -> dict[bytes, Entries]:
        """List the entries of all arrays, by node id."""
        folder = self._location.entries()
        found = defaultdict[bytes, Entries](dict)
        async with aclosing(self._store.list(folder)) as listed:
            async for each in listed:
                name = each.ref.key.removeprefix(folder.key)
                if name.startswith(_FRAGMENTS):  # which follow all node ids
                    break
                node_id = decode_id(name.partition("/")[0], NODE_ID_NBYTES)
                if node_id is not None:
                    _enter(each, found[node_id])
        return found

    async def entries(self, node_id: bytes) -> Entries:
        """List the entries of an array."""
        found: Entries = {}
        async for each in self._store.list(self._location.entries(node_id)):
            _enter(each, found)
        return found

    async def clear(self) -> None:
        """Delete all entries; some servers list empty folders, which are skipped."""
        listed = self._store.list(self._location.entries())
        refs = [each.ref async for each in listed if not each.ref.key.endswith("/")]
        await bounded_gather(partial(self._store.delete, expected=None), refs, limit=16)


def _enter(listed: Listed, entries: Entries) -> None:
    coords = parse_coords(listed.ref.key.rpartition("/")[2])
    if coords is not None and listed.size is not None:
        is_deletion = listed.size == GONE_NBYTES
        entries[coords] = ListedEntry(is_deletion, listed.etag, listed.modified_s)


def entry_nbytes(ref: ObjectRef, stored: StoredEntry) -> int:
    """Estimate the bytes of memory of a cached entry."""
    match stored.entry:
        case InlineChunk(data):
            more = len(data)
        case Fragmented(_, fragments):
            more = 256 * len(fragments)
        case _:
            more = 0
    return 512 + len(ref.key) + more  # 512 and 256 for the Python objects
