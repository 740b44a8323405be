"""What requests for commits say, apart from what they change."""

import re
from hashlib import blake2b
from typing import Any, Final, Literal

import orjson
from pydantic import BaseModel, ValidationError

from app.errors import BadBodyError, BadHeaderError

_KEY: Final = re.compile(r"[\x21-\x7e]{1,255}")


class CommitOptions(BaseModel, use_attribute_docstrings=True, extra="forbid", strict=True):
    """How something is committed."""

    message: str
    metadata: dict[str, Any] = {}
    """What else is told of the commit; `__icechunk` and `__shardgate` are reserved names."""
    on_conflict: Literal["fail", "ours", "theirs"] = "fail"
    """Which chunks count where others have committed the same ones since the parent: none, so
    that the answer is 409, those of this commit, or theirs. Other conflicts always are 409."""
    amend: bool = False
    """Take the place of the last commit of the branch, which has to be the parent."""
    allow_empty: bool = False
    """Commit even if nothing changes."""


class CommitBody(CommitOptions):
    """A commit without a session."""

    branch: str = "main"
    parent_id: str | None = None
    """The snapshot that the changes are made against; by default the one the branch is at."""
    changes: list[Any]
    """What changes, one after the other. Paths are absolute, such as `/a/b`. Each is one of

    - `{"op": "put_node", "path", "metadata"}`: `metadata` is the `zarr.json` of an array or group.
    - `{"op": "delete_node", "path"}`: with all that is below it.
    - `{"op": "put_chunks", "path", "chunks": [...]}`, of which each is one of
      `{"coords": [0, 1], "chunk_id", "offset", "length"}` (a part of what was posted to `/chunks`;
      `offset` is 0 by default), `{"coords", "inline"}` (base64) and
      `{"coords", "location", "offset", "length", "etag" or "last_modified"}` (a part of an object
      below an allowed prefix and in a virtual chunk container of the repository; what it has to
      be may be told, the time in RFC 3339).
    - `{"op": "put_chunks", "path", "coords": [[0, 1], ...], "chunk_ids": [...], "lengths": [...]}`:
      the same for many chunks of one kind, in columns: `chunk_ids`, `offsets`, `lengths`, or
      `inlines`, or `locations`, `offsets`, `lengths`, `etags`, `last_modified`.
    - `{"op": "delete_chunks", "path", "coords": [[0, 1], ...]}`

    Coordinates are of the chunks that are stored: of shards, where an array is sharded.
    """


class Committed(BaseModel, use_attribute_docstrings=True):
    """A new snapshot."""

    snapshot_id: str
    parent_id: str | None
    """The commit before it, which is another than was expected after a rebase."""


class WrittenChunk(BaseModel, use_attribute_docstrings=True):
    """A chunk that no commit refers to as yet."""

    chunk_id: str
    length: int


def parse_commit(body: bytes) -> CommitBody:
    """Read the body of a commit; what it changes is not looked at.

    Raises: `BadBodyError`.
    """
    try:
        return CommitBody.model_validate(orjson.loads(body))
    except orjson.JSONDecodeError as error:
        raise BadBodyError(f"no JSON: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise BadBodyError(f"{where}: {first['msg']}") from None


def parse_key(key: str | None) -> str | None:
    """Make the id of a write of the header ``Idempotency-Key``.

    Raises: `BadHeaderError`.
    """
    if key is None:
        return None
    if not _KEY.fullmatch(key):
        raise BadHeaderError("Idempotency-Key: up to 255 characters of ASCII, without spaces")
    return f"key-{blake2b(key.encode(), digest_size=16).hexdigest()}"
