"""All chunks that the minishard indexes of a shard name, checked column by column."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, overload

import numpy as np
import numpy.typing as npt

from app.formats.compression import inflate_to_array
from app.formats.neuroglancer_precomputed.encoded import Minishard
from app.formats.neuroglancer_precomputed.index import check_rows
from app.formats.neuroglancer_precomputed.keys import Ids, Mask
from app.formats.neuroglancer_precomputed.metadata import Part
from app.formats.neuroglancer_precomputed.minishards import decode_minishards
from app.formats.reading import DecodeError
from app.formats.surveying import Entry, Fault
from app.model import ByteRange, VirtualKey

_TOLD: Final = 100
"""So many chunks of a shard are named that have the same fault; the rest is counted."""

type Rows = npt.NDArray[np.uint64]
"""Of each chunk the id, where it begins and ends, and in which minishard it stands."""


@dataclass(frozen=True, slots=True, eq=False)
class Entries(Sequence[Entry]):
    """Entries in three columns; each becomes an object when it is asked for."""

    ids: memoryview
    starts: memoryview
    stops: memoryview

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, at: int) -> Entry: ...
    @overload
    def __getitem__(self, at: slice) -> "Entries": ...
    def __getitem__(self, at: int | slice) -> "Entry | Entries":
        if isinstance(at, slice):
            return Entries(self.ids[at], self.starts[at], self.stops[at])
        return Entry(self.ids[at], ByteRange(self.starts[at], self.stops[at]))

    def __iter__(self) -> Iterator[Entry]:
        return map(Entry, self.ids, map(ByteRange, self.starts, self.stops))


@dataclass(slots=True)
class TableReader:
    """Reads all entries of the shard *number* of *part*, and collects what is wrong with them."""

    part: Part
    number: int
    key: VirtualKey
    """Of the shard."""
    region: ByteRange
    """What offsets count in: the shard behind its shard index."""
    most_nbytes: int
    """A minishard index that holds more is refused."""
    total_nbytes: int
    """All together may hold no more."""
    faults: list[Fault] = field(default_factory=list)

    def read(self, minishards: Iterable[Minishard]) -> Entries:
        """Decode *minishards*, and leave out the chunks that no reader finds, or finds whole.

        The rest comes by place, counted from the beginning of the object.
        """
        rows = self._decode(minishards)
        ids, _, stops, owners = rows.T
        sound = np.ones(len(rows), np.bool_)
        for wrong, reason in (
            (~self.part.names.covers(ids), self._is_none),
            (self._misplaced(ids, owners), self._is_misplaced),
            (_repeated(ids, owners), _is_repeated),
            (stops > np.uint64(self.region.length), self._is_outside),
        ):
            self._tell(rows[sound & wrong], reason)
            sound &= ~wrong
        rows = rows[sound]
        rows = rows[np.lexsort((rows[:, 2], rows[:, 1]))]
        places = rows[:, 1:3] + np.uint64(self.region.start)
        columns = (column.copy().data for column in (rows[:, 0], *places.T))
        return Entries(*columns)

    def chunk_key(self, chunk_id: int) -> VirtualKey:
        """Spell the virtual key of a chunk."""
        name = self.part.names.format(chunk_id)
        return VirtualKey(f"{self.part.path}/{name}" if self.part.path else name)

    def _decode(self, minishards: Iterable[Minishard]) -> Rows:
        decoded = list(self._inflate(minishards))
        numbers = [number for number, _ in decoded]
        chunks = decode_minishards(numbers, [data for _, data in decoded])
        wrong = chunks.starts > chunks.stops
        if wrong.any():
            owners, first = np.unique(chunks.owners[wrong], return_index=True)
            for owner, chunk_id in zip(owners, chunks.ids[wrong][first], strict=True):
                reason = f"minishard index {owner}: chunk {chunk_id} ends past 2^64"
                self.faults.append(Fault(self.key, reason))
            wrong = np.isin(chunks.owners, owners)
        return np.column_stack(chunks)[~wrong]

    def _inflate(self, minishards: Iterable[Minishard]) -> Iterator[tuple[int, bytes | bytearray]]:
        """Give the number and the rows of each, but of those that are damaged."""
        room = self.total_nbytes
        is_gzip = self.part.sharding.is_minishard_index_gzip
        for number, _, encoded in minishards:
            try:
                data = inflate_to_array(encoded, self.most_nbytes) if is_gzip else encoded
                check_rows(data)
            except DecodeError as error:
                self.faults.append(Fault(self.key, f"minishard index {number}: {error}"))
                continue
            if (room := room - len(data)) < 0:
                reason = f"its minishard indexes hold over {self.total_nbytes} bytes in all"
                self.faults.append(Fault(self.key, reason))
                return
            yield number, data

    def _misplaced(self, ids: Ids, owners: Ids) -> Mask:
        shards, minishards = self.part.sharding.addresses(ids)
        wrong: Mask = (shards != np.uint64(self.number)) | (minishards != owners)
        return wrong

    def _tell(self, rows: Rows, reason: Callable[[int, int, int, int], Fault | str]) -> None:
        """Tell what *reason* says of each chunk in *rows*, of one that stands there twice once."""
        _, first = np.unique(rows[:, 0], return_index=True)
        told = rows[first[:_TOLD]].tolist()
        for row in told:
            said = reason(*row)
            fault = said if isinstance(said, Fault) else Fault(self.chunk_key(row[0]), said)
            self.faults.append(fault)
        if (more := len(first) - _TOLD) > 0:
            self.faults.append(
                Fault(self.key, f"{more:,} more chunks have the fault of chunk {told[-1][0]}")
            )

    def _is_none(self, chunk_id: int, *_: int) -> Fault:
        return Fault(self.key, f"id {chunk_id} is of no chunk on the grid")

    def _is_misplaced(self, chunk_id: int, _: int, __: int, owner: int) -> str:
        shard, minishard = self.part.sharding.address(chunk_id)
        name = self.part.sharding.shard_name(shard)
        return (
            f"chunk {chunk_id} is in minishard {owner} and not in minishard {minishard} of shard"
            f" {name}, where readers look for it"
        )

    def _is_outside(self, chunk_id: int, start: int, stop: int, _: int) -> str:
        place = ByteRange(start, stop)
        return f"chunk {chunk_id} at {place} ends past {self.region.length} bytes"


def _is_repeated(chunk_id: int, *_: int) -> str:
    return f"chunk {chunk_id} is twice in its minishard index"


def _repeated(ids: Ids, owners: Ids) -> Mask:
    """Tell which chunks stand twice in a minishard, where they stand by their ids."""
    same = (ids[1:] == ids[:-1]) & (owners[1:] == owners[:-1])
    found = np.zeros(len(ids), np.bool_)
    found[1:] |= same
    found[:-1] |= same
    return found
