"""Zarr v2: its metadata, read as the documents of Zarr v3 that say the same.

The objects of such arrays are served as they are stored, so that only pages, descriptions and
pictures read their metadata.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite, isnan
from typing import Final

from shardgate.errors import DamagedError
from shardgate.formats.contract import StoredObjects
from shardgate.formats.documents import DocumentDecoder, Json, as_integer, json_memory_nbytes
from shardgate.formats.reading import DecodedMetadata, DecodeError, Fetch, Read, RunInThread
from shardgate.formats.surveying import ChunkCollection, Listing
from shardgate.formats.zarr.codecs import shape_of
from shardgate.formats.zarr.survey import describe_served
from shardgate.model import ByteRange, ObjectRef, VirtualKey, is_key, join_path

ARRAY: Final = ".zarray"
GROUP: Final = ".zgroup"
ATTRIBUTES: Final = ".zattrs"
CONSOLIDATED: Final = ".zmetadata"

_OWN: Final = ("transpose", "bytes")
"""Codecs of Zarr v3 in an `array_document`; all others are those of v2."""
_MOST_FILTERS: Final = 16
_MOST_FIELDS: Final = 8  # of a structured type that are named
_DTYPE: Final = re.compile(r"([<>|])([A-Za-z])([0-9]{0,9})(\[[0-9A-Za-z]{1,9}\])?")
_NUMBERS: Final = {
    **{f"i{size}": f"int{8 * size}" for size in (1, 2, 4, 8)},
    **{f"u{size}": f"uint{8 * size}" for size in (1, 2, 4, 8)},
    **{f"f{size}": f"float{8 * size}" for size in (2, 4, 8)},
    "b1": "bool",
    "c8": "complex64",
    "c16": "complex128",
}
"""Data types of Zarr v3 by those of numpy, without the order of bytes."""
_TEXTS: Final = {"vlen-utf8": "string", "vlen-bytes": "variable_length_bytes"}
"""Data types of Zarr v3 by the filter that encodes Python objects."""


def array_document(stored: Json, attributes: Json = None) -> dict[str, Json]:
    """Return the document of the array that a ``.zarray`` and a ``.zattrs`` describe.

    Its ``zarr_format`` is still 2. Codecs have the names and members of v2: the filters stand
    before ``bytes``, and the compressor behind it. Raises: `DecodeError`.
    """
    if not isinstance(stored, dict) or stored.get("zarr_format") != 2:  # noqa: PLR2004
        raise DecodeError("no Zarr v2 array: zarr_format is not 2")
    shape = shape_of(stored.get("shape"), "shape", least=0)
    filters = [_codec(each) for each in _list_of(stored, "filters")]
    data_type, endian = _data_type(stored.get("dtype"), filters)
    codecs: list[Json] = [*filters, {"name": "bytes", "configuration": {"endian": endian}}]
    if (order := stored.get("order")) not in ("C", "F"):
        raise DecodeError(f"order is neither C nor F: {str(order)[:80]}")
    if order == "F" and len(shape) > 1:
        back = list(range(len(shape)))[::-1]
        codecs.insert(0, {"name": "transpose", "configuration": {"order": back}})
    if (compressor := stored.get("compressor")) is not None:
        codecs.append(_codec(compressor))
    separator = stored.get("dimension_separator")
    if separator is None:  # the member may be null
        separator = "."
    grid = {"name": "regular", "configuration": {"chunk_shape": stored.get("chunks")}}
    document: dict[str, Json] = {
        "zarr_format": 2,
        "node_type": "array",
        "shape": list(shape),
        "data_type": data_type,
        "chunk_grid": grid,
        "chunk_key_encoding": {"name": "v2", "configuration": {"separator": separator}},
        "fill_value": _fill_value(stored.get("fill_value"), data_type),
        "codecs": codecs,
        "attributes": attributes if isinstance(attributes, dict) else {},
    }
    names = _dimension_names(attributes, len(shape))
    return document if names is None else document | {"dimension_names": names}


def group_document(attributes: Json = None) -> dict[str, Json]:
    """Return the document of a group with these attributes."""
    members = attributes if isinstance(attributes, dict) else {}
    return {"zarr_format": 2, "node_type": "group", "attributes": members}


def decoders_of(document: dict[str, Json]) -> list[Json]:
    """Return the filters and the compressor of an `array_document`, in the order of encoding."""
    return [each["configuration"] for each in document["codecs"] if each["name"] not in _OWN]


def plain_document(document: dict[str, Json]) -> dict[str, Json]:
    """Return the metadata in Zarr v3 of an `array_document` whose chunks were decoded."""
    codecs = [each for each in document["codecs"] if each["name"] in _OWN]
    return document | {"zarr_format": 3, "codecs": codecs}


def _list_of(stored: dict[str, Json], name: str) -> Sequence[Json]:
    found = stored.get(name) or []
    if not isinstance(found, list) or len(found) > _MOST_FILTERS:
        raise DecodeError(f"{name} is no list of at most {_MOST_FILTERS}: {str(found)[:80]}")
    return found


def _codec(stored: Json) -> dict[str, Json]:
    match stored:
        case {"id": str(name)} if name not in _OWN:
            return {"name": name[:80], "configuration": stored}
    raise DecodeError(f"a codec without an id of Zarr v2: {str(stored)[:80]}")


def _data_type(dtype: Json, filters: Sequence[dict[str, Json]]) -> tuple[str, str]:
    """Return the data type, with its name in Zarr v3 where that has one, and the byte order."""
    if isinstance(dtype, list):
        fields = [str(field[0]) for field in dtype if isinstance(field, list) and field]
        more = ", …" if len(fields) > _MOST_FIELDS else ""
        return f"struct of {', '.join(fields[:_MOST_FIELDS])[:200]}{more}", "little"
    found = _DTYPE.fullmatch(dtype) if isinstance(dtype, str) else None
    if found is None:
        raise DecodeError(f"dtype: expected a type of numpy: {str(dtype)[:80]}")
    order, kind, size, unit = found.groups()
    endian = "big" if order == ">" else "little"
    if kind == "O":
        encoding = filters[0]["name"] if filters else ""
        return _TEXTS.get(encoding, "object"), endian
    if kind in ("M", "m"):
        return f"{'datetime' if kind == 'M' else 'timedelta'}64{unit or ''}", endian
    return _NUMBERS.get(f"{kind}{size}", f"{kind}{size}"), endian


def _fill_value(stored: Json, data_type: str) -> Json:
    """Return the fill value as Zarr v3 spells it: `null` leaves it open, and Python's writers have
    floats for integers.
    """
    if data_type == "bool":
        return bool(stored)
    if stored is None:
        return [0.0, 0.0] if data_type.startswith("complex") else 0
    if isinstance(stored, list):
        return [_spell(each) for each in stored]
    return _spell(as_integer(stored) if "int" in data_type else stored)


def _spell(number: Json) -> Json:
    """Return *number*, as text if it is not finite: Python's writers have bare words for these."""
    if not isinstance(number, float) or isfinite(number):
        return number
    if isnan(number):
        return "NaN"
    return "Infinity" if number > 0 else "-Infinity"


def _dimension_names(attributes: Json, ndim: int) -> list[str] | None:
    """Return the names that xarray writes, if there is one for each dimension."""
    match attributes:
        case {"_ARRAY_DIMENSIONS": list(names)} if len(names) == ndim:
            return names if all(isinstance(name, str) for name in names) else None
    return None


@dataclass(frozen=True, slots=True)
class StoredJson(DecodedMetadata):
    """A parsed document."""

    value: Json
    nbytes: int


def _parse(document: Json, data: bytes) -> StoredJson:
    return StoredJson(document, json_memory_nbytes(data))


def _read(directory: ObjectRef, name: str, limit_bytes: int) -> Read[StoredJson]:
    """Return the read of a document of at most *limit_bytes*."""
    decode = DocumentDecoder(_parse, limit_bytes)
    return Read("metadata", directory.join(name), ByteRange(0, limit_bytes + 1), decode)


@dataclass(frozen=True, slots=True)
class Zarr2Array(StoredObjects):
    """An array that a walk has found; keys of it need none of its metadata."""

    limit_bytes: int
    documents: tuple[Json, Json] | None = None
    """Its ``.zarray`` and ``.zattrs``, if consolidated metadata have these."""

    def encloses(self, _: VirtualKey) -> bool:
        return True

    async def collections(
        self, fetch: Fetch, _: Listing, run_in_thread: RunInThread
    ) -> Sequence[ChunkCollection | DamagedError]:
        documents = self.documents
        if documents is None:
            array = await fetch(_read(self.directory, ARRAY, self.limit_bytes))
            if array is None:  # deleted since it was listed
                return ()
            attributes = None
            with suppress(DamagedError):  # of the attributes: the array is sound
                attributes = await fetch(_read(self.directory, ATTRIBUTES, self.limit_bytes))
            documents = array.value.value, None if attributes is None else attributes.value.value
        try:
            description = describe_served(await run_in_thread(array_document, *documents))
        except DecodeError as error:
            return (DamagedError(self.directory.join(ARRAY), str(error)),)
        return (ChunkCollection(description, None),)


@dataclass(frozen=True, slots=True)
class Zarr2:
    """Format of directories with a ``.zarray``, of at most *limit_bytes*."""

    limit_bytes: int
    marker: str = ARRAY
    catalog: str = CONSOLIDATED

    def layout(self, directory: ObjectRef) -> Zarr2Array:
        return Zarr2Array(directory, self.limit_bytes)

    async def read_catalog(
        self, directory: ObjectRef, fetch: Fetch, run_in_thread: RunInThread
    ) -> Mapping[str, Zarr2Array]:
        """Return the arrays in consolidated metadata; none of a set of kerchunk in Parquet, whose
        catalog has the same name, and whose keys only a reader of it knows.
        """
        found = await fetch(_read(directory, CONSOLIDATED, self.limit_bytes))
        match None if found is None else found.value.value:
            case {"record_size": _}:
                return {}
            case {"metadata": dict(documents)}:
                return await run_in_thread(_arrays_in, directory, documents, self.limit_bytes)
        return {}


def _arrays_in(
    directory: ObjectRef, documents: dict[str, Json], limit_bytes: int
) -> dict[str, Zarr2Array]:
    arrays = {}
    for name in sorted(documents):
        path, _, last = name.rpartition("/")
        if last == ARRAY and is_key(name):
            both = documents[name], documents.get(join_path(path, ATTRIBUTES))
            arrays[path] = Zarr2Array(directory.join(path), limit_bytes, both)
    return arrays
