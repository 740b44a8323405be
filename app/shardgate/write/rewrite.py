"""Rewrite shards: all changes that wait for one shard go into one rewrite.

Checksums around bytes of the old shard are computed without a copy of it: the CRC-32C of joined
bytes follows from those of their parts. So the old shard is read once, in any order and with few
bytes in memory, for the CRCs of its segments between all edges of ranges.
"""

import asyncio
import secrets
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from typing import Any, Final, NamedTuple

from crc32c import crc32c

from shardgate.auditing import AuditedChange
from shardgate.concurrency import (
    Backoff,
    BatchQueue,
    SingleFlight,
    bounded_gather,
    is_many,
    resolve,
    run_in_thread,
    yield_to_loop,
)
from shardgate.errors import (
    ConflictError,
    DamagedError,
    PreconditionFailedError,
    VersionChangedError,
)
from shardgate.formats.contract import Checksummed, Entry, NewShard, OpenShard, ShardRewriter
from shardgate.formats.reading import Versioned
from shardgate.model import ByteRange, ETag, ObjectRef, Piece, Stored, VirtualKey, VolatileBucket
from shardgate.read.bodies import Demand, forms_of
from shardgate.read.budget import ByteBudget
from shardgate.read.consistency import FreshnessTracker, consistent
from shardgate.read.metadata_cache import ReadCache
from shardgate.storage.contract import (
    ABSENT,
    SPAN_NBYTES,
    Conflict,
    ObjectReader,
    ObjectStore,
    nbytes_of,
    plan_spans,
    read_exactly,
)

_BACKOFF: Final = Backoff(first_s=0.02, longest_s=0.2)
_CHECKSUM_NBYTES: Final = 4
_RESIDUE: Final = crc32c(bytes(_CHECKSUM_NBYTES))
"""The CRC-32C of any bytes followed by their own CRC-32C."""
_ZEROS: Final = memoryview(bytes(1024**2))

type OnRewrite = Callable[[int, int], None]
"""Called after each rewrite with the number of changes, and of lost races with other replicas."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkChange:
    """An inner chunk to store, or to delete where *data* is `None`."""

    key: VirtualKey
    entry: Entry
    data: bytes | None
    demand: Demand | None = None
    noted: AuditedChange | None = None
    """Gets the version before, if the change is logged."""
    done: "asyncio.Future[ETag | None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Resolves to the ETag of the stored inner chunk, `None` if deleted."""


type ChangeRequest = tuple[ChunkChange, ...]
"""Changes of one shard that are made together or not at all."""


class SortedChanges(NamedTuple):
    """Changes sorted by what becomes of them."""

    made: dict[Entry, bytes | None]
    """In the order of arrival."""
    idle: list[Entry]
    """Deleted, and absent before."""
    refused: dict[ChunkChange, str]
    """With the reasons."""
    relies_on_old: bool
    """Whether a change is refused, or has no effect, because of the old indexes."""


def sort_changes(
    shard: ShardRewriter[Any], old: OpenShard | None, changes: Sequence[ChunkChange]
) -> SortedChanges:
    """Check the precondition of each change against the shard with all changes before it."""
    made: dict[Entry, bytes | None] = {}
    refused: dict[ChunkChange, str] = {}
    for change in changes:
        entry = change.entry
        if change.demand is not None:
            if entry not in made:
                names = _names(shard, old, entry)
            else:
                # A change of the same rewrite is in no version that a client can know.
                names = () if made[entry] is None else (_unseen_etag(),)
            if (reason := change.demand(names)) is not None:
                refused[change] = reason
                continue
        made[entry] = change.data
    deleted = [entry for entry, data in made.items() if data is None]
    idle = [entry for entry in deleted if old is None or old.lookup(entry) is None]
    for entry in idle:
        del made[entry]
    return SortedChanges(made, idle, refused, bool(refused or idle))


def _names(shard: ShardRewriter[Any], old: OpenShard | None, entry: Entry) -> tuple[ETag, ...]:
    if old is None or (place := old.lookup(entry)) is None:
        return ()
    return forms_of(Stored(shard.ref, place, old.etag).etag)


def resolve_change(
    change: ChunkChange,
    shard: ObjectRef,
    sorted_changes: SortedChanges,
    places: Mapping[Entry, Stored],
) -> None:
    """Pass the outcome of *change* to its caller."""
    if (reason := sorted_changes.refused.get(change)) is not None:
        refusal = f"{change.key}, an inner chunk of the shard {shard}: {reason}"
        resolve(change.done, PreconditionFailedError(refusal))
    elif change.data is None:
        resolve(change.done, None)
    elif sorted_changes.made.get(change.entry) is change.data and change.entry in places:
        resolve(change.done, places[change.entry].etag)
    else:  # overwritten by a later change of the same rewrite
        resolve(change.done, _unseen_etag())


def _unseen_etag() -> ETag:
    return ETag(f'"{secrets.token_hex(16)}"')


class Rewrites:
    """Rewrites shards; changes that arrive during a rewrite go into the next one.

    A shard is replaced by compare-and-swap; after a lost race its indexes are read anew and the
    rewrite is planned again. Once begun, a rewrite is finished even if all callers leave.
    """

    def __init__(
        self, store: ObjectStore, reads: ReadCache, budget: ByteBudget, on_rewrite: OnRewrite
    ) -> None:
        self._store = store
        self._reads = reads
        self._budget = budget
        self._on_rewrite = on_rewrite
        self._queues: dict[ShardRewriter[Any], BatchQueue[ChangeRequest]] = {}
        self._running = SingleFlight[Any]()
        self._slots = asyncio.Semaphore(16)  # rewrites at once, each of which may hold a shard

    async def make(self, shard: ShardRewriter[Any], request: ChangeRequest) -> None:
        """Return when `done` of each change of *request* has its outcome; changes are durable."""
        queue = self._queues.get(shard)
        if queue is None:
            # The rewrite runs on its own: it must not end with the caller that began it.
            queue = self._queues[shard] = BatchQueue()
            self._running.start(shard, partial(self._run, shard, queue))
        queue.add(request)
        try:
            for change in request:  # all are done soon after the first
                if not change.done.done():
                    await asyncio.wait([change.done])
        except asyncio.CancelledError:
            with suppress(ValueError):  # the rewrite has begun
                queue.requests.remove(request)
            raise

    async def aclose(self) -> None:
        await self._running.aclose()

    async def _run(self, shard: ShardRewriter[Any], queue: BatchQueue[ChangeRequest]) -> None:
        requests: Sequence[ChangeRequest] = ()
        try:
            while True:
                async with self._slots:
                    began_at = self._reads.clock()
                    if requests := queue.take():
                        await self._rewrite(shard, list(chain(*requests)))
                # Callers that were just answered come back now, and can share the next rewrite.
                await queue.fill(min(0.25, self._reads.clock() - began_at))
                if not queue.requests:
                    return
        finally:
            del self._queues[shard]
            for change in chain(*requests, *queue.requests):
                change.done.cancel()

    async def _rewrite(self, shard: ShardRewriter[Any], changes: Sequence[ChunkChange]) -> None:
        attempts = 0

        async def attempt(tracker: FreshnessTracker) -> None:
            nonlocal attempts
            attempts += 1
            try:
                await self._attempt(shard, changes, tracker)
            except ConflictError:
                await tracker.confirm_older(tracker.began_at)
                raise

        try:
            await consistent(self._reads, attempt, backoff=_BACKOFF)
            self._on_rewrite(len(changes), attempts - 1)
        except Exception as error:  # noqa: BLE001  passed to the callers
            for change in changes:
                resolve(change.done, error)

    async def _attempt(
        self, shard: ShardRewriter[Any], changes: Sequence[ChunkChange], tracker: FreshnessTracker
    ) -> None:
        """Make *changes*; raise `VersionChangedError` if the shard is not the one planned for.

        A swap proves that cached indexes are current. Without one they are read again before a
        change is refused, or taken as made already.
        """
        old = await shard.open({change.entry for change in changes}, tracker)
        is_long = is_many(len(changes))
        sorted_changes = await run_in_thread(sort_changes, shard, old, changes, is_long=is_long)
        if sorted_changes.relies_on_old:
            await tracker.confirm_older(tracker.began_at)
        places: Mapping[Entry, Stored] = {}
        if sorted_changes.made:
            plan = await asyncio.to_thread(shard.plan, old, sorted_changes.made)
            swapped = await self._swap(shard, old, plan)
            if isinstance(swapped, Conflict):
                raise VersionChangedError(shard.ref)
            places = swapped
        elif sorted_changes.idle and isinstance(shard.ref.bucket, VolatileBucket):
            await self._record(shard, old)
        for number, change in enumerate(changes):
            if change.noted is not None:
                change.noted["before"] = next(iter(_names(shard, old, change.entry)), None)
            resolve_change(change, shard.ref, sorted_changes, places)
            await yield_to_loop(number)

    async def _record(self, shard: ShardRewriter[Any], old: OpenShard | None) -> None:
        """Have a session record deletions that leave *shard* as it is: a commit of them conflicts
        with others that wrote it.
        """
        recorded: object
        if old is None:
            recorded = await self._store.delete(shard.ref, expected=ABSENT)
        else:
            whole = ByteRange(0, old.size)
            recorded = await self._store.put(shard.ref, [whole], expected=old.etag)
        if isinstance(recorded, Conflict):
            raise VersionChangedError(shard.ref)

    async def _swap(
        self, shard: ShardRewriter[Any], old: OpenShard | None, plan: NewShard | None
    ) -> Mapping[Entry, Stored] | Conflict:
        if plan is None and old is not None:
            deleted = await self._store.delete(shard.ref, expected=old.etag)
            if deleted is True:
                self._reads.forget(shard.ref)
                return {}
            if isinstance(deleted, Conflict):
                return deleted
        return await self._put(shard, old, plan or shard.plan_empty())

    async def _put(
        self, shard: ShardRewriter[Any], old: OpenShard | None, plan: NewShard
    ) -> Mapping[Entry, Stored] | Conflict:
        version = None if old is None else old.etag
        size = length_of(plan.pieces)
        old_nbytes = 0 if old is None else old.size
        async with self._budget.room(min(64 * 1024**2, max(size, old_nbytes))):
            pieces = await write_checksums(self._store, shard.ref, version, plan.pieces)
            expected = ABSENT if version is None else version
            try:
                etag = await self._store.put(shard.ref, pieces, expected=expected)
            finally:  # a failed write may have taken effect
                self._reads.forget(shard.ref)
        if isinstance(etag, Conflict):
            return etag
        read, index = plan.index
        self._reads.put(read, Versioned(index, etag, size, int(time.time())))
        return {entry: Stored(shard.ref, place, etag) for entry, place in plan.places.items()}


type Segments = Mapping[int, tuple[int, int]]
"""End and CRC of each segment of the old shard, by its start."""


async def write_checksums(
    store: ObjectReader, ref: ObjectRef, version: ETag | None, pieces: Sequence[Piece | Checksummed]
) -> list[Piece]:
    """Return *pieces*, whose ranges are of *version*, with checksums behind `Checksummed` ones.

    Raises: `DamagedError` if the old checksum of bytes that are kept does not match,
    `VersionChangedError`, `StorageError`.
    """
    plain = [each for each in pieces if not isinstance(each, Checksummed)]
    if len(plain) == len(pieces):
        return plain
    covered = [each for each in pieces if isinstance(each, Checksummed)]
    places = [each.replaces for each in covered if each.replaces and any(_kept(each.pieces))]
    spans = plan_spans(part for place in places for part in _split(place))
    edges = sorted({*_edges(covered), *(edge for span in spans for edge in span)})

    async def read(span: ByteRange) -> Segments:
        found = await read_exactly(store, ref, span, version)
        return await asyncio.to_thread(_segments, found.data, span, edges)

    known = await bounded_gather(read, spans, limit=4)
    segments = {start: segment for each in known for start, segment in each.items()}
    return await asyncio.to_thread(_ChecksumWriter(ref, segments).join, pieces)


def length_of(pieces: Sequence[Piece | Checksummed]) -> int:
    """Return the length of *pieces* in bytes, checksums included."""
    return sum(
        length_of(each.pieces) + _CHECKSUM_NBYTES
        if isinstance(each, Checksummed)
        else nbytes_of(each)
        for each in pieces
    )


@dataclass(frozen=True, slots=True)
class _ChecksumWriter:
    ref: ObjectRef
    segments: Segments

    def join(self, pieces: Sequence[Piece | Checksummed]) -> list[Piece]:
        joined: list[Piece] = []
        for piece in pieces:
            joined += self._seal(piece)[0] if isinstance(piece, Checksummed) else (piece,)
        return joined

    def _seal(self, sealed: Checksummed) -> tuple[list[Piece], int]:
        """Return pieces and checksum, and the CRC of them all; verify the old one first."""
        replaces = sealed.replaces
        if replaces and any(_kept(sealed.pieces)) and self._crc_of(replaces) != _RESIDUE:
            raise DamagedError(self.ref, f"the checksum at the end of {replaces} does not match")
        joined: list[Piece] = []
        crc = 0
        for piece in sealed.pieces:
            match piece:
                case Checksummed():
                    inner, inner_crc = self._seal(piece)
                    joined += inner
                    crc = _append(crc, inner_crc, sum(map(nbytes_of, inner)))
                case ByteRange():
                    joined.append(piece)
                    crc = _append(crc, self._crc_of(piece), piece.length)
                case _:
                    joined.append(piece)
                    crc = crc32c(piece, crc)
        checksum = crc.to_bytes(_CHECKSUM_NBYTES, "little")
        return [*joined, checksum], crc32c(checksum, crc)

    def _crc_of(self, place: ByteRange) -> int:
        crc = 0
        at = place.start
        while at < place.stop:
            stop, segment_crc = self.segments[at]
            crc = _append(crc, segment_crc, stop - at)
            at = stop
        return crc


def _append(before: int, crc: int, nbytes: int) -> int:
    """Return the CRC of bytes with that of *before*, and then *nbytes* bytes with that of *crc*.

    The CRC is linear: the bytes after change that of zeros in their place by their own.
    """
    with_zeros = before
    only_zeros = 0
    for at in range(0, nbytes, len(_ZEROS)):
        zeros = _ZEROS[: nbytes - at]
        with_zeros = crc32c(zeros, with_zeros)
        only_zeros = crc32c(zeros, only_zeros)
    # The bytes change the sum of zeros alone as they change that of *before* and zeros.
    return with_zeros ^ only_zeros ^ crc


def _kept(pieces: Sequence[Piece | Checksummed]) -> Iterator[ByteRange]:
    for piece in pieces:
        if isinstance(piece, Checksummed):
            yield from _kept(piece.pieces)
        elif isinstance(piece, ByteRange):
            yield piece


def _edges(pieces: Sequence[Piece | Checksummed]) -> Iterator[int]:
    for piece in pieces:
        if isinstance(piece, Checksummed):
            yield from piece.replaces or ()
            yield from _edges(piece.pieces)
        elif isinstance(piece, ByteRange):
            yield from piece


def _split(place: ByteRange) -> Iterator[ByteRange]:
    for start in range(place.start, place.stop, SPAN_NBYTES):
        yield ByteRange(start, min(start + SPAN_NBYTES, place.stop))


def _segments(data: bytes, span: ByteRange, edges: Sequence[int]) -> Segments:
    """Return the segments of *data*, the bytes of *span*, between the sorted *edges*."""
    view = memoryview(data)
    inside = edges[bisect_left(edges, span.start) : bisect_right(edges, span.stop)]
    return {
        start: (stop, crc32c(view[start - span.start : stop - span.start]))
        for start, stop in pairwise(inside)
    }
