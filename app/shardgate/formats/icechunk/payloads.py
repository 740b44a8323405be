"""Payloads of changed chunks as numpy columns, and their columns read from JSON.

A commit may set a million chunks; none of them takes a Python object of its own.
"""

from base64 import b64decode
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from math import ceil
from typing import Annotated, Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, FailFast, Field

from shardgate.errors import BadBodyError
from shardgate.formats.icechunk.chunk_tables import Vectors, vector_at
from shardgate.formats.icechunk.coords import Coords, Places, sort_columns
from shardgate.formats.icechunk.ids import OBJECT_ID_NBYTES, decode_ids
from shardgate.formats.icechunk.manifest import (
    MAX_LOCATION_NBYTES,
    STRONG_ETAG,
    Native,
    PayloadKind,
    Virtual,
)
from shardgate.model import ByteRange, ETag, UnmodifiedSince

_MAX_DIMENSIONS: Final = 64
_BATCH: Final = 4096
"""Rows converted in one call, during which no other thread runs."""
_U32_STOP: Final = 2**32
_STOP: Final = 2**63
_NATIVE: Final = ("chunk_ids", "lengths")
_VIRTUAL: Final = ("locations", "lengths")
_FORMS: Final = (
    "a chunk has coords and inline; or chunk_id, offset, length; or location, offset, length, and "
    "optionally etag or last_modified"
)


class Inlaid(NamedTuple):
    """Payload that is to be stored in the manifest itself."""

    data: bytes


type Payload = Native | Inlaid | Virtual

_ROW: Final = np.dtype(
    [
        ("start", "<u8"),
        ("length", "<u8"),
        ("value", "<i8"),
        ("etag", "<i8"),
        ("modified", "<u4"),
        ("chunk_id", f"V{OBJECT_ID_NBYTES}"),
        ("kind", "<i8"),
    ]
)


@dataclass(frozen=True, slots=True, eq=False)
class Payloads:
    """Payloads of some chunks; `None` deletes a chunk."""

    rows: NDArray[Any]
    """Kind and byte range, id of a chunk file, and the positions of other values in *data*: an
    inline chunk or location, and an ETag. A time is in seconds. What is absent is 0.
    """
    data: bytes
    """Vectors as in a FlatBuffer."""

    @classmethod
    def of(cls, payloads: Iterable[Payload | None]) -> Self:
        """Convert objects to columns."""
        vectors = Vectors()
        rows = [_to_row(payload, vectors) for payload in payloads]
        return cls(np.array(rows, _ROW), vectors.joined())

    @classmethod
    def gone(cls, count: int) -> Self:
        return cls(np.zeros(count, _ROW), b"")

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        rows = np.concatenate([np.empty(0, _ROW), *(part.rows for part in parts)])
        nbytes = [len(part.data) for part in parts]
        starts = np.repeat(np.cumsum([0, *nbytes])[:-1], [len(part) for part in parts])
        for column in ("value", "etag"):
            rows[column] += starts * (rows[column] > 0)
        return cls(rows, b"".join(part.data for part in parts))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Payload | None]:
        batches = (self.rows[at : at + _BATCH].tolist() for at in range(0, len(self.rows), _BATCH))
        for start, length, value, etag, modified, chunk_id, kind in chain.from_iterable(batches):
            match kind:
                case PayloadKind.GONE:
                    yield None
                case PayloadKind.NATIVE:
                    yield Native(chunk_id, ByteRange(start, start + length))
                case PayloadKind.INLINE:
                    yield Inlaid(vector_at(self.data, value))
                case _:
                    checksum = UnmodifiedSince(modified) if modified else None
                    yield Virtual(
                        vector_at(self.data, value).decode(),
                        ByteRange(start, start + length),
                        ETag(vector_at(self.data, etag).decode()) if etag else checksum,
                    )

    def take(self, places: Places) -> Self:
        return type(self)(self.rows[places], self.data)

    def of_kind(self, kind: PayloadKind) -> NDArray[Any]:
        """Return the rows of this *kind*."""
        found: NDArray[Any] = self.rows[self.rows["kind"] == kind]
        return found

    def values_of(self, kind: PayloadKind) -> Iterator[bytes]:
        """Iterate over the distinct chunks or locations of this *kind*."""
        places = np.unique(self.of_kind(kind)["value"])
        return (vector_at(self.data, at) for at in places.tolist())


def _to_row(payload: Payload | None, vectors: Vectors) -> tuple[Any, ...]:
    no_id = bytes(OBJECT_ID_NBYTES)
    match payload:
        case None:
            return 0, 0, 0, 0, 0, no_id, PayloadKind.GONE
        case Native(chunk_id, (start, stop)):
            return start, stop - start, 0, 0, 0, chunk_id, PayloadKind.NATIVE
        case Inlaid(data):
            return 0, 0, vectors.add(data), 0, 0, no_id, PayloadKind.INLINE
        case Virtual(location, (start, stop), checksum):
            etag = vectors.add(checksum.encode()) if isinstance(checksum, str) else 0
            modified = checksum.epoch_s if isinstance(checksum, UnmodifiedSince) else 0
            value = vectors.add(location.encode())
            return start, stop - start, value, etag, modified, no_id, PayloadKind.LOCATION


type _Column[T] = Annotated[list[T], FailFast()]
type _Offset = Annotated[int, Field(ge=0, lt=_STOP)]
type _Length = Annotated[int, Field(gt=0, lt=_STOP)]


class ChunkColumns(BaseModel, extra="forbid", strict=True):
    """Payloads of one kind, as the columns of a JSON document."""

    inlines: _Column[str] = []
    chunk_ids: _Column[str] = []
    locations: _Column[str] = []
    offsets: _Column[_Offset | None] = []
    lengths: _Column[_Length] = []
    etags: _Column[str | None] = []
    last_modified: _Column[str | None] = []

    def payloads(self, count: int) -> Payloads:
        """Return the payloads of *count* chunks. Raises: `BadBodyError`."""
        names = self.model_fields_set & ChunkColumns.model_fields.keys()
        for name in names:
            if len(getattr(self, name)) != count:
                raise BadBodyError(f"{name} is a list of {count}, as many as the coords")
        rows, vectors = Payloads.gone(count).rows, Vectors()
        if names == {"inlines"}:
            rows["kind"] = PayloadKind.INLINE
            rows["value"] = _map_distinct(self.inlines, lambda text: vectors.add(_inline(text)))
        elif {*_NATIVE} <= names <= {*_NATIVE, "offsets"}:
            self._read_natives(rows)
        elif {*_VIRTUAL} <= names <= {*_VIRTUAL, "offsets", "etags", "last_modified"}:
            self._read_virtuals(rows, vectors)
        else:
            raise BadBodyError(_FORMS)
        return Payloads(rows, vectors.joined())

    def _read_natives(self, rows: NDArray[Any]) -> None:
        if (ids := decode_ids(self.chunk_ids)) is None:
            raise BadBodyError("a chunk_id is spelled as in the response of POST /chunks")
        rows["kind"] = PayloadKind.NATIVE
        rows["chunk_id"] = np.frombuffer(b"".join(ids), rows["chunk_id"].dtype)
        self._read_ranges(rows)

    def _read_virtuals(self, rows: NDArray[Any], vectors: Vectors) -> None:
        absent = [None] * len(rows)
        rows["kind"] = PayloadKind.LOCATION
        rows["value"] = _map_distinct(self.locations, lambda text: vectors.add(_location(text)))
        rows["etag"] = _map_distinct(
            self.etags or absent, lambda text: 0 if text is None else vectors.add(_etag(text))
        )
        rows["modified"] = _map_distinct(
            self.last_modified or absent, lambda text: 0 if text is None else _moment(text)
        )
        if ((rows["etag"] > 0) & (rows["modified"] > 0)).any():
            raise BadBodyError("a chunk has both etag and last_modified")
        self._read_ranges(rows)

    def _read_ranges(self, rows: NDArray[Any]) -> None:
        rows["length"] = self.lengths
        if self.offsets:
            rows["start"] = [each or 0 for each in self.offsets]
        if (rows["start"] + rows["length"] >= _STOP).any():
            raise BadBodyError("a chunk ends past 2^63")


def read_coords(value: list[Any]) -> Coords:
    """Read a JSON list of distinct chunk coordinates. Raises: `BadBodyError`."""
    what = "coords are lists of whole numbers from 0, all of one length"
    if not {list}.issuperset(map(type, value)):
        raise BadBodyError(what)
    ndims = set(map(len, value)) or {0}
    numbers = list(chain.from_iterable(value))
    if len(ndims) > 1 or max(ndims) > _MAX_DIMENSIONS or not {int}.issuperset(map(type, numbers)):
        raise BadBodyError(what)
    try:
        coords = np.array(numbers, np.uint32).reshape(len(value), max(ndims))
    except OverflowError:
        raise BadBodyError(what) from None
    order, first = sort_columns(np.ascontiguousarray(coords.T))
    if not first.all():
        repeated = coords[order[~first][0]].tolist()
        raise BadBodyError(f"chunk {repeated} is listed twice")
    return coords


def _map_distinct[T: Hashable](values: Sequence[T], convert: Callable[[T], int]) -> Places:
    """Convert *values*, each distinct one once."""
    found = {value: convert(value) for value in dict.fromkeys(values)}
    return np.fromiter(map(found.__getitem__, values), np.int64, len(values))


def _inline(text: str) -> bytes:
    try:
        data = b64decode(text, validate=True)
    except ValueError:
        data = b""
    if not data:
        raise BadBodyError("an inline chunk is base64, of one byte at least")
    return data


def _location(text: str) -> bytes:
    if len(location := text.encode()) > MAX_LOCATION_NBYTES:
        raise BadBodyError(f"a location is a URL of up to {MAX_LOCATION_NBYTES} bytes")
    return location


def _etag(text: str) -> bytes:
    opaque = text.removeprefix('"').removesuffix('"')
    if not opaque or not STRONG_ETAG.fullmatch(opaque):
        raise BadBodyError(f"{text[:80]!r} is no strong entity tag")
    return f'"{opaque}"'.encode()


def _moment(text: str) -> int:
    """Read a time of RFC 3339, rounded up to whole seconds."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = datetime.min  # noqa: DTZ901  refused below
    if moment.tzinfo is None or not 0 < (epoch_s := ceil(moment.timestamp())) < _U32_STOP:
        raise BadBodyError(f"{text[:80]!r} is no time such as 2026-01-31T12:00:00Z")
    return epoch_s
