"""References to be written, a batch for those that have the same fields ("ChunkRef")."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.formats.icechunk.columns import U32s
from app.formats.icechunk.payloads import Kind, Payloads, Rows
from app.formats.icechunk.vector_pool import VectorPool
from app.model import Condition, UnmodifiedSince

# The slots of fields, besides that of the index.
INLINE: Final = 1
OFFSET: Final = 2
LENGTH: Final = 3
CHUNK_ID: Final = 4
LOCATION: Final = 5
CHECKSUM_ETAG: Final = 6
CHECKSUM_LAST_MODIFIED: Final = 7
COMPRESSED_LOCATION: Final = 8
EXTRA: Final = 9

NUMBERS: Final[Mapping[int, str]] = {
    OFFSET: "<u8",
    LENGTH: "<u8",
    CHUNK_ID: "V12",
    CHECKSUM_LAST_MODIFIED: "<u4",
}
"""The types of the fields that lie in the table; an offset leads to each of the others."""
_CHECKSUMS: Final = (type(None), UnmodifiedSince, str)
TEXTS: Final = frozenset({LOCATION, CHECKSUM_ETAG})


class Batch(NamedTuple):
    """References with the same fields."""

    rows: NDArray[np.int64]
    """Which they are, among those of the source."""
    columns: Mapping[int, NDArray[Any]]
    """By their slots: the numbers, or the places of vectors."""


@dataclass(frozen=True, slots=True)
class Batches:
    """The references that come from one source."""

    batches: Sequence[Batch]
    vectors: U32s
    """What they lead to, in words."""

    def has(self, slot: int) -> bool:
        """Tell whether any reference has the field *slot*."""
        return any(slot in batch.columns for batch in self.batches)


def batch_payloads(payloads: Payloads) -> Batches:
    """Make references to *payloads*, none of which is gone."""
    pool = VectorPool()
    made = [
        _batch_native(payloads, payloads.of_kind(Kind.NATIVE)),
        _batch_inlaid(payloads, payloads.of_kind(Kind.INLAID), pool),
        *_batch_virtual(payloads, payloads.of_kind(Kind.VIRTUAL), pool),
    ]
    return Batches([batch for batch in made if len(batch.rows)], pool.words)


def _batch_native(payloads: Payloads, found: Rows) -> Batch:
    rows = payloads.rows[found]
    ids = b"".join([payloads.told[at] for at in rows["told"].tolist()])
    return Batch(found, {**_range(rows), CHUNK_ID: np.frombuffer(ids, "V12")})


def _batch_inlaid(payloads: Payloads, found: Rows, pool: VectorPool) -> Batch:
    places = _each(payloads.rows["told"][found], lambda at: pool.add(payloads.told[at]))
    return Batch(found, {INLINE: places})


def _batch_virtual(payloads: Payloads, found: Rows, pool: VectorPool) -> Iterator[Batch]:
    """Make a batch for each kind of checksum, and one for those that have none."""
    told, checksums = payloads.told, payloads.checksums
    kinds = np.array([_CHECKSUMS.index(type(each)) for each in checksums], np.int64)
    kind_of = kinds[payloads.rows["checksum"][found]] if len(found) else found
    for number, kind in enumerate(_CHECKSUMS):
        some = found[kind_of == number]
        rows = payloads.rows[some]
        columns = _range(rows)
        columns[LOCATION] = _each(rows["told"], lambda at: pool.add_text(told[at].decode()))
        if kind is UnmodifiedSince:
            columns[CHECKSUM_LAST_MODIFIED] = _each(
                rows["checksum"], lambda at: _epoch_s(checksums[at])
            )
        elif kind is str:
            columns[CHECKSUM_ETAG] = _each(
                rows["checksum"], lambda at: pool.add_text(str(checksums[at]))
            )
        yield Batch(some, columns)


def _epoch_s(checksum: Condition | None) -> int:
    return checksum.epoch_s if isinstance(checksum, UnmodifiedSince) else 0


def _range(rows: NDArray[Any]) -> dict[int, NDArray[Any]]:
    return {OFFSET: rows["start"], LENGTH: rows["stop"] - rows["start"]}


def _each(numbers: Rows, make: Callable[[int], int]) -> Rows:
    """Give what *make* makes of *numbers*, of each once."""
    distinct, inverse = np.unique(numbers, return_inverse=True)
    return np.array([make(number) for number in distinct.tolist()], np.int64)[inverse]
