"""Containers of the conformance suite: their description, storage and rewriting."""

from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c

from shardgate.formats.contract import Checksummed, Layout, NewShard, Slot, Target
from shardgate.formats.reading import Fetch
from shardgate.formats.surveying import Shard
from shardgate.model import ByteRange, ByteRequest, Location, Piece, Stored, SuffixRange, VirtualKey
from shardgate.storage.memory import MemoryStore
from tests.support.read.stores import Watched
from tests.support.records import replaced
from tests.support.resolving import ROOT


@dataclass(frozen=True)
class Case:
    """A container written by code that shares nothing with the package."""

    name: str
    build: Callable[[Mapping[str, bytes]], dict[str, bytes]]
    """Return objects by key from chunks by virtual key; all other chunks are empty."""
    chunks: Mapping[str, bytes]
    """Chunks to write; some shard has several."""
    absent: tuple[str, ...]
    """Virtual keys without a chunk in the written container."""
    checksummed: bool
    """True if checksums reveal each changed bit of an index."""
    metadata: tuple[str, ...] = ("zarr.json", "info")
    """Suffixes of names, or folders, of objects that hold no chunks."""
    has_shards: bool = True
    """True if shards are objects of their own, which can be surveyed."""
    entry_suffix: str = ""
    """Suffix of chunk keys in indexes of meshes, which name manifests and not fragments."""
    is_spelling: bool = False
    """True if the reads are those of another case, and only the bytes of indexes differ."""

    def is_metadata(self, name: str) -> bool:
        """Return whether the object *name* holds no chunks."""
        return name.endswith(self.metadata) or f"{name.partition('/')[0]}/" in self.metadata

    def __str__(self) -> str:
        return self.name


def filled(objects: Mapping[str, bytes], store: MemoryStore | None = None) -> MemoryStore:
    """Place *objects* below the root of a store."""
    store = store or MemoryStore()
    for key, data in objects.items():
        store.place(ROOT.join(key), data)
    return store


class Container(Watched):
    """A container at the root of a watched store, read as by the service."""

    async def open(self) -> Layout:
        """Open the container, and clear the recorded reads."""
        layout, *_ = await self.data.dataset.containers.find(ROOT, VirtualKey(""), self.fetch)
        self.store.calls.clear()
        return layout

    async def locate(self, key: str) -> Location:
        """Open the container and locate *key*."""
        return await (await self.open()).locate(VirtualKey(key), self.fetch)

    async def target(self, key: str) -> Target:
        """Open the container and return the write target of *key*."""
        return await (await self.open()).target(VirtualKey(key), self.fetch)

    async def slot(self, key: str) -> Slot:
        """Open the container and return the slot of a chunk."""
        slot = await self.target(key)
        assert isinstance(slot, Slot)
        return slot

    async def read(self, key: str) -> bytes | None:
        """Read all bytes of *key*."""
        return await self.data.read(key)

    async def warm(self, *keys: str) -> None:
        """Read *keys*, and clear the recorded reads."""
        for key in keys:
            await self.read(key)
        self.store.calls.clear()

    @property
    def reads(self) -> list[tuple[str, ByteRequest | None]]:
        """Recorded reads: the key below the root, and the requested part."""
        requests = [call.request for call in self.store.calls]
        return list(zip(self.keys, requests, strict=True))


async def write_chunks(
    objects: dict[str, bytes], chunks: Mapping[str, bytes | None]
) -> dict[str, NewShard | None]:
    """Write chunks into *objects*, check each plan, and return the plans by shard."""
    container, shards = Container(objects), defaultdict[Any, dict[Any, Any]](dict)
    plans: dict[str, NewShard | None] = {}
    for key, body in chunks.items():
        shard, entry = await container.slot(key)
        shards[shard][entry] = body
    for shard, changes in shards.items():
        key = shard.ref.key.removeprefix(f"{ROOT.key}/")
        old = await shard.open(list(changes), container.fetch)
        assert (old is None) is (key not in objects)
        plan = plans[key] = shard.plan(old, changes)
        if plan is None:
            objects.pop(key, None)
            continue
        data = objects[key] = render(plan.pieces, objects.get(key, b""))
        written = {entry: body for entry, body in changes.items() if body is not None}
        assert {entry: data[slice(*place)] for entry, place in plan.places.items()} == written
        read, index = plan.index
        assert read.ref == shard.ref
        match read.request:
            case SuffixRange(length):
                assert read.decode(data[-length:]) == index
            case ByteRange() as place:
                assert read.decode(data[slice(*place)]) == index
    return plans


async def chunks_of(shard: Shard, fetch: Fetch) -> AsyncIterator[tuple[str, Stored]]:
    """Yield key and place of each chunk in *shard* and in shards inside of it."""
    if (survey := await shard.survey(fetch)) is None:
        return
    table = survey.table()
    assert table.faults in ([], ())
    assert sorted(table, key=lambda entry: entry.place) == list(table)
    for entry in table:
        if survey.inner is not None:
            async for found in chunks_of(survey.inner(entry), fetch):
                yield found
        else:
            place = survey.whole.byte_range.narrow(entry.place)
            yield survey.key(entry.number), replaced(survey.whole, byte_range=place)


def render(pieces: Sequence[Piece | Checksummed], old: bytes = b"") -> bytes:
    """Concatenate *pieces*, of which ranges refer to *old*."""
    return b"".join(_bytes(piece, old) for piece in pieces)


def _bytes(piece: Piece | Checksummed, old: bytes) -> bytes:
    match piece:
        case ByteRange(start, stop):
            assert stop <= len(old)
            return old[start:stop]
        case Checksummed(pieces):
            data = render(pieces, old)
            checksum: int = google_crc32c.value(data)
            return data + checksum.to_bytes(4, "little")
        case _:
            return piece
