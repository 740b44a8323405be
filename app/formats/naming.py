"""What a client can ask for below a prefix: by the page, or in the order of keys."""

from typing import Final, NamedTuple

from app.model import Location


class Name(NamedTuple):
    """What a client can ask for right below a prefix."""

    name: str
    """Relative to the prefix; it ends in ``/`` where more is below."""
    nbytes: int | None = None
    """Of the entity, if that is known."""


LAST: Final = "\U0010ffff"
"""Behind every character of a key."""


class Window(NamedTuple):
    """Which keys are wanted: those that begin with *prefix* and come behind *after*."""

    prefix: str
    after: str = ""
    delimiter: str = ""
    """Keys that have it behind the prefix are wanted only up to there, all alike once."""

    def admits(self, key: str) -> bool:
        """Tell whether *key* is wanted."""
        return key.startswith(self.prefix) and key > self.after

    def meets(self, start: str) -> bool:
        """Tell whether a key that begins with *start* may be wanted."""
        return start + LAST > self.after and (
            start.startswith(self.prefix) or self.prefix.startswith(start)
        )

    def fold(self, key: str) -> str | None:
        """Cut *key* behind the delimiter; `None` where it has none behind the prefix."""
        if not self.delimiter or not key.startswith(self.prefix):
            return None
        at = key.find(self.delimiter, len(self.prefix))
        return None if at < 0 else key[: at + len(self.delimiter)]

    def opens(self, folded: str) -> bool:
        """Tell whether *folded*, which `fold` gave, is wanted."""
        return folded > self.after or (folded != self.after and self.after.startswith(folded))


class Item(NamedTuple):
    """A key, or the beginning of several that were folded."""

    key: str
    location: Location | None
    """`None` where keys were folded. Of what is `Missing` it was looked for."""
