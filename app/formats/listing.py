"""Listings of keys: the window that is wanted, the rules of a directory, and grids of chunks."""

from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import floordiv
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from app.model import Location

LAST: Final = "\U0010ffff"
"""Sorts after every character of a key."""
_REMEMBERED: Final = 64
"""Levels of a grid that are remembered: in the order of keys, a walk alternates between a few."""

type Rows = NDArray[np.unsignedinteger]
type Cell = tuple[int, ...]


class Name(NamedTuple):
    """A name that a client can request right below a prefix."""

    name: str
    """Relative to the prefix; it ends in ``/`` where more is below."""
    nbytes: int | None = None


class Window(NamedTuple):
    """Selects the keys that begin with *prefix* and sort after *after*."""

    prefix: str
    after: str = ""
    delimiter: str = ""
    """Keys that have it behind the prefix are folded there: alike ones are listed once."""

    def admits(self, key: str) -> bool:
        return key.startswith(self.prefix) and key > self.after

    def meets(self, start: str) -> bool:
        """Return whether a key that begins with *start* may be selected."""
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
        """Return whether *folded*, a result of `fold`, is selected."""
        return folded > self.after or (folded != self.after and self.after.startswith(folded))


class Item(NamedTuple):
    """A key, or the common beginning of several that were folded."""

    key: str
    location: Location | None
    """`None` for folded keys; `Missing` for a key that was looked up in vain."""


class Candidate(NamedTuple):
    """A key that may name something: its layout locates it."""

    key: str
    where: Hashable
    """Identifies the index to look in: one read serves all candidates with the same one."""


class Cursor:
    """Progress of a listing; walks consult it while it moves."""

    __slots__ = ("after", "prefix")

    def __init__(self, prefix: str, after: str) -> None:
        self.prefix = prefix
        self.after = after

    def admits(self, key: str) -> bool:
        return key > self.after and key.startswith(self.prefix)

    def meets(self, start: str) -> bool:
        """Return whether a key that begins with *start* may still be wanted."""
        return start + LAST > self.after and (
            start.startswith(self.prefix) or self.prefix.startswith(start)
        )


class KeySelection(NamedTuple):
    """The keys that a cursor still wants among those that begin with *lead*, without *lead*."""

    cursor: Cursor
    lead: str
    delimiter: str

    def meets(self, start: str) -> bool:
        return self.cursor.meets(self.lead + start)

    def is_past(self, start: str) -> bool:
        """Return whether no key is wanted that goes on with *start* or sorts after it."""
        return self.lead + start > self.cursor.prefix + LAST

    def rest(self, start: str) -> str:
        """Return the least wanted rest of the keys that go on with *start*; empty for all."""
        start = self.lead + start
        after = max(self.cursor.after, self.cursor.prefix)
        return after.removeprefix(start) if after.startswith(start) else ""

    @property
    def window(self) -> Window | None:
        """The present selection; `None` if it is empty."""
        lead, after = self.lead, self.cursor.after
        prefix = max(lead, self.cursor.prefix)
        if not after.startswith(lead):
            if after > lead:
                return None
            after = lead
        return Window(prefix.removeprefix(lead), after.removeprefix(lead), self.delimiter)


class ListNames(Protocol):
    """List the names that are stored right below a prefix."""

    def __call__(self, prefix: str, /) -> AsyncIterator[str]:
        """Yield objects, and folders with a final slash, relative to the container. Raises:
        `StorageError`, a ``lasting`` one where the store cannot list.
        """


class RunInThread(Protocol):
    """Run a slow function without blocking the event loop."""

    async def __call__[*Ts, T](self, call: Callable[[*Ts], T], /, *args: *Ts) -> T:
        """Return the result of *call*."""


class BoundedGather(Protocol):
    """Await several calls, a bounded number at a time."""

    async def __call__[A, T](
        self, call: Callable[[A], Awaitable[T]], each: Sequence[A], /
    ) -> list[T]:
        """Return the results of *call*, in the order of *each*."""


class ListingIO(NamedTuple):
    """The I/O that a walk may use."""

    list_names: ListNames
    run_in_thread: RunInThread
    bounded_gather: BoundedGather


type Walk = Callable[[KeySelection, ListingIO], AsyncIterator[Item | Candidate]]
"""Yields keys in the order of their bytes: the wanted ones, and hardly any others."""


def _show_all(_: str) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class ListingRules:
    """The keys of a directory: stored objects, and chunks that walks find."""

    shows: Callable[[str], bool] | None = _show_all
    """Returns whether a stored object or folder is listed; `None` hides all. Shards are hidden."""
    walks: Sequence[Walk] = ()
    is_plain: bool = False
    """True if everything below is served as it is stored."""


PLAIN: Final = ListingRules(is_plain=True)
NOTHING: Final = ListingRules(shows=None)


@dataclass(frozen=True, slots=True)
class Steps:
    """Integers in the order of their decimal texts, as in keys: *first* + *step* * place, for the
    places below *stop* in the runs of *size* places that *runs* counts.
    """

    runs: Rows
    """Numbers of the runs, rising."""
    size: int
    stop: int
    first: int = 0
    step: int = 1

    def walk(self, after: str) -> Iterator[int]:
        """Yield the places of the numbers whose texts are not before *after*."""
        if self.first < 0:
            for digit in range(1, 10):
                yield from self._below(f"-{digit}", -digit, after)
        for digit in range(10):
            yield from self._below(str(digit), digit, after)

    def _below(self, text: str, number: int, after: str) -> Iterator[int]:
        """Yield the places of *number*, which *text* spells, and of numbers that begin with it."""
        if text < after and not after.startswith(text):
            return
        if self._any(number, number + 1):
            yield (number - self.first) // self.step
        if number and self._any_longer(number):
            for digit in range(10):
                longer = number * 10 + (digit if number > 0 else -digit)
                yield from self._below(f"{text}{digit}", longer, after)

    def _any_longer(self, number: int) -> bool:
        """Return whether the text of *number* begins that of another number."""
        if number < 0:
            low, high = number * 10 - 9, number * 10 + 1
            while high > self.first:
                if self._any(low, high):
                    return True
                low, high = low * 10 - 9, high * 10 - 9
            return False
        low, high = number * 10, number * 10 + 10
        while low < self.first + self.step * self.stop:
            if self._any(low, high):
                return True
            low, high = low * 10, high * 10
        return False

    def _any(self, low: int, high: int) -> bool:
        start = max(0, -((self.first - low) // self.step))
        stop = min(self.stop, -((self.first - high) // self.step))
        if start >= stop:
            return False
        at = int(np.searchsorted(self.runs, np.uint64(start // self.size)))
        return at < len(self.runs) and max(start, int(self.runs[at]) * self.size) < stop


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of a grid of chunks."""

    count: int
    size: int
    """Number of cells per shard."""
    first: int = 0
    """The number of cell 0 in keys."""
    step: int = 1


@dataclass(frozen=True, slots=True)
class GridKeys:
    """Walks the cells of all stored shards of a grid, in the order of their keys."""

    axes: tuple[Axis, ...]
    spell: Callable[[Cell], str]
    """Returns the common beginning of the keys with these first coordinates."""
    shards: Callable[[Cell], Awaitable[Rows]]
    """Returns the next coordinates, in C order, of the stored shards with these first ones."""
    where: Callable[[Cell], Hashable]
    _levels: OrderedDict[Cell, Rows] = field(default_factory=OrderedDict)

    async def walk(self, selection: KeySelection) -> AsyncIterator[Candidate]:
        """Yield the selected cells, stored or not."""
        rows = await self._below(()) if self.axes else np.empty((1, 0), np.uint64)
        async for cell in self._walk(selection, (), rows):
            yield Candidate(self.spell(cell), self.where(cell))

    async def _walk(self, selection: KeySelection, cell: Cell, rows: Rows) -> AsyncIterator[Cell]:
        start, dim = self.spell(cell), len(cell)
        if not selection.meets(start):
            return
        if dim == len(self.axes):
            yield cell
            return
        if not rows.shape[1]:
            sizes = (axis.size for axis in self.axes)
            rows = await self._below(tuple(map(floordiv, cell, sizes)))
        axis, column = self.axes[dim], rows[:, 0]
        steps = Steps(np.unique(column), axis.size, axis.count, axis.first, axis.step)
        for at in steps.walk(selection.rest(start)):
            shard = np.uint64(at // axis.size)
            low, high = np.searchsorted(column, [shard, shard + np.uint64(1)])
            async for each in self._walk(selection, (*cell, at), rows[low:high, 1:]):
                yield each
            if selection.is_past(self.spell((*cell, at))) or not selection.meets(start):
                return

    async def _below(self, shard: Cell) -> Rows:
        if shard in self._levels:
            self._levels.move_to_end(shard)
            return self._levels[shard]
        rows = self._levels[shard] = await self.shards(shard)
        if len(self._levels) > _REMEMBERED:
            self._levels.popitem(last=False)
        return rows
