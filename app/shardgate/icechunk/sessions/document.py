"""Sessions: their stored document, the nodes that a client sees, edits of nodes.

A session is a document of changed nodes over a parent snapshot, and an entry for each changed
chunk. All of it is stored by this service only; Icechunk has no such files.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Annotated, Final, Literal, NamedTuple

import zstandard
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from shardgate.errors import BadBodyError, BusyError, ConflictError, DamagedError
from shardgate.formats.compression import decompress_zstd
from shardgate.formats.documents import json_memory_nbytes, parse_json
from shardgate.formats.icechunk.apply import read_document, read_grid
from shardgate.formats.icechunk.changes import ChangeSet, ChunkChanges, NodeDocument
from shardgate.formats.icechunk.ids import NODE_ID_NBYTES
from shardgate.formats.icechunk.keys import DOCUMENT
from shardgate.formats.icechunk.snapshot import Chunks, StoredNode, StoredSnapshot
from shardgate.formats.reading import DecodeError, check_format
from shardgate.formats.zarr.codecs import has_sharding
from shardgate.formats.zarr.keys import ChunkKeys
from shardgate.formats.zarr.metadata import chunk_keys
from shardgate.model import ETag, ObjectRef

type _Time = Annotated[float, Field(ge=0, lt=253_402_300_800)]
"""Up to the year 9999."""


@dataclass(frozen=True, slots=True)
class Open:
    """State of a session whose keys can be written."""

    name: Literal["open"] = "open"


@dataclass(frozen=True, slots=True)
class Sealed:
    """State of a session during a commit: nothing can be written."""

    key: str | None
    """Idempotency key of the request that commits."""
    name: Literal["sealed"] = "sealed"


@dataclass(frozen=True, slots=True)
class Committed:
    """State of a session that is committed and read-only."""

    snapshot_id: str
    parent_id: str | None
    """Parent of the snapshot: not that of the session, if it was rebased."""
    key: str | None
    name: Literal["committed"] = "committed"


@dataclass(frozen=True, slots=True)
class Discarded:
    """State of a session that is being removed, and invisible."""

    name: Literal["discarded"] = "discarded"


type State = Annotated[Open | Sealed | Committed | Discarded, Field(discriminator="name")]

OPEN: Final = Open()


class ChangedNode(NamedTuple):
    """An array or group that the parent lacks, or has with other metadata."""

    node_id: Annotated[bytes, Field(min_length=NODE_ID_NBYTES, max_length=NODE_ID_NBYTES)]
    document: bytes


@dataclass(frozen=True, slots=True)
class SessionDocument:
    """A session without its chunks; times are seconds since 1970, UTC."""

    __pydantic_config__ = ConfigDict(
        strict=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64"
    )
    branch: str
    parent_id: str
    inline_nbytes: int
    """Larger chunks have files of their own."""
    created_at_s: _Time
    expires_at_s: _Time
    state: State = OPEN
    attempt: int = 0
    """Number of failed commits, part of the id of the next one."""
    nodes: Mapping[str, ChangedNode | None] = field(default_factory=dict)
    """By path without a leading slash; `None` for deleted nodes, each of them listed."""
    format: Literal[1] = 1
    """Another one is needed for other members, kinds of journal entries, or ids of commits."""

    @property
    def nbytes(self) -> int:
        return 1024 + sum(512 + len(node.document) for node in self.nodes.values() if node)


def require_open(document: SessionDocument) -> None:
    """Check that a write made now will be part of the commit."""
    match document.state:
        case Open():
            return
        case Sealed():
            raise BusyError("the session is being committed; if the commit failed, commit again")
        case _:
            raise ConflictError("the session is committed and accepts no more writes")


def is_journaled(document: SessionDocument) -> bool:
    """Return whether journal entries override the chunks of the parent."""
    return not isinstance(document.state, Committed)


_STORED: Final = TypeAdapter(SessionDocument)


def encode_session(session: SessionDocument, limit_nbytes: int | None = None) -> bytes:
    """Encode *session* as compressed JSON. Raises: `ConflictError` where it could not be decoded
    within *limit_nbytes*.
    """
    text = _STORED.dump_json(session)
    if limit_nbytes is not None and not _fits(text, limit_nbytes):
        raise ConflictError(
            f"the metadata that the session changes would exceed {limit_nbytes} bytes: "
            "limits.repository_file_bytes"
        )
    return zstandard.compress(text)


def decode_session(data: bytes, limit_nbytes: int) -> SessionDocument:
    """Decode a session of at most *limit_nbytes* decompressed. Raises: `DecodeError`."""
    text = decompress_zstd(data, limit_nbytes)
    if not _fits(text, limit_nbytes):
        raise DecodeError(f"not a session: too many values in {len(text)} bytes")
    try:
        return _STORED.validate_json(text)
    except ValidationError as error:
        invalid = DecodeError(f"not a session: {error!r:.80}")
    document = None
    with suppress(ValueError):
        document = parse_json(text)
    check_format(document)
    raise invalid


def _fits(text: bytes, limit_nbytes: int) -> bool:
    is_short = len(text) <= limit_nbytes
    return is_short and json_memory_nbytes(text) <= limit_nbytes * 4  # Python objects of JSON


@dataclass(frozen=True, slots=True)
class ViewedNode:
    """An array or group of a session."""

    node_id: bytes
    path: str
    """Path without a leading slash; empty for the root."""
    document: bytes
    chunks: Chunks | None
    """For an array, with the manifests of the chunks that the parent has."""

    @property
    def etag(self) -> ETag:
        return version_of(self.document)


class ChunkAddress(NamedTuple):
    """A chunk, or shard, of an array."""

    node: ViewedNode
    coords: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SessionView:
    """The nodes of a session: those of the parent, replaced by the changed ones."""

    session: SessionDocument
    parent: StoredSnapshot
    ref: ObjectRef
    """The object of the session document, named in errors."""
    _known: dict[str, ViewedNode] = field(default_factory=dict, repr=False, compare=False)
    _last: dict[str, ChunkAddress] = field(default_factory=dict, repr=False, compare=False)
    """The chunk that was looked up last: a request finds its container by it, and then uses it."""

    def node(self, path: str) -> ViewedNode | None:
        """Return the node at *path*. Raises: `DamagedError`."""
        if (known := self._known.get(path)) is not None:
            return known
        if (found := self._find(path)) is not None:
            self._known[path] = found
        return found

    def is_in_parent(self, node: ViewedNode) -> bool:
        """Return whether *node* has replaced none of the parent, and was not created since."""
        stored = self.parent.nodes.get(f"/{node.path}")
        return stored is not None and stored.node_id == node.node_id

    def paths(self) -> Iterator[str]:
        """Iterate over the paths of all nodes, unordered."""
        changed = self.session.nodes
        yield from (path for path, node in changed.items() if node is not None)
        yield from (path[1:] for path in self.parent.nodes if path[1:] not in changed)

    def among(self, node_ids: Collection[bytes]) -> list[ViewedNode]:
        """Return the nodes with these ids, ordered by path."""
        changed = self.session.nodes
        stored = self.parent.nodes
        there = {path: node.node_id for path, node in changed.items() if node is not None}
        there |= {path[1:]: stored[path].node_id for path in stored if path[1:] not in changed}
        paths = sorted(path for path, node_id in there.items() if node_id in node_ids)
        return [node for path in paths if (node := self.node(path)) is not None]

    def below(self, path: str) -> Iterator[str]:
        """Iterate over the paths of all nodes below *path*, unordered."""
        start = f"{path}/" if path else ""
        return (each for each in self.paths() if each.startswith(start) and each != path)

    def address(self, key: str) -> ChunkAddress | None:
        """Return the chunk that *key* may name; `None` without such an array or outside of it."""
        if (known := self._last.get(key)) is not None:
            return known
        # The library can leave nodes in an array, and still reads all chunks of that.
        for node, rest in self._above(key):
            coords = None if node.chunks is None else node.chunks.keys.parse(rest)
            if node.chunks is not None and coords is not None and node.chunks.has(coords):
                self._last.clear()
                found = self._last[key] = ChunkAddress(node, coords)
                return found
        return None

    def around(self, key: str) -> tuple[ViewedNode | None, str]:
        """Return the nearest node above *key*, and the rest of *key*."""
        return next(self._above(key), (None, key))

    def _above(self, key: str) -> Iterator[tuple[ViewedNode, str]]:
        """Iterate over the nodes above *key*, the nearest first, with the rest of *key* below."""
        for path in _paths_above(key):
            node = self._known.get(path)
            if node is None and (path in self.session.nodes or f"/{path}" in self.parent.nodes):
                node = self.node(path)
            if node is not None:
                yield node, key.removeprefix(path).removeprefix("/")

    def _find(self, path: str) -> ViewedNode | None:
        stored = self.parent.nodes.get(f"/{path}")
        if path not in self.session.nodes:
            return None if stored is None else _view_stored(path, stored)
        changed = self.session.nodes[path]
        if changed is None:
            return None
        try:
            chunks = read_chunks(changed.document)
        except DecodeError as error:
            raise DamagedError(self.ref, f"the document of /{path}: {error}") from None
        is_kept = stored is not None and stored.node_id == changed.node_id
        if chunks is not None and is_kept and stored and stored.array:
            chunks = replace(chunks, manifests=stored.array.manifests)
        return ViewedNode(changed.node_id, path, changed.document, chunks)


def node_path(key: str) -> str | None:
    """Return the path of the node whose document *key* names; `None` for other keys."""
    path, _, name = key.rpartition("/")
    return path if name == DOCUMENT else None


def version_of(data: bytes) -> ETag:
    """Return the ETag of *data*."""
    return ETag(f'"{blake2b(data, digest_size=16).hexdigest()}"')


def _paths_above(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition("/")[0]
        yield path


def _view_stored(path: str, stored: StoredNode) -> ViewedNode:
    if stored.array is None:
        return ViewedNode(stored.node_id, path, stored.document, None)
    shape = stored.array.grid
    try:
        keys = chunk_keys(parse_json(stored.document).get("chunk_key_encoding"), len(shape))
    except (ValueError, AttributeError):
        keys = ChunkKeys("c/", "/", len(shape))  # the library uses one encoding
    chunks = Chunks(keys, shape, stored.array.manifests)
    return ViewedNode(stored.node_id, path, stored.document, chunks)


@lru_cache(maxsize=512)
def may_have_shards(document: bytes) -> bool:
    """Return `True` if chunks of the array with this ``zarr.json`` may hold inner chunks."""
    try:
        return has_sharding(read_document(document).get("codecs"))
    except DecodeError:
        return True


@lru_cache(maxsize=512)
def read_chunks(document: bytes) -> Chunks | None:
    """Read the chunk grid of an array's ``zarr.json``; `None` for a group. Raises: `DecodeError`.
    The chunks have no manifests.
    """
    if (grid := read_grid(document)) is None:
        return None
    node = read_document(document)
    keys = chunk_keys(node.get("chunk_key_encoding"), len(grid.array.grid))
    if (keys.prefix, keys.separator) != ("c/", "/"):
        raise DecodeError("the chunk key encoding is not default with the separator /")
    return Chunks(keys, grid.array.grid)


def put_node(view: SessionView, path: str, document: bytes, new_id: bytes) -> SessionDocument:
    """Set the metadata of the node at *path*; a new node gets *new_id*. A new one replaces a node,
    and all below it, whose kind or number of dimensions changes. Raises: `BadBodyError`,
    `ConflictError` where an array is above, or nodes below an array.
    """
    try:
        document.decode()
        chunks = read_chunks(document)
    except DecodeError as error:
        raise BadBodyError(f"{path}/zarr.json: {error}") from None
    except UnicodeDecodeError:
        raise BadBodyError(f"{path}/zarr.json: not UTF-8") from None
    for above in _paths_above(path):
        if (node := view.node(above)) is not None and node.chunks is not None:
            raise ConflictError(f"/{above} is an array: there is no node in it, such as /{path}")
    old = view.node(path)
    if old is not None and old.document == document:
        return view.session  # no change for the library either
    if old is not None and _can_keep_chunks(old.chunks, chunks):
        return _with_nodes(view, {path: ChangedNode(old.node_id, document)})
    if old is None and chunks is not None and any(view.below(path)):
        raise ConflictError(f"/{path} has nodes below: it cannot be an array")
    gone: dict[str, ChangedNode | None] = dict.fromkeys([] if old is None else view.below(path))
    return _with_nodes(view, {**gone, path: ChangedNode(new_id, document)})


def delete_nodes(view: SessionView, path: str) -> SessionDocument:
    """Delete the node at *path* and all nodes below it."""
    return _with_nodes(view, dict.fromkeys([path, *view.below(path)]))


def make_changes(view: SessionView, chunks: Mapping[bytes, ChunkChanges]) -> ChangeSet:
    """Return the change set of the session; *chunks* are of its arrays. Raises: `ConflictError`."""
    new, updated, deleted = {}, {}, set()
    for path, changed in view.session.nodes.items():
        stored = view.parent.nodes.get(f"/{path}")
        if stored is not None and (changed is None or changed.node_id != stored.node_id):
            deleted.add(stored.node_id)
        if changed is None:
            continue
        if stored is None or changed.node_id != stored.node_id:
            above = path.rpartition("/")[0]
            if path and view.node(above) is None:
                raise ConflictError(
                    f"there is no group /{above} for /{path}: its zarr.json is missing"
                )
            new[changed.node_id] = NodeDocument(f"/{path}", changed.document)
        else:
            updated[changed.node_id] = changed.document
    return ChangeSet(new, updated, frozenset(deleted), chunks=chunks)


def _can_keep_chunks(old: Chunks | None, new: Chunks | None) -> bool:
    if old is None or new is None:
        return old is new
    return len(old.grid) == len(new.grid)


def _with_nodes(view: SessionView, changed: Mapping[str, ChangedNode | None]) -> SessionDocument:
    """Insert *changed*; a deleted node is listed only if the parent has it."""
    nodes = {**view.session.nodes, **changed}
    for path, node in changed.items():
        if node is None and f"/{path}" not in view.parent.nodes:
            nodes.pop(path)
    return replace(view.session, nodes=nodes)
