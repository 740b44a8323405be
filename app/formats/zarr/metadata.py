"""``zarr.json``: what a node is, and the document that is served in its place."""

import json
from dataclasses import dataclass
from operator import floordiv, lt, mul
from typing import Any, Final

from app.formats.reading import DecodeError
from app.formats.zarr.codecs import (
    ChunkForm,
    UnshardableError,
    Unsharded,
    chunk_form,
    codec_name,
    configuration,
    has_sharding,
    shape_of,
    unshard,
)
from app.formats.zarr.keys import ChunkKeys, Keys

type Json = Any

_NODE_OVERHEAD: Final = 4096


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """A sharded array and the array of inner chunks served for it; shapes are in array elements."""

    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    keys: Keys
    """Of the inner chunks, and of the shards."""
    unsharded: Unsharded
    chunk: ChunkForm

    @property
    def inner_chunk_shape(self) -> tuple[int, ...]:
        """Shape of the chunks that are served."""
        return self.unsharded.inner_chunk_shape

    def origin(self, coords: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the first array element of the inner chunk at *coords*; `None` off the array."""
        origin = tuple(map(mul, coords, self.inner_chunk_shape))
        return origin if all(map(lt, origin, self.shape)) else None

    def shard_key(self, origin: tuple[int, ...]) -> str:
        """Return the key of the shard that holds the array element *origin*."""
        return self.keys.format(tuple(map(floordiv, origin, self.shard_shape)))


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a Zarr hierarchy."""

    kind: str
    """``array`` or ``group``."""
    served: bytes
    is_rewritten: bool
    array: ArraySpec | None = None
    """Set for arrays that are served unsharded."""
    why_sharded: str = ""
    """Reason why a sharded array is not served unsharded."""
    sharded: frozenset[str] = frozenset()
    """Paths of the arrays that a group's consolidated metadata describe unsharded."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the node holds, roughly."""
        return len(self.served) + _NODE_OVERHEAD


def parse_node(document: Json, data: bytes) -> Node:
    """Understand a ``zarr.json``: *document*, parsed from *data*. Raises: `DecodeError`."""
    if not isinstance(document, dict):
        raise DecodeError("no Zarr v3 metadata: no JSON object")
    if document.get("zarr_format") != 3:  # noqa: PLR2004
        raise DecodeError("no Zarr v3 metadata: zarr_format is not 3")
    match document.get("node_type"):
        case "array":
            return _parse_array_node(document, data)
        case "group":
            served = _unsharded_group(document)
            if served is document:
                return Node("group", data, is_rewritten=False)
            before, after = (
                each["consolidated_metadata"]["metadata"] for each in (document, served)
            )
            sharded = frozenset(path for path, node in after.items() if node is not before[path])
            return Node("group", _encode(served), is_rewritten=True, sharded=sharded)
        case other:
            raise DecodeError(f"node_type is neither array nor group: {str(other)[:80]}")


def _parse_array_node(document: dict[str, Json], data: bytes) -> Node:
    if not has_sharding(document.get("codecs")):
        return Node("array", data, is_rewritten=False)
    try:
        array = parse_array(document)
    except UnshardableError as reason:
        return Node("array", data, is_rewritten=False, why_sharded=str(reason))
    return Node("array", _encode(without_shards(document, array)), is_rewritten=True, array=array)


def parse_array(document: dict[str, Json]) -> ArraySpec:
    """Read the metadata of an array that has a sharding codec. Raises: `UnshardableError`,
    `DecodeError`.
    """
    shape = shape_of(document.get("shape"), "shape", least=0)
    grid = document.get("chunk_grid")
    if codec_name(grid) != "regular":
        raise UnshardableError(f"the chunk grid is {codec_name(grid):.80}")
    if document.get("storage_transformers"):
        raise UnshardableError("storage transformers change the keys or the bytes of shards")
    shard_shape = shape_of(configuration(grid).get("chunk_shape"), "chunk_shape", len(shape))
    unsharded = unshard(document["codecs"], shard_shape)
    return ArraySpec(
        shape,
        shard_shape,
        chunk_keys(document.get("chunk_key_encoding"), len(shape)),
        unsharded,
        chunk_form(unsharded.codecs, unsharded.inner_chunk_shape, document.get("data_type")),
    )


def chunk_keys(encoding: Json, ndim: int) -> ChunkKeys:
    """Read ``chunk_key_encoding``. Raises: `UnshardableError` if unknown, `DecodeError`."""
    name = codec_name(encoding)
    if name not in {"default", "v2"}:
        raise UnshardableError(f"the chunk key encoding is {name:.80}")
    separator = configuration(encoding).get("separator", "/" if name == "default" else ".")
    if separator not in ("/", "."):
        raise DecodeError(f"the separator is neither '/' nor '.': {str(separator)[:80]}")
    return ChunkKeys("c" if name == "default" else "", separator, ndim)


def without_shards(document: dict[str, Json], array: ArraySpec) -> dict[str, Json]:
    """Return the metadata of the unsharded array; all other members are unchanged."""
    chunk_shape = list(array.inner_chunk_shape)
    grid = {"name": "regular", "configuration": {"chunk_shape": chunk_shape}}
    return {**document, "chunk_grid": grid, "codecs": list(array.unsharded.codecs)}


def _unsharded_group(group: dict[str, Json]) -> dict[str, Json]:
    """Rewrite the arrays in consolidated metadata, except damaged ones; *group* itself if there are
    none.
    """
    consolidated = group.get("consolidated_metadata")
    if not isinstance(consolidated, dict) or not isinstance(consolidated.get("metadata"), dict):
        return group
    nodes = consolidated["metadata"]
    rewritten = {path: _unsharded(node) for path, node in nodes.items()}
    if all(rewritten[path] is node for path, node in nodes.items()):
        return group
    return {**group, "consolidated_metadata": {**consolidated, "metadata": rewritten}}


def _unsharded(node: Json) -> Json:
    try:
        if isinstance(node, dict) and has_sharding(node.get("codecs")):
            return without_shards(node, parse_array(node))
        return _unsharded_group(node) if isinstance(node, dict) else node
    except (UnshardableError, DecodeError):
        return node


def _encode(document: dict[str, Json]) -> bytes:
    """Write one line: indenting deeply nested JSON could take a thousand times its bytes."""
    return json.dumps(document).encode()
