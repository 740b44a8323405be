"""``zarr.json``: a node, the document that is served in its place, and the stored form of one that
a client writes, which keeps the shards.
"""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np

from shardgate.errors import BadBodyError, ConflictError
from shardgate.formats.documents import Json, parse_json, write_json
from shardgate.formats.reading import DecodedMetadata, DecodeError, Fetch, Opaque, Read, RunInThread
from shardgate.formats.zarr.array_spec import ArraySpec, RectilinearArraySpec
from shardgate.formats.zarr.codecs import (
    chunk_form,
    codec_name,
    configuration,
    has_sharding,
    item_nbytes,
    shape_of,
    unshard,
)
from shardgate.formats.zarr.grid import ShardEdges, read_chunk_shape, read_shard_edges
from shardgate.formats.zarr.keys import ChunkKeys
from shardgate.model import ByteRange, ObjectRef, is_key

type JsonObject = dict[str, Json]

_NODE_OVERHEAD: Final = 4096
_HIDDEN: Final = (
    "arrays are served without shards here, and a client that knows of shards would write whole "
    "shards under the keys of inner chunks: write this in the store, or through a dataset with "
    'view = "raw"; in an Icechunk repository commit it without a session'
)
_MISREAD: Final = (
    "the stored shards would be misread; to replace the array, delete it with all its chunks first"
)
_UNDERSTOOD: Final = frozenset(
    ["attributes", "chunk_grid", "chunk_key_encoding", "consolidated_metadata", "data_type"]
)
"""Members that may be objects and have a meaning."""
_SHARDS: Final = ("chunk_grid", "codecs")  # clients see them in another form
_OPTIONAL: Final = frozenset(
    ["blocksize", "checksum", "clevel", "cname", "level", "must_understand", "shuffle", "typesize"]
)
"""Members of codecs that readers need not know: they may be left out."""
_DEFAULTS: Final[dict[str, Json]] = {"configuration": {}, "index_location": "end"}
_FLOATS: Final = {
    **{name: name for name in ("float16", "float32", "float64")},
    "complex64": "float32",
    "complex128": "float64",
}
"""Types of the numbers in fill values, by data type."""


@dataclass(frozen=True, slots=True)
class Node(DecodedMetadata):
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
        array_nbytes = 0 if self.array is None else self.array.nbytes
        return len(self.served) + array_nbytes + _NODE_OVERHEAD


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
            nodes = consolidated_nodes(document) or {}
            served = {path: _unsharded(node) for path, node in nodes.items()}
            sharded = frozenset(path for path, node in nodes.items() if served[path] is not node)
            if not sharded:
                return Node("group", data, is_rewritten=False)
            rewritten = write_json(_with_nodes(document, served))
            return Node("group", rewritten, is_rewritten=True, sharded=sharded)
        case other:
            raise DecodeError(f"node_type is neither array nor group: {str(other)[:80]}")


def _parse_array_node(document: dict[str, Json], data: bytes) -> Node:
    if not has_sharding(document.get("codecs")):
        return Node("array", data, is_rewritten=False)
    try:
        array = parse_array(document)
        served = write_json(without_shards(document, array))
    except DecodeError as reason:
        return Node("array", data, is_rewritten=False, why_sharded=str(reason))
    return Node("array", served, is_rewritten=True, array=array)


def parse_array(document: dict[str, Json]) -> ArraySpec:
    """Read a sharded array. Raises: `DecodeError` with the reason where it cannot be unsharded."""
    for name, member in document.items():
        if name not in _UNDERSTOOD and isinstance(member, dict) and member.get("must_understand"):
            raise DecodeError(f"the extension {name:.80} must be understood")
    shape = shape_of(document.get("shape"), "shape", least=0)
    grid = document.get("chunk_grid")
    edges: tuple[ShardEdges, ...] = ()
    shard_shape = read_chunk_shape(grid, len(shape))
    if shard_shape is None:
        edges = read_shard_edges(grid, shape)
        shard_shape = tuple(max(each.lengths) for each in edges)
    if document.get("storage_transformers"):
        raise DecodeError("storage transformers change the keys or the bytes of shards")
    levels, codecs = unshard(document["codecs"], shard_shape)
    members = (
        shape,
        shard_shape,
        chunk_keys(document.get("chunk_key_encoding"), len(shape)),
        levels,
        codecs,
        chunk_form(codecs, levels[-1].inner_chunk_shape, document.get("data_type")),
    )
    if not edges:
        return ArraySpec(*members)
    for each, size in zip(edges, levels[0].inner_chunk_shape, strict=True):
        if odd := next((length for length in each.lengths if length % size), 0):
            raise DecodeError(f"inner chunks of {size} elements do not divide a shard of {odd}")
    return RectilinearArraySpec(*members, edges)


def chunk_keys(encoding: Json, ndim: int) -> ChunkKeys:
    """Read ``chunk_key_encoding``. Raises: `DecodeError`, also for an unknown one."""
    name = codec_name(encoding)
    if name not in {"default", "v2"}:
        raise DecodeError(f"the chunk key encoding is {name:.80}")
    separator = configuration(encoding).get("separator", "/" if name == "default" else ".")
    if separator not in ("/", "."):
        raise DecodeError(f"the separator is neither '/' nor '.': {str(separator)[:80]}")
    return ChunkKeys(f"c{separator}" if name == "default" else "", separator, ndim)


def without_shards(document: dict[str, Json], array: ArraySpec) -> dict[str, Json]:
    """Return the metadata of the unsharded array; all other members are unchanged."""
    chunk_shape = list(array.inner_chunk_shape)
    grid = {"name": "regular", "configuration": {"chunk_shape": chunk_shape}}
    rewritten = {"shape": list(array.shape), "chunk_grid": grid, "codecs": list(array.codecs)}
    return document | rewritten


def consolidated_nodes(group: JsonObject) -> dict[str, Json] | None:
    """Return the nodes in the consolidated metadata of *group*, by their paths, if it has these."""
    consolidated = group.get("consolidated_metadata")
    nodes = consolidated.get("metadata") if isinstance(consolidated, dict) else None
    return nodes if isinstance(nodes, dict) else None


def _with_nodes(group: JsonObject, nodes: dict[str, Json]) -> JsonObject:
    return {**group, "consolidated_metadata": {**group["consolidated_metadata"], "metadata": nodes}}


def _unsharded(node: Json) -> Json:
    """Return the document served for *node*: itself, unless it is a sharded array."""
    with suppress(DecodeError):
        if isinstance(node, dict) and has_sharding(node.get("codecs")):
            return without_shards(node, parse_array(node))
    return node


def parse_sent(sent: bytes) -> JsonObject:
    """Parse the JSON object that a client sent. Raises: `BadBodyError`."""
    try:
        document = parse_json(sent)
    except ValueError as error:
        raise BadBodyError(f"the document is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise BadBodyError("the document is no JSON object")
    return document


def parse_stored(data: bytes | None) -> Json:
    """Parse a stored document; `None` for invalid JSON, which anything may replace."""
    try:
        return None if data is None else parse_json(data)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class NodeTranslator:
    """Translates the ``zarr.json`` in *directory*."""

    directory: ObjectRef
    limit_bytes: int

    def is_marker(self, _: bytes) -> bool:
        return True

    async def translate(
        self, sent: bytes, stored: bytes | None, fetch: Fetch, run_in_thread: RunInThread
    ) -> bytes:
        """Return *sent* with the chunk grid and the codecs of the *stored* sharded array."""
        document = await run_in_thread(parse_sent, sent)
        old = await run_in_thread(parse_stored, stored)
        if isinstance(document.get("zarr_format"), str):  # the entry point of a draft of 2022
            restore(document, old)  # raises in place of a sharded array
            return sent
        if document.get("zarr_format") != 3 or document.get("node_type") not in ("array", "group"):  # noqa: PLR2004
            raise BadBodyError("no Zarr v3 metadata: no zarr_format 3 with a node_type")
        restored = await self._restore_node(document, old, fetch)
        try:
            return sent if restored is document else await run_in_thread(write_json, restored)
        except ValueError as error:
            raise BadBodyError(f"the document cannot be written: {error}") from None

    async def _restore_node(self, sent: JsonObject, stored: Json, fetch: Fetch) -> JsonObject:
        restored = restore(sent, stored)
        nodes = consolidated_nodes(sent)
        if sent["node_type"] == "array" or nodes is None:
            return restored
        below = {path: await self._restore_below(path, node, fetch) for path, node in nodes.items()}
        return restored if below == nodes else _with_nodes(restored, below)

    async def _restore_below(self, path: str, node: Json, fetch: Fetch) -> Json:
        """Restore *node* of consolidated metadata from its own stored document."""
        if not isinstance(node, dict) or node.get("node_type") != "array":
            return node
        name = f"{path}/zarr.json"
        if not is_key(name):
            raise BadBodyError(f"the consolidated metadata name no node: {path[:80]}")
        ref = self.directory.join(name)
        request = ByteRange(0, self.limit_bytes)
        found = await fetch(Read("metadata", ref, request, Opaque, is_marker=True))
        try:
            return restore(node, None if found is None else parse_stored(found.value.data))
        except ConflictError as error:
            raise ConflictError(f"{path}: {error}") from None


def restore(sent: JsonObject, stored: Json) -> JsonObject:
    """Return the metadata to store for a node. Raises: `ConflictError` for misread shards."""
    knows_shards = has_sharding(sent.get("codecs"))
    if not isinstance(stored, dict) or not has_sharding(stored.get("codecs")):
        if knows_shards:
            raise ConflictError(_HIDDEN)
        return sent
    if sent.get("node_type") != "array":
        raise ConflictError(f"a sharded array is stored here: {_MISREAD}")
    served = _unsharded(stored)
    is_copy = all(_is_same(member, sent, stored) for member in _SHARDS)
    # Clients see those inner shards that could not be flattened.
    shows_shards = served is not stored and has_sharding(served["codecs"])
    if knows_shards and not is_copy and not shows_shards:
        raise ConflictError(_HIDDEN)
    if served is stored:  # the array cannot be unsharded
        return sent
    for member in (*_SHARDS, "data_type", "fill_value"):
        if not _is_same(member, sent, stored if is_copy else served):
            raise ConflictError(f"{member} cannot change: {_MISREAD}")
    restored = {**sent, **{member: stored[member] for member in _SHARDS}}
    try:
        if parse_array(restored).keys != parse_array(stored).keys:
            raise ConflictError(f"chunk_key_encoding cannot change: {_MISREAD}")
    except DecodeError as error:
        raise ConflictError(f"{error}: {_MISREAD}") from None
    return restored


def _agree(one: Json, other: Json, optional: Collection[str] = _OPTIONAL) -> bool:
    """Return whether two codecs, or values in them, are equal but for defaults that are left out,
    and for *optional* members that only one of them has.
    """
    pairs = [(one, other)]
    for pair in pairs:  # grows while it is walked
        match pair:
            case dict(first), dict(second):
                for name in first.keys() | second.keys():
                    if (name in first and name in second) or name not in optional:
                        default = _DEFAULTS.get(name)
                        pairs.append((first.get(name, default), second.get(name, default)))
            case (str(name), dict(full)) | (dict(full), str(name)):
                pairs.append(({"name": name}, full))
            case list(first), list(second) if len(first) == len(second):
                pairs += zip(first, second, strict=True)
            case first, second if first != second:
                return False
    return True


def _is_same(member: str, sent: JsonObject, expected: JsonObject) -> bool:
    """Return whether a member means the same; fill values are compared as elements."""
    one = sent.get(member)
    other = expected.get(member)
    data_type = expected.get("data_type")
    name = data_type.get("name") if isinstance(data_type, dict) else data_type
    number = _FLOATS.get(str(name)) if member == "fill_value" else None
    if number is not None and None not in (one, other):
        with suppress(ValueError, TypeError, OverflowError), np.errstate(over="ignore"):
            first, second = (np.asarray(value, number) for value in (one, other))
            return np.array_equal(first, second, equal_nan=True)
    has_order = item_nbytes(data_type) != 1  # single bytes have none
    return _agree(one, other, _OPTIONAL if has_order else _OPTIONAL | {"endian"})
