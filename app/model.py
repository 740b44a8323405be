"""The shared vocabulary: small frozen values that cross every boundary."""

import re
from dataclasses import dataclass
from typing import Final, NamedTuple, NewType, Self

VirtualKey = NewType("VirtualKey", str)
"""The name a client asks for, relative to its dataset or container: ``s0/c/7/3/1``."""

NAMED_REFS: Final = ("@branch.", "@tag.")
"""How segments of keys begin that name a branch or a tag of a repository, see `escape_ref`."""

_UNSPEAKABLE: Final = re.compile(r"[\x00-\x1f\x7f%/]")

ETag = NewType("ETag", str)
"""A strong entity tag with its quotes, as HTTP writes it: ``'"9b2c"'`` (RFC 9110 §8.8.3)."""


GUARDED: Final = "guarded+"
"""Begins the buckets of what virtual references may reach."""


def escape_ref(name: str) -> str:
    """Percent-encode what no segment of a key can hold: branches and tags may be called ``a/b``."""
    return _UNSPEAKABLE.sub(lambda found: f"%{ord(found[0]):02X}", name)


class ObjectRef(NamedTuple):
    """The name of an object: the *bucket* that holds it and its *key* there.

    *bucket* is the URL of whatever has keys: ``s3://bucket``, ``https://host``, or the folder
    ``file:///data/em.zarr``. An empty *key*, or one that ends in ``/``, names a prefix.
    """

    bucket: str
    key: str

    def __str__(self) -> str:
        """Spell the URL; that it is read through a guard is nothing to people."""
        return f"{self.bucket.removeprefix(GUARDED)}/{self.key}"

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


type Piece = bytes | ByteRange
"""A part of an object that is to be written: new bytes, or a range of what it replaces."""


@dataclass(frozen=True, slots=True)
class SuffixRange:
    """The last *length* bytes of a sequence, or all of a shorter one."""

    length: int

    def __post_init__(self) -> None:
        if self.length <= 0:
            raise ValueError(f"not a suffix range: {self.length} bytes")


type ByteRequest = ByteRange | SuffixRange
"""What can be asked of an object whose size is not known yet."""


class UnmodifiedSince(NamedTuple):
    """The condition that an object was not modified after *epoch_s* (RFC 9110 §13.1.4).

    Counted in whole seconds since 1970 began in UTC, as HTTP tells times.
    """

    epoch_s: int


type Condition = ETag | UnmodifiedSince
"""What must hold of an object whose bytes are read."""


class Fixed(NamedTuple):
    """The version of an object that is never replaced, or must not have been.

    *etag* names it to clients. *condition* is what has to hold of the object, if whoever refers to
    it has told.
    """

    etag: ETag
    condition: Condition | None = None


type Version = ETag | Fixed
"""Which state of an object is meant: what it was found in, or the only one that it may be in."""


def condition_of(version: Version | UnmodifiedSince | None) -> Condition | None:
    """Tell what must hold of an object for its bytes to be of *version*."""
    return version.condition if isinstance(version, Fixed) else version


def etag_of(version: Version) -> ETag:
    """Name *version* to clients."""
    return version.etag if isinstance(version, Fixed) else version


class Stored(NamedTuple):
    """A range of an object, in one version of that."""

    ref: ObjectRef
    byte_range: ByteRange
    version: Version


class Part(NamedTuple):
    """A range of an object as it is now; the object has to exist, and to be long enough.

    Many versions may be as old as *version* tells, so that one has to be looked at to be named.
    """

    ref: ObjectRef
    byte_range: ByteRange
    version: UnmodifiedSince | None = None


class Gzipped(NamedTuple):
    """Bytes that are stored as gzip; a client gets that, or what it holds."""

    place: Stored


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


class Referenced(NamedTuple):
    """What a key refers to, where it may come to refer to something else."""

    place: Stored | Part | Inline
    by: str
    """Tells apart the objects that it may refer to, whose own versions can be alike."""
    is_lasting: bool
    """Whether it will refer to the very same for ever."""
    modified_s: int | None = None
    """When the key last came to refer to something else, where that is known."""


type Location = Stored | Gzipped | Whole | Inline | Missing | Referenced
"""Where the bytes of a virtual key are."""
