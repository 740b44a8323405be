"""References as numpy columns: parts of objects, whole objects, and bytes held in the set."""

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import lt
from sys import getsizeof
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardgate.formats.documents import Json, check_levels, json_memory_nbytes
from shardgate.formats.listing import Window
from shardgate.formats.members import NO_KEY, LeftOut, SortedNames
from shardgate.formats.reading import DecodedMetadata, DecodeError
from shardgate.formats.zarr.keys import ChunkKeys
from shardgate.model import ByteRange, check_integer

CONSOLIDATED: Final = ".zmetadata"
"""Name of the consolidated metadata of Zarr v2, and of the catalog of a set in Parquet."""
ABSENT: Final = 2**32 - 1
"""Source of a row without a reference."""
INLINE: Final = 2**32 - 2
"""Source of bytes in the set itself."""
WHOLE: Final = 2**64 - 1
"""Length of a reference to a whole object."""
MOST_NBYTES: Final = 2**63 - 1
"""Largest end of a part of an object."""
MEMORY_PER_BYTE: Final = 8
"""Memory that JSON may take while it is decoded, for each byte that it may have."""


class InvalidReference(NamedTuple):
    """A reference that cannot be followed."""

    reason: str


class SourcePart(NamedTuple):
    """A part of the object at *url*, or all of it."""

    url: str
    byte_range: ByteRange | None


type Reference = SourcePart | InvalidReference | bytes | None
"""A part of an object, bytes in the set, or nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceTable:
    """Rows of references: 20 bytes each, beside the distinct URLs and the bytes in the set."""

    urls: Sequence[str | InvalidReference]
    sources: NDArray[np.uint32]
    """Position in `urls`, or `INLINE`, or `ABSENT`."""
    offsets: NDArray[np.uint64]
    lengths: NDArray[np.uint64]
    inline: bytes

    @property
    def nbytes(self) -> int:
        columns = self.sources.nbytes + self.offsets.nbytes + self.lengths.nbytes
        return columns + len(self.inline) + sum(map(getsizeof, self.urls)) + 8 * len(self.urls)

    def __len__(self) -> int:
        return len(self.sources)

    def lookup(self, row: int) -> Reference:
        if row >= len(self):
            return InvalidReference(f"its table has {len(self)} references, and no {row}")
        source = self.sources.item(row)
        start = self.offsets.item(row)
        length = self.lengths.item(row)
        if source == ABSENT:
            return None
        if source == INLINE:
            return self.inline[start : start + length]
        if isinstance(url := self.urls[source], InvalidReference):
            return url
        return SourcePart(url, None if length == WHOLE else ByteRange(start, start + length))

    def length_of(self, row: int) -> int | None:
        """Return the bytes of the key in *row*; `None` where only its object tells."""
        length = self.lengths.item(row)
        return None if length == WHOLE else length


@dataclass(frozen=True, slots=True)
class ReferenceGrid:
    """The chunks of an array; *counts* is their number along each dimension."""

    keys: ChunkKeys
    counts: tuple[int, ...]

    def names(
        self, present: NDArray[np.bool_], start: str, window: Window, first: int = 0
    ) -> Iterator[tuple[str, int]]:
        """Yield the names in *window* that begin with *start*, in order, of the *present* chunks,
        each with its number; that of the first one is *first*.
        """
        if not present.ndim:
            yield start.removesuffix(self.keys.separator), first
            return
        size = prod(present.shape[1:])
        stored = np.flatnonzero(present.any(axis=tuple(range(1, present.ndim)))).tolist()
        for at in sorted(stored, key=str):
            if window.meets(below := f"{start}{at}"):
                below += self.keys.separator
                yield from self.names(present[at], below, window, first + at * size)


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceSet(DecodedMetadata):
    """References by name; a set in Parquet has those of chunks in tables of their own."""

    names: SortedNames
    table: ReferenceTable
    """Its rows are in the order of the names."""
    record_size: int = 0
    """References in each of the other tables."""
    arrays: Mapping[str, ReferenceGrid | InvalidReference] = field(default_factory=dict)
    """Grids of chunks, whose references are in other tables, by the paths of arrays."""
    is_metadata: bool = True
    """False for consolidated metadata of Zarr v2, which have the name of a catalog."""
    left_out: LeftOut = field(default_factory=LeftOut)
    """Names that are no keys."""
    fault: str = ""
    """Reason why the set may have further keys, which are not known."""

    @property
    def nbytes(self) -> int:
        grids_nbytes = 512 * len(self.arrays)  # with their paths
        return self.names.nbytes + self.table.nbytes + grids_nbytes

    def invalid(self) -> Iterator[tuple[str, str]]:
        """Yield the names of references that cannot be followed, and the reasons."""
        urls = self.table.urls
        bad = [at for at, url in enumerate(urls) if isinstance(url, InvalidReference)]
        for row in np.flatnonzero(np.isin(self.table.sources, bad)).tolist():
            yield self.names.at(row), urls[self.table.sources[row]][0]

    def find_chunk(self, name: str) -> tuple[str, int] | InvalidReference | None:
        """Return the path of the array of the chunk *name*, and its number in C order."""
        end = len(name)
        while (end := name.rfind("/", 0, end)) > 0:
            if (grid := self.arrays.get(name[:end])) is not None:
                if isinstance(grid, InvalidReference):
                    return grid
                coords = grid.keys.parse(name[end + 1 :])
                if coords is None or not all(map(lt, coords, grid.counts)):
                    return None
                number = 0
                for at, count in zip(coords, grid.counts, strict=True):
                    number = number * count + at
                return name[:end], number
        return InvalidReference(self.fault) if self.fault else None


class TableBuilder:
    """Collects references by name; the last of a name counts, and names that are no keys do not."""

    def __init__(self, most_rows: int) -> None:
        self._most_rows = most_rows
        self._rows: dict[bytes, int] = {}
        self._numbers: dict[str | InvalidReference, int] = {}
        self._sources = array("I")
        self._offsets = array("Q")
        self._lengths = array("Q")
        self._inline = bytearray()
        self._left_out = LeftOut()
        self.has_valid = False
        self.fault = ""
        """See `ReferenceSet`."""

    def add_invalid(self, name: str, reason: str) -> None:
        """Add a reference that cannot be followed."""
        self._add_url(name, InvalidReference(reason), 0, WHOLE)

    def add_bytes(self, name: str, data: bytes) -> None:
        self._set(name, INLINE, len(self._inline), len(data))
        self._inline += data
        self.has_valid = True

    def add_source(self, name: str, url: str, part: tuple[int, int] | None) -> None:
        """Add the object at *url*, or its *part*: offset and length. Raises: `DecodeError`."""
        offset, length = part or (0, WHOLE)
        if part is not None:
            check_integer(offset, "offset", MOST_NBYTES, DecodeError)
            check_integer(length, f"length at {offset}", MOST_NBYTES - offset, DecodeError)
        self._add_url(name, url, offset, length)
        self.has_valid = True

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: str) -> bool:
        return _encode(name) in self._rows

    def bytes_of(self, name: bytes) -> bytes | None:
        """Return the bytes of *name*, if the set holds them."""
        row = self._rows.get(name)
        if row is None or self._sources[row] != INLINE:
            return None
        start = self._offsets[row]
        return bytes(self._inline[start : start + self._lengths[row]])

    @property
    def names(self) -> Iterator[bytes]:
        return iter(self._rows)

    @property
    def urls(self) -> Sequence[str | InvalidReference]:
        """Distinct URLs, in the order in which they were added."""
        return list(self._numbers)

    def build(self, urls: Sequence[str | InvalidReference]) -> ReferenceSet:
        """Return the set, with *urls* in place of those that were added."""
        names, order = SortedNames.of(list(self._rows))
        rows = np.fromiter(self._rows.values(), np.intp, len(self._rows))[order]
        table = ReferenceTable(
            tuple(urls),
            np.array(self._sources, np.uint32)[rows],
            np.array(self._offsets, np.uint64)[rows],
            np.array(self._lengths, np.uint64)[rows],
            bytes(self._inline),
        )
        return ReferenceSet(names, table, left_out=self._left_out, fault=self.fault)

    def _add_url(self, name: str, url: str | InvalidReference, offset: int, length: int) -> None:
        self._set(name, self._numbers.setdefault(url, len(self._numbers)), offset, length)

    def _set(self, name: str, source: int, offset: int, length: int) -> None:
        text = _encode(name)
        if NO_KEY.search(text) is not None:
            self._left_out = self._left_out.add(name)
            return
        self._rows[text] = len(self._sources)
        if len(self._rows) > (most := self._most_rows):
            raise DecodeError(f"more than {most} references: a set in Parquet can have more")
        self._sources.append(source)
        self._offsets.append(offset)
        self._lengths.append(length)


def _encode(name: str) -> bytes:
    """Encode *name*; half of a character, which is in no key, becomes a backslash."""
    return name.encode(errors="backslashreplace")


def check_size(data: bytes, limit_nbytes: int) -> None:
    """Raise `DecodeError` if the JSON *data* is longer than the limit, or takes much memory."""
    if len(data) > limit_nbytes:
        raise DecodeError(f"a reference set of more than {limit_nbytes} bytes")
    if (nbytes := json_memory_nbytes(data)) > MEMORY_PER_BYTE * limit_nbytes:
        raise DecodeError(f"it would take {nbytes} bytes of memory, for {len(data)} of JSON")


def consolidate(documents: Mapping[str, Json]) -> bytes:
    """Return consolidated metadata of Zarr v2, which has *documents* by their keys. Raises:
    `ValueError` for NaN and infinities, which Python writes into attributes as no JSON: readers of
    strict JSON could then read none of the documents, and can read the others one by one.
    """
    document = {"zarr_consolidated_format": 1, "metadata": documents}
    data = json.dumps(document, allow_nan=False).encode()
    check_levels(data)
    return data
