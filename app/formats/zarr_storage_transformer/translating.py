"""Metadata as clients see them, turned into those that are stored: the transformer is kept."""

from dataclasses import dataclass
from typing import Any, Final

from app.errors import ConflictError
from app.formats.documents import DocumentDecoder
from app.formats.reading import DecodeError, Fetch, Read
from app.formats.zarr_sharding_indexed.translating import (
    HIDDEN,
    MISREAD,
    decode_stored,
    parse_given,
    parse_stored,
    spell,
)
from app.formats.zarr_sharding_indexed.unshard import UnshardableError
from app.formats.zarr_storage_transformer.keys import MetadataKeys
from app.formats.zarr_storage_transformer.metadata import parse_array
from app.model import ByteRange, ObjectRef

type Json = Any

_TRANSFORMERS: Final = "storage_transformers"
_FIXED: Final = ("chunk_grid", "chunk_memory_layout", "compressor", "data_type", "fill_value")


@dataclass(frozen=True, slots=True)
class ArrayTranslator:
    """Translates the metadata of an array."""

    async def translate(self, given: bytes, stored: bytes | None, _: Fetch) -> bytes:
        """Give *given* the transformer that is stored."""
        document = parse_given(given)
        restored = _restore(document, decode_stored(stored))
        return given if restored is document else spell(restored)


@dataclass(frozen=True, slots=True)
class ConsolidatedTranslator:
    """Translates what zarr-python 2 gathered of the hierarchy in *directory*."""

    directory: ObjectRef
    keys: MetadataKeys
    limit_bytes: int

    async def translate(self, given: bytes, _: bytes | None, fetch: Fetch) -> bytes:
        """Give each array in *given* the transformer that is stored with it."""
        document = parse_given(given)
        nodes = document.get("metadata")
        if not isinstance(nodes, dict):
            return given
        restored = {key: await self._restored(key, node, fetch) for key, node in nodes.items()}
        if all(restored[key] is node for key, node in nodes.items()):
            return given
        return spell({**document, "metadata": restored})

    async def _restored(self, key: str, node: Json, fetch: Fetch) -> Json:
        if not isinstance(node, dict) or not self.keys.owns(key):
            return node
        decode = DocumentDecoder(parse_stored, self.limit_bytes)
        request = ByteRange(0, self.limit_bytes + 1)
        found = await fetch(Read("metadata", self.directory.join(key), request, decode))
        try:
            return _restore(node, None if found is None else found.value.document)
        except ConflictError as error:
            raise ConflictError(f"{key}: {error}") from None


def _restore(given: dict[str, Json], stored: Json) -> dict[str, Json]:
    """Turn the metadata of an array as clients see them into those that are stored.

    Raises: `ConflictError` where that would let shards be misread.
    """
    kept = stored.get(_TRANSFORMERS) if isinstance(stored, dict) else None
    if given.get(_TRANSFORMERS) and given[_TRANSFORMERS] != kept:
        raise ConflictError(HIDDEN)
    if not kept:
        return given
    try:
        parse_array(stored)
    except (UnshardableError, DecodeError):  # served as it is
        return given
    if (changed := _changed(given, stored)) is not None:
        raise ConflictError(f"{changed} cannot change: {MISREAD}")
    return {**given, _TRANSFORMERS: kept}


def _changed(given: dict[str, Json], stored: dict[str, Json]) -> str | None:
    """Name what *given* says otherwise than *stored*, and may not."""
    shape = given.get("shape")
    if not isinstance(shape, list) or len(shape) != len(stored["shape"]):
        return "the number of dimensions"
    return next((member for member in _FIXED if _of(given, member) != _of(stored, member)), None)


def _of(array: dict[str, Json], member: str) -> Json:
    """Read a member, with what it says by saying nothing."""
    found = array.get(member)
    if member == "chunk_grid" and isinstance(found, dict):
        return {"separator": "/", **found}
    return found
