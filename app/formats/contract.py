"""What a format owes the resolver, and what it may ask of it.

A format describes its reads and says how it will decode them; the resolver performs, caches,
shares and times them. ``open`` answers whether a directory is a container of the format;
the `Layout` it gives then turns virtual keys into locations.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from app.model import ByteRequest, ETag, Location, ObjectRef, VirtualKey


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
    if_match: ETag | None = None
    """Read only this version; such a read never goes stale."""


class Versioned[T](NamedTuple):
    """A decoded value, and the version and size in bytes of the object it came from."""

    value: T
    etag: ETag
    size: int


class Fetch(Protocol):
    """Perform a described read."""

    async def __call__[T: Weighable](self, read: Read[T], /) -> Versioned[T] | None:
        """Perform *read*; `None` means that there is no such object.

        Raises: `DamagedError` where *read.decode* fails, `VersionChangedError` where
        *read.if_match* does not hold, and any `StorageError`.
        """
        ...


class Layout(Protocol):
    """An opened container."""

    @property
    def encloses(self) -> bool:
        """Whether nothing below can be a container of its own."""
        ...

    async def locate(self, key: VirtualKey, fetch: Fetch) -> Location:
        """Find the bytes of *key*, which is relative to the container.

        Raises: `DamagedError` where an index contradicts itself or its object.
        """
        ...

    def shows(self, key: VirtualKey) -> bool:
        """Tell whether the stored object *key* can be asked for under its own name."""
        ...


class Format(Protocol):
    """A way to lay out containers."""

    @property
    def name(self) -> str:
        """The name in settings and answers: ``zarr``."""
        ...

    async def open(self, directory: ObjectRef, fetch: Fetch) -> Layout | None:
        """Open *directory*, or `None` if it holds no marker of this format.

        Raises: `DamagedError` where there is a marker that cannot be understood.
        """
        ...
