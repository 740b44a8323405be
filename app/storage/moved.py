"""Notices of how objects were written."""

from typing import Literal, NamedTuple, Protocol

from app.model import ObjectRef

type Way = Literal["put", "copy"]
"""Whether all bytes of an object were sent, or the server copied some itself."""


class Moved(NamedTuple):
    """Bytes that a write took."""

    sent: int = 0
    fetched: int = 0
    """Of the old object, to be sent again."""
    copied: int = 0
    """By the server, which nobody had to send."""


class OnWrite(Protocol):
    """Hears of one finished write, also of one that was lost or failed."""

    def __call__(self, way: Way, ref: ObjectRef, moved: Moved, /) -> None:
        """Take note; it is called on the event loop."""
        ...


def unheard(_way: Way, _ref: ObjectRef, _moved: Moved) -> None:
    """Take no note."""
