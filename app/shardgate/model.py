"""Values that all layers share: keys, objects, byte ranges, versions, locations."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, NewType, Self
from urllib.parse import quote, unquote

VirtualKey = NewType("VirtualKey", str)
"""Key of a request, relative to its dataset or container: ``s0/c/7/3/1``."""

NAMED_REFS: Final = ("@branch.", "@tag.")
"""Prefixes of key segments that name a branch or a tag; see `escape_ref`."""
SHARDED: Final = "@sharded/"
"""Begin of keys of a dataset, or behind a ref, that name objects as they are stored."""

MAX_KEY_NBYTES: Final = 1024
"""As in S3."""
FORBIDDEN_IN_KEYS: Final = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]|^/|//|(?:^|/)\.\.?(?:/|$)")
"""Control characters, halves of surrogate pairs, and empty, ``.`` and ``..`` segments."""
_NOT_IN_SEGMENTS: Final = re.compile(r"[\x00-\x1f\x7f%/]")
_KEPT_ESCAPE: Final = re.compile(
    "%(2[134-9A-Ca-cFf]|3[AaBbDdFf]|40|5[BbDd])|%(?![0-9A-Fa-f]{2})"  # reserved, and ``%``
)

ETag = NewType("ETag", str)
"""A strong entity tag with its quotes, as HTTP writes it: ``'"9b2c"'`` (RFC 9110 §8.8.3)."""

LogLevel = Literal["critical", "error", "warning", "info", "debug"]


def is_key(text: str) -> bool:
    """Return whether *text* can be the key of a request."""
    is_short = len(text.encode(errors="replace")) <= MAX_KEY_NBYTES
    return is_short and FORBIDDEN_IN_KEYS.search(text) is None


def escape_ref(name: str) -> str:
    """Percent-encode characters of a ref name that a key segment cannot hold, such as ``/``."""
    return _NOT_IN_SEGMENTS.sub(lambda found: f"%{ord(found[0]):02X}", name)


def join_path(path: str, name: str) -> str:
    """Join two paths, of which either may be empty."""
    return f"{path}/{name}".strip("/")


def decode_path(path: str) -> str:
    """Decode a path of a URL, but for characters that an escape keeps from being delimiters, such
    as ``/`` and ``+`` (RFC 3986 §2.2), and ``%``. Raises: `UnicodeDecodeError`.
    """
    return unquote(
        _KEPT_ESCAPE.sub(lambda at: f"%25{(at[1] or '25').upper()}", path), "utf-8", "strict"
    )


def encode_path(path: str) -> str:
    """Percent-encode a path that `decode_path` has returned; delimiters stay as they were."""
    return quote(path, safe="/~%!$&'()*+,;=:@")


class Bucket(str):
    """Name of a bucket that is read in a way of its own; it equals no URL."""

    __slots__ = ("url",)
    url: str
    """URL for people."""

    def __new__(cls, name: str, url: str) -> Self:
        """Return the bucket that is called *name*."""
        bucket = super().__new__(cls, name)
        bucket.url = url
        return bucket


class GuardedBucket(Bucket):
    """Bucket of virtual references, which lead to single objects below *url*."""

    __slots__ = ()

    def __new__(cls, url: str) -> Self:
        """Return the bucket of *url*, which may hold a path."""
        return super().__new__(cls, f"guarded+{url}", url)


class VolatileBucket(Bucket):
    """Bucket of a session, whose state is read anew, and not shared, for each request."""

    __slots__ = ()


class ObjectRef(NamedTuple):
    """The name of an object: the *bucket* that holds it and its *key* there.

    *bucket* is a `Bucket`, or the URL of whatever has keys: ``s3://bucket``, ``https://host``, or
    the folder ``file:///data/em.zarr``. An empty *key*, or one that ends in ``/``, names a prefix.
    """

    bucket: str
    key: str

    def __str__(self) -> str:
        """Return the URL; of an object of a session its key below a ref."""
        bucket = self.bucket.url if isinstance(self.bucket, Bucket) else self.bucket
        return f"{bucket}/{self.key}"

    @property
    def prefix(self) -> "ObjectRef":
        """Prefix of all objects below; empty for a bucket."""
        return self if not self.key or self.key.endswith("/") else self._replace(key=self.key + "/")

    def join(self, relative: str) -> "ObjectRef":
        """Return the object *relative* below this prefix."""
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
        """Return a range; raise `ValueError` unless 0 <= *start* <= *stop*."""
        if not 0 <= start <= stop:
            raise ValueError(f"not a byte range: [{start}, {stop})")
        return tuple.__new__(cls, (start, stop))  # as the base does, by a call less

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"

    @property
    def length(self) -> int:
        """Number of bytes."""
        return self.stop - self.start

    def narrow(self, inner: Self) -> Self:
        """Translate *inner*, relative to this range, into the outer sequence."""
        if inner.stop > self.stop - self.start:
            raise ValueError(f"{inner} reaches past the end of {self}")
        return type(self)(self.start + inner.start, self.start + inner.stop)

    def overlaps(self, other: Self) -> bool:
        """Return whether the ranges have a byte in common."""
        return max(self.start, other.start) < min(self.stop, other.stop)


def coalesce(
    ranges: Iterable[ByteRange], *, max_gap_nbytes: int, max_span_nbytes: int
) -> list[ByteRange]:
    """Merge neighbours whose gap is cheaper to read than another request.

    Returns spans in order of their start; each range lies within one of them. A span is at most
    *max_span_nbytes* long, unless a single range is longer.
    """
    spans: list[ByteRange] = []
    for wanted in sorted(set(ranges)):
        if spans:
            last = spans[-1]
            stop = max(last.stop, wanted.stop)
            is_near = wanted.start - last.stop <= max_gap_nbytes
            if wanted.stop <= last.stop or (is_near and stop - last.start <= max_span_nbytes):
                spans[-1] = ByteRange(last.start, stop)
                continue
        spans.append(wanted)
    return spans


EVERYTHING: Final = ByteRange(0, 2**63 - 1)
"""All bytes of a sequence of any length."""


def check_integer(
    value: object, name: str, most: int, error: Callable[[str], Exception], least: int = 0
) -> int:
    """Return *value*, a decoded number called *name*. Raises: *error*, unless it is an integer, and
    no boolean, of *least* to *most*.
    """
    if type(value) is int and least <= value <= most:
        return value
    # Python refuses to print integers of more than 4,300 digits.
    is_long = type(value) is int and value.bit_length() > 128  # noqa: PLR2004
    found = "a longer number" if is_long else repr(value)[:80]
    raise error(f"{name}: expected an integer of {least} to {most}, found {found}")


type Piece = bytes | ByteRange
"""Part of an object to write: new bytes, or a range of the object that it replaces."""


@dataclass(frozen=True, slots=True)
class SuffixRange:
    """The last *length* bytes of a sequence, or all of a shorter one."""

    length: int

    def __post_init__(self) -> None:
        if self.length <= 0:
            raise ValueError(f"not a suffix range: {self.length} bytes")


type ByteRequest = ByteRange | SuffixRange
"""Range of an object of unknown size."""


class UnmodifiedSince(NamedTuple):
    """Condition: not modified after *epoch_s*, in whole seconds since 1970 (RFC 9110 §13.1.4)."""

    epoch_s: int


type Condition = ETag | UnmodifiedSince
"""Precondition of reading an object."""


class Fixed(NamedTuple):
    """Version of an object that must not change: its ETag for clients, and its precondition."""

    etag: ETag
    condition: Condition | None = None


type Version = ETag | Fixed
"""Version of an object: the one that was found, or the only valid one."""


def condition_of(version: Version | UnmodifiedSince | None) -> Condition | None:
    """Return the precondition of reading *version*."""
    return version.condition if isinstance(version, Fixed) else version


def etag_of(version: Version) -> ETag:
    """Return the ETag of *version* for clients."""
    return version.etag if isinstance(version, Fixed) else version


class Stored(NamedTuple):
    """Range of one version of an object."""

    ref: ObjectRef
    byte_range: ByteRange
    version: Version

    @property
    def etag(self) -> ETag:
        """ETag of these bytes: that of the object with the range."""
        start, stop = self.byte_range
        return ETag(f'{etag_of(self.version)[:-1]}-{start:x}-{stop - start:x}"')


class Part(NamedTuple):
    """Range of the current version of an object, which must exist and be long enough."""

    ref: ObjectRef
    byte_range: ByteRange
    version: UnmodifiedSince | None = None


class Inline(NamedTuple):
    """Bytes in memory: rewritten metadata, or a small chunk of an index."""

    data: bytes
    etag: ETag


class Coded(NamedTuple):
    """Bytes stored with a content coding, sent as such or inflated."""

    place: Stored | Inline
    coding: str
    etag: ETag | None = None
    """ETag of a whole object; that of a part is made of version and range."""


class Whole(NamedTuple):
    """Object served as stored; it may not exist."""

    ref: ObjectRef


@dataclass(frozen=True, slots=True)
class Missing:
    """Result of a look-up that found no such bytes."""


MISSING: Final = Missing()


class Referenced(NamedTuple):
    """Target of a mutable reference."""

    place: Stored | Part | Inline
    reference_id: str
    """Identifies the target; versions of different targets can be equal."""
    is_immutable: bool
    """Whether the reference never changes."""
    modified_s: int | None = None
    """Time of the last change of the reference, if known."""


type Location = Stored | Coded | Whole | Inline | Missing | Referenced
"""Location of the bytes of a virtual key."""
