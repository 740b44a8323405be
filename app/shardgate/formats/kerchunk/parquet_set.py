"""Reference sets in Parquet: a catalog in ``.zmetadata``, and tables of so many references each.

Reference *i* of an array, counted in C order over its grid of chunks, is row ``i % record_size`` of
``{array}/refs.{i // record_size}.parq``. A table that does not exist has no references.
"""

import json
from contextlib import suppress
from dataclasses import replace
from math import prod
from typing import Final

import numpy as np

from shardgate.formats.documents import DocumentDecoder, Json, parse_json
from shardgate.formats.kerchunk.parquet import NULL, ParquetFile
from shardgate.formats.kerchunk.reference_table import (
    ABSENT,
    CONSOLIDATED,
    INLINE,
    MEMORY_PER_BYTE,
    MOST_NBYTES,
    WHOLE,
    InvalidReference,
    ReferenceGrid,
    ReferenceSet,
    ReferenceTable,
    TableBuilder,
    check_size,
    consolidate,
)
from shardgate.formats.reading import DecodeError
from shardgate.formats.references import inline_bytes
from shardgate.formats.zarr.codecs import shape_of
from shardgate.formats.zarr.keys import ChunkKeys
from shardgate.model import check_integer

_ARRAY: Final = "/.zarray"
_MOST_RECORDS: Final = 2**22  # in a table, which takes 20 bytes for each


def decode_catalog(data: bytes, limit_nbytes: int) -> ReferenceSet:
    """Decode a catalog of at most *limit_nbytes*."""
    check_size(data, limit_nbytes)
    return DocumentDecoder(lambda document, _: _catalog(document, limit_nbytes), limit_nbytes)(data)


def _catalog(document: Json, most_documents: int) -> ReferenceSet:
    builder = TableBuilder(most_documents)
    arrays = dict[str, ReferenceGrid | InvalidReference]()
    match document:
        case {"metadata": dict(documents), "record_size": int(record_size)}:
            check_integer(record_size, "record_size", _MOST_RECORDS, DecodeError, least=1)
        case _:
            return replace(builder.build(()), is_metadata=False)
    sound = dict[str, Json]()
    for name, value in documents.items():
        grid: ReferenceGrid | InvalidReference | None = None
        try:
            text = value if isinstance(value, str) else json.dumps(value)
            document = parse_json(text.encode())
            if not isinstance(document, dict):
                raise DecodeError("expected a document")
            if name.endswith(_ARRAY):
                grid = _grid(document)
        except ValueError as error:
            builder.add_invalid(name, str(error))
            grid = InvalidReference(f"{name[:200]}: {error}")
        else:
            sound[name] = document
            builder.add_bytes(name, text.encode())
        # A name that is no key was left out: its tables may lie outside of the set.
        if grid is not None and name.endswith(_ARRAY) and name in builder:
            arrays[name.removesuffix(_ARRAY)] = grid
    if len(sound) == len(documents):
        with suppress(ValueError):  # of NaN
            builder.add_bytes(CONSOLIDATED, consolidate(sound))
    return replace(builder.build(builder.urls), record_size=record_size, arrays=arrays)


def _grid(document: Json) -> ReferenceGrid:
    match document:
        case {"shape": list(), "chunks": list(), **members}:
            what = "its shape or chunks are invalid"
            shape = shape_of(document["shape"], f"{what}: shape", least=0)
            chunks = shape_of(document["chunks"], f"{what}: chunks", len(shape))
            if (separator := members.get("dimension_separator", ".")) in (".", "/"):
                counts = tuple(-(-n // size) for n, size in zip(shape, chunks, strict=True))
                if prod(max(count, 1) for count in counts) <= MOST_NBYTES:
                    counts = counts or (1,)
                    return ReferenceGrid(ChunkKeys("", separator, len(counts)), counts)
    raise DecodeError("its shape, chunks or separator are invalid")


def decode_table(data: bytes, most_rows: int, limit_nbytes: int) -> ReferenceTable:
    """Decode a table of up to *most_rows*, of at most *limit_nbytes*, also once it is inflated."""
    file = ParquetFile(data, most_rows)
    if max(len(data), file.decoded_nbytes) > limit_nbytes:
        raise DecodeError(f"a table of references of more than {limit_nbytes} bytes")
    if file.names.isdisjoint(("path", "raw")):
        raise DecodeError("a table of references has neither path nor raw")
    paths = file.texts("path")
    blobs = file.texts("raw")
    sources = np.where(paths.codes == NULL, np.uint32(ABSENT), paths.codes)
    sources[blobs.codes != NULL] = INLINE
    offsets = np.zeros(file.rows, np.uint64)
    lengths = np.zeros(file.rows, np.uint64)
    urls = [_decode_url(text) for text in paths.values]
    if "path" in file.names:
        starts = file.integers("offset")
        sizes = file.integers("size")
        offsets[:] = starts
        lengths[:] = sizes
        is_bad = (starts < 0) | (sizes < 0) | (offsets + lengths > MOST_NBYTES)
        sources[is_bad & (sources < INLINE)] = len(urls)
        urls.append(InvalidReference("its offset and size are no part of an object"))
        lengths[(starts == 0) & (sizes == 0)] = WHOLE
    decoded: list[bytes] = []
    bad_codes: list[int] = []
    for code, value in enumerate(blobs.values):
        try:
            decoded.append(inline_bytes(value))
        except ValueError:
            decoded.append(b"")
            bad_codes.append(code)
    sources[np.isin(blobs.codes, bad_codes)] = len(urls)
    urls.append(InvalidReference("no base64"))
    bounds = np.cumsum([0, *map(len, decoded)], dtype=np.uint64)
    is_inline = sources == INLINE
    offsets[is_inline] = bounds[blobs.codes[is_inline]]
    lengths[is_inline] = np.diff(bounds)[blobs.codes[is_inline]]
    return ReferenceTable(urls, sources, offsets, lengths, b"".join(decoded))


def _decode_url(text: bytes) -> str | InvalidReference:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return InvalidReference("a URL that is not UTF-8")


def memory_nbytes(data: bytes | None, most_nbytes: int) -> int:
    """Return the memory that decoding a table takes: its pages, and a few columns."""
    if data is None:
        return MEMORY_PER_BYTE * most_nbytes
    file = ParquetFile(data, _MOST_RECORDS)
    return 4 * file.decoded_nbytes + 128 * file.rows
