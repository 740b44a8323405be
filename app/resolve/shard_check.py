"""Check one shard: its indexes, and its chunks if asked."""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import batched
from typing import Final, NamedTuple

import crc32c

from app.errors import DamagedError, lost
from app.formats.surveying import Entry, Fault, Shard, Survey
from app.model import ByteRange, ObjectRef, Stored, VirtualKey, condition_of
from app.resolve.audit import CHECKSUM_NBYTES, find_overlaps, look_through
from app.resolve.coalesce import plan_reads
from app.resolve.perform import DirectFetch
from app.storage.contract import Found, ObjectReader

_GAP_BYTES: Final = 64 * 1024
_SPAN_BYTES: Final = 8 * 1024**2
_PLANNED_ENTRIES: Final = 4096


@dataclass(frozen=True, slots=True)
class Damage:
    """What is wrong with *object*, seen by the virtual key of the first chunk it hurts."""

    object: str
    key: str
    reason: str


@dataclass(slots=True)
class Report:
    """What was read so far, and what came out."""

    arrays: int = 0
    """Collections of every kind."""
    shards: int = 0
    chunks: int = 0
    nbytes: int = 0
    """Bytes of inner chunks that the indexes name."""
    counts: dict[str, int] = field(default_factory=dict)
    """What else was looked at in containers that keep states: snapshots, manifests, references."""
    not_checked: dict[str, str] = field(default_factory=dict)
    """What is not known to be right, arrays that are served as they are among it, and why."""
    damages: list[Damage] = field(default_factory=list)

    def add(self, other: "Report") -> None:
        """Count what *other* counted."""
        self.shards += other.shards
        self.chunks += other.chunks
        self.nbytes += other.nbytes
        self.damages += other.damages

    def skip(self, path: str, reason: str) -> None:
        """Note that what is at *path* was not checked, for one more reason."""
        known = self.not_checked.get(path)
        self.not_checked[path] = f"{known}; {reason}" if known else reason


class _Looked(NamedTuple):
    entries: Sequence[Entry]
    nbytes: int
    faults: list[Fault]


class ShardCheck:
    """Checks one version of *shard*, which is in the container at the path *container*."""

    def __init__(self, store: ObjectReader, container: str, shard: Shard, *, chunks: bool) -> None:
        self.report = Report()
        self._store = store
        self._fetch = DirectFetch(store)
        self._container = container
        self._shard = shard
        self._chunks = chunks

    async def run(self) -> None:
        """Check the shard if there is one.

        Raises: `VersionChangedError` where it is replaced meanwhile, and any `StorageError`.
        """
        await self._check(self._shard)

    def damage(self, ref: ObjectRef, key: VirtualKey, reason: str) -> None:
        """Note what is wrong with the object *ref*; *key* is relative to the container."""
        self.report.damages.append(Damage(str(ref), f"{self._container}/{key}".lstrip("/"), reason))

    async def _check(self, shard: Shard) -> None:
        try:
            survey = await shard.survey(self._fetch)
        except DamagedError as damaged:
            self._count(shard)
            self.damage(damaged.ref, shard.key, damaged.reason)
            return
        if survey is None:
            return
        self._count(shard)
        entries, nbytes, faults = await look_through(survey, _look)
        for fault in faults:
            self.damage(survey.whole.ref, fault.key, fault.reason)
        if self._chunks:
            await self._check_checksums(shard, survey)
        if survey.inner is not None:
            for entry in entries:
                await self._check(survey.inner(entry))
            return
        self.report.chunks += len(entries)
        self.report.nbytes += nbytes
        if self._chunks:
            await self._check_chunks(survey, entries)

    def _count(self, shard: Shard) -> None:
        """Count *shard* unless it is inside of another."""
        self.report.shards += shard is self._shard

    async def _check_chunks(self, survey: Survey, entries: Sequence[Entry]) -> None:
        """Read what *entries* name, neighbours together."""
        for planned in batched(entries, _PLANNED_ENTRIES):
            waiting = deque(planned)
            places = [entry.place for entry in planned]
            for span in plan_reads(places, max_gap_bytes=_GAP_BYTES, max_span_bytes=_SPAN_BYTES):
                data = await self._read(_narrow(survey.whole, span)) if span.length else b""
                inside = []
                while waiting and waiting[0].place.stop <= span.stop:
                    inside.append(waiting.popleft())
                for fault in await asyncio.to_thread(_look_at, survey, inside, span, data):
                    self.damage(survey.whole.ref, fault.key, fault.reason)

    async def _check_checksums(self, shard: Shard, survey: Survey) -> None:
        """Check the checksums behind a shard, each over all that is before it."""
        for place in (_narrow(survey.whole, part) for part in survey.checksummed):
            if not await self._is_intact(place):
                self.damage(place.ref, shard.key, "the checksum behind the shard does not match")

    async def _is_intact(self, place: Stored) -> bool:
        checksum, kept = 0, b""
        ref, byte_range, version = place
        condition = condition_of(version)
        async with self._store.stream(ref, byte_range, if_match=condition) as pieces:
            async for piece in pieces:
                kept += piece
                checksum = crc32c.crc32c(kept[:-CHECKSUM_NBYTES], checksum)
                kept = kept[-CHECKSUM_NBYTES:]
        return checksum == int.from_bytes(kept, "little")

    async def _read(self, place: Stored) -> bytes:
        ref, byte_range, version = place
        found = await self._store.get(ref, byte_range, if_match=condition_of(version))
        if not isinstance(found, Found):
            raise lost(ref, version)
        return found.data


def _look(survey: Survey) -> _Looked:
    table = survey.table()
    faults = [*table.faults, *find_overlaps(survey, table)]
    return _Looked(table.entries, sum(entry.place.length for entry in table.entries), faults)


def _look_at(survey: Survey, entries: Iterable[Entry], span: ByteRange, data: bytes) -> list[Fault]:
    """Check the chunks *entries*, whose bytes are in *data*, the bytes at *span*."""
    faults = []
    for entry in entries:
        chunk = data[entry.place.start - span.start : entry.place.stop - span.start]
        if (reason := survey.check(entry, chunk)) is not None:
            faults.append(Fault(survey.key(entry), reason))
    return faults


def _narrow(whole: Stored, inner: ByteRange) -> Stored:
    return Stored(whole.ref, whole.byte_range.narrow(inner), whole.version)
