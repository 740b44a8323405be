"""The document of a session: where it began, how it stands, and which nodes it has changed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypedDict

import orjson
import zstandard
from pydantic import ConfigDict, TypeAdapter

from app.formats.compression import decompress_zstd
from app.formats.documents import json_memory_nbytes
from app.formats.icechunk.ids import NODE_ID_NBYTES, decode_id, encode_id
from app.formats.reading import DecodeError

_FORMAT: Final = 1
_MEMORY_PER_BYTE: Final = 4
"""Of the limit, for the parsed document."""


class Open(NamedTuple):
    """Keys can be written."""


class Sealed(NamedTuple):
    """A commit is under way: nothing is written until it has ended."""

    until_s: float
    """When others may take it for broken off, and go on with it."""
    by: str
    """Tells the one who commits from others."""


class Committed(NamedTuple):
    """It is committed, and takes no more."""

    snapshot_id: str
    parent_id: str | None
    """Of the snapshot: not where the session began, if others committed meanwhile."""
    key: str | None
    """What the request was told by that committed it."""


class Discarded(NamedTuple):
    """It is about to be removed, and there for nobody."""


type State = Open | Sealed | Committed | Discarded

OPEN: Final = Open()


class ChangedNode(NamedTuple):
    """An array or group that is not in the parent, or has other metadata there."""

    node_id: bytes
    document: bytes
    """Its ``zarr.json``, as it is stored."""


@dataclass(frozen=True, slots=True)
class SessionDocument:
    """All of a session but its chunks; times are seconds since 1970 began, UTC."""

    branch: str
    parent_id: str
    """The snapshot that it began with."""
    inline_nbytes: int
    """Larger chunks have files of their own."""
    created_at_s: float
    expires_at_s: float
    state: State = OPEN
    attempt: int = 0
    """How many commits of it have failed, so that none is taken for another."""
    nodes: Mapping[str, ChangedNode | None] = field(default_factory=dict)
    """By paths without a slash in front; `None` of those that the parent has and the session not.

    All that are below a path which is gone, or of another kind, are told of too.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the value holds, roughly."""
        return 1024 + sum(512 + len(node.document) for node in self.nodes.values() if node)


def encode_session(session: SessionDocument) -> bytes:
    """Spell *session*."""
    document = {
        "format": _FORMAT,
        "branch": session.branch,
        "parent_id": session.parent_id,
        "inline_nbytes": session.inline_nbytes,
        "created_at_s": session.created_at_s,
        "expires_at_s": session.expires_at_s,
        "state": {"is": type(session.state).__name__.lower(), **session.state._asdict()},
        "attempt": session.attempt,
        "nodes": {path: _spell_node(node) for path, node in session.nodes.items()},
    }
    return zstandard.compress(orjson.dumps(document))


def decode_session(data: bytes, limit_nbytes: int) -> SessionDocument:
    """Read a session, which takes at most *limit_nbytes* inflated.

    Raises: `DecodeError`.
    """
    try:
        text = decompress_zstd(data, limit_nbytes)
        if json_memory_nbytes(text) > limit_nbytes * _MEMORY_PER_BYTE:
            raise DecodeError(f"too many values in {len(text)} bytes")
        return _read_session(orjson.loads(text))
    except ValueError as error:
        raise DecodeError(f"no session: {error!r:.80}") from None


class _StoredNode(TypedDict):
    node_id: str
    document: str


class _Stored(TypedDict):
    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")  # type: ignore[misc]
    format: int
    branch: str
    parent_id: str
    inline_nbytes: int
    created_at_s: float
    expires_at_s: float
    state: dict[str, str | float | None]
    attempt: int
    nodes: dict[str, _StoredNode | None]


_STORED: Final = TypeAdapter(_Stored)
_STATES: Final[Mapping[object, TypeAdapter[Any]]] = {
    each.__name__.lower(): TypeAdapter(each) for each in (Open, Sealed, Committed, Discarded)
}


def _read_session(document: Any) -> SessionDocument:
    if isinstance(document, dict) and document.get("format", _FORMAT) != _FORMAT:
        raise DecodeError("the session was written by a later release")
    stored = _STORED.validate_python(document)
    name = stored["state"].pop("is", None)
    if name not in _STATES:
        raise DecodeError("the session is in no state")
    return SessionDocument(
        stored["branch"],
        stored["parent_id"],
        stored["inline_nbytes"],
        stored["created_at_s"],
        stored["expires_at_s"],
        _STATES[name].validate_python(stored["state"]),
        stored["attempt"],
        {path: _read_node(node) for path, node in stored["nodes"].items()},
    )


def _spell_node(node: ChangedNode | None) -> dict[str, str] | None:
    if node is None:
        return None
    return {"node_id": encode_id(node.node_id), "document": node.document.decode()}


def _read_node(node: _StoredNode | None) -> ChangedNode | None:
    if node is None:
        return None
    if (node_id := decode_id(node["node_id"], NODE_ID_NBYTES)) is None:
        raise DecodeError("a node of the session has no id")
    return ChangedNode(node_id, node["document"].encode())
