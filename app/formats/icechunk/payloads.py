"""Payloads of changed chunks as numpy columns, and their columns read from JSON.

A commit may set a million chunks; none of them takes a Python object of its own.
"""

from base64 import b64decode
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum
from itertools import chain
from math import ceil
from types import NoneType
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from app.errors import BadBodyError
from app.formats.icechunk.coords import Coords, Places, sort_columns
from app.formats.icechunk.ids import decode_ids
from app.formats.icechunk.manifest import MAX_LOCATION_NBYTES, STRONG_ETAG, Native, Virtual
from app.model import ByteRange, Condition, ETag, UnmodifiedSince

_MAX_DIMENSIONS: Final = 64
_U32_STOP: Final = 2**32
_STOP: Final = 2**63
_RANGES: Final = ("offsets", "lengths")
_CHECKSUMS: Final = ("etags", "last_modified")


class Inlaid(NamedTuple):
    """Payload that is to be stored in the manifest itself."""

    data: bytes


type Payload = Native | Inlaid | Virtual


class PayloadKind(IntEnum):
    """Kind of a payload."""

    GONE = 0
    NATIVE = 1
    INLAID = 2
    VIRTUAL = 3


class Distinct[T: Hashable](NamedTuple):
    """The distinct ones of some values, and for each value its number among them."""

    values: Sequence[T]
    numbers: Places

    @classmethod
    def of(cls, values: Sequence[T]) -> Self:
        numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
        places = np.fromiter(map(numbers.__getitem__, values), np.int64, len(values))
        return cls(tuple(numbers), places)


type Ranges = tuple[Places, Places]
"""Starts and stops of half-open byte ranges."""

_ROW: Final = np.dtype(
    [("kind", "u1"), ("start", "<i8"), ("stop", "<i8"), ("value", "<i8"), ("checksum", "<i8")]
)


@dataclass(frozen=True, slots=True, eq=False)
class Payloads:
    """Payloads of some chunks; `None` deletes a chunk."""

    rows: NDArray[Any]
    """Kind, byte range, and the numbers of the value and the checksum of each."""
    values: Sequence[bytes]
    """Ids of chunk files, bytes of inline chunks, and locations."""
    checksums: Sequence[Condition | None]

    @classmethod
    def of(cls, payloads: Iterable[Payload | None]) -> Self:
        """Convert objects to columns."""
        rows: list[tuple[int, ...]] = []
        values: list[bytes] = []
        checksums: dict[Condition | None, int] = {}
        for payload in payloads:
            at = len(values)
            match payload:
                case None:
                    rows.append((PayloadKind.GONE, 0, 0, 0, 0))
                case Native(chunk_id, (start, stop)):
                    rows.append((PayloadKind.NATIVE, start, stop, at, 0))
                    values.append(chunk_id)
                case Inlaid(data):
                    rows.append((PayloadKind.INLAID, 0, 0, at, 0))
                    values.append(data)
                case Virtual(location, (start, stop), checksum):
                    number = checksums.setdefault(checksum, len(checksums))
                    rows.append((PayloadKind.VIRTUAL, start, stop, at, number))
                    values.append(location.encode())
        return cls(np.array(rows, _ROW), values, list(checksums))

    @classmethod
    def gone(cls, count: int) -> Self:
        return cls(np.zeros(count, _ROW), (), ())

    @classmethod
    def columns(
        cls,
        kind: PayloadKind,
        values: Distinct[bytes],
        ranges: Ranges | None = None,
        checksums: Distinct[Condition | None] | None = None,
    ) -> Self:
        """Refer to *values*: ids of chunk files, bytes of inline chunks, or locations."""
        rows = np.zeros(len(values.numbers), _ROW)
        rows["kind"], rows["value"] = kind, values.numbers
        if ranges is not None:
            rows["start"], rows["stop"] = ranges
        if checksums is None:
            return cls(rows, values.values, (None,))
        rows["checksum"] = checksums.numbers
        return cls(rows, values.values, checksums.values)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        if len(parts) == 1:
            return parts[0]
        rows = np.concatenate([np.empty(0, _ROW), *(part.rows for part in parts)])
        values: list[bytes] = []
        checksums: list[Condition | None] = []
        at = 0
        for part in parts:
            some = rows[at : at + len(part)]
            some["value"] += len(values)
            some["checksum"] += len(checksums)
            values += part.values
            checksums += part.checksums
            at += len(part)
        return cls(rows, values, checksums)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Payload | None]:
        return map(self._payload, self.rows)

    def take(self, places: Places) -> Self:
        return type(self)(self.rows[places], self.values, self.checksums)

    def of_kind(self, kind: PayloadKind) -> Places:
        """Return the row numbers of the payloads of this *kind*."""
        return np.flatnonzero(self.rows["kind"] == kind)

    def values_of(self, kind: PayloadKind) -> Iterator[bytes]:
        """Iterate over the distinct ids, chunks or locations of this *kind*."""
        used = np.zeros(len(self.values), np.bool_)
        used[self.rows["value"][self.of_kind(kind)]] = True
        return (self.values[number] for number in np.flatnonzero(used).tolist())

    def _payload(self, row: Any) -> Payload | None:
        kind, start, stop, number, checksum = row.item()
        match kind:
            case PayloadKind.NATIVE:
                return Native(self.values[number], ByteRange(start, stop))
            case PayloadKind.INLAID:
                return Inlaid(self.values[number])
            case PayloadKind.VIRTUAL:
                location = self.values[number].decode()
                return Virtual(location, ByteRange(start, stop), self.checksums[checksum])
        return None


def read_coords(where: str, value: object) -> Coords:
    """Read a JSON list of distinct chunk coordinates. Raises: `BadBodyError`."""
    what = f"{where}: coords are lists of whole numbers from 0, all of one length"
    if not isinstance(value, list) or not _are_all(list, value):
        raise BadBodyError(what)
    ndims = set(map(len, value))
    if len(ndims) > 1 or max(ndims, default=0) > _MAX_DIMENSIONS:
        raise BadBodyError(what)
    numbers = _numbers(list(chain.from_iterable(value)), _U32_STOP)
    if numbers is None:
        raise BadBodyError(what)
    coords = numbers.astype(np.uint32).reshape(len(value), max(ndims, default=0))
    order, first = sort_columns(np.ascontiguousarray(coords.T))
    if not first.all():
        repeated = coords[order[~first][0]].tolist()
        raise BadBodyError(f"{where}: chunk {repeated} is listed twice")
    return coords


def read_payloads(where: str, columns: Mapping[str, Any], count: int) -> Payloads:
    """Read the JSON columns of *count* payloads of one kind. Raises: `BadBodyError`."""
    for name, column in columns.items():
        if not isinstance(column, list) or len(column) != count:
            raise BadBodyError(f"{where}: {name} is a list of {count}, as many as the coords")
    names = columns.keys()
    if names == {"inlines"}:
        inlines = [_read_inline(where, each) for each in columns["inlines"]]
        return Payloads.columns(PayloadKind.INLAID, Distinct(inlines, np.arange(count)))
    if {"chunk_ids", "lengths"} <= names <= {"chunk_ids", *_RANGES}:
        ids = _read_ids(where, columns["chunk_ids"])
        return Payloads.columns(PayloadKind.NATIVE, ids, _ranges(where, columns))
    if {"locations", "lengths"} <= names <= {"locations", *_RANGES, *_CHECKSUMS}:
        locations = _read_locations(where, columns["locations"])
        ranges, checksums = _ranges(where, columns), _read_checksums(where, columns, count)
        return Payloads.columns(PayloadKind.VIRTUAL, locations, ranges, checksums)
    raise BadBodyError(
        f"{where}: a chunk has coords and inline; or chunk_id, offset, length; or location, "
        "offset, length, and optionally etag or last_modified"
    )


def _read_inline(where: str, text: object) -> bytes:
    try:
        data = b64decode(text, validate=True) if isinstance(text, str) else b""
    except ValueError:
        data = b""
    if not data:
        raise BadBodyError(f"{where}: an inline chunk is base64, of one byte at least")
    return data


def _read_ids(where: str, texts: Sequence[Any]) -> Distinct[bytes]:
    spelled = Distinct.of(texts) if _are_all(str, texts) else None
    ids = decode_ids(spelled.values) if spelled is not None else None
    if spelled is None or ids is None:
        raise BadBodyError(f"{where}: a chunk_id is spelled as in the response of POST /chunks")
    return Distinct(ids, spelled.numbers)


def _ranges(where: str, columns: Mapping[str, Any]) -> Ranges:
    lengths = _numbers(columns["lengths"], _STOP)
    starts = columns.get("offsets", [0] * len(columns["lengths"]))
    offsets = _numbers([0 if each is None else each for each in starts], _STOP)
    if lengths is None or offsets is None or not lengths.all():
        raise BadBodyError(f"{where}: an offset is a whole number, and so is a length, from 1")
    stops = offsets + lengths
    if (stops < 0).any():
        raise BadBodyError(f"{where}: a chunk ends past 2^63")
    return offsets, stops


def _read_locations(where: str, texts: Sequence[Any]) -> Distinct[bytes]:
    found = Distinct.of(texts) if _are_all(str, texts) else Distinct((), np.empty(0, np.int64))
    locations = [text.encode() for text in found.values]
    if len(found.numbers) < len(texts) or max(map(len, locations), default=0) > MAX_LOCATION_NBYTES:
        raise BadBodyError(f"{where}: a location is a URL of up to {MAX_LOCATION_NBYTES} bytes")
    return Distinct(locations, found.numbers)


def _read_checksums(
    where: str, columns: Mapping[str, Any], count: int
) -> Distinct[Condition | None]:
    etags, moments = (
        _distinct_texts(where, columns.get(name, [None] * count)) for name in _CHECKSUMS
    )
    tags = [None if each is None else _read_etag(where, each) for each in etags.values]
    times = [None if each is None else _read_moment(where, each) for each in moments.values]
    is_tagged = np.array([each is not None for each in tags], np.bool_)[etags.numbers]
    is_dated = np.array([each is not None for each in times], np.bool_)[moments.numbers]
    if (is_tagged & is_dated).any():
        raise BadBodyError(f"{where}: a chunk has both etag and last_modified")
    return Distinct(
        [*tags, *times], np.where(is_tagged, etags.numbers, len(tags) + moments.numbers)
    )


def _distinct_texts(where: str, texts: Sequence[Any]) -> Distinct[str | None]:
    if not {str, NoneType}.issuperset(map(type, texts)):
        raise BadBodyError(f"{where}: an etag is text, and so is a last_modified")
    return Distinct.of(texts)


def _read_etag(where: str, text: str) -> ETag:
    opaque = text.removeprefix('"').removesuffix('"')
    if not opaque or not STRONG_ETAG.fullmatch(opaque):
        raise BadBodyError(f"{where}: {text[:80]!r} is no strong entity tag")
    return ETag(f'"{opaque}"')


def _read_moment(where: str, text: str) -> UnmodifiedSince:
    """Read a time of RFC 3339, rounded up to whole seconds."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = datetime.min  # noqa: DTZ901  refused below
    if moment.tzinfo is None or not 0 < (epoch_s := ceil(moment.timestamp())) < _U32_STOP:
        raise BadBodyError(f"{where}: {text[:80]!r} is no time such as 2026-01-31T12:00:00Z")
    return UnmodifiedSince(epoch_s)


def _numbers(values: Sequence[Any], stop: int) -> Places | None:
    try:
        numbers = np.array(values, np.int64) if _are_all(int, values) else None
    except OverflowError:
        return None
    if numbers is None or (len(numbers) and not 0 <= numbers.min() <= numbers.max() < stop):
        return None
    return numbers


def _are_all(kind: type, values: Iterable[Any]) -> bool:
    return {kind}.issuperset(map(type, values))
