"""The minishard indexes of a shard as they are stored: where they lie, and their bytes.

A shard can have very many; each becomes an object when it is asked for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from app.formats.neuroglancer_precomputed.minishards import Numbers
from app.model import ByteRange


class Minishard(NamedTuple):
    """An encoded minishard index; *place* counts from the end of the shard index."""

    number: int
    place: ByteRange
    encoded: bytes


class Places(NamedTuple):
    """Where the indexes of the minishards *numbers* lie, one behind the other; none is empty."""

    numbers: Numbers
    starts: Numbers
    stops: Numbers

    @property
    def nbytes(self) -> int:
        """Of all together."""
        return int((self.stops - self.starts).sum())

    @property
    def span(self) -> ByteRange:
        """What they all lie in."""
        return ByteRange(int(self.starts[0]), int(self.stops[-1]))

    def among(self, run: slice) -> "Places":
        """Give some of them."""
        return Places(*(column[run] for column in self))

    def each(self) -> Iterator[ByteRange]:
        """Give one after the other."""
        return map(ByteRange, self.starts.tolist(), self.stops.tolist())

    def pick(self, data: bytes) -> bytes:
        """Leave out of the bytes of the `span` what lies between them."""
        if len(data) == self.nbytes:
            return data
        starts, stops = (column - self.starts[0] for column in self[1:])
        return b"".join(map(data.__getitem__, map(slice, starts.tolist(), stops.tolist())))


@dataclass(frozen=True, slots=True, eq=False)
class Minishards:
    """Encoded minishard indexes, by their places."""

    places: Places
    runs: Sequence[bytes]
    """All bytes; each minishard index is in one run."""

    @property
    def nbytes(self) -> int:
        """Of all together."""
        return sum(map(len, self.runs))

    def __iter__(self) -> Iterator[Minishard]:
        return map(Minishard, self.places.numbers.tolist(), self.places.each(), self._encoded())

    def find(self, number: int) -> Minishard | None:
        """Give the index of the minishard *number*, unless that is empty."""
        found = np.flatnonzero(self.places.numbers == number)
        if not found.size:
            return None
        at = int(found[0])
        nbytes = self.places.stops - self.places.starts
        start, run = int(nbytes[:at].sum()), 0
        while start >= len(self.runs[run]):
            start, run = start - len(self.runs[run]), run + 1
        (place,) = self.places.among(slice(at, at + 1)).each()
        return Minishard(number, place, self.runs[run][start : start + place.length])

    def _encoded(self) -> Iterator[bytes]:
        ends = np.cumsum(self.places.stops - self.places.starts)
        reached = first = 0
        for run in self.runs:
            last = int(np.searchsorted(ends, reached + len(run), side="right"))
            edges = chain([0], (ends[first:last] - reached).tolist())
            yield from (run[start:stop] for start, stop in pairwise(edges))
            reached, first = reached + len(run), last
