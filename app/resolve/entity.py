"""What a virtual key names, and what is made of it."""

from collections.abc import AsyncIterator
from enum import Enum, auto
from typing import NamedTuple, Protocol

from app.model import ByteRange, ETag, Inline, Stored
from app.storage.contract import Found

type Body = bytes | AsyncIterator[bytes]


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

    @property
    def gzip_etag(self) -> ETag:
        """Name the version in the form of gzip; *etag* is that of what it holds."""
        return ETag(f'{self.etag[:-1]}-gzip"')


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
