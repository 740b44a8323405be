"""The shared vocabulary: small frozen values that cross every boundary."""

from dataclasses import dataclass
from typing import Final, NamedTuple, NewType, Self

VirtualKey = NewType("VirtualKey", str)
"""The name a client asks for, relative to its dataset or container: ``s0/c/7/3/1``."""

ETag = NewType("ETag", str)
"""A strong entity tag with its quotes, as HTTP writes it: ``'"9b2c"'`` (RFC 9110 §8.8.3)."""


class ObjectRef(NamedTuple):
    """The name of an object: the *bucket* that holds it and its *key* there.

    *bucket* is the URL of whatever has keys: ``s3://bucket``, ``https://host``, or the folder
    ``file:///data/em.zarr``. An empty *key*, or one that ends in ``/``, names a prefix.
    """

    bucket: str
    key: str

    def __str__(self) -> str:
        return f"{self.bucket}/{self.key}"

    @property
    def prefix(self) -> "ObjectRef":
        """Name the prefix of everything below; that of a bucket is empty."""
        return self if not self.key or self.key.endswith("/") else self._replace(key=self.key + "/")

    def join(self, relative: str) -> "ObjectRef":
        """Name the object *relative* below this prefix."""
        if not self.key or not relative:
            return ObjectRef(self.bucket, self.key or relative)
        return ObjectRef(self.bucket, f"{self.key.rstrip('/')}/{relative}")


class _Bounds(NamedTuple):
    start: int
    stop: int


class ByteRange(_Bounds):
    """The half-open range ``[start, stop)`` of a byte sequence."""

    __slots__ = ()

    def __new__(cls, start: int, stop: int) -> Self:
        """Make a range, which begins before it ends or there.

        Raises: `ValueError`.
        """
        if not 0 <= start <= stop:
            raise ValueError(f"not a byte range: [{start}, {stop})")
        return super().__new__(cls, start, stop)

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"

    @property
    def length(self) -> int:
        """How many bytes the range holds."""
        return self.stop - self.start

    def narrow(self, inner: Self) -> Self:
        """Translate *inner*, counted from our start, into the outer sequence."""
        if inner.stop > self.stop - self.start:
            raise ValueError(f"{inner} reaches past the end of {self}")
        return type(self)(self.start + inner.start, self.start + inner.stop)

    def overlaps(self, other: Self) -> bool:
        """Tell whether a byte lies in both ranges."""
        return max(self.start, other.start) < min(self.stop, other.stop)


EVERYTHING: Final = ByteRange(0, 2**63 - 1)
"""All bytes of a sequence of any length."""


@dataclass(frozen=True, slots=True)
class SuffixRange:
    """The last *length* bytes of a sequence, or all of a shorter one."""

    length: int

    def __post_init__(self) -> None:
        if self.length <= 0:
            raise ValueError(f"not a suffix range: {self.length} bytes")


type ByteRequest = ByteRange | SuffixRange
"""What can be asked of an object whose size is not known yet."""


class Stored(NamedTuple):
    """A range of an object, as it was when the object carried *etag*."""

    ref: ObjectRef
    byte_range: ByteRange
    etag: ETag


class Gzipped(NamedTuple):
    """Bytes that are stored as gzip; a client gets that, or what it holds."""

    stored: Stored


class Whole(NamedTuple):
    """An object that is served as it is; whether it exists, only its store can tell."""

    ref: ObjectRef


class Inline(NamedTuple):
    """Bytes that are at hand already: rewritten metadata, a small chunk kept in an index."""

    data: bytes
    etag: ETag


@dataclass(frozen=True, slots=True)
class Missing:
    """A finished look-up proved that there are no such bytes."""


MISSING: Final = Missing()

type Location = Stored | Gzipped | Whole | Inline | Missing
"""Where the bytes of a virtual key are."""
