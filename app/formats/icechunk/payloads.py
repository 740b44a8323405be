"""What changed chunks refer to, in columns: a hundred thousand of them without an object each."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from app.formats.icechunk.references import Native, Virtual
from app.model import ByteRange, Condition


class Inlaid(NamedTuple):
    """A chunk that is to be in the manifest itself."""

    data: bytes


type Payload = Native | Inlaid | Virtual
"""Where the bytes of a chunk are to be looked for."""
type Rows = NDArray[np.int64]


class Kind(IntEnum):
    """What a chunk becomes."""

    GONE = 0
    NATIVE = 1
    INLAID = 2
    VIRTUAL = 3


class Distinct[T: Hashable](NamedTuple):
    """The different ones of some values, and which of them each is."""

    values: Sequence[T]
    numbers: Rows

    @classmethod
    def of(cls, values: Sequence[T]) -> Self:
        """Tell *values* apart."""
        numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
        places = np.fromiter(map(numbers.__getitem__, values), np.int64, len(values))
        return cls(tuple(numbers), places)


class Ranges(NamedTuple):
    """Where chunks lie in objects: half-open, as everywhere."""

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]


_ROW: Final = np.dtype(
    [("kind", "u1"), ("start", "<i8"), ("stop", "<i8"), ("told", "<i8"), ("checksum", "<i8")]
)


@dataclass(frozen=True, slots=True, eq=False)
class Payloads:
    """What each of some chunks refers to from now on; `None` deletes it."""

    rows: NDArray[Any]
    """What differs: the kind of each, its range, and where the rest of it is."""
    told: Sequence[bytes]
    """Ids of chunk files, the bytes of chunks, locations."""
    checksums: Sequence[Condition | None]

    @classmethod
    def of(cls, payloads: Iterable[Payload | None]) -> Self:
        """Put *payloads* in columns."""
        rows: list[tuple[int, ...]] = []
        told: list[bytes] = []
        checksums: dict[Condition | None, int] = {}
        for payload in payloads:
            at = len(told)
            match payload:
                case None:
                    rows.append((Kind.GONE, 0, 0, 0, 0))
                case Native(chunk_id, (start, stop)):
                    rows.append((Kind.NATIVE, start, stop, at, 0))
                    told.append(chunk_id)
                case Inlaid(data):
                    rows.append((Kind.INLAID, 0, 0, at, 0))
                    told.append(data)
                case Virtual(location, (start, stop), checksum):
                    number = checksums.setdefault(checksum, len(checksums))
                    rows.append((Kind.VIRTUAL, start, stop, at, number))
                    told.append(location.encode())
        return cls(np.array(rows, _ROW), told, list(checksums))

    @classmethod
    def gone(cls, count: int) -> Self:
        """Delete *count* chunks."""
        return cls(np.zeros(count, _ROW), (), ())

    @classmethod
    def native(cls, ids: Distinct[bytes], ranges: Ranges) -> Self:
        """Refer to parts of chunk files."""
        return cls(_rows(Kind.NATIVE, ids.numbers, ranges), ids.values, (None,))

    @classmethod
    def inlaid(cls, chunks: Sequence[bytes]) -> Self:
        """Put *chunks* into the manifest."""
        return cls(_rows(Kind.INLAID, np.arange(len(chunks))), chunks, (None,))

    @classmethod
    def virtual(
        cls, locations: Distinct[str], ranges: Ranges, checksums: Distinct[Condition | None]
    ) -> Self:
        """Refer to parts of objects that are none of the repository's."""
        rows = _rows(Kind.VIRTUAL, locations.numbers, ranges)
        rows["checksum"] = checksums.numbers
        return cls(rows, [each.encode() for each in locations.values], checksums.values)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Put *parts* one after the other."""
        if len(parts) == 1:
            return parts[0]
        rows = np.concatenate([np.empty(0, _ROW), *(part.rows for part in parts)])
        told: list[bytes] = []
        checksums: list[Condition | None] = []
        at = 0
        for part in parts:
            some = rows[at : at + len(part)]
            some["told"] += len(told)
            some["checksum"] += len(checksums)
            told += part.told
            checksums += part.checksums
            at += len(part)
        return cls(rows, told, checksums)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Payload | None]:
        return map(self._payload, self.rows)

    def take(self, places: Rows) -> Self:
        """Give those at *places*, in their order."""
        return type(self)(self.rows[places], self.told, self.checksums)

    def of_kind(self, kind: Kind) -> Rows:
        """Tell which are of this *kind*."""
        return np.flatnonzero(self.rows["kind"] == kind)

    def told_by(self, kind: Kind) -> Iterator[bytes]:
        """Give each different id, chunk or location of those of this *kind*."""
        used = np.zeros(len(self.told), np.bool_)
        used[self.rows["told"][self.of_kind(kind)]] = True
        return (self.told[number] for number in np.flatnonzero(used).tolist())

    def _payload(self, row: Any) -> Payload | None:
        kind, start, stop, number, checksum = row.item()
        match kind:
            case Kind.NATIVE:
                return Native(self.told[number], ByteRange(start, stop))
            case Kind.INLAID:
                return Inlaid(self.told[number])
            case Kind.VIRTUAL:
                location = self.told[number].decode()
                return Virtual(location, ByteRange(start, stop), self.checksums[checksum])
        return None


def _rows(kind: Kind, told: Rows, ranges: Ranges | None = None) -> NDArray[Any]:
    rows = np.zeros(len(told), _ROW)
    rows["kind"] = kind
    rows["told"] = told
    if ranges is not None:
        rows["start"], rows["stop"] = ranges
    return rows
