"""What every store owes its callers."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final, Protocol

from app.model import ByteRange, ByteRequest, Condition, ETag, ObjectRef


@dataclass(frozen=True, slots=True)
class Stat:
    """The size in bytes and the version of an object."""

    size: int
    etag: ETag
    is_gzip: bool = False
    """Whether it was stored with ``Content-Encoding: gzip``."""


@dataclass(frozen=True, slots=True)
class Found:
    """Bytes of an object: *byte_range* of *size* bytes, all from the version *etag*."""

    data: bytes
    byte_range: ByteRange
    size: int
    etag: ETag
    is_gzip: bool = False
    """Whether the object was stored with ``Content-Encoding: gzip``."""


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

    def list(self, prefix: ObjectRef, *, delimiter: str = "") -> AsyncIterator[Listed]:
        """List what lies below *prefix* (empty, or ending in ``/``), by key.

        With the *delimiter* ``/`` deeper keys are rolled up into common prefixes.
        """
        ...

    async def reach(self, root: ObjectRef) -> None:
        """Return if the bucket or folder of *root* can be reached, else raise."""
        ...

    async def aclose(self) -> None:
        """Give connections and descriptors back."""
        ...
