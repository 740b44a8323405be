"""Listings of keys: the window that is wanted, the rules of a directory, and grids of chunks."""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from shardgate.formats.reading import Fetch, RunInThread
from shardgate.formats.surveying import Listing
from shardgate.model import Location

LAST: Final = "\U0010ffff"
"""Sorts after every character of a key."""
_REMEMBERED: Final = 64
"""Levels of a grid that are remembered: in the order of keys, a walk alternates between a few."""

type Rows = NDArray[np.unsignedinteger]
type Cell = tuple[int, ...]

_NO_ROWS: Final[Rows] = np.empty((1, 0), np.uint64)


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
        """Return whether *folded*, a result of `fold`, may be selected."""
        return folded > self.after or self.begins_in(folded)

    def begins_in(self, folded: str) -> bool:
        """Return whether *folded* is selected only if it has keys that sort after *after*."""
        return folded != self.after and self.after.startswith(folded)

    def is_past(self, start: str) -> bool:
        """Return whether no key is selected that begins with *start* or sorts after it."""
        return start > self.prefix + LAST

    def rest(self, start: str) -> str:
        """Return the least selected rest of the keys that begin with *start*; empty for all."""
        least = max(self.after, self.prefix)
        return least.removeprefix(start) if least.startswith(start) else ""

    def below(self, lead: str) -> "Window":
        """Select the rests of the keys that begin with *lead*; folded if the prefix does too."""
        prefix, after, delimiter = self
        if not after.startswith(lead):
            after = LAST if after > lead else ""
        if not prefix.startswith(lead):
            prefix = delimiter = ""
        return Window(prefix.removeprefix(lead), after.removeprefix(lead), delimiter)


class Item(NamedTuple):
    """A key, or the common beginning of several that were folded."""

    key: str
    location: Location | None
    """`None` for folded keys; `Missing` for a key that was looked up in vain."""


type Wanted = Callable[[], Window]
"""Returns the window of the keys that are still wanted, which moves on while they are walked."""


type ListNames = Callable[[str], AsyncIterator[str]]
"""Lists the names right below a prefix: objects, and folders with a final slash, relative to the
container. Raises: `StorageUnusableError` where the store cannot list, and any other `StorageError`.
"""


class BoundedGather(Protocol):
    """Await several calls, a bounded number at a time."""

    async def __call__[A, T](
        self, call: Callable[[A], Awaitable[T]], each: Sequence[A], /
    ) -> list[T]:
        """Return the results of *call*, in the order of *each*."""


class ListingIO(NamedTuple):
    """The I/O that a walk may use."""

    list_names: ListNames
    list_objects: Listing
    fetch: Fetch
    run_in_thread: RunInThread
    bounded_gather: BoundedGather


type Walk = Callable[[Wanted, ListingIO], AsyncIterator["Item | str | Walk"]]
"""Yields keys in the order of their bytes, the wanted ones and hardly any others: as items, or as
texts if their layout has to locate them; a walk in place of the keys that it yields.
"""


@dataclass(frozen=True, slots=True)
class GridWalk:
    """A walk of all cells that stored shards may hold, of which they may hold few."""

    walk: Walk
    grid: "Grid"
    """Spells the keys."""
    stored: Callable[[ListingIO], AsyncIterator[AsyncIterator[Rows]]]
    """Finds the stored shards; each yields the cells whose chunks it holds, of shape
    ``(count, ndim)``. Raises: `DamagedError` for an invalid index.
    """
    index_nbytes: int

    def __call__(self, wanted: Wanted, io: ListingIO) -> AsyncIterator[Item | str | Walk]:
        return self.walk(wanted, io)


@dataclass(frozen=True, slots=True)
class ListingRules:
    """The keys of a directory: stored objects, and chunks that walks find."""

    shows: Callable[[str], bool] | None = lambda _: True
    """Returns whether a stored object or folder is listed; `None` hides all. Shards are hidden."""
    walks: Sequence[Walk] = ()
    is_plain: bool = False
    """True if everything below is served as it is stored."""
    is_uniform: bool = False
    """True if all folders below have these rules too, but for containers."""


PLAIN: Final = ListingRules(is_plain=True)
UNIFORM: Final = ListingRules(is_uniform=True)


@dataclass(frozen=True, slots=True)
class GridAxis:
    """One dimension of a grid of chunks."""

    count: int
    size: int = 1
    """Number of cells per shard."""
    first: int = 0
    """The number of cell 0 in keys."""
    step: int = 1

    def shard_of(self, cell: int) -> int:
        """Return the position along this axis of the shard that holds *cell*."""
        return cell // self.size

    def first_cell(self, shard: int) -> int:
        return shard * self.size

    def walk(self, shards: Rows, after: str) -> Iterator[int]:
        """Yield the cells in *shards*, which ascend, in the order of the decimal texts of their
        numbers; those whose texts are before *after* are left out.
        """
        if self.first < 0:
            for digit in range(1, 10):
                yield from self._below(shards, -1, digit, after)
        for digit in range(10):
            yield from self._below(shards, 1, digit, after)

    def _below(self, shards: Rows, sign: int, number: int, after: str) -> Iterator[int]:
        """Yield the cells of *number* with *sign*, and of numbers whose texts begin with its."""
        text = f"{'-' * (sign < 0)}{number}"
        if text < after and not after.startswith(text):
            return
        if self._any(shards, sign, number, number + 1):
            yield (sign * number - self.first) // self.step
        if number and self._any_longer(shards, sign, number):
            for digit in range(10):
                yield from self._below(shards, sign, 10 * number + digit, after)

    def _any_longer(self, shards: Rows, sign: int, number: int) -> bool:
        low, high = 10 * number, 10 * number + 10
        largest = max(-self.first, self.first + self.step * self.count)
        while low <= largest:
            if self._any(shards, sign, low, high):
                return True
            low, high = 10 * low, 10 * high
        return False

    def _any(self, shards: Rows, sign: int, low: int, high: int) -> bool:
        """Return whether there is a number with *sign* and a magnitude from *low* to *high*."""
        if sign < 0:
            low, high = 1 - high, 1 - low
        start = max(0, -((self.first - low) // self.step))
        stop = min(self.count, -((self.first - high) // self.step))
        if start >= stop:
            return False
        at = _find(shards, self.shard_of(start))
        return at < len(shards) and max(start, self.first_cell(int(shards[at]))) < stop


class _Unread(NamedTuple):
    """First coordinates of shards of which the next ones are needed."""

    shard: Cell


@dataclass(frozen=True, slots=True)
class Grid:
    """The cells of all stored shards, in the order of their keys."""

    axes: tuple[GridAxis, ...]
    spell: Callable[[Cell], str]
    """Returns the common beginning of the keys with these first coordinates."""
    levels: OrderedDict[Cell, Rows] = field(default_factory=OrderedDict)
    """By first coordinates, the next coordinates in C order of the stored shards with these."""

    @classmethod
    def of(cls, rows: Rows, axes: tuple[GridAxis, ...], spell: Callable[[Cell], str]) -> Self:
        """Return the grid with stored shards at *rows*, of shape ``(count, ndim)``, in C order."""
        return cls(axes, spell, OrderedDict({(): rows} if len(rows) else {}))

    async def walk(
        self, wanted: Wanted, read: Callable[[Cell], Awaitable[Rows]]
    ) -> AsyncIterator[Cell]:
        """Yield the wanted cells, stored or not; *read* returns rows that are not in `levels`."""
        for cell in self._walk(wanted, (), _NO_ROWS):
            if not isinstance(cell, _Unread):
                yield cell
                continue
            self.levels[cell.shard] = await read(cell.shard)
            if len(self.levels) > _REMEMBERED:
                self.levels.popitem(last=False)

    def sort(self, cells: Rows) -> Rows:
        """Return *cells*, of shape ``(count, ndim)``, in the order of their keys."""
        ranks = [np.zeros(len(cells), np.intp)]
        for column, axis in zip(cells.T, self.axes, strict=True):
            numbers, places = np.unique(column, return_inverse=True)
            # A volume may reach past 2^63, where numpy's numbers would overflow.
            texts = [str(axis.first + axis.step * number) for number in numbers.tolist()]
            ranks.append(np.argsort(np.argsort(texts))[places])
        return cells[np.lexsort((ranks[0], *reversed(ranks[1:])))]

    def select(self, cells: Rows, start: str, wanted: Wanted) -> Iterator[str]:
        """Yield the wanted keys of sorted *cells* from *start* on."""

        def key_at(at: int) -> str:
            return self.spell(tuple(cells[at].tolist()))

        every = range(len(cells))
        at = bisect_left(every, start, key=key_at)
        while at < len(cells):
            key = key_at(at)
            window = wanted()
            if window.is_past(key):
                return
            if window.admits(key):
                yield key
                at += 1
            else:
                least = max(window.prefix, window.after)
                at = max(at + 1, bisect_left(every, least, key=key_at))

    def cells(self, window: Window) -> Iterator[Cell]:
        """Iterate over cells whose shards are all in `levels`; shorter ones for folded keys."""
        found = self._walk(lambda: window, (), _NO_ROWS, is_folding=True) if self.levels else ()
        return (cell for cell in found if not isinstance(cell, _Unread))

    def _walk(
        self, wanted: Wanted, cell: Cell, rows: Rows, *, is_folding: bool = False
    ) -> Iterator[Cell | _Unread]:
        start = self.spell(cell)
        dim = len(cell)
        window = wanted()
        if not window.meets(start):
            return
        if dim == len(self.axes) or (is_folding and window.fold(start) is not None):
            yield cell
            return
        if not rows.shape[1]:
            shard = tuple(axis.shard_of(at) for at, axis in zip(cell, self.axes, strict=False))
            if shard not in self.levels:
                yield _Unread(shard)
            self.levels.move_to_end(shard)
            rows = self.levels[shard]
        axis = self.axes[dim]
        column = rows[:, 0]
        for at in axis.walk(column, window.rest(start)):
            below = (*cell, at)
            shard_at = axis.shard_of(at)
            low = _find(column, shard_at)
            high = _find(column, shard_at, "right")
            yield from self._walk(wanted, below, rows[low:high, 1:], is_folding=is_folding)
            window = wanted()
            if window.is_past(self.spell(below)) or not window.meets(start):
                return


def _find(column: Rows, number: int, side: Literal["left", "right"] = "left") -> int:
    """Search *column* for *number*, of the same type: conversion would take a copy."""
    if number > np.iinfo(column.dtype).max:
        return len(column)
    return int(np.searchsorted(column, column.dtype.type(number), side))
