"""Chunk files of repositories: written under ids of their own, and asked for before a commit."""

import secrets
from collections.abc import Mapping
from typing import Final, NamedTuple

import cachetools

from app.errors import BadBodyError, BusyError, ReadOnlyError
from app.formats.icechunk.ids import OBJECT_ID_NBYTES, decode_id, encode_id
from app.model import ObjectRef
from app.resolve.icechunk.repo_swap import demand_unlocked
from app.resolve.icechunk.repositories import OpenedRepository
from app.storage.abreast import abreast
from app.storage.contract import ABSENT, Conflict, ObjectStore

_ATTEMPTS: Final = 3
_MAX_KNOWN: Final = 2**18
"""So many of the last chunk files that this process wrote need not be asked for."""
_KNOWN_S: Final = 3600
"""By then those may have been collected to which nothing refers."""
_MAX_SINGLE: Final = 256
"""More are found by listing all that there are."""


class _Name(NamedTuple):
    folder: ObjectRef
    chunk_id: bytes


class ChunkFiles:
    """Writes the chunk files of repositories, and knows the latest of them."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._known: cachetools.TTLCache[_Name, int] = cachetools.TTLCache(_MAX_KNOWN, _KNOWN_S)

    async def put(self, opened: OpenedRepository, body: bytes) -> bytes:
        """Write a chunk file, and give its id.

        Raises: `BadBodyError` for one without bytes, `LockedError`, `ReadOnlyError` for version 1
        of the format, `UnwritableError`, `StorageError`.
        """
        if not body:
            raise BadBodyError("a chunk has one byte at least: the library refuses empty ones")
        if (info := await opened.info()) is None:
            raise ReadOnlyError(f"{opened.directory} follows version 1 of Icechunk's format")
        demand_unlocked(info, opened.repo)
        for _ in range(_ATTEMPTS):
            chunk_id = secrets.token_bytes(OBJECT_ID_NBYTES)
            name = opened.repository.file("chunks", chunk_id)
            if not isinstance(await self._store.put(name, [body], expected=ABSENT), Conflict):
                self._known[_Name(opened.directory, chunk_id)] = len(body)
                return chunk_id
        raise BusyError(f"{opened.directory}: no id was free")

    async def lengths(
        self, opened: OpenedRepository, wanted: Mapping[bytes, int]
    ) -> Mapping[bytes, int]:
        """Tell the lengths of those chunk files of *wanted* that there are.

        Raises: `StorageError`.
        """
        found: dict[bytes, int] = {}
        for chunk_id in wanted:
            if (length := self._known.get(_Name(opened.directory, chunk_id))) is not None:
                found[chunk_id] = length
        missing = [chunk_id for chunk_id in wanted if chunk_id not in found]
        listed: Mapping[bytes, int]
        if len(missing) <= _MAX_SINGLE:
            names = [opened.repository.file("chunks", chunk_id) for chunk_id in missing]
            stats = zip(missing, await abreast(self._store.stat, names), strict=True)
            listed = {chunk_id: stat.size for chunk_id, stat in stats if stat is not None}
        else:
            listed = await self._list(opened, frozenset(missing))
        for chunk_id, length in listed.items():
            self._known[_Name(opened.directory, chunk_id)] = length
        return {**found, **listed}

    async def _list(
        self, opened: OpenedRepository, wanted: frozenset[bytes]
    ) -> Mapping[bytes, int]:
        """Find those *wanted* among all; a few listings go on at a time, for ids are random."""

        async def part(letter: str) -> dict[bytes, int]:
            start = opened.directory.join(f"chunks/{letter}")
            found: dict[bytes, int] = {}
            async for each in self._store.list(start):
                chunk_id = decode_id(each.ref.key.rpartition("/")[2])
                if chunk_id in wanted and each.size is not None:
                    found[chunk_id] = each.size
            return found

        parts = await abreast(part, sorted({encode_id(each)[0] for each in wanted}))
        return {chunk_id: size for found in parts for chunk_id, size in found.items()}
