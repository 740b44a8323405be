"""Pages of the keys of a container, in the order of their bytes."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from app.formats.contract import Layout
from app.formats.naming import LAST, Item, Window
from app.formats.reading import Fetch
from app.model import ETag, Inline, Location, Missing, Part, Referenced, Stored
from app.resolve.entity import Entity

_LOOKED_FOR: Final = 10_000
"""Shards may hold few of the chunks that they have room for."""
_AT_A_TIME: Final = 100


class Entry(NamedTuple):
    """A key, or the beginning of several that were folded."""

    key: str
    nbytes: int | None
    """`None` where keys were folded."""
    etag: ETag | None
    """`None` too where only the object would tell."""


@dataclass(frozen=True, slots=True)
class Page:
    """Entries that follow one another."""

    entries: list[Entry]
    after: str | None
    """The key to go on behind, which need not be one of the entries; `None` at the end."""


async def list_page(
    layout: Layout, window: Window, container: str, limit: int, fetch: Fetch
) -> Page | None:
    """List up to *limit* wanted keys of the *container*, with which they begin.

    `None` where the layout does not know its keys.
    """
    if window.after and not window.after.startswith(container):
        if window.after > container + LAST:
            return Page([], None)
        window = window._replace(after=container)
    inside = window._replace(
        prefix=window.prefix.removeprefix(container), after=window.after.removeprefix(container)
    )
    items = layout.items(inside, fetch, asyncio.to_thread)
    return None if items is None else await _page(items, container, limit)


async def _page(items: AsyncIterator[Item], container: str, limit: int) -> Page:
    """Gather up to *limit* entries, and look for no more than so many keys."""
    entries: list[Entry] = []
    last = None
    looked = 0
    async for key, location in items:
        if len(entries) == limit or looked == limit + _LOOKED_FOR:
            return Page(entries, last)
        looked += 1
        if looked % _AT_A_TIME == 0:
            await asyncio.sleep(0)
        last = container + key
        if not isinstance(location, Missing):
            entries.append(_entry(last, location))
    return Page(entries, None)


def _entry(key: str, location: Location | None) -> Entry:
    match location:
        case Referenced(Part(_, byte_range), _, _):
            return Entry(key, byte_range.length, None)
        case Referenced(Stored() | Inline() as place, by, is_lasting):
            entity = Entity.at(place).referenced(by, is_lasting=is_lasting)
            return Entry(key, entity.length, entity.etag)
        case Stored() | Inline():
            entity = Entity.at(location)
            return Entry(key, entity.length, entity.etag)
        case _:
            return Entry(key, None, None)
