"""The resolver over any store, without HTTP."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

from shardgate.datasets import open_containers
from shardgate.formats.contract import Format
from shardgate.formats.listing import Window
from shardgate.model import ByteRange, ByteRequest, ObjectRef, VirtualKey
from shardgate.read.bodies import Body, Entity, Selection
from shardgate.read.budget import BucketBudgets, ByteBudget
from shardgate.read.chunks import ChunkReader
from shardgate.read.containers import Container, Containers, Dataset
from shardgate.read.listing import Page, Root
from shardgate.read.metadata_cache import MetadataCache, ReadCache
from shardgate.read.resolver import Resolver
from shardgate.settings import DatasetSettings, LimitSettings
from shardgate.storage.contract import ObjectReader
from tests.support.records import replaced

ROOT = ObjectRef("memory://bucket", "data")
NOTHING = Selection(HTTPStatus.OK)
"""The selection of a client that reads no bytes."""


def everything(entity: Entity) -> Selection:
    """Select the whole entity, as it is stored."""
    return replaced(NOTHING, reads=ByteRange(0, entity.length))


@dataclass
class Reading:
    """A resolver and its parts."""

    resolver: Resolver
    fetch: ReadCache
    chunks: ChunkReader
    budget: ByteBudget
    dataset: Dataset

    async def read(self, key: str, asked: ByteRequest | None = None) -> bytes | None:
        """Read all bytes of *key*, without a coding; see `Resolver.open` for *asked*."""

        def choose(entity: Entity) -> Selection | None:
            return None if entity.coding else everything(entity)

        async with self.resolver.open(self.dataset, VirtualKey(key), choose, asked) as opened:
            return None if opened is None else await gather(opened.body)

    @property
    def root(self) -> Root:
        """The root of the dataset, for listings and surveys."""
        return self.resolver.root(self.dataset)

    async def page(self, window: Window, limit: int = 1000) -> Page:
        """List a page of the keys in *window*."""
        return await self.resolver.page(self.dataset, window, limit)

    async def keys(self, window: Window) -> list[str]:
        """List the keys of a page of *window*."""
        return [entry.key for entry in (await self.page(window)).entries]

    async def names(self, prefix: str) -> list[str]:
        """List the names in the folder *prefix*."""
        return [each.name async for each in self.resolver.list(self.dataset, VirtualKey(prefix))]

    async def container(self, key: str) -> Container:
        """Find the container of *key*."""
        return await self.resolver.find_container(self.dataset, VirtualKey(key))


async def gather(body: Body) -> bytes:
    """Join the pieces of a body."""
    return body if isinstance(body, bytes) else b"".join([piece async for piece in body])


def known_containers(*, whole_index_bytes: int = 2**20, decoded_bytes: int = 2**20) -> Containers:
    """Return the containers that the service looks for."""
    sizes = {"whole_index_bytes": whole_index_bytes, "decoded_bytes": decoded_bytes}
    limits = LimitSettings.model_validate({"metadata_bytes": 2**20} | sizes)
    return open_containers(DatasetSettings(url="memory://data"), limits)


def reading(
    store: ObjectReader,
    *,
    root: ObjectRef = ROOT,
    formats: tuple[Format, ...] | None = None,
    index_bytes: int = 2**20,
    chunk_bytes: int = 2**20,
    ttl_s: float = 60,
    whole_index_nbytes: int = 2**20,
    gap_bytes: int = 4096,
    stream_bytes: int = 2**20,
    decoded_bytes: int = 2**20,
    in_flight_bytes: int = 2**26,
    clock: Callable[[], float] = time.monotonic,
) -> Reading:
    """Build a resolver as the service does."""
    fetch = ReadCache(store, MetadataCache(index_bytes), ttl_s=ttl_s, clock=clock)
    budget = ByteBudget(in_flight_bytes, wait_s=0.2)
    budgets = BucketBudgets(budget)
    chunks = ChunkReader(
        store, budgets, max_bytes=chunk_bytes, max_gap_bytes=gap_bytes, max_span_bytes=stream_bytes
    )
    resolver = Resolver(
        store,
        fetch,
        chunks,
        budgets,
        stream_bytes=stream_bytes,
        decoded_bytes=decoded_bytes,
        clock=clock,
    )
    sizes = {"whole_index_bytes": whole_index_nbytes, "decoded_bytes": decoded_bytes}
    containers = Containers(formats) if formats else known_containers(**sizes)
    dataset = Dataset("data", root, containers, "auto")
    return Reading(resolver, fetch, chunks, budget, dataset)
