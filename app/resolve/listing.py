"""Pages of the keys of a dataset, in the order of their bytes."""

import asyncio
from collections.abc import Callable, Hashable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, NamedTuple, cast

from app.concurrency import bounded_gather, take
from app.formats.listing import LAST, Candidate, Cursor, Window
from app.formats.reading import Fetch
from app.model import (
    MISSING,
    ETag,
    Gzipped,
    Inline,
    Location,
    Missing,
    ObjectRef,
    Part,
    Referenced,
    Stored,
    Whole,
)
from app.resolve.entity import Entity
from app.resolve.tree import Seen, Tree
from app.resolve.walk import Root
from app.storage.contract import Listed

_LOOKED_FOR: Final = 10_000
"""Shards may hold few of the chunks that they have room for."""
_BATCH: Final = 500

type _Place = Location | Listed | None


class Entry(NamedTuple):
    """A key, or the beginning of several that were folded."""

    key: str
    nbytes: int | None
    """Of what is stored, which for gzip is not what a client gets that does not take it.

    `None` where keys were folded.
    """
    etag: ETag | None
    """`None` too where only the object would tell."""
    modified_s: float | None = None
    """When it was last modified, if that is known, in seconds since 1970 began in UTC."""


@dataclass(frozen=True, slots=True)
class Page:
    """Entries that follow one another."""

    entries: list[Entry]
    after: str | None
    """The key to go on behind, which need not be one of the entries; `None` at the end."""


async def list_page(
    root: Root, window: Window, limit: int, modified_s: Callable[[ObjectRef], int | None]
) -> Page:
    """List up to *limit* wanted keys below *root*, fewer where too many had to be looked for.

    *modified_s* tells when an object that ``root.fetch`` read was last modified.

    What is there all the time is listed once, whatever comes and goes while pages are asked for.

    Raises: `StorageError`, and `DamagedError` of anything that tells of keys: to leave them out
    would say that they are absent.
    """
    if not limit:
        return Page([], None)
    prefix, after, delimiter = window
    if window.fold(after) == after:
        after += LAST
    tree = Tree(root, Cursor(prefix, after), delimiter)
    return await _Gathering(tree, window, limit, modified_s).page()


class _Gathering:
    """Fills a page."""

    def __init__(
        self,
        tree: Tree,
        window: Window,
        limit: int,
        modified_s: Callable[[ObjectRef], int | None],
    ) -> None:
        self._modified_s = modified_s
        self._tree = tree
        self._window = window
        self._limit = limit
        self._entries: list[Entry] = []
        self._looked = 0
        self._last: str | None = None

    async def page(self) -> Page:
        """Go through the wanted keys batch by batch until the page is full."""
        size = self._fewest
        async with aclosing(self._tree.walk()) as walk:
            while batch := await take(walk, size):
                before = len(self._entries)
                for seen, found in zip(batch, await self._locate(batch), strict=True):
                    if not self._is_wanted(seen, found):
                        continue
                    if self._is_full:
                        return Page(self._entries, self._last)
                    self._add(seen, found)
                is_vain = len(self._entries) == before
                size = min(_BATCH, max(self._fewest, 2 * size if is_vain else 0))
                await asyncio.sleep(0)
        return Page(self._entries, None)

    @property
    def _fewest(self) -> int:
        """How many keys to look for at once: of those that are folded the first may do."""
        return 1 if self._window.delimiter else self._limit - len(self._entries) + 1

    @property
    def _is_full(self) -> bool:
        return len(self._entries) == self._limit or self._looked == self._limit + _LOOKED_FOR

    def _is_wanted(self, seen: Seen, found: _Place) -> bool:
        """Tell whether it is news: what was folded, and what comes twice, is not."""
        cursor = self._tree.cursor
        return cursor.meets(seen.key) if found is None else cursor.admits(seen.key)

    def _add(self, seen: Seen, found: _Place) -> None:
        """Go on to *seen*, and add it if it is there."""
        cursor, key = self._tree.cursor, seen.key
        self._looked += 1
        self._last = cursor.after = key
        if isinstance(found, Missing):
            return
        folded = key if found is None else self._window.fold(key)
        if folded is not None:
            self._last, cursor.after = folded, folded + LAST
            self._entries.append(Entry(folded, None, None))
        elif found is not None:
            modified_s = self._time_of(seen, found)
            self._entries.append(_entry(key, found)._replace(modified_s=modified_s))

    def _time_of(self, seen: Seen, found: Location | Listed) -> float | None:
        match found:
            case Referenced(modified_s=modified_s):
                return modified_s
            case Stored(ref) | Gzipped(Stored(ref)):
                return self._modified_s(ref)
            case _:
                return seen.found.modified_s if isinstance(seen.found, Listed) else None

    async def _locate(self, batch: Sequence[Seen]) -> list[_Place]:
        """Find out where all is: first for one of each index, which brings it for the others."""
        found: dict[int, _Place] = {}
        leading: dict[Hashable, int] = {}
        following: list[int] = []
        for at, seen in enumerate(batch):
            if seen.layout is None:
                found[at] = cast("_Place", seen.found)
            elif not isinstance(seen.found, Candidate):
                leading[seen.key] = at
            elif leading.setdefault((id(seen.layout), seen.found.where), at) != at:
                following.append(at)
        for wave in (list(leading.values()), following):
            places = await bounded_gather(
                lambda at: _locate(batch[at], self._tree.root.fetch), wave
            )
            found.update(zip(wave, places, strict=True))
        return [found[at] for at in range(len(batch))]


async def _locate(seen: Seen, fetch: Fetch) -> _Place:
    """Find where *seen* is; what is served as it is, is as it was listed."""
    if seen.layout is None:
        return MISSING
    place = await seen.layout.locate(seen.inside, fetch)
    if isinstance(place, Whole):
        return seen.found if isinstance(seen.found, Listed) else MISSING
    return place


def _entry(key: str, found: Location | Listed) -> Entry:
    match found:
        case Listed(_, size, etag):
            return Entry(key, size, etag)
        case Referenced(Part(_, byte_range)):
            return Entry(key, byte_range.length, None)
        case Referenced(Stored() | Inline() as place, by, is_lasting):
            entity = Entity.at(place).referenced(by, is_lasting=is_lasting)
        case Stored() | Inline() as place:
            entity = Entity.at(place)
        case Gzipped(place):
            entity = Entity.at(place)
        case _:
            return Entry(key, None, None)
    return Entry(key, entity.length, entity.etag)
