"""Reference sets in Parquet: a catalog in ``.zmetadata``, and tables of so many references each.

Reference *i* of an array, counted in C order over its grid of chunks, is row ``i % record_size`` of
``{array}/refs.{i // record_size}.parq``. A table that does not exist has no references.
"""

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardgate.errors import DamagedError
from shardgate.formats.documents import DocumentDecoder, Json
from shardgate.formats.kerchunk import json_set
from shardgate.formats.kerchunk.parquet import NULL, ParquetFile
from shardgate.formats.kerchunk.reference_table import (
    ABSENT,
    CONSOLIDATED,
    INLINE,
    MEMORY_PER_BYTE,
    MOST_NBYTES,
    WHOLE,
    Holder,
    ReferenceSet,
    ReferenceTable,
    TableBuilder,
    check_values,
    consolidate,
    inline_bytes,
    locate,
)
from shardgate.formats.listing import Window
from shardgate.formats.members import Place
from shardgate.formats.reading import DecodeError, Fetch, Read
from shardgate.formats.references import Allowed
from shardgate.model import MISSING, ByteRange, ObjectRef

_ARRAY: Final = "/.zarray"
_MOST_RECORDS: Final = 2**22
"""Most references in a table, which takes 20 bytes for each."""
_MOST_LISTED: Final = 2**26
"""Most chunks, and their tables, of an array whose references are listed."""
_MOST_TABLES: Final = 2**14
_MOST_DIGITS: Final = 19
_GRID_NBYTES: Final = 512
"""Memory of the grid of an array, with its path."""


class ReferenceGrid(NamedTuple):
    """The chunks of an array."""

    counts: tuple[int, ...]
    separator: str

    def number(self, text: str) -> int | None:
        """Return the number of a chunk in C order; `None` if *text* names none."""
        parts = text.split(self.separator)
        if len(parts) != len(self.counts):
            return None
        number = 0
        for part, count in zip(parts, self.counts, strict=True):
            is_number = part.isascii() and part.isdigit() and len(part) <= _MOST_DIGITS
            if not is_number or str(int(part)) != part or int(part) >= count:
                return None
            number = number * count + int(part)
        return number

    def keys(
        self, present: NDArray[np.bool_], start: str, window: Window, first: int = 0
    ) -> Iterator[tuple[str, int]]:
        """Yield the keys in *window* that begin with *start*, in order, of the *present* chunks,
        each with its number; that of the first one is *first*.
        """
        if not present.ndim:
            yield start.removesuffix(self.separator), first
            return
        size = prod(present.shape[1:])
        stored = np.flatnonzero(present.any(axis=tuple(range(1, present.ndim)))).tolist()
        for at in sorted(stored, key=str):
            below = f"{start}{at}"
            if window.meets(below):
                yield from self.keys(present[at], below + self.separator, window, first + at * size)


@dataclass(frozen=True, slots=True, eq=False)
class Catalog:
    """Decoded ``.zmetadata``."""

    record_size: int
    """References in a table; 0 in a document that is no catalog of a reference set."""
    documents: ReferenceSet
    arrays: Mapping[str, ReferenceGrid]
    """Grids by the paths of arrays."""

    @property
    def is_metadata(self) -> bool:
        return self.record_size > 0

    @property
    def nbytes(self) -> int:
        return self.documents.nbytes + _GRID_NBYTES * len(self.arrays)

    def find(self, key: str) -> tuple[str, int] | None:
        """Return the path of the array of *key*, and the number of its chunk."""
        end = len(key)
        while (end := key.rfind("/", 0, end)) > 0:
            if (grid := self.arrays.get(key[:end])) is not None:
                number = grid.number(key[end + 1 :])
                return None if number is None else (key[:end], number)
        return None


@dataclass(frozen=True, slots=True)
class CatalogDecoder:
    """Decodes a catalog of at most *limit_nbytes*."""

    limit_nbytes: int

    def __call__(self, data: bytes) -> Catalog:
        limit = self.limit_nbytes
        if len(data) > limit:
            raise DecodeError(f"a catalog of references of more than {limit} bytes")
        check_values(data, limit)
        return DocumentDecoder(lambda document, _: _catalog(document, limit), limit)(data)


def _catalog(document: Json, most_documents: int) -> Catalog:
    builder, arrays = TableBuilder(most_documents), dict[str, ReferenceGrid]()
    match document:
        case {"metadata": dict(documents), "record_size": int(record_size)}:
            pass
        case _:
            return Catalog(0, builder.build(()), arrays)
    if not 0 < record_size <= _MOST_RECORDS:
        raise DecodeError(f"record_size: expected 1 to {_MOST_RECORDS}, found {record_size}")
    for name, value in documents.items():
        text = value if isinstance(value, str) else json.dumps(value)
        documents[name] = document = json.loads(value) if isinstance(value, str) else value
        if not isinstance(document, dict):
            raise DecodeError(f"{name[:200]}: expected a document")
        builder.add_bytes(name, text.encode())
        if name.endswith(_ARRAY):
            arrays[name.removesuffix(_ARRAY)] = _grid(name, document)
    builder.add_bytes(CONSOLIDATED, consolidate(documents))
    return Catalog(record_size, builder.build(()), arrays)


def _grid(name: str, document: Json) -> ReferenceGrid:
    match document:
        case {"shape": list(shape), "chunks": list(chunks)} if len(shape) == len(chunks):
            separator = document.get("dimension_separator", ".")
            are_sizes = all(type(each) is int and each >= 0 for each in (*shape, *chunks))
            if are_sizes and 0 not in chunks and separator in (".", "/"):
                counts = tuple(-(-n // size) for n, size in zip(shape, chunks, strict=True))
                if prod(max(count, 1) for count in counts) <= MOST_NBYTES:
                    return ReferenceGrid(counts or (1,), separator)
    raise DecodeError(f"{name[:200]}: its shape, chunks or separator are invalid")


@dataclass(frozen=True, slots=True)
class TableDecoder:
    """Decodes a table of up to *most_rows*, of at most *limit_nbytes*, also once it is inflated."""

    most_rows: int
    limit_nbytes: int

    def __call__(self, data: bytes) -> ReferenceTable:
        file = ParquetFile(data, self.most_rows)
        if max(len(data), file.decoded_nbytes) > self.limit_nbytes:
            raise DecodeError(f"a table of references of more than {self.limit_nbytes} bytes")
        if file.names.isdisjoint(("path", "raw")):
            raise DecodeError("a table of references has neither path nor raw")
        (urls, texts), (inline, values) = file.texts("path"), file.texts("raw")
        sources = np.where(urls == NULL, np.uint32(ABSENT), urls)
        sources[inline != NULL] = INLINE
        offsets, lengths = np.zeros((2, file.rows), np.uint64)
        if "path" in file.names:
            columns = file.integers("offset"), file.integers("size")
            has_source = sources < INLINE
            for column, numbers in zip((offsets, lengths), columns, strict=True):
                if (numbers[has_source] < 0).any():
                    raise DecodeError("a reference has a negative offset or size")
                column[:] = numbers
            if (offsets + lengths)[has_source].max(initial=0) > MOST_NBYTES:
                raise DecodeError("a reference ends past the end of any object")
            lengths[(offsets == 0) & (lengths == 0)] = WHOLE
        try:
            blobs = list(map(inline_bytes, values))
            names = [text.decode() for text in texts]
        except ValueError as error:
            raise DecodeError(f"a reference is neither UTF-8 nor base64: {error}") from None
        bounds = np.cumsum([0, *map(len, blobs)], dtype=np.uint64)
        is_inline = sources == INLINE
        offsets[is_inline] = bounds[inline[is_inline]]
        lengths[is_inline] = np.diff(bounds)[inline[is_inline]]
        return ReferenceTable(names, sources, offsets, lengths, b"".join(blobs))


def _memory_nbytes(data: bytes | None, most_nbytes: int) -> int:
    """Return the memory that decoding a table takes: its pages, and a few columns."""
    if data is None:
        return MEMORY_PER_BYTE * most_nbytes
    file = ParquetFile(data, _MOST_RECORDS)
    return 4 * file.decoded_nbytes + 128 * file.rows


@dataclass(frozen=True, slots=True)
class ParquetSet:
    """Members of the set in *directory*."""

    directory: ObjectRef
    limit_nbytes: int
    allowed: tuple[Allowed, ...]
    read: Read[Catalog] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        request, decode = ByteRange(0, self.limit_nbytes + 1), CatalogDecoder(self.limit_nbytes)
        ref = self.directory.join(CONSOLIDATED)
        read = Read("metadata", ref, request, decode, None, json_set.memory_nbytes)
        object.__setattr__(self, "read", read)

    async def find(self, name: str, fetch: Fetch) -> Place:
        found = await fetch(self.read)
        if found is None:
            return MISSING
        catalog = found.value
        if (row := catalog.documents.names.position(name)) is not None:
            holder = Holder(self.read.ref, found.etag, catalog.documents.table)
            return await locate(holder, row, name, (), fetch)
        if (chunk := catalog.find(name)) is None:
            return MISSING
        path, number = chunk
        record, row = divmod(number, catalog.record_size)
        table = await self._holder(catalog, path, record, fetch)
        if table is None:
            return MISSING
        if row >= len(table.table):
            raise DamagedError(table.ref, f"it has {len(table.table)} references, and no {row}")
        return await locate(table, row, name, self.allowed, fetch)

    async def below(
        self, prefix: str, after: str, delimiter: str, fetch: Fetch
    ) -> AsyncIterator[tuple[str, int | None]]:
        if (found := await fetch(self.read)) is None:
            return
        catalog, window = found.value, Window(prefix, after, delimiter)
        documents = catalog.documents
        blocks = [
            (f"{path}/0", path)
            for path in catalog.arrays  # the document of the array has the same folder
            if window.meets(f"{path}/") and window.fold(f"{path}/") is None
        ]
        rows = dict(documents.names.below(prefix, after, delimiter))
        for name, path in sorted([*((name, "") for name in rows), *blocks]):
            if path:
                async for key in self._chunks(catalog, path, window, fetch):
                    yield key
            else:
                row = rows[name]
                yield name, None if row is None else documents.table.length_of(row)

    async def _chunks(
        self, catalog: Catalog, path: str, window: Window, fetch: Fetch
    ) -> AsyncIterator[tuple[str, int | None]]:
        """Yield the keys of chunks of the array at *path*."""
        grid, size = catalog.arrays[path], catalog.record_size
        count = prod(grid.counts)
        tables = -(-count // size)
        if count > _MOST_LISTED or tables > _MOST_TABLES:
            reason = f"{path}: {count} chunks in {tables} tables are too many to be listed"
            raise DamagedError(self.read.ref, reason)
        present = np.zeros(count, np.bool_)
        for record in range(tables):
            if (found := await self._holder(catalog, path, record, fetch)) is not None:
                part = present[record * size : (record + 1) * size]
                rows = found.table.sources[: len(part)] != ABSENT
                part[: len(rows)] = rows
        last = window.after
        for key, number in grid.keys(present.reshape(grid.counts), f"{path}/", window):
            record, row = divmod(number, size)
            name = window.fold(key) or key
            if name <= last or not key.startswith(window.prefix):
                continue
            last = name
            found = await self._holder(catalog, path, record, fetch) if name == key else None
            is_row = found is not None and row < len(found.table)
            yield name, found.table.length_of(row) if found is not None and is_row else None

    async def _holder(
        self, catalog: Catalog, path: str, record: int, fetch: Fetch
    ) -> Holder | None:
        ref = self.directory.join(f"{path}/refs.{record}.parq")
        request = ByteRange(0, self.limit_nbytes + 1)
        decode = TableDecoder(catalog.record_size, self.limit_nbytes)
        read = Read("references", ref, request, decode, None, _memory_nbytes)
        found = await fetch(read)
        return None if found is None else Holder(ref, found.etag, found.value)
