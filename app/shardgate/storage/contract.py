"""Interface of object stores, the values that pass through it, and what all stores share."""

from bisect import bisect_right
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Final, NamedTuple, NotRequired, Protocol, TypedDict

from shardgate.errors import BadKeyError, RangeNotSatisfiedError, VersionChangedError
from shardgate.model import (
    ByteRange,
    ByteRequest,
    Condition,
    ETag,
    ObjectRef,
    Piece,
    SuffixRange,
    UnmodifiedSince,
    coalesce,
)


class ObjectHeaders(NamedTuple):
    """Headers that an object is stored with."""

    coding: str = ""
    """``Content-Encoding``, see `content_coding`; empty for none."""
    content_type: str = ""
    metadata: tuple[tuple[str, str], ...] = ()
    """User metadata of S3: pairs of a name without ``x-amz-meta-`` and a value."""

    @property
    def nbytes(self) -> int:
        own = len(self.coding) + len(self.content_type)
        return own + sum([len(name) + len(value) for name, value in self.metadata])


NO_HEADERS: Final = ObjectHeaders()


@dataclass(frozen=True, slots=True)
class Stat:
    """Size in bytes and version of an object."""

    size: int
    etag: ETag
    coding: str = ""
    modified_s: int | None = field(default=None, compare=False)
    """Time of the last modification in whole seconds since the Unix epoch, if known."""
    headers: ObjectHeaders = field(default=NO_HEADERS, compare=False)


@dataclass(slots=True)  # each read makes one, and a frozen one takes ten times as long to make
class Found:
    """The bytes *byte_range* of an object of *size* bytes in the version *etag*."""

    data: bytes
    byte_range: ByteRange
    size: int
    etag: ETag
    coding: str = ""
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


class WriteNotice(NamedTuple):
    """Bytes that one write of an object moved."""

    sent: int = 0
    fetched: int = 0
    """Bytes of the old object that were read to be sent again."""
    copied: int = 0
    """Bytes that the server copied."""


type OnWrite = Callable[[WriteNotice], None]
"""Called on the event loop after each write over a network, also a failed one."""


OBJECT: Final = "object"
"""Kind of reads and writes of objects that no format describes."""


class ReadOptions(TypedDict, total=False):
    """Keyword arguments of `ObjectReader.get`."""

    if_match: Condition | None
    if_none_match: ETag | None
    kind: str


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
        place of a folder or a folder in the place of a file, or if a lease forbids the write,
        `TooLargeError` and `BadHeaderError` for more bytes or headers than the store takes,
        `UnwritableError`, `StorageError`.
        """

    async def delete(self, ref: ObjectRef, *, expected: Expected) -> bool | Conflict:
        """Remove *ref*; return `False` if the store cannot remove one version only.

        Removing an absent object returns `True` or `CONFLICT`. With `ABSENT` nothing is removed,
        and a session records that the object is to stay absent.
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
        kind: str = OBJECT,
    ) -> Found | NotModified | None:
        """Read the range *request* of *ref*, or the whole object, into memory.

        A range that ends past the object is clamped. A range that begins past the object, or a
        suffix of an empty object, raises `RangeNotSatisfiedError`, or `VersionChangedError` with a
        condition *if_match*. `NotModified` is returned only if *if_none_match* is the version.
        *kind* is a label for metrics, and changes nothing.
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
    ) -> AsyncGenerator[Listed]:
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


def check_condition(
    ref: ObjectRef,
    condition: Condition | None,
    etag: ETag | None = None,
    modified_s: int | None = None,
) -> None:
    """Raise `VersionChangedError` unless *condition* holds for the version that was read.

    *etag* is `None` for an absent object, for which none holds. *modified_s* is the modification
    time in whole seconds, `None` if unknown (RFC 9110 §13.1).
    """
    if condition is None or condition == etag:
        return
    if not isinstance(condition, UnmodifiedSince) or modified_s is None:
        raise VersionChangedError(ref)
    if modified_s > condition.epoch_s:
        raise VersionChangedError(ref)


async def read_exactly(
    store: ObjectReader,
    ref: ObjectRef,
    byte_range: ByteRange,
    condition: Condition | None,
    kind: str = OBJECT,
) -> Found:
    """Read *byte_range*; raise `VersionChangedError` unless *ref* has all of it in one version."""
    found = await store.get(ref, byte_range, if_match=condition, kind=kind)
    if not isinstance(found, Found) or found.byte_range != byte_range:
        raise VersionChangedError(ref)
    return found


def clamp(
    ref: ObjectRef, request: ByteRequest | None, size: int, if_match: Condition | None
) -> ByteRange:
    """Return the range of an object of *size* bytes that satisfies *request* (RFC 9110 §14).

    Only an empty range may begin at the end. With a condition, a range outside the object means
    that the object has changed, since the caller knew the size.
    """
    if request is None:
        return ByteRange(0, size)
    if isinstance(request, SuffixRange):
        start = max(0, size - request.length)
        stop = size
    elif request.start == request.stop <= size:
        return request
    else:
        start = request.start
        stop = min(request.stop, size)
    if start >= stop:
        raise RangeNotSatisfiedError(ref, size) if if_match is None else VersionChangedError(ref)
    return ByteRange(start, stop)


def check_write(ref: ObjectRef, pieces: Sequence[Piece], expected: Expected) -> None:
    """Raise `BadKeyError` for keys of no object, `ValueError` for ranges without a version."""
    name = f"/{ref.key}".replace(f"/{UPLOADS}", "/", 1)  # the mark is allowed in that folder
    if name.endswith("/") or TEMPORARY in name:
        raise BadKeyError(f"{ref.key!r} cannot be the key of an object")
    if not isinstance(expected, str) and ByteRange in map(type, pieces):
        raise ValueError(f"{ref}: byte ranges need the version that they are taken from")


def is_as_expected(etag: ETag | None, expected: Expected) -> bool:
    """Return whether an object in the version *etag*, `None` if absent, may be replaced."""
    if expected is None:
        return True
    return etag == (None if expected == ABSENT else expected)


def is_unfinished(prefix: ObjectRef, ref: ObjectRef) -> bool:
    """Return whether *ref*, listed below *prefix*, is an unfinished object of a writer."""
    # A mark in the folder that is listed does not count: that of uploads is listed by its name.
    return TEMPORARY in ref.key[prefix.key.rfind("/") + 1 :]


SPAN_NBYTES: Final = 16 * 1024**2


def plan_spans(ranges: Iterable[ByteRange]) -> list[ByteRange]:
    """Coalesce *ranges* across gaps of up to 1 MiB into reads of up to 16 MiB."""
    return coalesce(ranges, max_gap_nbytes=1024**2, max_span_nbytes=SPAN_NBYTES)


def assemble(pieces: Sequence[Piece], spans: Sequence[ByteRange], read: Sequence[bytes]) -> bytes:
    """Concatenate *pieces*, whose ranges lie in sorted *spans*, of which *read* holds the bytes."""
    starts = [span.start for span in spans]
    copied: list[bytes] = []
    for piece in pieces:
        if isinstance(piece, bytes):
            copied.append(piece)
            continue
        at = bisect_right(starts, piece.start) - 1
        data = read[at]
        if piece.length == len(data):
            copied.append(data)
            continue
        start = piece.start - starts[at]
        stop = piece.stop - starts[at]
        step = 1024**2  # a copy holds the interpreter lock, and longer ones other threads up
        copied += [data[low : min(low + step, stop)] for low in range(start, stop, step)]
    return b"".join(copied)


async def stream_of(data: bytes) -> AsyncIterator[bytes]:
    """Yield *data* unless it is empty."""
    if data:
        yield data


def nbytes_of(piece: Piece) -> int:
    """Return the length of *piece*."""
    return piece.length if isinstance(piece, ByteRange) else len(piece)
