"""What a client can ask for below a prefix: by the page, or in the order of keys."""

from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

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


class Candidate(NamedTuple):
    """A key that may name something: its layout locates it."""

    key: str
    where: Hashable
    """In which index to look for it: one read brings it for all that have the same one."""


class Cursor:
    """How far a listing has come: which keys are wanted is asked of it while they are walked."""

    __slots__ = ("after", "prefix")

    def __init__(self, prefix: str, after: str) -> None:
        self.prefix = prefix
        self.after = after

    def admits(self, key: str) -> bool:
        """Tell whether *key* is wanted."""
        return key > self.after and key.startswith(self.prefix)

    def meets(self, start: str) -> bool:
        """Tell whether a key that begins with *start* may be wanted."""
        return start + LAST > self.after and (
            start.startswith(self.prefix) or self.prefix.startswith(start)
        )


class Wanted(NamedTuple):
    """What is wanted of the keys that begin with *lead*, told by the rest of them."""

    cursor: Cursor
    lead: str
    delimiter: str

    def meets(self, start: str) -> bool:
        """Tell whether a key that goes on with *start* may be wanted."""
        return self.cursor.meets(self.lead + start)

    def is_past(self, start: str) -> bool:
        """Tell whether nothing is wanted of the keys that go on with *start* or come behind."""
        return self.lead + start > self.cursor.prefix + LAST

    def rest(self, start: str) -> str:
        """Give what may be begun behind, of the keys that go on with *start*; all is empty."""
        start = self.lead + start
        after = max(self.cursor.after, self.cursor.prefix)
        return after.removeprefix(start) if after.startswith(start) else ""

    @property
    def window(self) -> Window | None:
        """Say the same once and for all; `None` if nothing is wanted."""
        lead, after = self.lead, self.cursor.after
        prefix = max(lead, self.cursor.prefix)
        if not after.startswith(lead):
            if after > lead:
                return None
            after = lead
        return Window(prefix.removeprefix(lead), after.removeprefix(lead), self.delimiter)


class Look(Protocol):
    """Name what is stored right below a prefix."""

    def __call__(self, prefix: str, /) -> AsyncIterator[str]:
        """Give objects, and folders with a slash behind them, relative to the container.

        Raises: `StorageError`, where the store cannot list one that is ``lasting``.
        """
        ...


class Aside(Protocol):
    """Call a function that computes for long where it holds nothing up."""

    async def __call__[*Ts, T](self, call: Callable[[*Ts], T], /, *args: *Ts) -> T:
        """Give what *call* returns."""
        ...


class Abreast(Protocol):
    """Wait for several things at a time."""

    async def __call__[A, T](
        self, call: Callable[[A], Awaitable[T]], each: Sequence[A], /
    ) -> list[T]:
        """Give what *call* returns of each, in their order."""
        ...


class Means(NamedTuple):
    """What it takes to find the keys of a container."""

    look: Look
    aside: Aside
    abreast: Abreast


type Walk = Callable[[Wanted, Means], AsyncIterator[Item | Candidate]]
"""Gives keys in the order of their bytes: the wanted ones, and hardly any others."""


def _shows(_: str) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Shelf:
    """What of a directory can be asked for."""

    shows: Callable[[str], bool] | None = _shows
    """Tells it of the name of a stored object, or of a folder; `None` is of nothing that is stored.

    What is hidden are shards, and what is beside them under names like those of chunks.
    """
    walks: Sequence[Walk] = ()
    """Find the chunks whose keys begin with the directory."""
    is_plain: bool = False
    """Whether everything below is stored and served as it is."""


PLAIN: Final = Shelf(is_plain=True)
NOTHING: Final = Shelf(shows=None)
