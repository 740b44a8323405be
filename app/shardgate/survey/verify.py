"""Verify every shard index below a root, and every inner chunk if asked."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import suppress
from itertools import batched
from typing import Final, NamedTuple, Self

import crc32c
import numpy as np
from numpy.typing import NDArray

from shardgate.concurrency import yield_to_loop
from shardgate.errors import (
    DamagedError,
    NotAllowedError,
    OfflineError,
    StorageError,
    StorageUnusableError,
    VersionChangedError,
    lost,
)
from shardgate.formats.members import Members, members_of
from shardgate.formats.surveying import (
    LEFT_OUT,
    ChunkCollection,
    Column,
    Damage,
    Enclosed,
    EntryTable,
    Fault,
    Finding,
    IndexEntry,
    Listing,
    MissingBytes,
    NeededObject,
    Ranges,
    Report,
    Shard,
    Stateful,
    Survey,
    Unreadable,
    uncheckable,
)
from shardgate.model import (
    ByteRange,
    ObjectRef,
    Stored,
    VirtualKey,
    coalesce,
    condition_of,
    join_path,
)
from shardgate.read.listing import Root
from shardgate.read.member_store import survey_shard
from shardgate.read.metadata_cache import uncached_reads
from shardgate.read.walking import OpenedContainer, collections_of, find_containers
from shardgate.storage.contract import Found, ObjectReader
from shardgate.storage.memory import MemoryStore
from shardgate.survey.key_part import ALL_KEYS, KeyPart
from shardgate.survey.sources import Sources, check_object

CHECKSUM_NBYTES: Final = 4
_ATTEMPTS: Final = 4
type OnShard = Callable[[Report], None]


async def verify(
    root: Root,
    *,
    chunks: bool,
    ref: str = "",
    part: KeyPart = ALL_KEYS,
    on_shard: OnShard = lambda _: None,
) -> Report:
    """Check every shard of every collection below *root*; with *chunks* read the chunks too.

    In an Icechunk repository the references of *ref*, by default of the default branch, are
    followed. Objects that cannot be read are reported like damaged ones.

    Of a *part* those shards, and objects that references need, are checked whose object is of it;
    a chunk in a manifest is of the part of that. All else is reported by the part of the path of
    its container, and what keeps a part from finding its shards by each that could not read it.

    Raises: `UnknownRefError`, `StorageError` where collections or shards cannot be listed.
    """
    verifier = _Verifier(root, ref, part, on_shard, chunks=chunks)
    await verifier.run()
    damages = sorted(verifier.report.damages, key=lambda damage: (damage.object, damage.key))
    # A source that is absent or short is found once for itself, and by all metadata that it holds.
    first: dict[tuple[str, ...], Damage] = {}
    for each in damages:
        is_missing = isinstance(each.reason, MissingBytes)
        identity = (each.object,) if is_missing else (each.object, each.key, each.reason)
        first.setdefault(identity, each)
    verifier.report.damages = list(first.values())
    return verifier.report


class _Verifier:
    def __init__(
        self, root: Root, ref: str, part: KeyPart, on_shard: OnShard, *, chunks: bool
    ) -> None:
        self.report = Report(reads_chunks=chunks)
        self._root = root
        self._ref = ref
        self._part = part
        self._on_shard = on_shard
        self._chunks = chunks
        self._gate = asyncio.Semaphore(8)  # shards that are checked at the same time
        self._sets: set[ObjectRef] = set()

    async def run(self) -> None:
        skipped = 0
        try:
            async with asyncio.TaskGroup() as group:
                async for opened in find_containers(self._root):
                    path, layout, _ = opened
                    if isinstance(layout, DamagedError):
                        if layout.ref not in self._sets:  # else following references finds it
                            self._add_damage(layout, path)
                        continue
                    if isinstance(layout, Exception):
                        self._add_own(Report(not_checked={"": str(layout)}), path, path)
                        continue
                    async for finding in self._findings(opened):
                        if isinstance(finding, Report):
                            self._add_own(finding, path, path)
                        elif self._is_own(finding):
                            await self._gate.acquire()
                            group.create_task(self._check(finding, path))
                        else:
                            skipped += 1
                            await yield_to_loop(skipped)
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed

    def _is_own(self, finding: NeededObject | Enclosed) -> bool:
        ref = finding.shard.ref if isinstance(finding, Enclosed) else finding.place.ref
        return self._part.holds_object(self._root.ref, ref)

    def _add_own(self, found: Report, path: str, container: str) -> None:
        """Add a report about no shard, if the path of its *container* is of the part."""
        # Another part cannot tell which shards this one did not find.
        if isinstance(found, Unreadable) or self._part.holds(container):
            self._add(found, path)

    def _add(self, part: Report, path: str) -> None:
        self.report.add(part, path)
        if part.shards or part.counts or part.damages:
            self._on_shard(self.report)

    async def _check(self, finding: NeededObject | Enclosed, path: str) -> None:
        store: ObjectReader = self._root.store
        try:
            match finding:
                case NeededObject():
                    part = await check_object(store, finding)
                case Enclosed(below, shard, data):
                    path = join_path(path, below)
                    if data is not None:
                        store = _holding(shard.ref, data)
                    part = await _check_shard(store, shard, chunks=self._chunks)
        finally:
            self._gate.release()
        self._add(part, path)

    async def _findings(self, opened: OpenedContainer) -> AsyncGenerator[Finding]:
        path, layout, _ = opened
        if isinstance(layout, Members) and layout.references is not None:
            self._sets.add(layout.references)
            sources = Sources(layout, layout.references, self._root.fetch)
            async for finding in sources.findings():
                yield finding
        if not isinstance(layout, Stateful):
            for _, _, found in await collections_of(self._root, opened):
                if isinstance(found, DamagedError):
                    self._add_damage(found, path)
                    continue
                with suppress(DamagedError):  # of the set, whose other collections tell it
                    async for finding in _findings_of(found, opened.listing, chunks=self._chunks):
                        yield finding
            return
        fetch = uncached_reads(self._root.store)
        try:
            async for finding in layout.findings(self._ref, fetch, chunks=self._chunks):
                yield finding
        except OfflineError as error:
            yield Report(not_checked={"": str(error)})
        except DamagedError as error:
            self._add_damage(error, path)

    def _add_damage(self, error: DamagedError, path: str) -> None:
        """Add the damage of metadata, which have keys below the root, or of their source."""
        name = str(error.ref)
        start = str(self._root.ref.prefix)
        key = name.removeprefix(start) if name.startswith(start) else path
        # What lacks bytes is of the part of its own key, as where references are followed.
        owner = name.removeprefix(start) if isinstance(error.reason, MissingBytes) else path
        self._add_own(Report.of_damage(error.ref, key, error.reason), "", owner)


async def _findings_of(
    collection: ChunkCollection, listing: Listing, *, chunks: bool
) -> AsyncGenerator[Finding]:
    """Yield the stored shards, or all possible ones where the store cannot list."""
    description = collection.description
    shards = collection.shards
    why = ""
    if description.kind == LEFT_OUT:
        yield Report(not_checked={"": description.why_sharded})
        return
    if shards is None:
        why = description.why_sharded or "it is not sharded"
    elif chunks and not shards.is_checkable:
        why = uncheckable(description)
    yield Report(arrays=1, not_checked={description.path: why} if why else {})
    if shards is None:
        return
    try:
        async for name in listing(shards.prefix):
            if (shard := shards.named(name)) is not None:
                yield Enclosed("", shard)
    except StorageUnusableError as error:
        if (every := shards.every()) is None:
            reason = f"{error.reason}, and its shards may be too many to try each"
            yield Report.of_damage(error.ref, description.path, reason)
            return
        for shard in every:
            yield Enclosed("", shard)


async def _check_shard(store: ObjectReader, shard: Shard, *, chunks: bool) -> Report:
    """Check *shard*, again if it is replaced during the check."""
    for attempt in range(1, _ATTEMPTS + 1):
        check = _ShardCheck(store, chunks=chunks)
        try:
            await check.run(shard)
        except NotAllowedError:
            pass  # counted among the references of its set
        except (StorageError, DamagedError) as error:
            if isinstance(error, VersionChangedError) and attempt < _ATTEMPTS:
                continue
            check.damage(error.ref, shard.key, error.reason)
        break
    return check.report


class _ShardCheck:
    """Check of one version of a shard; keys are relative to its container."""

    def __init__(self, store: ObjectReader, *, chunks: bool) -> None:
        self.report = Report()
        self._store = store
        self._fetch = uncached_reads(store)
        self._chunks = chunks

    def damage(self, ref: ObjectRef, key: VirtualKey, reason: str) -> None:
        self.report.damages.append(Damage(str(ref), key, reason))

    async def run(self, shard: Shard) -> None:
        try:
            survey = await survey_shard(shard, self._fetch)
        except DamagedError as damaged:
            self.report.shards = 1
            members = members_of(shard.ref)
            references = None if members is None else members.references
            is_missing = isinstance(damaged.reason, MissingBytes)
            # Following all references of a set finds damaged ones, and what is missing of sources.
            if references is None or not (damaged.ref == references or is_missing):
                self.damage(damaged.ref, shard.key, damaged.reason)
            return
        if survey is None:
            return
        # Shards inside are parts of it; a chunk without an index is none.
        self.report.shards = min(1, len(survey.indexes.starts))
        table, nbytes, faults = await asyncio.to_thread(_check_table, survey)
        for fault in faults:
            self.damage(survey.whole.ref, fault.key, fault.reason)
        store = self._store if survey.data is None else _holding(survey.whole.ref, survey.data)
        if self._chunks:
            await self._check_checksums(store, shard, survey)
        if survey.inner is not None:
            for entry in table:
                await self.run(survey.inner(entry))
            return
        self.report.chunks += len(table)
        self.report.nbytes += nbytes
        if self._chunks:
            await self._check_chunks(store, survey, table)

    async def _check_chunks(self, store: ObjectReader, survey: Survey, table: EntryTable) -> None:
        for planned in batched(table, 4096):  # entries, of which a plan keeps all in memory
            waiting = deque(planned)
            places = [entry.place for entry in planned]
            for span in coalesce(places, max_gap_nbytes=64 * 1024, max_span_nbytes=8 * 1024**2):
                data = await _read(store, _narrow(survey.whole, span)) if span.length else b""
                inside = []
                while waiting and waiting[0].place.stop <= span.stop:
                    inside.append(waiting.popleft())
                for fault in await asyncio.to_thread(_check_data, survey, inside, span, data):
                    self.damage(survey.whole.ref, fault.key, fault.reason)

    async def _check_checksums(self, store: ObjectReader, shard: Shard, survey: Survey) -> None:
        """Check the CRC32C at the end of each checksummed part, over all bytes before it."""
        for place in (_narrow(survey.whole, part) for part in survey.checksummed):
            if not await _is_intact(store, place):
                self.damage(place.ref, shard.key, "the checksum behind the shard does not match")


async def _is_intact(store: ObjectReader, place: Stored) -> bool:
    checksum = 0
    kept = b""  # the last bytes, which may be the checksum of the others
    ref, byte_range, version = place
    condition = condition_of(version)
    async with store.stream(ref, byte_range, if_match=condition) as pieces:
        async for piece in pieces:
            kept += piece
            checksum = crc32c.crc32c(kept[:-CHECKSUM_NBYTES], checksum)
            kept = kept[-CHECKSUM_NBYTES:]
    return checksum == int.from_bytes(kept, "little")


async def _read(store: ObjectReader, place: Stored) -> bytes:
    ref, byte_range, version = place
    found = await store.get(ref, byte_range, if_match=condition_of(version))
    if not isinstance(found, Found):
        raise lost(ref, version)
    return found.data


def _holding(ref: ObjectRef, data: bytes) -> MemoryStore:
    store = MemoryStore()
    store.place(ref, data)
    return store


def _check_table(survey: Survey) -> tuple[EntryTable, int, list[Fault]]:
    table = survey.table()
    faults = [*table.faults, *_find_overlaps(survey, table)]
    return table, table.places.nbytes, faults


class Sweep(NamedTuple):
    """The entries of a shard and other ranges of it, in the order of their places."""

    rows: NDArray[np.intp]
    """Rows in the table; of other ranges numbers behind its last row."""
    places: Ranges
    reached: Column
    """The largest stop of all ranges before."""

    @classmethod
    def over(cls, table: EntryTable, *others: Ranges) -> Self:
        unsorted = (table.places, *others)
        starts = np.concatenate([each.starts for each in unsorted])
        stops = np.concatenate([each.stops for each in unsorted])
        order = np.lexsort((stops, starts))
        places = Ranges(starts[order], stops[order])
        reached = np.maximum.accumulate(np.append(np.uint64(0), places.stops))[:-1]
        return cls(order, places, reached)


def _find_overlaps(survey: Survey, table: EntryTable) -> Iterator[Fault]:
    """Find the entries that share bytes with an index, or with an entry that begins earlier."""
    rows, (starts, stops), reached = Sweep.over(table, survey.indexes)
    longest = np.maximum.accumulate(np.where(stops > reached, np.arange(len(rows)), 0))
    for at in np.flatnonzero(starts < np.minimum(stops, reached)).tolist():
        hurt = int(rows[at])
        other = int(rows[longest[at - 1]])
        if hurt >= len(table):
            hurt, other = other, hurt
        named = "the shard index" if other >= len(table) else _name_of(table[other])
        yield Fault(survey.key(table[hurt].number), f"{_name_of(table[hurt])} overlaps {named}")


def _name_of(entry: IndexEntry) -> str:
    return f"inner chunk {entry.number} at {entry.place}"


def _check_data(
    survey: Survey, entries: Iterable[IndexEntry], span: ByteRange, data: bytes
) -> list[Fault]:
    faults = []
    for entry in entries:
        chunk = data[entry.place.start - span.start : entry.place.stop - span.start]
        if (reason := survey.check(entry, chunk)) is not None:
            faults.append(Fault(survey.key(entry.number), reason))
    return faults


def _narrow(whole: Stored, inner: ByteRange) -> Stored:
    return Stored(whole.ref, whole.byte_range.narrow(inner), whole.version)
