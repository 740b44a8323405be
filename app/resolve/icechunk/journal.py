"""What is stored of sessions: a document for each, and an entry for each chunk it changed.

They lie in the folder ``sessions`` of the repository, which the library knows nothing of: the
document is ``{session id}.session``, and the entries ``{session id}/{node id}/{shelf}/{coords}``.
All are replaced in place, so that the store puts those in order who write one chunk.
"""

import re
from collections.abc import AsyncIterator
from typing import Final, NamedTuple
from zlib import crc32

from app.concurrency import bounded_gather
from app.errors import DamagedError
from app.formats.icechunk.ids import NODE_ID_NBYTES, decode_id, encode_id
from app.formats.icechunk.session import (
    GONE_NBYTES,
    Entry,
    decode_entry,
    encode_entry,
    parse_coords,
    spell_coords,
)
from app.formats.reading import DecodeError
from app.model import ETag, ObjectRef
from app.resolve.metadata_cache import SizedLRUCache
from app.storage.contract import Conflict, Expected, NotModified, ObjectStore

_SHELVES: Final = 4
"""Folders that the entries of an array are divided among.

One writer at a time locks each to replace entries; new ones of one folder are made together.
"""
SESSIONS: Final = "sessions/"
"""The folder of a repository."""
_DOCUMENT: Final = ".session"
_OVERHEAD_NBYTES: Final = 512
_REMOVED_AT_ONCE: Final = 16
_NAME: Final = re.compile(r"([0-9A-Z]{20})\.session")


class Place(NamedTuple):
    """Where the objects of one session are."""

    directory: ObjectRef
    """Of the repository."""
    session_id: str

    @property
    def document(self) -> ObjectRef:
        """Name the document."""
        return self.directory.join(f"{SESSIONS}{self.session_id}{_DOCUMENT}")

    def entries(self, node_id: bytes | None = None) -> ObjectRef:
        """Name the folder of the entries, or of those of one array."""
        below = "" if node_id is None else f"{encode_id(node_id)}/"
        return self.directory.join(f"{SESSIONS}{self.session_id}/{below}")

    def entry(self, node_id: bytes, coords: tuple[int, ...]) -> ObjectRef:
        """Name the entry of a chunk."""
        name = spell_coords(coords)
        shelf = crc32(name.encode()) % _SHELVES
        return self.entries(node_id).join(f"{shelf:x}/{name}")


class Kept(NamedTuple):
    """An entry, and its version in the store."""

    entry: Entry
    etag: ETag


class ListedEntry(NamedTuple):
    """An entry that has not been read."""

    coords: tuple[int, ...]
    is_gone: bool
    etag: ETag | None


class Journal:
    """Reads and writes the entries of all sessions; one is read anew each time, by its version."""

    def __init__(self, store: ObjectStore, *, max_bytes: int) -> None:
        self._store = store
        self._known = SizedLRUCache[ObjectRef, Kept](max_bytes, _weigh)

    async def get(
        self, place: Place, node_id: bytes, coords: tuple[int, ...], etag: ETag | None = None
    ) -> Kept | None:
        """Read an entry, unless the version *etag* that a listing told is known; `None` is none.

        Raises: `DamagedError`, `StorageError`.
        """
        ref = place.entry(node_id, coords)
        known = self._known.get(ref)
        if known is not None and known.etag == etag:
            return known
        found = await self._store.get(ref, if_none_match=known and known.etag)
        if isinstance(found, NotModified):
            return known
        if found is None:
            return None
        try:
            kept = Kept(decode_entry(found.data), found.etag)
        except DecodeError as error:
            raise DamagedError(ref, str(error)) from error
        self._known.put(ref, kept)
        return kept

    async def put(
        self,
        place: Place,
        node_id: bytes,
        coords: tuple[int, ...],
        entry: Entry,
        *,
        expected: Expected,
    ) -> Conflict | None:
        """Write an entry in the place of the version *expected*."""
        ref = place.entry(node_id, coords)
        etag = await self._store.put(ref, [encode_entry(entry)], expected=expected)
        if isinstance(etag, Conflict):
            return etag
        self._known.put(ref, Kept(entry, etag))
        return None

    async def remove(self, place: Place, node_id: bytes, coords: tuple[int, ...]) -> None:
        """Let a chunk be as it is in the parent."""
        await self._store.delete(place.entry(node_id, coords), expected=None)

    async def arrays(self, place: Place) -> set[bytes]:
        """Name the arrays that there may be entries of."""
        folder = place.entries()
        listed = self._store.list(folder, delimiter="/")
        names = [each.ref.key.removeprefix(folder.key).rstrip("/") async for each in listed]
        node_ids = (decode_id(name, NODE_ID_NBYTES) for name in names)
        return {node_id for node_id in node_ids if node_id is not None}

    async def listed(self, place: Place, node_id: bytes) -> AsyncIterator[ListedEntry]:
        """List the entries of an array."""
        folder = place.entries(node_id)
        async for each in self._store.list(folder):
            coords = parse_coords(each.ref.key.rpartition("/")[2])
            if coords is not None and each.size is not None:
                yield ListedEntry(coords, each.size == GONE_NBYTES, each.etag)

    async def clear(self, place: Place) -> None:
        """Remove all entries; some servers list folders that are empty by now, as if they were."""

        async def remove(ref: ObjectRef) -> None:
            await self._store.delete(ref, expected=None)

        listed = self._store.list(place.entries())
        refs = [each.ref async for each in listed if not each.ref.key.endswith("/")]
        await bounded_gather(remove, refs, limit=_REMOVED_AT_ONCE)


async def list_sessions(store: ObjectStore, directory: ObjectRef) -> AsyncIterator[str]:
    """Give the ids of the sessions of a repository that there are documents of."""
    folder = directory.join(SESSIONS)
    async for each in store.list(folder, delimiter="/"):
        found = _NAME.fullmatch(each.ref.key.removeprefix(folder.key))
        if found is not None and decode_id(found[1]) is not None:
            yield found[1]


def _weigh(ref: ObjectRef, kept: Kept) -> int:
    inline = 0 if kept.entry is None else len(encode_entry(kept.entry))
    return _OVERHEAD_NBYTES + len(ref.key) + inline
