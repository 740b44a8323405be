"""``zarr.json`` as clients see it, turned into the one that is stored: the shards are kept."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from app.errors import BadBodyError, ConflictError
from app.formats.documents import DocumentDecoder
from app.formats.reading import DecodeError, Fetch, Read
from app.formats.zarr_sharding_indexed.metadata import chunk_keys, parse_array, without_shards
from app.formats.zarr_sharding_indexed.spelling import (
    are_codecs_alike,
    are_extensions_alike,
    are_fill_values_alike,
)
from app.formats.zarr_sharding_indexed.unshard import (
    UnshardableError,
    has_sharding,
    shape_of,
)
from app.model import ByteRange, ObjectRef

type Json = Any
type Node = dict[str, Json]

HIDDEN: Final = (
    "here an array has no shards, and a client that knows of them would write whole shards under "
    "the names of inner chunks: write this in the store, or through a dataset whose view is raw; "
    "in an Icechunk repository commit it without a session"
)
MISREAD: Final = (
    "what is stored in shards would be misread; to make another array in its place, delete this "
    "one with all its chunks first"
)
_SHARDS: Final = ("chunk_grid", "codecs")
"""What clients see otherwise than it is stored."""


@dataclass(frozen=True, slots=True)
class StoredNode:
    """The metadata of a node as they are stored."""

    document: Json
    nbytes: int


def parse_stored(document: Json, data: bytes) -> StoredNode:
    """Keep *document*, whatever it is, which *data* spells."""
    return StoredNode(document, len(data))


@dataclass(frozen=True, slots=True)
class NodeTranslator:
    """Translates the ``zarr.json`` in *directory*."""

    directory: ObjectRef
    limit_bytes: int

    async def translate(self, given: bytes, stored: bytes | None, fetch: Fetch) -> bytes:
        """Give *given* the chunk grid and the codecs that are stored in shards."""
        document = parse_given(given)
        if isinstance(document.get("zarr_format"), str):  # the entry point of a draft of 2022
            return given
        if document.get("zarr_format") != 3 or document.get("node_type") not in ("array", "group"):  # noqa: PLR2004
            raise BadBodyError("no Zarr v3 metadata: no zarr_format 3 with a node_type")
        restored = restore(document, decode_stored(stored))
        if document["node_type"] == "group":
            restored = await self._restore_below(document, "", fetch)
        return given if restored is document else spell(restored)

    async def _restore_below(self, group: Node, path: str, fetch: Fetch) -> Node:
        """Restore the arrays in a group's consolidated metadata."""
        consolidated = group.get("consolidated_metadata")
        nodes = consolidated.get("metadata") if isinstance(consolidated, dict) else None
        if not isinstance(consolidated, dict) or not isinstance(nodes, dict):
            return group
        restored = {
            name: await self._restored(node, path + name, fetch) for name, node in nodes.items()
        }
        if all(restored[name] is node for name, node in nodes.items()):
            return group
        return {**group, "consolidated_metadata": {**consolidated, "metadata": restored}}

    async def _restored(self, node: Json, path: str, fetch: Fetch) -> Json:
        if not isinstance(node, dict):
            return node
        if node.get("node_type") == "group":
            return await self._restore_below(node, f"{path}/", fetch)
        if {"", ".", ".."} & set(path.split("/")):
            raise BadBodyError(f"the consolidated metadata name no node: {path[:80]}")
        ref = self.directory.join(f"{path}/zarr.json")
        decode = DocumentDecoder(parse_stored, self.limit_bytes)
        found = await fetch(Read("metadata", ref, ByteRange(0, self.limit_bytes + 1), decode))
        try:
            return restore(node, None if found is None else found.value.document)
        except ConflictError as error:
            raise ConflictError(f"{path}: {error}") from None


def parse_given(given: bytes) -> Node:
    """Read the JSON object that a client sent.

    Raises: `BadBodyError`.
    """
    try:
        document = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise BadBodyError(f"the document is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise BadBodyError("the document is no JSON object")
    return document


def spell(document: Json) -> bytes:
    """Write what was read from what a client sent.

    Raises: `BadBodyError` for what is nested too deeply.
    """
    try:
        return json.dumps(document).encode()
    except RecursionError as error:
        raise BadBodyError(f"no such JSON: {error}") from None


def restore(given: Node, stored: Json) -> Node:
    """Turn the metadata of a node as clients see it into those that are stored.

    Raises: `ConflictError` where that would let shards be misread.
    """
    if not isinstance(stored, dict) or not has_sharding(stored.get("codecs")):
        if has_sharding(given.get("codecs")):
            raise ConflictError(HIDDEN)
        return given
    if given.get("node_type") != "array":
        raise ConflictError(f"a sharded array is stored here: {MISREAD}")
    is_copy = not any(_differs(given, stored, member) for member in _SHARDS)
    seen = _seen(stored)
    knows_others = has_sharding(given.get("codecs")) and not is_copy
    if knows_others and (seen is stored or not has_sharding(seen["codecs"])):
        raise ConflictError(HIDDEN)
    if seen is stored:  # an array that is served as it is
        return given
    for member in _COMPARE:
        if _differs(given, stored if is_copy else seen, member):
            raise ConflictError(f"{member} cannot change: {MISREAD}")
    return {**given, **{member: stored[member] for member in _SHARDS}}


def _seen(stored: Node) -> Node:
    """Give what clients see of a sharded array."""
    try:
        return without_shards(stored, parse_array(stored))
    except (UnshardableError, DecodeError):
        return stored


def _differs(given: Node, expected: Node, member: str) -> bool:
    """Tell whether *given* says something else of *member* than is *expected*."""
    try:
        return not _COMPARE[member](given, expected)
    except (DecodeError, UnshardableError, RecursionError):
        return True


def _ndim(node: Node) -> int:
    return len(shape_of(node.get("shape"), "shape", least=0))


def _has_same_ndim(given: Node, expected: Node) -> bool:
    return _ndim(given) == _ndim(expected)


def _has_same_grid(given: Node, expected: Node) -> bool:
    return are_extensions_alike(given.get("chunk_grid"), expected.get("chunk_grid"))


def _has_same_keys(given: Node, expected: Node) -> bool:
    ndim = _ndim(expected)
    one, other = (node.get("chunk_key_encoding") for node in (given, expected))
    return chunk_keys(one, ndim) == chunk_keys(other, ndim)


def _has_same_codecs(given: Node, expected: Node) -> bool:
    ndim, data_type = _ndim(expected), expected.get("data_type")
    return are_codecs_alike(given.get("codecs"), expected.get("codecs"), ndim, data_type)


def _has_same_type(given: Node, expected: Node) -> bool:
    return are_extensions_alike(given.get("data_type"), expected.get("data_type"))


def _has_same_fill_value(given: Node, expected: Node) -> bool:
    return are_fill_values_alike(
        given.get("fill_value"), expected.get("fill_value"), expected.get("data_type")
    )


def _has_no_transformers(given: Node, _: Node) -> bool:
    return not given.get("storage_transformers")


_COMPARE: Final[dict[str, Callable[[Node, Node], bool]]] = {
    "the number of dimensions": _has_same_ndim,
    "chunk_grid": _has_same_grid,
    "chunk_key_encoding": _has_same_keys,
    "codecs": _has_same_codecs,
    "data_type": _has_same_type,
    "fill_value": _has_same_fill_value,
    "storage_transformers": _has_no_transformers,
}
"""By what they compare; they raise `DecodeError` and `UnshardableError` for what is no such."""


def decode_stored(data: bytes | None) -> Json:
    """Read what is stored; what is no JSON may be replaced by anything."""
    try:
        return None if data is None else json.loads(data)
    except (ValueError, RecursionError):
        return None
