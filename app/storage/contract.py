"""What every store owes its callers."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from app.model import ByteRange, ByteRequest, Condition, ETag, ObjectRef, Piece


class ObjectHeaders(NamedTuple):
    """Headers that an object is stored with."""

    is_gzip: bool = False
    """Whether its ``Content-Encoding`` is gzip."""
    content_type: str = ""
    metadata: tuple[tuple[str, str], ...] = ()
    """User metadata of S3: names without ``x-amz-meta-``, and values."""

    @property
    def nbytes(self) -> int:
        """Bytes of text in it."""
        return len(self.content_type) + sum(len(name) + len(value) for name, value in self.metadata)


NO_HEADERS: Final = ObjectHeaders()


@dataclass(frozen=True, slots=True)
class Stat:
    """The size in bytes and the version of an object."""

    size: int
    etag: ETag
    is_gzip: bool = False
    """Whether it was stored with ``Content-Encoding: gzip``."""
    modified_s: int | None = field(default=None, compare=False)
    """When it was last modified, where the store tells: whole seconds since 1970 began in UTC."""
    headers: ObjectHeaders = field(default=NO_HEADERS, compare=False)


@dataclass(frozen=True, slots=True)
class Found:
    """Bytes of an object: *byte_range* of *size* bytes, all from the version *etag*."""

    data: bytes
    byte_range: ByteRange
    size: int
    etag: ETag
    is_gzip: bool = False
    """Whether the object was stored with ``Content-Encoding: gzip``."""
    modified_s: int | None = field(default=None, compare=False)
    """When it was last modified; see `Stat`."""
    headers: ObjectHeaders | Mapping[bytes, bytes] = field(default=NO_HEADERS, compare=False)
    """Of the object, or of the answer, which `object_headers` reads."""


@dataclass(frozen=True, slots=True)
class NotModified:
    """The object still is the version the caller knows."""


NOT_MODIFIED: Final = NotModified()


@dataclass(frozen=True, slots=True)
class Listed:
    """An object, or a common prefix (its key ends in ``/``), below a listed prefix."""

    ref: ObjectRef
    size: int | None
    """Bytes of the object; `None` for a prefix."""
    etag: ETag | None = None
    """The version, where the listing tells the one that a read tells."""
    modified_s: float | None = None
    """When it was last modified, in seconds since 1970 began in UTC."""


@dataclass(frozen=True, slots=True)
class Absent:
    """Stands for the version of an object that does not exist."""


ABSENT: Final = Absent()

type Expected = ETag | Absent | None
"""The only version that may be replaced; `None` is whatever is there."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """The object is in another version than was expected, and has not been touched."""


CONFLICT: Final = Conflict()

TEMPORARY: Final = ".shardgate-"
"""Stands in the names of our own unfinished objects; nothing lists them."""
UPLOADS: Final = f"{TEMPORARY}uploads/"
"""The folder of what comes in parts: the only names with that mark which callers may write.

It is listed by who names it.
"""


class ObjectWriter(Protocol):
    """Replaces objects by compare-and-swap. Losing is a value; every failure a `StorageError`.

    What is answered is durable. Of a write that fails nobody knows whether it was done; one whose
    answer was lost is looked for before it is called lost or a conflict.
    """

    async def demand_safety(self, root: ObjectRef) -> None:
        """Return if this store was seen to refuse a wrong precondition below *root*.

        Raises: `UnwritableError`, `StorageError`.
        """
        ...

    def keeps_headers(self, ref: ObjectRef) -> bool:
        """Return whether an object can be stored with other headers than none."""
        ...

    async def put(
        self,
        ref: ObjectRef,
        pieces: Sequence[Piece],
        *,
        expected: Expected,
        headers: ObjectHeaders = NO_HEADERS,
    ) -> ETag | Conflict:
        """Make *pieces*, one behind the other, the object; give its version.

        Ranges are of the version *expected*, which then is an ETag. Others may have written on top
        by the time that the answer is here: then nothing is in the version that is given, which
        can be used as any other that was replaced.

        Raises: `BadKeyError` for what can be the name of no object, `ConflictError` where a
        file stands in the way of a folder or a folder in that of a file, `UnwritableError`,
        `StorageError`.
        """
        ...

    async def delete(self, ref: ObjectRef, *, expected: ETag | None) -> bool | Conflict:
        """Remove *ref*; tell whether it is gone, or the store cannot remove just that version.

        What was gone before is either gone, or in another version than was expected.
        """
        ...


class ObjectReader(Protocol):
    """Reads objects. Absence is `None`; every failure is a `StorageError`.

    The version of an answer is the one of all its bytes. A read with a condition gets what that
    holds of or `VersionChangedError`, even from a server that ignores ``If-Match`` and
    ``If-Unmodified-Since``, and the same if the object is gone or does not tell its time.
    """

    async def get(
        self,
        ref: ObjectRef,
        request: ByteRequest | None = None,
        *,
        if_match: Condition | None = None,
        if_none_match: ETag | None = None,
    ) -> Found | NotModified | None:
        """Read *request* of *ref*, or all of it, into memory.

        A range that ends past the object is clamped; one that begins there, or any suffix of an
        empty object, raises `RangeNotSatisfiedError`, or `VersionChangedError` where there is a
        condition *if_match*. `NotModified` answers *if_none_match* only.
        """
        ...

    def stream(
        self, ref: ObjectRef, byte_range: ByteRange, *, if_match: Condition | None
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Read exactly *byte_range* of one version piece by piece.

        Entering raises what `get` raises, and `VersionChangedError` where the object is absent or
        too short, also without a condition; a fault in the middle raises from the iterator.
        """
        ...

    async def stat(self, ref: ObjectRef) -> Stat | None:
        """Ask for size and version without reading."""
        ...

    def list(
        self, prefix: ObjectRef, *, delimiter: str = "", after: str = ""
    ) -> AsyncIterator[Listed]:
        """List what has a key that begins like *prefix*, and comes behind the key *after*, by key.

        With the *delimiter* ``/`` keys that have it behind the prefix are rolled up into common
        prefixes, which come behind *after* by their own text.
        """
        ...

    async def reach(self, root: ObjectRef) -> None:
        """Return if the bucket or folder of *root* can be reached, else raise."""
        ...

    async def aclose(self) -> None:
        """Give connections and descriptors back."""
        ...


class ObjectStore(ObjectReader, ObjectWriter, Protocol):
    """Reads and writes objects."""
