"""The reads that a format describes, and who performs them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from app.model import ByteRequest, ETag, Fixed, ObjectRef, UnmodifiedSince, Version


class DecodeError(ValueError):
    """Bytes that were read cannot be decoded; the message says why."""


class Weighable(Protocol):
    """A decoded value that knows what it weighs in memory."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the value holds."""
        ...


@dataclass(frozen=True, slots=True)
class Opaque:
    """Bytes of which only size and version matter."""

    data: bytes

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the value holds."""
        return len(self.data)


class Read[T: Weighable](NamedTuple):
    """The bytes a format wants to see, and how it will understand them.

    Reads that compare equal are one entry of the cache, so *decode* is a function or a frozen
    value that can be called, not a closure.
    """

    kind: str
    """What is read, from a closed set: ``shard-index``; the label of metrics."""
    ref: ObjectRef
    request: ByteRequest | None
    """The part of the object; `None` for all of it."""
    decode: Callable[[bytes], T]
    """Raises `DecodeError`."""
    version: Version | UnmodifiedSince | None = None
    """Read only this version; such a read never goes stale, unless it only names a time."""
    memory_nbytes: Callable[[bytes | None, int], int] | None = None
    """Returns how much memory decoding takes, of the data, or of any, as far as *request* goes.

    Raises `DecodeError`. Where it is set the data is decoded off the event loop.
    """

    @property
    def is_pinned(self) -> bool:
        """Whether a single version will do."""
        return isinstance(self.version, str | Fixed)


class Versioned[T](NamedTuple):
    """A decoded value, and the version and size in bytes of the object it came from."""

    value: T
    etag: ETag
    size: int
    modified_s: int | None = None
    """When the object was last modified, where that is known: whole seconds since 1970 in UTC."""


class Fetch(Protocol):
    """Perform a described read."""

    async def __call__[T: Weighable](
        self, read: Read[T], /, *, ever: bool = False
    ) -> Versioned[T] | None:
        """Perform *read*; `None` means that there is no such object.

        *ever* takes what was there once, however long ago.

        Raises: `DamagedError` where *read.decode* fails or a `Fixed` version does not hold,
        `VersionChangedError` where another one does not, and any `StorageError`.
        """
        ...
