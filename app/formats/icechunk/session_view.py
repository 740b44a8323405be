"""What a session is to who reads it: the nodes of its parent, and over them those it changed."""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from operator import lt
from typing import Final, NamedTuple

from app.errors import DamagedError
from app.formats.icechunk.listing import DOCUMENT
from app.formats.icechunk.metadata import Chunks, ManifestRef
from app.formats.icechunk.session_document import SessionDocument
from app.formats.icechunk.stored_nodes import StoredNode, StoredSnapshot
from app.formats.reading import DecodeError
from app.formats.zarr.codecs import (
    UnshardableError,
    codec_name,
    configuration,
    has_sharding,
    shape_of,
)
from app.formats.zarr.keys import ChunkKeys
from app.formats.zarr.metadata import chunk_keys
from app.model import ETag, ObjectRef

_MOST_CHUNKS: Final = 2**32 - 1
"""Along one dimension: coordinates are stored in 4 bytes."""


class Grid(NamedTuple):
    """The chunks, or shards, that an array has room for."""

    keys: ChunkKeys
    shape: tuple[int, ...]

    def has(self, coords: tuple[int, ...]) -> bool:
        """Tell whether there can be a chunk at *coords*."""
        return len(coords) == len(self.shape) and all(map(lt, coords, self.shape))


@dataclass(frozen=True, slots=True)
class ViewedNode:
    """An array or group."""

    node_id: bytes
    path: str
    """Without a slash in front; that of the root is empty."""
    document: bytes
    """Its ``zarr.json``, as it is stored."""
    grid: Grid | None
    """`None` for a group."""
    manifests: tuple[ManifestRef, ...] = ()
    """Of the chunks that the parent has."""

    @property
    def folder(self) -> str:
        """How the keys begin that are below the node."""
        return f"{self.path}/" if self.path else ""

    @property
    def chunks(self) -> Chunks | None:
        """Tell where the parent has the chunks of an array."""
        return None if self.grid is None else Chunks(*self.grid, self.manifests)

    @property
    def etag(self) -> ETag:
        """Name the version of the document."""
        return version_of(self.document)


class ChunkAddress(NamedTuple):
    """A chunk, or shard, of an array."""

    node: ViewedNode
    coords: tuple[int, ...]

    @property
    def may_be_shard(self) -> bool:
        """Whether other chunks may lie in it."""
        return _may_have_shards(self.node.document)


@dataclass(frozen=True, slots=True)
class SessionView:
    """One state of the nodes of a session."""

    session: SessionDocument
    parent: StoredSnapshot
    ref: ObjectRef
    """What holds the session."""
    _known: dict[str, ViewedNode] = field(default_factory=dict, repr=False, compare=False)

    def node(self, path: str) -> ViewedNode | None:
        """Find the node at *path*.

        Raises: `DamagedError`.
        """
        if (known := self._known.get(path)) is not None:
            return known
        if (found := self._find(path)) is not None:
            self._known[path] = found
        return found

    def paths(self) -> Iterator[str]:
        """Give the paths of all nodes, in no order."""
        changed = self.session.nodes
        yield from (path for path, node in changed.items() if node is not None)
        yield from (path[1:] for path in self.parent.nodes if path[1:] not in changed)

    def among(self, node_ids: Collection[bytes]) -> list[ViewedNode]:
        """Find the nodes whose ids are *node_ids*, in the order of their paths."""
        changed, stored = self.session.nodes, self.parent.nodes
        there = {path: node.node_id for path, node in changed.items() if node is not None}
        there |= {path[1:]: stored[path].node_id for path in stored if path[1:] not in changed}
        paths = sorted(path for path, node_id in there.items() if node_id in node_ids)
        return [node for path in paths if (node := self.node(path)) is not None]

    def below(self, path: str) -> Iterator[str]:
        """Give the paths of all nodes below *path*, in no order."""
        start = f"{path}/" if path else ""
        return (each for each in self.paths() if each.startswith(start) and each != path)

    def address(self, key: str) -> ChunkAddress | None:
        """Find the chunk that *key* may name; `None` where there is no such array, or chunk."""
        node, rest = self.around(key)
        if node is None or node.grid is None:
            return None
        coords = node.grid.keys.parse(rest)
        return None if coords is None or not node.grid.has(coords) else ChunkAddress(node, coords)

    def around(self, key: str) -> tuple[ViewedNode | None, str]:
        """Find the nearest node that *key* leads into, and the rest of *key*."""
        path = key
        while path:
            path = path.rpartition("/")[0]
            if (node := self.node(path)) is not None:
                return node, key.removeprefix(node.folder)
        return None, key

    def _find(self, path: str) -> ViewedNode | None:
        stored = self.parent.nodes.get(f"/{path}")
        if path not in self.session.nodes:
            return None if stored is None else _view_stored(path, stored)
        changed = self.session.nodes[path]
        if changed is None:
            return None
        is_kept = stored is not None and stored.node_id == changed.node_id
        manifests = stored.array.manifests if is_kept and stored and stored.array else ()
        try:
            grid = read_grid(changed.document)
        except DecodeError as error:
            raise DamagedError(self.ref, f"the document of /{path}: {error}") from None
        return ViewedNode(changed.node_id, path, changed.document, grid, manifests)


def node_path(key: str) -> str | None:
    """Tell which node *key* is the document of, if it is one."""
    path, _, name = key.rpartition("/")
    return path if name == DOCUMENT else None


def version_of(data: bytes) -> ETag:
    """Name the version of what consists of *data*."""
    return ETag(f'"{blake2b(data, digest_size=16).hexdigest()}"')


def _view_stored(path: str, stored: StoredNode) -> ViewedNode:
    if stored.array is None:
        return ViewedNode(stored.node_id, path, stored.document, None)
    shape = tuple(dimension.num_chunks for dimension in stored.array.dimensions)
    try:
        keys = chunk_keys(json.loads(stored.document).get("chunk_key_encoding"), len(shape))
    except (UnshardableError, ValueError, AttributeError, RecursionError):
        keys = ChunkKeys("c", "/", len(shape))  # as the library takes them, whatever is told
    grid = Grid(keys, shape)
    return ViewedNode(stored.node_id, path, stored.document, grid, stored.array.manifests)


@lru_cache(maxsize=512)
def _may_have_shards(document: bytes) -> bool:
    try:
        return has_sharding(_read_node(document).get("codecs"))
    except DecodeError:
        return True


@lru_cache(maxsize=512)
def read_grid(document: bytes) -> Grid | None:
    """Read what room an array has for chunks; `None` is for a group.

    Raises: `DecodeError` for what can be the document of no node of a repository.
    """
    node = _read_node(document)
    if node.get("node_type") == "group":
        return None
    if node.get("node_type") != "array":
        raise DecodeError("node_type is neither array nor group")
    shape = shape_of(node.get("shape"), "shape", least=0)
    grid = node.get("chunk_grid")
    if codec_name(grid) != "regular":
        raise DecodeError(f"the chunk grid is {codec_name(grid):.80}, and only regular is written")
    each = shape_of(configuration(grid).get("chunk_shape"), "chunk_shape", len(shape))
    keys = _only_keys(node.get("chunk_key_encoding"), len(shape))
    counts = tuple(-(-length // chunk) for length, chunk in zip(shape, each, strict=True))
    if any(count > _MOST_CHUNKS for count in counts):
        raise DecodeError(f"more than {_MOST_CHUNKS} chunks along one dimension")
    return Grid(keys, counts)


def _only_keys(encoding: object, ndim: int) -> ChunkKeys:
    """Read the chunk key encoding, which is the only one that the library knows."""
    try:
        keys = chunk_keys(encoding, ndim)
    except UnshardableError as error:
        raise DecodeError(str(error)) from None
    if (keys.prefix, keys.separator) != ("c", "/"):
        raise DecodeError("the chunk key encoding is not default with the separator /")
    return keys


def _read_node(document: bytes) -> Mapping[str, object]:
    try:
        node = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"no JSON: {error}") from None
    if not isinstance(node, dict) or node.get("zarr_format") != 3:  # noqa: PLR2004
        raise DecodeError("no Zarr v3 metadata: zarr_format is not 3")
    return node
