"""What a virtual key names, and what is made of it."""

from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol

from app.model import ByteRange, ETag, Inline, Stored
from app.storage.contract import Found

type Body = bytes | AsyncIterator[bytes]


class Entity(NamedTuple):
    """What a key names now: its version, its length in bytes, and where they are."""

    etag: ETag
    length: int
    source: Stored | Inline
    first: Found | None = None
    """The beginning of what is asked for, where finding out had to read it."""


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
