"""Manifests: the references to the chunks of arrays ("Chunk Manifest Files").

A decoded manifest holds its payload and, for each array, the position of the reference of each
chunk. A reference is read from the payload when it is looked up.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from threading import Lock
from typing import Final, NamedTuple

import numpy as np
import zstandard

from shardgate.formats.compression import decompress_frame, zstd_decompressor
from shardgate.formats.icechunk.chunk_tables import (
    ARRAY_CHUNKS,
    MAX_NBYTES,
    ChunkTables,
    locate_chunk_tables,
    read_columns,
)
from shardgate.formats.icechunk.coords import Box, Coords, U32s, sort_columns
from shardgate.formats.icechunk.flatbuffers import (
    DATA,
    FILE_ID,
    I32,
    U16,
    U32,
    U64,
    UINT8,
    FileDecoder,
    FileType,
    TableType,
    tables_of,
)
from shardgate.formats.icechunk.ids import OBJECT_ID_NBYTES
from shardgate.formats.reading import DecodeError
from shardgate.model import ByteRange, Condition, ETag, UnmodifiedSince

_MAX_ARRAYS: Final = 2**16  # each takes time and memory; the library writes one

MANIFEST: Final = TableType(
    FILE_ID, tables_of(ARRAY_CHUNKS).required("arrays"), DATA, UINT8._replace(absent=1)
)
"""Id, arrays, dictionary and algorithm of compressed locations."""
_FIELD_NBYTES: Final = (4, 8, 8, OBJECT_ID_NBYTES, 4, 4, 4, 4)
"""Size of each field of `ChunkRef` in its table, as in `RefLayout`."""
_ZSTD: Final = 1
MAX_LOCATION_NBYTES: Final = 1024
_MAX_TEXT_NBYTES: Final = 8192
_MAX_LAYOUTS: Final = 64
STRONG_ETAG: Final = re.compile(r"[\x21\x23-\x7e\x80-\xff]*")
_OUTSIDE: Final = "it reaches out of the manifest"


class PayloadKind(IntEnum):
    """Kind of a reference: the slot of the field of `ChunkRef` that says where the chunk is."""

    GONE = 0
    """Deleted, which is no reference."""
    INLINE = 1
    NATIVE = 4
    LOCATION = 5
    COMPRESSED = 8


class Native(NamedTuple):
    """Reference to a part of a chunk file of the repository."""

    chunk_id: bytes
    byte_range: ByteRange


@dataclass(frozen=True, slots=True)
class InlineChunk:
    """Chunk in the manifest itself."""

    data: bytes
    start: int = field(default=0, compare=False)
    """Position in the payload of the manifest that it was read from."""


class Virtual(NamedTuple):
    """Reference to a part of an object outside of the repository."""

    location: str
    """A URL, possibly of scheme ``vcc`` with the name of a virtual chunk container."""
    byte_range: ByteRange
    checksum: Condition | None


type Reference = Native | InlineChunk | Virtual


@dataclass(frozen=True, slots=True)
class Dense:
    """Table positions for all cells of a box; 0 for cells without a reference."""

    box: Box
    tables: memoryview

    @property
    def nbytes(self) -> int:
        return self.tables.nbytes + self.box.nbytes

    def find(self, coords: tuple[int, ...]) -> int:
        """Return the position of the table of chunk *coords*, or 0."""
        key = self.box.key(coords)
        return 0 if key < 0 else self.tables[key]

    def coords(self) -> Coords:
        """Return the coordinates of all references, in C order."""
        return self.box.coords(np.flatnonzero(np.asarray(self.tables)).astype(np.uint64))

    def positions(self) -> U32s:
        """Return the table positions, in the order of `coords`."""
        tables: U32s = np.asarray(self.tables)
        found: U32s = tables[tables != 0]
        return found


@dataclass(frozen=True, slots=True)
class Sparse:
    """Cells of a box that have a reference, each once and in order, with table positions."""

    box: Box
    keys: memoryview
    tables: memoryview

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.tables.nbytes + self.box.nbytes

    def find(self, coords: tuple[int, ...]) -> int:
        key = self.box.key(coords)
        at = bisect_left(self.keys, key)
        return self.tables[at] if at < len(self.keys) and self.keys[at] == key else 0

    def coords(self) -> Coords:
        return self.box.coords(np.asarray(self.keys))

    def positions(self) -> U32s:
        return np.asarray(self.tables)


@dataclass(frozen=True, slots=True)
class Wide:
    """Coordinates whose box has too many cells to be numbered, each once and in C order."""

    rows: Coords
    tables: U32s

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.tables.nbytes + 800  # Python objects

    def find(self, coords: tuple[int, ...]) -> int:
        rows = self.rows
        at = bisect_left(range(len(rows)), coords, key=lambda row: tuple(rows[row].tolist()))
        return int(self.tables[at]) if tuple(rows[at : at + 1].ravel().tolist()) == coords else 0

    def coords(self) -> Coords:
        return self.rows

    def positions(self) -> U32s:
        return self.tables


type ArrayIndex = Dense | Sparse | Wide
"""Positions of the tables of one array by the coordinates of its chunks."""


def make_array_index(columns: U32s, tables: U32s) -> ArrayIndex:
    """Index *tables* by coordinates of shape ``(ndim, count)``; the first of equals counts."""
    box = Box.around(columns)
    if box is None:
        order, first = sort_columns(columns)
        order = order[first]
        return Wide(np.ascontiguousarray(columns[:, order].T), tables[order])
    keys = box.keys(columns)
    rises = bool((keys[1:] > keys[:-1]).all())
    # With at most three cells for a reference, a table of all cells is no larger, and faster.
    if box.cells <= len(keys) * 3:
        if rises and box.cells == len(keys):
            return Dense(box, tables.copy().data)
        cells = np.zeros(box.cells, np.uint32)
        # Backwards, so that the first of equal cells is written last.
        cells[keys[::-1]] = tables[::-1]
        return Dense(box, cells.data)
    if not rises:
        keys, first = np.unique(keys, return_index=True)
        tables = tables[first]
    return Sparse(box, keys.data, tables.copy().data)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A decoded manifest; look-ups are thread-safe."""

    object_id: bytes
    references: "ReferenceReader"
    arrays: Mapping[tuple[bytes, int], ArrayIndex]
    """By node id and number of dimensions."""
    nbytes: int

    def lookup(self, node_id: bytes, coords: tuple[int, ...]) -> Reference | None:
        """Return the reference of chunk *coords* of array *node_id*; `None` if there is none. The
        library can write references with another number of coordinates, and never reads them.
        Raises: `DecodeError` for a reference that contradicts itself.
        """
        index = self.arrays.get((node_id, len(coords)))
        position = index.find(coords) if index else 0
        if not position and not coords:
            position = self._find_old_scalar(node_id)
        if not position:
            return None
        try:
            return self.references.read(position)
        except DecodeError as error:
            raise DecodeError(f"the reference of chunk {coords} is damaged: {error}") from None

    def coords(self, node_id: bytes, ndim: int) -> Coords:
        """Return the chunks of array *node_id* that have a reference, in C order."""
        if index := self.arrays.get((node_id, ndim)):
            return index.coords()
        return np.empty((len(self.positions(node_id, ndim)), ndim), np.uint32)

    def positions(self, node_id: bytes, ndim: int) -> U32s:
        """Return the positions of the references, in the order of `coords`."""
        if index := self.arrays.get((node_id, ndim)):
            return index.positions()
        position = 0 if ndim else self._find_old_scalar(node_id)
        return np.array([position] if position else [], np.uint32)

    def _find_old_scalar(self, node_id: bytes) -> int:
        """Find the chunk of an array without dimensions, to which old writers gave one."""
        index = self.arrays.get((node_id, 1))
        return index.find((0,)) if index else 0


class ManifestDecoder(FileDecoder):
    """Decodes the file of manifest *object_id*."""

    def __call__(self, data: bytes) -> Manifest:
        reader, root = self.open(data, FileType.MANIFEST, MANIFEST.lazy, MAX_NBYTES)
        _, at, dictionary, algorithm = root
        payload = reader.data
        locations = LocationCodec(algorithm, reader.read(DATA, dictionary), len(payload))
        references = ReferenceReader(payload, locations)
        found = locate_chunk_tables(reader, at, "refs")
        arrays = dict(_index(payload, found))
        nbytes = references.nbytes + sum(index.nbytes for index in arrays.values())
        return Manifest(self.object_id, references, arrays, nbytes)


def _index(data: bytes, found: ChunkTables) -> Iterator[tuple[tuple[bytes, int], ArrayIndex]]:
    made = 0
    for node_id, start, stop in found.arrays:
        ndims = found.ndims[start:stop]
        for rows in _rows_by_ndim(ndims):
            made += 1
            if made > _MAX_ARRAYS:
                raise DecodeError(f"it has references of more than {_MAX_ARRAYS} arrays")
            ndim = int(ndims[rows][0])
            columns = read_columns(data, found.indexes[start:stop][rows], ndim)
            yield (node_id, ndim), make_array_index(columns, found.tables[start:stop][rows])


def _rows_by_ndim(ndims: U32s) -> list[slice] | list["np.ndarray[tuple[int], np.dtype[np.intp]]"]:
    if not len(ndims):
        return []
    if ndims.min() == ndims.max():
        return [slice(None)]
    # Stable, so that the first of equal references stays the first.
    order = np.argsort(ndims, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(ndims[order])) + 1)


class RefLayout(NamedTuple):
    """Offsets of the fields of `ChunkRef` after the index, for one vtable; 0 if absent."""

    inline: int
    offset: int
    length: int
    chunk_id: int
    location: int
    etag: int
    last_modified: int
    compressed_location: int

    @property
    def nbytes(self) -> int:
        return max(at + nbytes for at, nbytes in zip(self, _FIELD_NBYTES, strict=True) if at)

    @property
    def kind(self) -> PayloadKind:
        """Return the kind of the references. Raises: `DecodeError` for none, or more than one."""
        # A kind is the slot of its field in the vtable, and slots count from 1.
        kinds = [kind for kind in PayloadKind if kind is not PayloadKind.GONE]
        found = [kind for kind in kinds if self[kind - 1]]
        if found == [PayloadKind.LOCATION, PayloadKind.COMPRESSED]:
            return PayloadKind.COMPRESSED
        if not found:
            raise DecodeError("it has neither inline nor chunk_id nor location")
        if len(found) > 1:
            names = " and ".join(self._fields[kind - 1] for kind in found)
            raise DecodeError(f"it has both {names}")
        return found[0]


class LocationCodec:
    """Decompresses the locations of a manifest, each by itself; thread-safe."""

    def __init__(self, algorithm: int, dictionary: bytes | None, payload_nbytes: int = 0) -> None:
        self.algorithm = algorithm
        self.dictionary = dictionary if algorithm == _ZSTD else None
        self._lock = Lock()
        self._decompressor = None
        self._kept: dict[bytes, str] = {}
        self._max_kept = 0
        self.nbytes = 0
        if dictionary and algorithm == _ZSTD:
            self._decompressor = zstd_decompressor(dictionary, 2**23)  # RFC 8878
            # Many chunks lie in one object, so that few locations are worth keeping.
            self._max_kept = min(4096, payload_nbytes // 1024)
            self.nbytes = self._decompressor.memory_size() + 3 * len(dictionary)
            self.nbytes += self._max_kept * 256  # Python objects of a location

    def decode(self, data: bytes) -> str:
        """Return the location that *data* holds. Raises: `DecodeError`."""
        if (kept := self._kept.get(data)) is not None:
            return kept
        if self._decompressor is None:
            if self.algorithm == 0:
                return _decode_text(data)
            if self.algorithm == _ZSTD:
                raise DecodeError("its location is compressed, and there is no location_dictionary")
            raise DecodeError(f"its location is compressed by unknown algorithm {self.algorithm}")
        location = _decode_text(self._decompress(self._decompressor, data))
        # Emptied in place of evicted: neighbours in time lie in the same objects.
        if len(self._kept) >= self._max_kept:
            self._kept = {}
        self._kept[data] = location
        return location

    def _decompress(self, decompressor: zstandard.ZstdDecompressor, data: bytes) -> bytes:
        try:
            # A decompressor of zstandard must not be used by two threads at once.
            with self._lock:
                return decompress_frame(decompressor, data, MAX_LOCATION_NBYTES)
        except DecodeError as error:
            raise DecodeError(f"its location cannot be decompressed: {error}") from None


class ReferenceReader:
    """Reads tables `ChunkRef` of a manifest; thread-safe."""

    __slots__ = ("_layouts", "data", "locations")

    def __init__(self, data: bytes, locations: LocationCodec) -> None:
        self.data = data
        self.locations = locations
        self._layouts: dict[int, tuple[int, RefLayout]] = {}

    @property
    def nbytes(self) -> int:
        return len(self.data) + self.locations.nbytes

    def read(self, table: int) -> Reference:
        """Read the reference at *table*, whose vtable is known to lie in the payload."""
        data = self.data
        vtable = table - I32.unpack_from(data, table)[0]
        last, layout = self._layouts.get(vtable) or self._lay_out(vtable)
        inline, offset, length, chunk_id, _, _, _, _ = layout
        if table > last:
            raise DecodeError(_OUTSIDE)
        if inline:
            at, stop = self._vector(table + inline)
            return InlineChunk(data[at:stop], at)
        start = U64.unpack_from(data, table + offset)[0] if offset else 0
        stop = start + U64.unpack_from(data, table + length)[0] if length else start
        if stop > 2**63 - 1:  # no object is so long, and no HTTP range
            raise DecodeError("it ends past 2^63")
        if chunk_id:
            at = table + chunk_id
            return Native(data[at : at + OBJECT_ID_NBYTES], ByteRange(start, stop))
        return self._read_virtual(table, layout, ByteRange(start, stop))

    def layout(self, vtable: int) -> "RefLayout":
        return (self._layouts.get(vtable) or self._lay_out(vtable))[1]

    def _lay_out(self, vtable: int) -> tuple[int, RefLayout]:
        stop = vtable + U16.unpack_from(self.data, vtable)[0]
        slots = range(vtable + 6, vtable + 6 + 2 * len(_FIELD_NBYTES), 2)
        layout = RefLayout(
            *(U16.unpack_from(self.data, at)[0] if at + 2 <= stop else 0 for at in slots)
        )
        # Once for all references with this vtable, in place of once for each.
        layout.kind  # noqa: B018  raises
        if len(self._layouts) == _MAX_LAYOUTS:
            self._layouts = {}
        found = self._layouts[vtable] = len(self.data) - layout.nbytes, layout
        return found

    def _read_virtual(self, table: int, layout: RefLayout, byte_range: ByteRange) -> Virtual:
        if at := layout.compressed_location:
            location = self.locations.decode(self._text(table + at))
        else:
            location = _decode_text(self._text(table + layout.location))
        checksum: Condition | None = None
        if at := layout.etag:
            checksum = _parse_etag(_decode_text(self._text(table + at)))
        elif at := layout.last_modified:
            (epoch_s,) = U32.unpack_from(self.data, table + at)
            checksum = UnmodifiedSince(epoch_s) if epoch_s else None
        return Virtual(location, byte_range, checksum)

    def _text(self, at: int) -> bytes:
        start, stop = self._vector(at)
        if stop - start > _MAX_TEXT_NBYTES:
            raise DecodeError("a string is too long")
        return self.data[start:stop]

    def _vector(self, at: int) -> tuple[int, int]:
        data = self.data
        start = at + U32.unpack_from(data, at)[0] + 4
        if start <= len(data):
            stop: int = start + U32.unpack_from(data, start - 4)[0]
            if stop <= len(data):
                return start, stop
        raise DecodeError(_OUTSIDE)


def _decode_text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise DecodeError("a string is not valid UTF-8") from None


def _parse_etag(text: str) -> ETag | None:
    """Read a strong entity tag, with or without its quotes; ``*`` demands nothing."""
    if text == "*":
        return None
    opaque = text.strip('"')
    if opaque.startswith("W/") or not STRONG_ETAG.fullmatch(opaque):
        raise DecodeError("its checksum_etag is no strong entity tag")
    return ETag(f'"{opaque}"')
