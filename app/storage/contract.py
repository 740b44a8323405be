"""Interface of object stores, and the values that pass through it."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, NotRequired, Protocol, TypedDict

from app.model import ByteRange, ByteRequest, Condition, ETag, ObjectRef, Piece


class ObjectHeaders(NamedTuple):
    """Headers that an object is stored with."""

    is_gzip: bool = False
    """True if ``Content-Encoding`` is gzip."""
    content_type: str = ""
    metadata: tuple[tuple[str, str], ...] = ()
    """User metadata of S3: pairs of a name without ``x-amz-meta-`` and a value."""

    @property
    def nbytes(self) -> int:
        return len(self.content_type) + sum(len(name) + len(value) for name, value in self.metadata)


NO_HEADERS: Final = ObjectHeaders()


@dataclass(frozen=True, slots=True)
class Stat:
    """Size in bytes and version of an object."""

    size: int
    etag: ETag
    is_gzip: bool = False
    modified_s: int | None = field(default=None, compare=False)
    """Time of the last modification in whole seconds since the Unix epoch, if known."""
    headers: ObjectHeaders = field(default=NO_HEADERS, compare=False)


@dataclass(frozen=True, slots=True)
class Found:
    """The bytes *byte_range* of an object of *size* bytes in the version *etag*."""

    data: bytes
    byte_range: ByteRange
    size: int
    etag: ETag
    is_gzip: bool = False
    modified_s: int | None = field(default=None, compare=False)
    headers: ObjectHeaders | Mapping[bytes, bytes] = field(default=NO_HEADERS, compare=False)
    """Headers of the object, or raw response headers for `object_headers` to parse."""


@dataclass(frozen=True, slots=True)
class NotModified:
    """The object is still in the version that the caller knows."""


NOT_MODIFIED: Final = NotModified()


@dataclass(frozen=True, slots=True)
class Listed:
    """An object, or a common prefix (its key ends in ``/``), below a listed prefix."""

    ref: ObjectRef
    size: int | None
    """Bytes of the object; `None` for a prefix."""
    etag: ETag | None = None
    """The ETag that a read returns too, if the listing has it."""
    modified_s: float | None = None
    """Time of the last modification in seconds since the Unix epoch."""


@dataclass(frozen=True, slots=True)
class Absent:
    """Version of an object that does not exist."""


ABSENT: Final = Absent()

type Expected = ETag | Absent | None
"""The version that a write may replace; `None` is any, also none."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """The object was not written: it is not in the expected version."""


CONFLICT: Final = Conflict()

TEMPORARY: Final = ".shardgate-"
"""Marks the names of unfinished objects of the service, which are never listed."""
UPLOADS: Final = f"{TEMPORARY}uploads/"
"""Folder of multipart uploads: the only names with that mark that callers may write and list."""

type WriteWay = Literal["put", "copy"]
"""``put``: all bytes were sent; ``copy``: the server copied some of them itself."""


class WriteNotice(NamedTuple):
    """Bytes that one write of an object moved."""

    sent: int = 0
    fetched: int = 0
    """Bytes of the old object that were read to be sent again."""
    copied: int = 0
    """Bytes that the server copied."""


type OnWrite = Callable[[WriteWay, ObjectRef, WriteNotice], None]
"""Called on the event loop after each write to S3, also a failed one."""


class ReadConditions(TypedDict, total=False):
    """Keyword arguments of `ObjectReader.get`."""

    if_match: Condition | None
    if_none_match: ETag | None


class WriteOptions(TypedDict):
    """Keyword arguments of `ObjectWriter.put`."""

    expected: Expected
    headers: NotRequired[ObjectHeaders]


class ObjectWriter(Protocol):
    """Replaces objects by compare-and-swap. A lost race is a return value, a failure an exception.

    A write that returns is durable. A write that raises may or may not have been done; one whose
    response was lost is looked for before it is reported as failed or as a conflict.
    """

    async def verify_conditional_writes(self, root: ObjectRef) -> None:
        """Return if this store refuses writes below *root* whose precondition does not hold.

        Raises: `UnwritableError`, `StorageError`.
        """

    def keeps_headers(self, ref: ObjectRef) -> bool:
        """Return whether *ref* can be stored with headers."""

    async def put(
        self,
        ref: ObjectRef,
        pieces: Sequence[Piece],
        *,
        expected: Expected,
        headers: ObjectHeaders = NO_HEADERS,
    ) -> ETag | Conflict:
        """Write the concatenated *pieces* as the object and return its version.

        Ranges among *pieces* refer to the version *expected*, which then is an ETag. If the object
        is replaced by another writer before this returns, no object has the returned ETag.

        Raises: `BadKeyError` if the key cannot name an object, `ConflictError` if a file is in the
        place of a folder or a folder in the place of a file, `UnwritableError`, `StorageError`.
        """

    async def delete(self, ref: ObjectRef, *, expected: ETag | None) -> bool | Conflict:
        """Remove *ref*; return `False` if the store cannot remove one version only.

        Removing an absent object returns `True` or `CONFLICT`.
        """


class ObjectReader(Protocol):
    """Reads objects. Absence is `None`; every failure is a `StorageError`.

    All bytes of a result are of the version that it names. A read with a condition raises
    `VersionChangedError` unless the condition holds, also if the server ignores ``If-Match`` and
    ``If-Unmodified-Since``, if the object is gone, or if its modification time is unknown.
    """

    async def get(
        self,
        ref: ObjectRef,
        request: ByteRequest | None = None,
        *,
        if_match: Condition | None = None,
        if_none_match: ETag | None = None,
    ) -> Found | NotModified | None:
        """Read the range *request* of *ref*, or the whole object, into memory.

        A range that ends past the object is clamped. A range that begins past the object, or a
        suffix of an empty object, raises `RangeNotSatisfiedError`, or `VersionChangedError` with a
        condition *if_match*. `NotModified` is returned only if *if_none_match* is the version.
        """

    def stream(
        self, ref: ObjectRef, byte_range: ByteRange, *, if_match: Condition | None
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Stream exactly *byte_range* of one version.

        Entering raises what `get` raises, and `VersionChangedError` if the object is absent or too
        short, also without a condition. Later failures are raised by the iterator.
        """

    async def stat(self, ref: ObjectRef) -> Stat | None:
        """Return size and version without reading the object."""

    def list(
        self, prefix: ObjectRef, *, delimiter: str = "", after: str = ""
    ) -> AsyncIterator[Listed]:
        """List the objects whose keys start with *prefix* and are greater than *after*, by key.

        With the *delimiter* ``/``, keys that contain it after the prefix are rolled up into common
        prefixes, which are compared with *after* as they are.
        """

    async def check_reachable(self, root: ObjectRef) -> None:
        """Return if the bucket or folder of *root* can be reached. Raises: `StorageError`."""

    async def aclose(self) -> None:
        """Close connections and files."""


class ObjectStore(ObjectReader, ObjectWriter, Protocol):
    """Reads and writes objects."""
