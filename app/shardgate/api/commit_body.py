"""Bodies of commits: options, and edits of nodes and chunks.

Chunks are read as columns, not as objects: one request may set a million of them.
"""

import json
from base64 import b64decode
from collections.abc import Callable, Hashable, Sequence
from datetime import datetime
from io import BytesIO
from itertools import chain
from math import ceil
from typing import Annotated, Any, Final, Literal

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, FailFast, Field, TypeAdapter, ValidationError

from shardgate.errors import BadBodyError, TooLargeError
from shardgate.formats.icechunk.changes import DeleteNode, Edit, MoveNode, PutNode, SetChunks
from shardgate.formats.icechunk.coords import Coords, sort_columns
from shardgate.formats.icechunk.ids import decode_ids
from shardgate.formats.icechunk.manifest import MAX_LOCATION_NBYTES, STRONG_ETAG, PayloadKind
from shardgate.formats.icechunk.payloads import Payloads
from shardgate.formats.icechunk.snapshot import is_node_path
from shardgate.model import MAX_KEY_NBYTES
from shardgate.server.body import RequestDocument, first_fault

JSON_LINES: Final = "application/x-ndjson"
# Longest JSON text of a commit: no other thread runs while it is parsed.
_MAX_JSON_NBYTES: Final = 2 * 1024**2
_MAX_DIMENSIONS: Final = 64
_STOP: Final = 2**63
_COLUMNS: Final = {
    "coords": "coords",
    "chunk_id": "chunk_ids",
    "offset": "offsets",
    "length": "lengths",
    "inline": "inlines",
    "location": "locations",
    "etag": "etags",
    "last_modified": "last_modified",
}
_KINDS: Final = ("chunk_id", "inline", "location")
_NATIVE: Final = ("chunk_ids", "lengths")
_VIRTUAL: Final = ("locations", "lengths")
_FORMS: Final = (
    "a chunk has coords and inline; or chunk_id, offset, length; or location, offset, length, and "
    "optionally etag or last_modified"
)


class CommitOptions(RequestDocument):
    """Options of a commit."""

    message: str
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Metadata of the snapshot; the names `__icechunk` and `__shardgate` are reserved."""
    on_conflict: Literal["fail", "ours", "theirs"] = "fail"
    """Which chunks win where others have committed the same ones since the parent: none, so that
    the answer is 409, those of this commit, or theirs. Other conflicts always are 409."""
    amend: bool = False
    """Replace the last commit of the branch, which must be the parent."""
    allow_empty: bool = False
    """Commit even if nothing changes."""


class SessionCommitOptions(CommitOptions):
    """Options of the commit of a session."""

    detached: bool = False
    """Make a snapshot that no branch leads to, instead of a commit to the branch."""


class DirectCommitOptions(CommitOptions):
    """Options of a commit without a session."""

    branch: str | None = "main"
    """Without one (`null`) the snapshot is detached: no branch leads to it, and `parent_id` is its
    parent."""
    parent_id: str | None = None
    """The snapshot that the changes are made against; by default the tip of the branch."""


class CommitBody(DirectCommitOptions):
    """A commit without a session."""

    changes: list[Any]
    """Changes, applied in order. Paths are absolute, such as `/a/b`. Each is one of

    - `{"op": "put_node", "path", "metadata"}`: `metadata` is the `zarr.json` of an array or group.
    - `{"op": "delete_node", "path"}`: with all nodes below it.
    - `{"op": "move_node", "path", "to"}`: with all nodes below it, to a path where the parent has
      no node, in a group that exists. Chunks stay where they are.
    - `{"op": "put_chunks", "path", "chunks": [...]}`, where each chunk is one of
      `{"coords": [0, 1], "chunk_id", "offset", "length"}` (a part of what was posted to `/chunks`;
      `offset` is 0 by default), `{"coords", "inline"}` (base64) and
      `{"coords", "location", "offset", "length", "etag" or "last_modified"}` (a part of an object
      below an allowed prefix and in a virtual chunk container of the repository; its version is
      optional, the time is in RFC 3339).
    - `{"op": "put_chunks", "path", "coords": [[0, 1], ...], "chunk_ids": [...], "lengths": [...]}`:
      the same for many chunks of one kind, in columns: `chunk_ids`, `offsets`, `lengths`, or
      `inlines`, or `locations`, `offsets`, `lengths`, `etags`, `last_modified`.
    - `{"op": "delete_chunks", "path", "coords": [[0, 1], ...]}`

    Coordinates are of the chunks that are stored: of shards, where an array is sharded.
    """


def parse_commit(body: bytes) -> tuple[DirectCommitOptions, list[Edit]]:
    """Parse the JSON body of a commit. Raises: `TooLargeError`, `BadBodyError`."""
    if len(body) > _MAX_JSON_NBYTES:
        raise TooLargeError(
            f"the body has {len(body)} bytes, and as JSON may have {_MAX_JSON_NBYTES}: send more "
            f"with Content-Type: {JSON_LINES}, the options on the first line and each change on "
            "a line of its own"
        )
    try:
        document = CommitBody.model_validate(_load(body, "the body"))
    except ValidationError as error:
        raise BadBodyError(first_fault(error)) from None
    edits = read_edits(document.changes)
    document.changes.clear()
    return document, edits


def parse_commit_lines(body: bytes) -> tuple[DirectCommitOptions, list[Edit]]:
    """Parse the body of a commit that has its options in the first line, and a change in each
    further line. Raises: `TooLargeError`, `BadBodyError`, with the number of the line.
    """
    options = None
    edits: list[Edit] = []
    for number, line in enumerate(BytesIO(body), 1):
        where = f"line {number}"
        if len(line) > _MAX_JSON_NBYTES:
            raise TooLargeError(
                f"{where} has {len(line)} bytes, and may have {_MAX_JSON_NBYTES}: several lines "
                "may put chunks of one array"
            )
        if not line.strip():
            continue
        if options is not None:
            edits.append(read_edit(_load(line, where), where))
            continue
        try:
            options = DirectCommitOptions.model_validate(_load(line, where))
        except ValidationError as error:
            raise BadBodyError(f"{where}: {first_fault(error)}") from None
    if options is None:
        raise BadBodyError("the body has no line with the options of the commit")
    return options, edits


def _load(text: bytes, where: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadBodyError(f"{where} is not JSON: {error}") from None


type _Values[T] = Annotated[list[T], FailFast()]
type _Offset = Annotated[int, Field(ge=0, lt=_STOP)]
type _Length = Annotated[int, Field(gt=0, lt=_STOP)]


class ChunkColumns(BaseModel, extra="forbid", strict=True):
    """Payloads of one kind, as the columns of a JSON document."""

    inlines: _Values[str] = []
    chunk_ids: _Values[str] = []
    locations: _Values[str] = []
    offsets: _Values[_Offset | None] = []
    lengths: _Values[_Length] = []
    etags: _Values[str | None] = []
    last_modified: _Values[str | None] = []

    def payloads(self, count: int) -> Payloads:
        """Return the payloads of *count* chunks. Raises: `BadBodyError`."""
        names = self.model_fields_set & ChunkColumns.model_fields.keys()
        for name in names:
            if len(getattr(self, name)) != count:
                raise BadBodyError(f"{name} is a list of {count}, as many as the coords")
        if names == {"inlines"}:
            values = _map(_inline, self.inlines)
            return Payloads.of_columns(PayloadKind.INLINE, count, values=values)
        if {*_NATIVE} <= names <= {*_NATIVE, "offsets"}:
            return self._natives(count)
        if {*_VIRTUAL} <= names <= {*_VIRTUAL, "offsets", "etags", "last_modified"}:
            return self._virtuals(count)
        raise BadBodyError(_FORMS)

    def _natives(self, count: int) -> Payloads:
        if (ids := decode_ids(self.chunk_ids)) is None:
            raise BadBodyError("a chunk_id is spelled as in the response of POST /chunks")
        start, length = self._ranges()
        kind = PayloadKind.NATIVE
        return Payloads.of_columns(kind, count, chunk_ids=ids, start=start, length=length)

    def _virtuals(self, count: int) -> Payloads:
        etags = _map(_etag, self.etags)
        modified = _map(_moment, self.last_modified)
        if any(etag and time for etag, time in zip(etags, modified, strict=False)):
            raise BadBodyError("a chunk has both etag and last_modified")
        start, length = self._ranges()
        return Payloads.of_columns(
            PayloadKind.LOCATION,
            count,
            values=_map(_location, self.locations),
            etags=etags,
            start=start,
            length=length,
            modified=modified or 0,
        )

    def _ranges(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return where byte ranges start, and their lengths."""
        # All ranges start at 0 if there are no offsets.
        start = np.array([each or 0 for each in self.offsets] or 0, np.uint64)
        length = np.array(self.lengths, np.uint64)
        if (start + length >= _STOP).any():  # both are below 2^63: the sum does not overflow
            raise BadBodyError("a chunk ends past 2^63")
        return start, length


def read_edits(items: Sequence[Any]) -> list[Edit]:
    """Read the list ``changes`` of a request. Raises: `BadBodyError`, with its position."""
    return [read_edit(item, f"changes[{number}]") for number, item in enumerate(items)]


def read_edit(item: Any, where: str) -> Edit:
    """Read one change. Raises: `BadBodyError`, which says *where* it is in the request."""
    try:
        return _ITEM.validate_python(item).edit()
    except ValidationError as error:
        raise BadBodyError(f"{where}: {first_fault(error)}") from None
    except BadBodyError as error:
        raise BadBodyError(f"{where}: {error}") from None


def _check_path(path: str) -> str:
    if not is_node_path(path) or "\0" in path:
        raise BadBodyError(f"{path[:80]!r} is no path of a node, such as /a/b")
    if len(path.encode()) > MAX_KEY_NBYTES:
        raise BadBodyError(f"{path[:80]!r}… is longer than keys, of {MAX_KEY_NBYTES} bytes, can be")
    return path


type _NodePath = Annotated[str, AfterValidator(_check_path)]


class _PutNodeItem(BaseModel, extra="forbid", strict=True):
    op: Literal["put_node"]
    path: _NodePath
    metadata: dict[str, Any]

    def edit(self) -> PutNode:
        node_type = self.metadata.get("node_type")
        if node_type not in ("array", "group"):
            raise BadBodyError("metadata.node_type is array or group")
        # orjson reads 1,024 levels, but writes only 254.
        text = json.dumps(self.metadata, separators=(",", ":"))
        return PutNode(self.path, text.encode(), node_type == "array")


class _DeleteNodeItem(BaseModel, extra="forbid", strict=True):
    op: Literal["delete_node"]
    path: _NodePath

    def edit(self) -> DeleteNode:
        return DeleteNode(self.path)


class _MoveNodeItem(BaseModel, extra="forbid", strict=True):
    op: Literal["move_node"]
    path: _NodePath
    to: _NodePath

    def edit(self) -> MoveNode:
        return MoveNode(self.path, self.to)


class _PutChunksItem(ChunkColumns):
    op: Literal["put_chunks"]
    path: _NodePath
    coords: list[Any] = Field([])
    chunks: list[Any] | None = None
    """Chunks as objects, instead of columns."""

    def edit(self) -> SetChunks:
        if self.chunks is None:
            coords = read_coords(self.coords)
            return SetChunks(self.path, coords, self.payloads(len(coords)))
        if self.model_fields_set != {"op", "path", "chunks"}:
            raise BadBodyError("put_chunks has either chunks or columns")
        return SetChunks(self.path, *_read_entries(self.chunks))


class _DeleteChunksItem(BaseModel, extra="forbid", strict=True):
    op: Literal["delete_chunks"]
    path: _NodePath
    coords: list[Any]

    def edit(self) -> SetChunks:
        coords = read_coords(self.coords)
        return SetChunks(self.path, coords, Payloads.gone(len(coords)))


type _EditItem = _PutNodeItem | _DeleteNodeItem | _MoveNodeItem | _PutChunksItem | _DeleteChunksItem

_ITEM: Final[TypeAdapter[_EditItem]] = TypeAdapter(Annotated[_EditItem, Field(discriminator="op")])


def _read_entries(entries: list[Any]) -> tuple[Coords, Payloads]:
    """Read chunks that are objects; those of one kind follow one another."""
    if not {dict}.issuperset(map(type, entries)):
        raise BadBodyError("chunks is a list of objects")
    # A million chunks have few combinations of members.
    shapes = set(map(tuple, entries))
    for shape in shapes:
        if not {"coords"} <= set(shape) <= _COLUMNS.keys() or sum(map(shape.count, _KINDS)) != 1:
            raise BadBodyError(f"a chunk has coords and one of {', '.join(_KINDS)}")
    coords: list[Any] = []
    payloads: list[Payloads] = []
    for kind in _KINDS:
        some = [entry for entry in entries if kind in entry]
        coords += [entry["coords"] for entry in some]
        names = set[str]().union(*(shape for shape in shapes if kind in shape)) - {"coords"}
        columns = {_COLUMNS[name]: [entry.get(name) for entry in some] for name in names}
        if some:
            payloads.append(ChunkColumns.model_validate(columns).payloads(len(some)))
    return read_coords(coords), Payloads.joined(payloads)


def read_coords(value: list[Any]) -> Coords:
    """Read a JSON list of distinct chunk coordinates. Raises: `BadBodyError`."""
    what = "coords are lists of whole numbers from 0, all of one length"
    if not {list}.issuperset(map(type, value)):
        raise BadBodyError(what)
    ndims = set(map(len, value)) or {0}
    numbers = list(chain.from_iterable(value))
    if len(ndims) > 1 or max(ndims) > _MAX_DIMENSIONS or not {int}.issuperset(map(type, numbers)):
        raise BadBodyError(what)
    try:
        coords = np.array(numbers, np.uint32).reshape(len(value), max(ndims))
    except OverflowError:
        raise BadBodyError(what) from None
    order, first = sort_columns(np.ascontiguousarray(coords.T))
    if not first.all():
        repeated = coords[order[~first][0]].tolist()
        raise BadBodyError(f"chunk {repeated} is listed twice")
    return coords


def _map[S: Hashable, T](convert: Callable[[S], T], values: Sequence[S]) -> list[T]:
    """Convert *values*, each distinct one once."""
    found = {value: convert(value) for value in dict.fromkeys(values)}
    return list(map(found.__getitem__, values))


def _inline(text: str) -> bytes:
    try:
        data = b64decode(text, validate=True)
    except ValueError:
        data = b""
    if not data:
        raise BadBodyError("an inline chunk is base64, of one byte at least")
    return data


def _location(text: str) -> bytes:
    if len(location := text.encode()) > MAX_LOCATION_NBYTES:
        raise BadBodyError(f"a location is a URL of up to {MAX_LOCATION_NBYTES} bytes")
    return location


def _etag(text: str | None) -> bytes:
    if text is None:
        return b""
    opaque = text.removeprefix('"').removesuffix('"')
    if not opaque or not STRONG_ETAG.fullmatch(opaque):
        raise BadBodyError(f"{text[:80]!r} is no strong entity tag")
    return f'"{opaque}"'.encode()


def _moment(text: str | None) -> int:
    """Read a time of RFC 3339, rounded up to whole seconds."""
    if text is None:
        return 0
    try:
        moment = datetime.fromisoformat(text)
        epoch_s = ceil(moment.timestamp()) if moment.tzinfo is not None else 0
    except ValueError:
        epoch_s = 0
    if not 0 < epoch_s < 2**32:  # manifests have 32 bits for it
        raise BadBodyError(f"{text[:80]!r} is no time such as 2026-01-31T12:00:00Z")
    return epoch_s
