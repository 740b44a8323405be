"""How often what was asked for was at hand, and for what stores are asked otherwise."""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

CHUNK: Final = "chunk"
OBJECT: Final = "object"
"""What no format describes: an object that is passed on, or written."""

kind_of_read: Final = ContextVar("kind_of_read", default=OBJECT)
"""The `Read.kind` that a store is being asked for, or one of the kinds above."""


@dataclass(slots=True)
class Tally:
    """What came of asking for what may be at hand."""

    hits: int = 0
    """It was."""
    joins: int = 0
    """It was on its way, for others."""
    misses: int = 0
    """A store had to be asked."""
    merged: int = 0
    """It came with a read that was begun for another chunk."""
