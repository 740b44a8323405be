"""Writers over a store in memory, each with the caches of one process of the service."""

import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from struct import iter_unpack
from typing import Any, ClassVar, Final

from shardgate.model import ETag, ObjectRef, VirtualKey
from shardgate.read.bodies import Demand
from shardgate.read.budget import ByteBudget
from shardgate.storage.contract import Found, ObjectHeaders
from shardgate.storage.memory import MemoryStore
from shardgate.write.rewrite import Rewrites
from shardgate.write.writer import Eraser, KeyWrite, PassthroughWriter, Writer
from tests.support.formats.zarr.building import EMPTY, LITTLE, array_metadata, sharding
from tests.support.read.stores import CallOn, Tapped
from tests.support.resolving import ROOT, Reading, reading

PER_SHARD: Final = 8
CHUNK_NBYTES: Final = 4


def absent(names: Sequence[ETag]) -> str | None:
    """Precondition: the object is absent."""
    return "exists" if names else None


def present(names: Sequence[ETag]) -> str | None:
    """Precondition: the object exists."""
    return None if names else "is absent"


def the_same(etag: ETag | None) -> Demand:
    """Return the demand that the version is *etag*."""
    return lambda names: None if etag in names else "is another"


def zarr_json(**changes: Any) -> bytes:
    """Return the metadata of an array of bytes: 32 chunks of 4, 8 of them in a shard."""
    shard = CHUNK_NBYTES * PER_SHARD
    codec = sharding([CHUNK_NBYTES], [{"name": "bytes"}], index_codecs=[LITTLE])
    return json.dumps(array_metadata([4 * shard], [shard], [codec]) | changes).encode()


def filled() -> MemoryStore:
    """Return a store with a sharded array without chunks, and an object beside it."""
    store = MemoryStore()
    store.place(ROOT.join("a/zarr.json"), zarr_json())
    store.place(ROOT.join("notes/one"), b"one")
    return store


async def stored(memory: MemoryStore, key: str) -> bytes | None:
    """Read an object of the store."""
    found = await memory.get(ROOT.join(key))
    return found.data if isinstance(found, Found) else None


def chunks_of(shard: bytes) -> dict[int, bytes]:
    """Return the chunks of a shard by number."""
    entries = iter_unpack("<QQ", shard[-16 * PER_SHARD :])
    return {
        number: shard[entry[0] : entry[0] + entry[1]]
        for number, entry in enumerate(entries)
        if entry != EMPTY
    }


@dataclass
class Replica:
    """A process of the service: writers, and a resolver with the same caches."""

    writer: Writer
    eraser: Eraser
    reading: Reading
    rewriter: Rewrites
    room: ByteBudget
    """Budget for the shards that are built."""
    rewrites: list[tuple[int, int]] = field(default_factory=list)
    """For each rewrite the number of changes, and of lost swaps."""

    async def put(
        self, key: str, body: bytes | None, demand: Demand | None = None, *, coding: str = ""
    ) -> ETag | None:
        """Write one key."""
        given = KeyWrite(VirtualKey(key), body, ObjectHeaders(coding), demand)
        return await self.writer.put(self.reading.dataset, given)

    async def read(self, key: str) -> bytes | None:
        """Read one key."""
        return await self.reading.read(key)


def replica(store: Any, clock: Callable[[], float] = time.monotonic) -> Replica:
    """Start a process over *store*."""
    told: list[tuple[int, int]] = []
    looked = reading(store, clock=clock)
    objects = PassthroughWriter(store, looked.fetch, document_bytes=2**16, decoded_bytes=2**16)
    room = ByteBudget(2**20, wait_s=60)
    rewrites = Rewrites(store, looked.fetch, room, lambda *counts: told.append(counts))
    writer = Writer(store, looked.fetch, objects, rewrites)
    eraser = Eraser(looked.resolver, objects, writer)
    return Replica(writer, eraser, looked, rewrites, room, told)


async def put_each(one: Replica, given: dict[str, bytes | None]) -> list[object]:
    """Write many keys."""
    several = [KeyWrite(VirtualKey(key), body) for key, body in given.items()]
    return list(await one.writer.put_each(one.reading.dataset, several))


class Between(Tapped):
    """A store that calls *between* before each call, which may write or raise."""

    taps: ClassVar[tuple[str, ...]] = (*Tapped.taps, "verify_conditional_writes")

    def __init__(
        self, store: MemoryStore, between: Callable[[str, ObjectRef], Any] = lambda *_: None
    ) -> None:
        super().__init__(store)
        self.between = between
        self.calls: list[tuple[str, str]] = []

    async def around(self, name: str, ref: ObjectRef, call: CallOn) -> Any:
        """Record the call, and run the other thing before it."""
        self.calls.append((name, ref.key.removeprefix(f"{ROOT.key}/")))
        if (waiting := self.between(name, ref)) is not None:
            await waiting
        return await call()


def before(
    method: str, *others: Callable[[], Awaitable[object]]
) -> Callable[[str, ObjectRef], Awaitable[object] | None]:
    """Return what a `Between` does before its first calls of *method*: one of *others* each."""
    left = list(others)
    return lambda name, _: left.pop(0)() if name == method and left else None
