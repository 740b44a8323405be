"""Reads as values: formats describe them, `read.metadata_cache.ReadCache` performs them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from shardgate.model import ByteRequest, ETag, ObjectRef, UnmodifiedSince, Version


class DecodeError(ValueError):
    """Bytes that were read cannot be decoded; the message says why."""


def check_format(stored: object) -> None:
    """Check the member ``format`` of a document that this service stores: 1, or none.

    Raises: `DecodeError` for that of a later version.
    """
    found = stored.get("format", 1) if isinstance(stored, dict) else 1
    if found != 1:
        reason = "written by a later version of Shardgate; this one reads format 1"
        raise DecodeError(f"format {found!r:.20}, {reason}")


class StepsError(DecodeError):
    """Decoding takes more steps than the object may take."""


class StepBudget:
    """The steps that decoding an object may take: the same for all processes, however busy."""

    def __init__(self, most: int) -> None:
        self._left = most

    def spend(self, count: int) -> None:
        """Count steps. Raises: `StepsError`."""
        self._left -= count
        if self._left < 0:
            raise StepsError("decoding it takes more steps than an object of its length may take")


class Weighable(Protocol):
    """A decoded value with a size in memory."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the value holds."""


class DecodedMetadata:
    """A decoded value that tells how it is to be taken."""

    __slots__ = ()

    @property
    def is_metadata(self) -> bool:
        """False for a file that has the name of a marker by chance."""
        return True

    @property
    def is_page(self) -> bool:
        """True for an error page in place of a marker."""
        return False

    @property
    def why_sharded(self) -> str:
        """Reason why not all that it describes is served unsharded; empty for none."""
        return ""


@dataclass(frozen=True, slots=True)
class Opaque:
    """Bytes that are not decoded."""

    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class BoundDecoder[*Ts, T]:
    """A decoder that calls *function* with the data and *arguments*. Unlike partial functions of
    the standard library, those with equal arguments are equal.
    """

    function: Callable[[bytes, *Ts], T]
    arguments: tuple[*Ts]

    def __call__(self, data: bytes) -> T:
        return self.function(data, *self.arguments)


class Read[T: Weighable](NamedTuple):
    """The bytes that a format needs, and the function that decodes them. Equal reads are one entry
    of the cache, so *decode* is a function or a frozen value such as a `BoundDecoder`.
    """

    kind: str
    """Label of metrics, from a closed set: ``shard-index``."""
    ref: ObjectRef
    request: ByteRequest | None
    """The part of the object; `None` for all of it."""
    decode: Callable[[bytes], T]
    version: Version | UnmodifiedSince | None = None
    """The only version to read; such a read never goes stale, unless this is only a time."""
    memory_nbytes: Callable[[bytes | None, int], int] | None = None
    """Returns the memory that decoding takes: of the data, or at most for *request* if `None`;
    raises `DecodeError`. Where it is set, the data are decoded off the event loop. It is compared
    like *decode*: methods of equal values are not equal.
    """
    is_marker: bool = False
    """Whether the object decides the meaning of the keys below a directory: one that was seen and
    is gone counts as missing for a time, not as absent.
    """
    is_slow: bool = False
    """Whether even a few bytes are decoded off the event loop."""


class Versioned[T](NamedTuple):
    """A decoded value, and the version and size in bytes of the object it came from."""

    value: T
    etag: ETag
    size: int
    modified_s: int | None = None
    """Time of the last modification, if known: whole seconds since 1970 in UTC."""
    coding: str = ""
    """Content coding of the object, which was removed before it was decoded."""


class Fetch(Protocol):
    """Perform a described read."""

    async def __call__[T: Weighable](
        self, read: Read[T], /, *, allow_stale: bool = False
    ) -> Versioned[T] | None:
        """Perform *read*; `None` if there is no such object.

        *allow_stale* accepts a cached result of any age.

        Raises: `DamagedError` where *read.decode* fails or a `Fixed` version does not hold,
        `VersionChangedError` where another one does not, and any `StorageError`.
        """


class RunInThread(Protocol):
    """Run a slow function without blocking the event loop."""

    async def __call__[*Ts, T](self, call: Callable[[*Ts], T], /, *args: *Ts) -> T:
        """Return the result of *call*."""
