"""Contents of each format's folder for the conformance suite; stores and shards put together."""

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
from tests.read.stores import Clock, WatchedStore
from tests.support.resolving import ROOT, reading


@dataclass(frozen=True)
class Case:
    """A container that code independent of the app has written."""

    name: str
    build: Callable[[Mapping[str, bytes]], dict[str, bytes]]
    """From chunks by virtual key to objects by key; what is not given is empty."""
    chunks: Mapping[str, bytes]
    """Chunks to write, more than one in some shard."""
    absent: tuple[str, ...]
    """Virtual keys that name nothing in the written container."""
    checksummed: bool
    """True if any changed bit of an index is noticed."""
    metadata: tuple[str, ...] = ("zarr.json", "info")
    """How the names of objects end that hold no chunks, or the folders that such objects are in."""
    has_shards: bool = True
    """True if shards are objects of their own, which can be looked through."""
    entry_suffix: str = ""
    """What an index puts behind the key of a chunk: it names manifests, not their fragments."""

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


class Container:
    """What is stored at the root, in a watched store, and read as the service does."""

    def __init__(self, objects: Mapping[str, bytes], **options: Any) -> None:
        self.store, self.clock = WatchedStore(), Clock()
        self.etags = {key: self.store.place(ROOT.join(key), data) for key, data in objects.items()}
        self.data = reading(self.store, clock=self.clock, **options)
        self.fetch = self.data.fetch

    async def open(self) -> Layout:
        """Open the container, and forget the reads of that."""
        layout, _ = await self.data.dataset.containers.find(ROOT, VirtualKey(""), self.fetch)
        self.store.calls.clear()
        return layout

    async def locate(self, key: str) -> Location:
        """Open the container and locate *key*."""
        return await (await self.open()).locate(VirtualKey(key), self.fetch)

    async def target(self, key: str) -> Target:
        """Open the container and find where *key* is written."""
        return await (await self.open()).target(VirtualKey(key), self.fetch)

    async def slot(self, key: str) -> Slot:
        """Find where a chunk is written."""
        slot = await self.target(key)
        assert isinstance(slot, Slot)
        return slot

    async def read(self, key: str) -> bytes | None:
        """Read all bytes of *key*."""
        return await self.data.read(key)

    async def warm(self, *keys: str) -> None:
        """Read *keys*, and count from zero."""
        for key in keys:
            await self.read(key)
        self.store.calls.clear()

    @property
    def reads(self) -> list[tuple[str, ByteRequest | None]]:
        """What was read: the key below the root, and which part."""
        return [
            (call.ref.key.removeprefix(f"{ROOT.key}/"), call.request) for call in self.store.calls
        ]

    @property
    def keys(self) -> list[str]:
        """The keys of `reads`."""
        return [key for key, _ in self.reads]


async def write_chunks(
    objects: dict[str, bytes], chunks: Mapping[str, bytes | None]
) -> dict[str, NewShard | None]:
    """Write chunks by their keys, and see that all is as it is told; give plans by shards."""
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
        assert plan.indexes
        for read, index in plan.indexes:
            assert read.ref == shard.ref
            match read.request:
                case SuffixRange(length):
                    assert read.decode(data[-length:]) == index
                case ByteRange() as place:
                    assert read.decode(data[slice(*place)]) == index
    return plans


async def chunks_of(shard: Shard, fetch: Fetch) -> AsyncIterator[tuple[str, Stored]]:
    """Name the chunks of *shard*, those of shards inside of it too; none of an absent one."""
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
            yield survey.key(entry.number), survey.whole._replace(byte_range=place)


def render(pieces: Sequence[Piece | Checksummed], old: bytes = b"") -> bytes:
    """Put *pieces* one behind the other; ranges are of *old*."""
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
