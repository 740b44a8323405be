"""Stores and clocks with which tests of the resolver record and delay reads."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from shardgate.errors import StorageUnusableError, VersionChangedError
from shardgate.model import (
    EVERYTHING,
    ByteRange,
    ByteRequest,
    Condition,
    ETag,
    ObjectRef,
    VirtualKey,
)
from shardgate.read.bodies import Entity, Selection
from shardgate.read.budget import ByteBudget
from shardgate.read.containers import Container, Containers
from shardgate.storage.contract import OBJECT, Found, Listed, NotModified, Stat
from shardgate.storage.memory import MemoryStore
from tests.support.clocks import Clock
from tests.support.records import replaced
from tests.support.resolving import NOTHING, ROOT, Reading, everything, gather, reading

REF = ObjectRef("memory://bucket", "data/object")


@dataclass(frozen=True)
class Call:
    """One request to a store."""

    method: str
    ref: ObjectRef
    request: ByteRequest | None = None
    if_match: Condition | None = None
    if_none_match: ETag | None = None


class WatchedStore(MemoryStore):
    """Records every read, and holds each until its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.cancelled = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: Exception | None = None
        """Error that the next read raises."""
        self.spoil: Callable[[Found], Found] = lambda found: found
        """Function applied to each result."""

    @property
    def methods(self) -> list[str]:
        """Names of the calls so far."""
        return [call.method for call in self.calls]

    async def get(
        self,
        ref: ObjectRef,
        request: ByteRequest | None = None,
        *,
        if_match: Condition | None = None,
        if_none_match: ETag | None = None,
        kind: str = OBJECT,
    ) -> Found | NotModified | None:
        """Record, wait, read."""
        self.calls.append(Call("get", ref, request, if_match, if_none_match))
        await self._pass()
        found = await super().get(ref, request, if_match=if_match, if_none_match=if_none_match)
        await self.pause()
        return self.spoil(found) if isinstance(found, Found) else found

    @asynccontextmanager
    async def stream(
        self, ref: ObjectRef, byte_range: ByteRange, *, if_match: Condition | None
    ) -> AsyncGenerator[AsyncIterator[bytes]]:
        """Record, wait, and yield the range in pieces of 1000 bytes."""
        self.calls.append(Call("stream", ref, byte_range, if_match))
        await self._pass()
        found = await super().get(ref, byte_range, if_match=if_match)
        if not isinstance(found, Found) or found.byte_range != byte_range:
            raise VersionChangedError(ref)
        yield self._pieces(found.data)

    async def stat(self, ref: ObjectRef) -> Stat | None:
        """Record, wait, measure."""
        self.calls.append(Call("stat", ref))
        await self._pass()
        return await super().stat(ref)

    async def pause(self) -> None:
        """Do something before and after each read, and before each piece of a stream."""

    async def _pieces(self, data: bytes) -> AsyncIterator[bytes]:
        for at in range(0, len(data), 1000):
            await self.pause()
            yield data[at : at + 1000]

    async def _pass(self) -> None:
        await self.pause()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure


type CallOn = partial[Any]


class Tapped:
    """A store that passes some of its calls through `around`."""

    taps: ClassVar[tuple[str, ...]] = ("get", "put", "delete", "stat")

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    async def around(self, name: str, ref: ObjectRef, call: CallOn) -> Any:
        """Do *call*, the method *name* on *ref*."""
        return await call()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)
        if name not in self.taps:
            return call

        async def tapped(ref: ObjectRef, *args: Any, **options: Any) -> Any:
            return await self.around(name, ref, partial(call, ref, *args, **options))

        return tapped


@dataclass(frozen=True, slots=True)
class SearchedContainers(Containers):
    """Containers that record the keys they are searched for."""

    searches: list[str] = field(default_factory=list)

    async def find(self, root: ObjectRef, key: VirtualKey, *args: Any) -> Container:
        """Note the key, and search."""
        self.searches.append(key)
        return await Containers.find(self, root, key, *args)


def watch_searches(data: Reading) -> list[str]:
    """Record the keys for whose containers *data* searches from now on."""
    known = data.dataset.containers
    searched = SearchedContainers(known.formats, member_formats=known.member_formats)
    data.dataset = replace(data.dataset, containers=searched)
    return searched.searches


class Unlisted(MemoryStore):
    """A store that cannot list, like HTTP."""

    async def list(
        self, prefix: ObjectRef, *, delimiter: str = "", after: str = ""
    ) -> AsyncGenerator[Listed]:
        """Raise when iterated."""
        nothing: list[Listed] = []
        for listed in nothing:
            yield listed
        raise StorageUnusableError(prefix, "cannot be listed")


@asynccontextmanager
async def holding(budget: ByteBudget, nbytes: int) -> AsyncGenerator[None]:
    """Hold bytes of *budget* inside the block."""
    await budget.acquire(nbytes)
    try:
        yield
    finally:
        budget.release(nbytes)


async def settle() -> None:
    """Wait until all tasks that can run have run, also those that their short timers start.

    Timers that are set before that of this function end no later, however slow the machine is.
    """
    turns = 10 * [0.0]
    for delay_s in (*turns, 0.01, *turns):
        await asyncio.sleep(delay_s)


class Watched:
    """Objects at the root of a watched store, and a resolver with a clock that is set by hand."""

    def __init__(self, objects: Mapping[str, bytes], **options: Any) -> None:
        self.store, self.clock = WatchedStore(), Clock()
        self.etags = self.write(objects)
        self.data = reading(self.store, clock=self.clock, **options)
        self.fetch = self.data.fetch

    def write(self, objects: Mapping[str, bytes]) -> dict[str, ETag]:
        """Store objects below the root, and return their ETags."""
        return {key: self.store.place(ROOT.join(key), data) for key, data in objects.items()}

    @property
    def keys(self) -> list[str]:
        """The keys that were read or measured."""
        return [call.ref.key.removeprefix(f"{ROOT.key}/") for call in self.store.calls]


class Watching(Watched):
    """Objects that are read in part or as a whole, or looked up without reading them."""

    async def read(
        self, key: str, part: tuple[int, int] | None = None, asked: ByteRequest | None = EVERYTHING
    ) -> bytes | None:
        """Read *part* of *key*, or all of it as it is stored; see `Resolver.open` for *asked*."""

        def choose(entity: Entity) -> Selection:
            return replaced(NOTHING, reads=ByteRange(*part)) if part else everything(entity)

        data = self.data
        async with data.resolver.open(data.dataset, VirtualKey(key), choose, asked) as opened:
            return None if opened is None else await gather(opened.body)

    async def stat(self, key: str) -> Entity | None:
        """Look *key* up without reading it, as HEAD does."""
        data = self.data
        async with data.resolver.open(data.dataset, VirtualKey(key), lambda _: NOTHING) as opened:
            assert opened is None or opened.body == b""
            return None if opened is None else opened.entity

    async def warm(self, *keys: str) -> None:
        """Look *keys* up, and reset the recorded calls."""
        for key in keys:
            await self.stat(key)
        self.store.calls.clear()
