"""Chunk files of repositories: written under ids of their own, and asked for before a commit."""

import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Final, NamedTuple

import cachetools

from app.concurrency import bounded_gather, take
from app.errors import BadBodyError, BusyError
from app.formats.icechunk.ids import OBJECT_ID_NBYTES, decode_id, encode_id
from app.formats.icechunk.repo_info import RepoInfo
from app.model import ObjectRef
from app.resolve.icechunk.repositories import OpenedRepository
from app.storage.contract import ABSENT, Conflict, ObjectStore

_ATTEMPTS: Final = 3
_MAX_KNOWN: Final = 2**18
"""So many of the last chunk files that this process wrote need not be asked for."""
_KNOWN: Final = timedelta(hours=1)
"""Longer ago it would be hard to tell whether somebody has collected them since."""
_MAX_SINGLE: Final = 256
"""More are found by listing all that there are."""
_PAGE: Final = 1000
_MAX_LISTED: Final = 100
"""So many names are looked at for each chunk file; asking for that alone costs no more."""


class _Name(NamedTuple):
    folder: ObjectRef
    chunk_id: bytes


class ChunkFiles:
    """Writes the chunk files of repositories, and knows the latest of them."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._known: cachetools.TTLCache[_Name, int] = cachetools.TTLCache(
            _MAX_KNOWN, _KNOWN.total_seconds()
        )

    async def put(self, opened: OpenedRepository, body: bytes) -> bytes:
        """Write a chunk file, and give its id.

        Raises: `BadBodyError` for one without bytes, `LockedError`, `ReadOnlyError` for version 1
        of the format, `UnwritableError`, `StorageError`.
        """
        if not body:
            raise BadBodyError("a chunk has one byte at least: the library refuses empty ones")
        await opened.writable_info()
        for _ in range(_ATTEMPTS):
            chunk_id = secrets.token_bytes(OBJECT_ID_NBYTES)
            name = opened.repository.file("chunks", chunk_id)
            if not isinstance(await self._store.put(name, [body], expected=ABSENT), Conflict):
                self._known[_Name(opened.directory, chunk_id)] = len(body)
                return chunk_id
        raise BusyError(f"{opened.directory}: no id was free")

    async def lengths(
        self, opened: OpenedRepository, info: RepoInfo, wanted: Mapping[bytes, int]
    ) -> Mapping[bytes, int]:
        """Tell the lengths of those chunk files of *wanted* that there are, as *info* has it.

        Raises: `DamagedError`, `StorageError`.
        """
        found: dict[bytes, int] = {}
        for chunk_id in wanted:
            if (length := self._known.get(_Name(opened.directory, chunk_id))) is not None:
                found[chunk_id] = length
        if found:
            may_be_gone = await opened.think(opened.repo, lambda: _may_have_collected(info))
            found = {} if may_be_gone else found
        missing = [chunk_id for chunk_id in wanted if chunk_id not in found]
        if len(missing) <= _MAX_SINGLE:
            return {**found, **await self._ask(opened, missing)}
        by_letter: dict[str, list[bytes]] = {}
        for chunk_id in missing:
            by_letter.setdefault(encode_id(chunk_id)[0], []).append(chunk_id)
        parts = await bounded_gather(partial(self._list, opened), list(by_letter.values()))
        return {**found, **{chunk_id: size for part in parts for chunk_id, size in part.items()}}

    async def _ask(self, opened: OpenedRepository, wanted: Sequence[bytes]) -> Mapping[bytes, int]:
        names = [opened.repository.file("chunks", chunk_id) for chunk_id in wanted]
        stats = zip(wanted, await bounded_gather(self._store.stat, names), strict=True)
        return {chunk_id: stat.size for chunk_id, stat in stats if stat is not None}

    async def _list(self, opened: OpenedRepository, wanted: Sequence[bytes]) -> Mapping[bytes, int]:
        """Find those *wanted*, whose names begin alike, in a listing.

        Where there are far more others it is broken off: ids are random, and so are their places.
        """
        listed = self._store.list(opened.directory.join(f"chunks/{encode_id(wanted[0])[0]}"))
        found, left = dict[bytes, int](), set(wanted)
        for _ in range(1 + _MAX_LISTED * len(wanted) // _PAGE):
            some = await take(listed, _PAGE)
            for each in some:
                chunk_id = decode_id(each.ref.key.rpartition("/")[2])
                if chunk_id in left and each.size is not None:
                    found[chunk_id] = each.size
                    left.remove(chunk_id)
            if len(some) < _PAGE:
                return found
        return {**found, **await self._ask(opened, sorted(left))}


def _may_have_collected(info: RepoInfo) -> bool:
    """Whether garbage may have been collected within `_KNOWN` before the last operation.

    Raises: `DecodeError`.
    """
    since: datetime | None = None
    for update in info.updates():
        since = since or update.updated_at - _KNOWN
        if update.updated_at < since:
            return False
        if update.kind == "gc_ran":
            return True
    return info.repo_before_updates is not None
