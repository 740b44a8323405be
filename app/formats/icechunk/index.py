"""The manifest: which chunks of which arrays there are, and where ("Chunk Manifest Files").

A reference is found by its coordinates, and read when it is asked for; until then it stays in the
payload, and only its position is known.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from app.formats.icechunk.columns import BLOCK, Column, U32s, make_column, words_of
from app.formats.icechunk.envelope import FileType, open_envelope
from app.formats.icechunk.fields import check_object_id
from app.formats.icechunk.flatbuffer import U8, Buffer, Table, required
from app.formats.icechunk.ids import NODE_ID_NBYTES, encode_id
from app.formats.icechunk.references import LocationCodec, Reference, References
from app.formats.reading import DecodeError
from app.model import ByteRange

_MAX_NBYTES: Final = 2**31 - 1
_MAX_COLUMNS: Final = 2**16
"""Each takes time and memory; the library has one in a manifest."""
_NONE: Final = np.empty(0, np.uint32)
_VTABLE_NBYTES: Final = 6
"""Of one that has the first field."""
_MEMORY_PER_REFERENCE: Final = 64
_MEMORY_PER_COORDINATE: Final = 16


@dataclass(frozen=True, slots=True)
class Manifest:
    """A decoded manifest; any thread may look things up in it."""

    object_id: bytes
    references: References
    columns: Mapping[tuple[bytes, int], Column]
    """By the id of an array's node, and by the number of dimensions."""
    nbytes: int
    """Bytes of memory that the payload and the columns hold."""

    @property
    def node_ids(self) -> Sequence[bytes]:
        """Name the arrays that have references here."""
        return list(dict.fromkeys(node_id for node_id, _ in self.columns))

    def lookup(self, node_id: bytes, coords: tuple[int, ...]) -> Reference | None:
        """Find chunk *coords* of array *node_id*; `None` if there is none.

        References with another number of coordinates are of no chunk: the library writes them
        when it is asked to, and never finds them.

        Raises: `DecodeError` for a reference that contradicts itself.
        """
        column = self.columns.get((node_id, len(coords)))
        position = column.find(coords) if column else 0
        if not position and (coords or not (position := self._find_old_scalar(node_id))):
            return None
        try:
            return self.references.read(position)
        except DecodeError as error:
            raise DecodeError(f"the reference of chunk {coords} is damaged: {error}") from None

    def read(self, place: ByteRange) -> bytes:
        """Copy what a reference has inline."""
        return self.references.data[place.start : place.stop]

    def coords(self, node_id: bytes, ndim: int) -> NDArray[np.uint32]:
        """List the chunks of array *node_id* of *ndim* dimensions: a row each, in C order."""
        if column := self.columns.get((node_id, ndim)):
            return column.coords()
        found = ndim == 0 and self._find_old_scalar(node_id) > 0
        return np.empty((int(found), ndim), np.uint32)

    def positions(self, node_id: bytes, ndim: int) -> NDArray[np.uint32]:
        """List where the references lie of the chunks that `coords` lists."""
        if column := self.columns.get((node_id, ndim)):
            return column.positions()
        position = 0 if ndim else self._find_old_scalar(node_id)
        return np.array([position] if position else [], np.uint32)

    def _find_old_scalar(self, node_id: bytes) -> int:
        """Find the only chunk of an array without dimensions, to which old writers gave one."""
        column = self.columns.get((node_id, 1))
        return column.find((0,)) if column else 0


@dataclass(frozen=True, slots=True)
class ManifestDecoder:
    """Decodes the file of manifest *object_id*, whose payload may have *limit_nbytes*."""

    object_id: bytes
    limit_nbytes: int

    def __call__(self, data: bytes) -> Manifest:
        """Find all references; what one of them says is looked at when it is read.

        Raises: `DecodeError`.
        """
        limit_nbytes = min(self.limit_nbytes, _MAX_NBYTES)
        payload = open_envelope(data, FileType.MANIFEST, limit_nbytes).payload
        root = Buffer(payload, limit_nbytes).root
        check_object_id(root, "manifest", encode_id(self.object_id))
        references = References(
            payload, LocationCodec(root.number(3, U8, 1), root.data(2), len(payload))
        )
        columns = dict(_make_columns(root))
        nbytes = references.nbytes + sum(column.nbytes for column in columns.values())
        return Manifest(self.object_id, references, columns, nbytes)


def _make_columns(root: Table) -> Iterator[tuple[tuple[bytes, int], Column]]:
    """Give the columns of each array, whose references may be in several parts of the manifest."""
    parts: defaultdict[bytes, list[U32s]] = defaultdict(list)
    required(root.vector(1, 4), "arrays")
    for array in root.tables(1):
        node_id = required(array.struct(0, NODE_ID_NBYTES), "node_id")
        start, count = required(array.vector(1, 4), "refs")
        if start % 4:
            raise DecodeError("damaged FlatBuffer: an offset is not aligned")
        array.buffer.spend(count * _MEMORY_PER_REFERENCE)
        parts[node_id].append(np.arange(start // 4, start // 4 + count, dtype=np.uint32))
    slots = [slot for found in parts.values() for slot in found]
    located = _locate(root.buffer, slots[0] if len(slots) == 1 else np.concatenate([_NONE, *slots]))
    stop = made = 0
    for node_id, found in parts.items():
        start, stop = stop, stop + sum(map(len, found))
        for ndim, tables, indexes in _split(*(row[start:stop] for row in located)):
            made += 1
            if made > _MAX_COLUMNS:
                raise DecodeError(f"it has references of more than {_MAX_COLUMNS} arrays")
            column = make_column(root.buffer.data, tables, indexes, ndim)
            yield (node_id, ndim), column


def _locate(buffer: Buffer, slots: U32s) -> U32s:
    """Follow the offsets at *slots*, in words of 4 bytes, to references and on to their indexes.

    Gives three rows: the position of each table; that of its first coordinate, in words; how many
    coordinates there are.

    Raises: `DecodeError` for an offset that leads out of the payload, and where there is no index.
    """
    located = np.empty((3, len(slots)), np.uint32)
    walk = _Walk(buffer.data)
    for start in range(0, len(slots), BLOCK):
        block = slice(start, start + BLOCK)
        table = walk.follow(slots[block].astype(np.int64) << 2)
        index = walk.follow(walk.first_field(table))
        located[0, block], located[1, block] = table, (index >> 2) + 1
        located[2, block] = walk.count(index)
    buffer.spend(int(located[2].sum(dtype=np.uint64)) * _MEMORY_PER_COORDINATE)
    return located


class _Walk:
    """Reads many numbers of a FlatBuffer at a time; positions are int64, so that none wraps."""

    def __init__(self, data: bytes) -> None:
        self._nbytes = len(data)
        self._words = words_of(data)
        self._halves = np.frombuffer(data, "<u2", len(data) // 2)

    def follow(self, at: NDArray[np.int64]) -> NDArray[np.int64]:
        """Find what the offsets at *at* lead to, numbers of 4 bytes."""
        found = at + self._words.take(at >> 2, mode="clip")
        return self._check(found, 4, 4)

    def first_field(self, table: NDArray[np.int64]) -> NDArray[np.int64]:
        """Find where in each *table* its first field lies."""
        offset = self._words.view("<i4").take(table >> 2, mode="clip")
        vtable = self._check(table - offset, 4, 2)
        nbytes = self._halves.take(vtable >> 1, mode="clip").astype(np.int64)
        self._check(vtable + nbytes, 0, 1)
        field = self._halves.take((vtable >> 1) + 2, mode="clip").astype(np.int64)
        if nbytes.min() < _VTABLE_NBYTES or not field.all():
            raise DecodeError("a reference has no index")
        return self._check(table + field, 4, 4)

    def count(self, vector: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Count the items, of 4 bytes, of each *vector*."""
        count = self._words.take(vector >> 2, mode="clip")
        self._check(vector + 4 + (count.astype(np.int64) << 2), 0, 1)
        return count

    def _check(self, at: NDArray[np.int64], nbytes: int, align: int) -> NDArray[np.int64]:
        """Give *at*, where *nbytes* lie inside of the payload, *align*ed.

        Raises: `DecodeError` where they do not.
        """
        if at.min() < 0 or at.max() > self._nbytes - nbytes:
            raise DecodeError("damaged FlatBuffer: an offset leads out of it")
        if np.bitwise_or.reduce(at) & (align - 1):
            raise DecodeError("damaged FlatBuffer: an offset is not aligned")
        return at


def _split(tables: U32s, indexes: U32s, ndims: U32s) -> Iterator[tuple[int, U32s, U32s]]:
    """Part references by how many coordinates they have; else they keep their order."""
    if len(ndims) == 0:
        return
    if ndims.min() == ndims.max():
        yield int(ndims[0]), tables, indexes
        return
    order = np.argsort(ndims, kind="stable")
    starts = np.flatnonzero(np.diff(ndims[order])) + 1
    for part in np.split(order, starts):
        yield int(ndims[part[0]]), tables[part], indexes[part]
