"""From a dataset, a virtual key and a body to what is durable in the store."""

from collections import defaultdict
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, Final, NamedTuple

from app.concurrency import bounded_gather, run_in_thread, yield_to_loop
from app.errors import BadKeyError, ShardgateError, UnsupportedError
from app.formats.contract import Document, ShardRewriter, Slot, Stray
from app.model import ETag, VirtualKey, Whole
from app.resolve.changes import Change
from app.resolve.containers import LIKE_A_CHUNK
from app.resolve.entity import Demand
from app.resolve.fetch import ReadCache
from app.resolve.noting import Noting
from app.resolve.objects import ObjectWriter
from app.resolve.resolver import Dataset
from app.resolve.rewriting import Rewrites
from app.storage.contract import NO_HEADERS, ObjectHeaders, ObjectStore

_AT_ONCE: Final = 16
"""Objects and shards of one request that are written at a time."""
_IN_THREAD_NBYTES: Final = 32 * 1024
"""Larger bodies are encoded off the event loop."""
_PRESENT_S: Final = 5.0
"""Metadata that have been known for longer are asked for again before a shard is written."""
_ABSENT_S: Final = 1.0
"""So is, sooner, what was not there."""
_SET_BY_TOOLS: Final = {
    "mtime",
    "md5chksum",
    "s3cmd-attrs",
    "icclient",
    "iccompalg",
    "icechunkwriteid",
    "icfiletype",
    "icspecver",
}
"""User metadata that rclone, s3cmd and Icechunk add to every object, and can do without."""

type Outcome = ETag | ShardgateError | None
"""The version that a key has now, `None` if it is no more, or why it was not written."""


class Given(NamedTuple):
    """A body for a key; no body takes the key away."""

    key: VirtualKey
    body: bytes | None
    headers: ObjectHeaders = NO_HEADERS
    """What it came with: stored where the key names an object, and the store keeps any."""
    demand: Demand | None = None


class Writer:
    """Writes virtual keys; what it returns is durable, and seen by readers of this process."""

    def __init__(
        self,
        store: ObjectStore,
        fetch: ReadCache,
        objects: ObjectWriter,
        rewrites: Rewrites,
    ) -> None:
        self._store = store
        self._fetch = fetch
        self._objects = objects
        self._rewrites = rewrites

    async def put(self, dataset: Dataset, given: Given) -> ETag | None:
        """Write one key; give the version that it has now, `None` if it is no more.

        Raises: `PreconditionFailedError`, `BadKeyError`, `BadBodyError`, `UnknownCodingError`,
        `ConflictError`, `ReadOnlyError`, `UnwritableError`, `DamagedError`, `StorageError`,
        `BusyError`.
        """
        await self._store.verify_conditional_writes(dataset.root)
        target = await self._target(dataset, given, self._fetch.clock())
        if not isinstance(target, Slot):
            return await self._write(target, given)
        change = await _change(target, given)
        await self._rewrites.make(target.shard, (change,))
        return change.done.result()

    async def put_whole(self, dataset: Dataset, given: Given) -> ETag | None:
        """Do what `put` does with a key that is known to be the name of an object."""
        await self._store.verify_conditional_writes(dataset.root)
        target = Whole(dataset.root.join(given.key))
        self._demand_kept(target, given)
        return await self._write(target, given)

    async def demand_place(
        self, dataset: Dataset, key: VirtualKey, headers: ObjectHeaders = NO_HEADERS
    ) -> None:
        """Raise what `put` would of *key*, whatever the body."""
        await self._store.verify_conditional_writes(dataset.root)
        await self._target(dataset, Given(key, b"", headers), self._fetch.clock())

    async def put_each(self, dataset: Dataset, given: Sequence[Given]) -> list[Outcome]:
        """Write many keys, those of a shard in one rewrite; tell of each what came of it.

        Of a key that is given twice the last one counts.
        """
        await self._store.verify_conditional_writes(dataset.root)
        bulk, began_at = _Bulk(), self._fetch.clock()
        for number, each in enumerate({each.key: each for each in given}.values()):
            await yield_to_loop(number)
            try:
                target = await self._target(dataset, each, began_at)
                await bulk.add(target, each)
            except ShardgateError as error:
                bulk.outcomes[each.key] = error

        async def rewrite(shard: ShardRewriter[Any], changes: Mapping[VirtualKey, Change]) -> None:
            await self._rewrites.make(shard, tuple(changes.values()))
            for number, (key, change) in enumerate(changes.items()):
                bulk.outcomes[key] = await _outcome(change.done)
                await yield_to_loop(number)

        async def write(target: Document | Whole, each: Given) -> None:
            bulk.outcomes[each.key] = await _outcome(self._write(target, each))

        jobs = [partial(rewrite, *each) for each in bulk.shards.items()]
        jobs += [partial(write, *each) for each in bulk.objects]
        await bounded_gather(lambda job: job(), jobs, limit=_AT_ONCE)
        return [bulk.outcomes[each.key] for each in given]

    async def _target(
        self, dataset: Dataset, given: Given, began_at: float
    ) -> Slot | Document | Whole:
        """Find where a key is written, by metadata that were not old when the request *began_at*.

        A chunk of an array that is new must not be taken for an object: its key is one only if
        there is no array as yet.
        """
        key = given.key
        noting = Noting(self._fetch)
        target = await dataset.containers.target(dataset.root, key, noting)
        absent_s = inf
        if isinstance(target, Whole | Stray):
            is_doubtful = noting.ends_in_absence and LIKE_A_CHUNK.search(key)
            absent_s = 0 if is_doubtful else _ABSENT_S
        old = noting.known_before(began_at, _PRESENT_S, absent_s)
        if any(await bounded_gather(self._fetch.has_changed, old)):
            target = await dataset.containers.target(dataset.root, key, self._fetch)
        if not isinstance(target, Stray):
            self._demand_kept(target, given)
            return target
        if given.body is not None:
            raise BadKeyError(f"{key} is no chunk: write the metadata of its array first")
        return Whole(target.ref)

    def _demand_kept(self, target: Slot | Document | Whole, given: Given) -> None:
        """Raise `UnsupportedError` for user metadata that would be lost."""
        if isinstance(target, Whole) and self._store.keeps_headers(target.ref):
            return
        for name, _ in given.headers.metadata:
            if name not in _SET_BY_TOOLS:
                reason = "cannot be kept, only objects in S3 have metadata"
                raise UnsupportedError(f"{given.key}: x-amz-meta-{name} {reason}")

    async def _write(self, target: Document | Whole, given: Given) -> ETag | None:
        _, body, headers, demand = given
        if body is None:
            is_document = isinstance(target, Document)
            await self._objects.delete(target.ref, demand=demand, is_document=is_document)
            return None
        if isinstance(target, Document):
            return await self._objects.put_document(
                target, body, is_gzip=headers.is_gzip, demand=demand
            )
        return await self._objects.put(target.ref, body, headers, demand=demand)


class _Bulk:
    """Keys that are written together, and what came of each."""

    def __init__(self) -> None:
        self.outcomes: dict[VirtualKey, Outcome] = {}
        self.shards: defaultdict[ShardRewriter[Any], dict[VirtualKey, Change]] = defaultdict(dict)
        self.objects: list[tuple[Document | Whole, Given]] = []

    async def add(self, target: Slot | Document | Whole, given: Given) -> None:
        """Put *given* to others of the same shard."""
        if isinstance(target, Slot):
            self.shards[target.shard][given.key] = await _change(target, given)
        else:
            self.objects.append((target, given))


async def _change(slot: Slot, given: Given) -> Change:
    """Encode the body of an inner chunk."""
    shard, entry = slot
    body = given.body
    if body is not None:
        encode = partial(shard.encode, entry, body, is_gzip=given.headers.is_gzip)
        body = await run_in_thread(encode, is_long=len(body) > _IN_THREAD_NBYTES)
    return Change(given.key, entry, body, given.demand)


async def _outcome(write: Awaitable[ETag | None]) -> Outcome:
    try:
        return await write
    except ShardgateError as error:
        return error
