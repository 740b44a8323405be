"""``zarr.json``: a node, the document that is served in its place, and the stored form of one that
a client writes, which keeps the shards.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import floordiv, lt, mul
from typing import Any, Final

import numpy as np

from app.errors import BadBodyError, ConflictError
from app.formats.documents import DocumentDecoder
from app.formats.listing import Axis
from app.formats.reading import DecodeError, Fetch, Read
from app.formats.zarr.codecs import (
    ChunkForm,
    UnshardableError,
    Unsharded,
    chunk_form,
    codec_name,
    configuration,
    has_sharding,
    item_nbytes,
    shape_of,
    unshard,
)
from app.formats.zarr.keys import ChunkKeys, Keys
from app.model import ByteRange, ObjectRef

type Json = Any

_NODE_OVERHEAD: Final = 4096
HIDDEN: Final = (
    "arrays are served without shards here, and a client that knows of shards would write whole "
    "shards under the keys of inner chunks: write this in the store, or through a dataset with "
    'view = "raw"; in an Icechunk repository commit it without a session'
)
MISREAD: Final = (
    "the stored shards would be misread; to replace the array, delete it with all its chunks first"
)
_SHARDS: Final = ("chunk_grid", "codecs")
"""The members that clients see in another form."""
_OPTIONAL: Final = {
    "gzip": {"level"},
    "zstd": {"level", "checksum"},
    "blosc": {"cname", "clevel", "shuffle", "typesize", "blocksize"},
}
"""Members of a codec's configuration that a reader need not know."""
_FLOATS: Final = {"float16": 2, "float32": 4, "float64": 8}
_COMPLEX: Final = {"complex64": "float32", "complex128": "float64"}
_LARGEST: Final = float(np.finfo("f8").max)
_NON_FINITE: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

type NodeDocument = dict[str, Json]


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

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The grid of the inner chunks."""
        shapes = zip(self.shape, self.inner_chunk_shape, self.shard_shape, strict=True)
        return tuple(Axis(-(-size // inner), shard // inner) for size, inner, shard in shapes)

    def origin(self, coords: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the first array element of the inner chunk at *coords*; `None` off the array."""
        origin = tuple(map(mul, coords, self.unsharded.levels[-1].inner_chunk_shape))
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


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A metadata document in the form that is stored."""

    document: Json
    nbytes: int


def _keep_document(document: Json, data: bytes) -> StoredDocument:
    return StoredDocument(document, len(data))


def parse_sent(sent: bytes) -> NodeDocument:
    """Parse the JSON object that a client sent. Raises: `BadBodyError`."""
    try:
        document = json.loads(sent)
    except (ValueError, RecursionError) as error:
        raise BadBodyError(f"the document is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise BadBodyError("the document is no JSON object")
    return document


def parse_stored(data: bytes | None) -> Json:
    """Parse a stored document; `None` for what is no JSON, which anything may replace."""
    try:
        return None if data is None else json.loads(data)
    except (ValueError, RecursionError):
        return None


def encode_document(document: Json) -> bytes:
    """Encode what `parse_sent` has parsed. Raises: `BadBodyError` for deep nesting."""
    try:
        return json.dumps(document).encode()
    except RecursionError as error:
        raise BadBodyError(f"the document cannot be written: {error}") from None


@dataclass(frozen=True, slots=True)
class Restorer:
    """Restores nodes in consolidated metadata from their own stored documents."""

    directory: ObjectRef
    limit_bytes: int
    restore: Callable[[NodeDocument, Json], NodeDocument]

    async def node(self, sent: NodeDocument, key: str, name: str, fetch: Fetch) -> NodeDocument:
        """Restore the node *name*, stored under *key*. Raises: `ConflictError`."""
        decode = DocumentDecoder(_keep_document, self.limit_bytes)
        request = ByteRange(0, self.limit_bytes + 1)
        found = await fetch(Read("metadata", self.directory.join(key), request, decode))
        try:
            return self.restore(sent, None if found is None else found.value.document)
        except ConflictError as error:
            raise ConflictError(f"{name}: {error}") from None


@dataclass(frozen=True, slots=True)
class NodeTranslator:
    """Translates the ``zarr.json`` in *directory*."""

    directory: ObjectRef
    limit_bytes: int

    async def translate(self, sent: bytes, stored: bytes | None, fetch: Fetch) -> bytes:
        """Return *sent* with the chunk grid and the codecs of the *stored* sharded array."""
        document = parse_sent(sent)
        if isinstance(document.get("zarr_format"), str):  # the entry point of a draft of 2022
            return sent
        if document.get("zarr_format") != 3 or document.get("node_type") not in ("array", "group"):  # noqa: PLR2004
            raise BadBodyError("no Zarr v3 metadata: no zarr_format 3 with a node_type")
        restored = restore(document, parse_stored(stored))
        if document["node_type"] == "group":
            restored = await self._restore_below(document, "", fetch)
        return sent if restored is document else encode_document(restored)

    async def _restore_below(self, group: NodeDocument, path: str, fetch: Fetch) -> NodeDocument:
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
        restorer = Restorer(self.directory, self.limit_bytes, restore)
        return await restorer.node(node, f"{path}/zarr.json", path, fetch)


def restore(sent: NodeDocument, stored: Json) -> NodeDocument:
    """Return the metadata to store for a node. Raises: `ConflictError` for misread shards."""
    if not isinstance(stored, dict) or not has_sharding(stored.get("codecs")):
        if has_sharding(sent.get("codecs")):
            raise ConflictError(HIDDEN)
        return sent
    if sent.get("node_type") != "array":
        raise ConflictError(f"a sharded array is stored here: {MISREAD}")
    is_copy = not any(_differs(sent, stored, member) for member in _SHARDS)
    served = _served(stored)
    knows_others = has_sharding(sent.get("codecs")) and not is_copy
    if knows_others and (served is stored or not has_sharding(served["codecs"])):
        raise ConflictError(HIDDEN)
    if served is stored:  # the array cannot be unsharded
        return sent
    for member in _COMPARE:
        if _differs(sent, stored if is_copy else served, member):
            raise ConflictError(f"{member} cannot change: {MISREAD}")
    return {**sent, **{member: stored[member] for member in _SHARDS}}


def _served(stored: NodeDocument) -> NodeDocument:
    try:
        return without_shards(stored, parse_array(stored))
    except (UnshardableError, DecodeError):
        return stored


def _differs(sent: NodeDocument, expected: NodeDocument, member: str) -> bool:
    try:
        return not _COMPARE[member](sent, expected)
    except (DecodeError, UnshardableError, RecursionError):
        return True


def _ndim(node: NodeDocument) -> int:
    return len(shape_of(node.get("shape"), "shape", least=0))


def _has_same_keys(sent: NodeDocument, expected: NodeDocument) -> bool:
    ndim = _ndim(expected)
    one, other = (node.get("chunk_key_encoding") for node in (sent, expected))
    return chunk_keys(one, ndim) == chunk_keys(other, ndim)


def _has_same_codecs(sent: NodeDocument, expected: NodeDocument) -> bool:
    ndim, data_type = _ndim(expected), expected.get("data_type")
    return are_codecs_equivalent(sent.get("codecs"), expected.get("codecs"), ndim, data_type)


def _has_same_fill_value(sent: NodeDocument, expected: NodeDocument) -> bool:
    one, other = sent.get("fill_value"), expected.get("fill_value")
    return are_fill_values_equal(one, other, expected.get("data_type"))


def _has_same_extension(member: str) -> Callable[[NodeDocument, NodeDocument], bool]:
    """Return a comparison of a data type, or of another name with perhaps a configuration."""

    def compare(sent: NodeDocument, expected: NodeDocument) -> bool:
        one, other = sent.get(member), expected.get(member)
        return (codec_name(one), configuration(one)) == (codec_name(other), configuration(other))

    return compare


_COMPARE: Final[dict[str, Callable[[NodeDocument, NodeDocument], bool]]] = {
    "the number of dimensions": lambda sent, expected: _ndim(sent) == _ndim(expected),
    "chunk_grid": _has_same_extension("chunk_grid"),
    "chunk_key_encoding": _has_same_keys,
    "codecs": _has_same_codecs,
    "data_type": _has_same_extension("data_type"),
    "fill_value": _has_same_fill_value,
    "storage_transformers": lambda sent, _: not sent.get("storage_transformers"),
}
"""Comparisons by member; they raise `DecodeError` and `UnshardableError` for invalid members."""


def are_codecs_equivalent(one: Json, other: Json, ndim: int, data_type: Json) -> bool:
    """Return whether two codec chains of arrays of *ndim* dimensions mean the same."""
    if not isinstance(one, list) or not isinstance(other, list) or len(one) != len(other):
        return False
    return all(_is_same_codec(a, b, ndim, data_type) for a, b in zip(one, other, strict=True))


def _is_same_codec(one: Json, other: Json, ndim: int, data_type: Json) -> bool:
    name, members = _normalized(one, ndim, data_type)
    other_name, other_members = _normalized(other, ndim, data_type)
    if name != other_name:
        return False
    if name == "sharding_indexed":
        for chain in ("codecs", "index_codecs"):
            pair = members.pop(chain, []), other_members.pop(chain, [])
            of_type = data_type if chain == "codecs" else "uint64"
            if not are_codecs_equivalent(*pair, ndim, of_type):
                return False
    for member in _OPTIONAL.get(name, ()):
        if member not in members or member not in other_members:
            members.pop(member, None)
            other_members.pop(member, None)
    return members == other_members


def _normalized(codec: Json, ndim: int, data_type: Json) -> tuple[str, dict[str, Json]]:
    name, members = codec_name(codec), dict(configuration(codec))
    match name:
        case "bytes" | "endian":
            name = "bytes"
            if item_nbytes(data_type) == 1:
                members.pop("endian", None)
        case "transpose" if members.get("order") in ("C", "F"):
            axes = list(range(ndim))
            members["order"] = axes if members["order"] == "C" else axes[::-1]
        case "sharding_indexed":
            members.setdefault("index_location", "end")
    return name, members


def are_fill_values_equal(one: Json, other: Json, data_type: Json) -> bool:
    """Return whether two fill values of *data_type* are the same element, bit by bit."""
    name = data_type.get("name") if isinstance(data_type, dict) else data_type
    return bool(_element(one, name) == _element(other, name))


def _element(value: Json, data_type: Json) -> Json:
    if data_type in _COMPLEX and isinstance(value, list):
        return [_element(part, _COMPLEX[data_type]) for part in value]
    if data_type not in _FLOATS or isinstance(value, bool):
        return value
    number = _NON_FINITE.get(value, value) if isinstance(value, str) else value
    if isinstance(number, str):
        return _bits(number, _FLOATS[data_type])
    if not isinstance(number, int | float) or (isinstance(number, int) and abs(number) > _LARGEST):
        return value
    with np.errstate(over="ignore"):
        element = np.asarray(float(number)).astype(data_type)
    return element.astype(f">f{_FLOATS[data_type]}").tobytes()


def _bits(spelled: str, nbytes: int) -> Json:
    """Return the bytes that ``0x…`` spells, or *spelled* if it does not spell *nbytes*."""
    digits = spelled.removeprefix("0x")
    try:
        return bytes.fromhex(digits) if len(digits) == 2 * nbytes else spelled
    except ValueError:
        return spelled
