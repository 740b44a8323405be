"""What a virtual key names, and what is made of it."""

from collections.abc import AsyncIterator, Callable, Sequence
from enum import Enum, auto
from typing import NamedTuple, Protocol

from app.model import ByteRange, ETag, Inline, Stored, etag_of
from app.storage.contract import NO_HEADERS, Found, ObjectHeaders

type Body = bytes | AsyncIterator[bytes]

type Demand = Callable[[Sequence[ETag]], bool]
"""What a request demands: told all names of the version that a key has now, none where there is
nothing, it tells whether the request may go on."""


class Coding(Enum):
    """What the bytes of an entity's source are to who asks for it."""

    PLAIN = auto()
    """What is asked for, in the only form there is."""
    GZIP = auto()
    """What is asked for, compressed; a client may take it so."""
    INFLATED = auto()
    """What is asked for, as it was in `GZIP`."""


class Entity(NamedTuple):
    """What a key names now: its version, its length in bytes, and where they are."""

    etag: ETag
    length: int
    """Of *source*."""
    source: Stored | Inline
    first: Found | None = None
    """The beginning of what is asked for, where finding out had to read it."""
    coding: Coding = Coding.PLAIN
    is_lasting: bool = False
    """Whether the key will name the same for ever."""
    modified_s: int | None = None
    """When its object was last modified, where that is known: whole seconds since 1970 in UTC."""
    headers: ObjectHeaders = NO_HEADERS
    """Of an object that is served as it is."""

    @staticmethod
    def at(place: Stored | Inline, modified_s: int | None = None) -> "Entity":
        """Name a part of an object by the object's version and the place of the part."""
        if isinstance(place, Inline):
            return Entity(place.etag, len(place.data), place, modified_s=modified_s)
        _, byte_range, version = place
        tag = f'{etag_of(version)[:-1]}-{byte_range.start:x}-{byte_range.length:x}"'
        return Entity(ETag(tag), byte_range.length, place, modified_s=modified_s)

    def referenced(self, by: str, *, is_lasting: bool) -> "Entity":
        """Name it as what something refers to; see `Referenced`."""
        etag = ETag(f'{self.etag[:-1]}-{by}"') if by else self.etag
        return self._replace(etag=etag, is_lasting=is_lasting)

    @property
    def names(self) -> tuple[ETag, ...]:
        """Give all names that clients may know this version by."""
        return (self.etag, self.gzip_etag)

    @property
    def gzip_etag(self) -> ETag:
        """Name the version in the form of gzip; *etag* is that of what it holds."""
        return gzip_name(self.etag)


def gzip_name(etag: ETag) -> ETag:
    """Name the form of gzip of what *etag* names."""
    return ETag(f'{etag[:-1]}-gzip"')


class Choice(Protocol):
    """What the caller made of an entity."""

    @property
    def reads(self) -> ByteRange | None:
        """The part of the entity whose bytes are wanted; `None` for none of them."""
        ...


class Opened[C: Choice](NamedTuple):
    """An entity, what was chosen of it, and those bytes."""

    entity: Entity
    choice: C
    body: Body
