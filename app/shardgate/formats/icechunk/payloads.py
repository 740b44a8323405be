"""Payloads of changed chunks as numpy columns.

A commit may set a million chunks; none of them takes a Python object of its own.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardgate.formats.icechunk.chunk_tables import Vectors, vector_at
from shardgate.formats.icechunk.coords import Places
from shardgate.formats.icechunk.ids import OBJECT_ID_NBYTES
from shardgate.formats.icechunk.manifest import InlineChunk, Native, PayloadKind, Reference, Virtual
from shardgate.model import UnmodifiedSince

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
    inline chunk or location, and an ETag. A time is in seconds. An absent value is 0.
    """
    data: bytes
    """Vectors as in a FlatBuffer."""

    @classmethod
    def of(cls, payloads: Iterable[Reference | None]) -> Self:
        """Convert objects to columns."""
        vectors = Vectors()
        rows = [_to_row(payload, vectors) for payload in payloads]
        return cls(np.array(rows, _ROW), vectors.joined())

    @classmethod
    def of_columns(
        cls,
        kind: PayloadKind,
        count: int,
        *,
        chunk_ids: Sequence[bytes] = (),
        values: Sequence[bytes] = (),
        etags: Sequence[bytes] = (),
        **numbers: ArrayLike,
    ) -> Self:
        """Build *count* payloads of one *kind*; *values* are inline chunks or locations, *numbers*
        the other columns of `rows`. Empty columns are 0.
        """
        rows = cls.gone(count).rows
        vectors = Vectors()
        rows["kind"] = kind
        for name, column in numbers.items():
            rows[name] = column
        if chunk_ids:
            rows["chunk_id"] = np.frombuffer(b"".join(chunk_ids), rows["chunk_id"].dtype)
        for name, texts in (("value", values), ("etag", etags)):
            if texts:
                rows[name] = [vectors.add(text) if text else 0 for text in texts]
        return cls(rows, vectors.joined())

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

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + len(self.data)

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, places: Places) -> Self:
        return type(self)(self.rows[places], self.data)

    def of_kind(self, kind: PayloadKind) -> NDArray[Any]:
        found: NDArray[Any] = self.rows[self.rows["kind"] == kind]
        return found

    def values_of(self, kind: PayloadKind) -> Iterator[bytes]:
        """Iterate over the distinct chunks or locations of this *kind*."""
        places = np.unique(self.of_kind(kind)["value"])
        return (vector_at(self.data, at) for at in places.tolist())


def _to_row(payload: Reference | None, vectors: Vectors) -> tuple[Any, ...]:
    no_id = bytes(OBJECT_ID_NBYTES)
    match payload:
        case None:
            return 0, 0, 0, 0, 0, no_id, PayloadKind.GONE
        case Native(chunk_id, (start, stop)):
            return start, stop - start, 0, 0, 0, chunk_id, PayloadKind.NATIVE
        case InlineChunk(data):
            return 0, 0, vectors.add(data), 0, 0, no_id, PayloadKind.INLINE
        case Virtual(location, (start, stop), checksum):
            etag = vectors.add(checksum.encode()) if isinstance(checksum, str) else 0
            modified = checksum.epoch_s if isinstance(checksum, UnmodifiedSince) else 0
            value = vectors.add(location.encode())
            return start, stop - start, value, etag, modified, no_id, PayloadKind.LOCATION
