"""What the entries of a surveyed shard do to one another: pure."""

import asyncio
import heapq
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Final

from app.formats.surveying import Entry, Fault, Survey, Table
from app.model import ByteRange

CHECKSUM_NBYTES: Final = 4
_LARGE_ENTRIES: Final = 4096
_INDEX: Final = -1
"""The number of an index among entries."""


async def look_through[T](survey: Survey, look: Callable[[Survey], T]) -> T:
    """Call *look*, off the event loop where it takes long."""
    if survey.count < _LARGE_ENTRIES:
        return look(survey)
    return await asyncio.to_thread(look, survey)


def find_overlaps(survey: Survey, table: Table) -> Iterator[Fault]:
    """Tell the entries that share bytes with an index, or with an entry that begins before."""
    indexes = (Entry(_INDEX, place) for place in sorted(survey.indexes))
    last: Entry | None = None
    for entry in heapq.merge(table.entries, indexes, key=attrgetter("place")):
        if last is not None and entry.place.overlaps(last.place):
            hurt, other = (last, entry) if entry.number == _INDEX else (entry, last)
            yield Fault(survey.key(hurt), f"{_named(hurt)} overlaps {_named(other)}")
        if last is None or entry.place.stop > last.place.stop:
            last = entry


def find_gaps(survey: Survey, table: Table) -> list[int]:
    """Measure the stretches of the shard that hold nothing known."""
    checksums = (ByteRange(at.stop - CHECKSUM_NBYTES, at.stop) for at in survey.checksummed)
    entries = (entry.place for entry in table.entries)
    end = ByteRange(survey.whole.byte_range.length, survey.whole.byte_range.length)
    others = sorted([*survey.indexes, *checksums, end])
    return list(_uncovered(heapq.merge(entries, others)))


def _named(entry: Entry) -> str:
    if entry.number == _INDEX:
        return "the shard index"
    return f"inner chunk {entry.number} at {entry.place}"


def _uncovered(places: Iterable[ByteRange]) -> Iterator[int]:
    """Measure the stretches from 0 on that no place covers; they come in their order."""
    covered = 0
    for place in places:
        if place.start > covered:
            yield place.start - covered
        covered = max(covered, place.stop)
