"""Pages of keys, whatever layout tells them."""

from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from typing import cast

import pytest

from app.formats.contract import Format
from app.formats.listing import Item, KeySelection, ListingIO, ListingRules, Window
from app.formats.reading import Fetch
from app.model import (
    MISSING,
    ByteRange,
    ETag,
    Fixed,
    Gzipped,
    Inline,
    Location,
    ObjectRef,
    Part,
    Referenced,
    Stored,
    VirtualKey,
)
from app.resolve.containers import Containers
from app.resolve.entity import Entity
from app.resolve.fetch import Memory, ReadCache
from app.resolve.listing import Page, list_page
from app.resolve.walk import Root
from app.storage.memory import MemoryStore

REF = ObjectRef("memory://bucket", "data/chunk")
ROOT = ObjectRef("memory://bucket", "root")
PLACE = Inline(b"1", ETag('"1"'))
EVERYTHING = Window("")


@dataclass(frozen=True)
class Known:
    """A layout, and the format of it, that knows nothing but its keys."""

    locations: dict[str, Location | None]
    at: ObjectRef
    name: str = "known"

    def claim(self, _: VirtualKey) -> None:
        """Claim nothing."""

    async def open(self, directory: ObjectRef, _: Fetch) -> "Known | None":
        """Be in one directory."""
        return self if directory == self.at else None

    def encloses(self, _: VirtualKey) -> bool:
        """Have nothing else below."""
        return True

    async def listing_rules(self, _: VirtualKey, __: Fetch) -> ListingRules:
        """Give the keys that are wanted."""

        async def walk(wanted: KeySelection, _: ListingIO) -> AsyncGenerator[Item]:
            window = wanted.window
            for key in sorted(self.locations):
                if window is not None and window.admits(key):
                    yield Item(key, self.locations[key])

        return ListingRules(None, (walk,))


async def _page(
    locations: Iterable[str] | dict[str, Location | None],
    window: Window = EVERYTHING,
    limit: int = 1000,
    container: str = "",
) -> Page:
    given: dict[str, Location | None] = dict.fromkeys(locations, PLACE)
    given |= locations if isinstance(locations, dict) else {}
    known = cast("Format", Known(given, ROOT.join(container.rstrip("/"))))
    store = MemoryStore()
    store.place(ROOT.join(f"{container}object"), b"")
    fetch = ReadCache(store, Memory(2**20), ttl_s=60)
    return await list_page(
        Root(ROOT, store, Containers([known]), fetch), window, limit, lambda _: None
    )


def _keys(page: Page) -> list[str]:
    return [entry.key for entry in page.entries]


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5])
async def test_pages_follow_one_another(limit: int) -> None:
    """A page tells where the next begins, unless it is the last."""
    page = await _page("abcd", limit=limit)
    found, pages = _keys(page), 1
    while page.after is not None:
        page = await _page("abcd", Window("", page.after), limit)
        found += _keys(page)
        pages += 1

    assert found == list("abcd")
    assert pages == -(-4 // limit)


async def test_a_page_of_no_keys_is_the_last() -> None:
    """Whoever asks for none is not sent on."""
    assert await _page("abcd", limit=0) == Page([], None)


async def test_what_is_missing_is_passed_over_but_not_for_ever() -> None:
    """A page ends where too much was looked for, and tells where to go on."""
    gaps: dict[str, Location | None] = {f"{n:06}": MISSING for n in range(25_000)}
    first = await _page({**gaps, "x": PLACE}, limit=5)
    second = await _page({**gaps, "x": PLACE}, Window("", first.after or ""), limit=5)

    assert (first.entries, first.after) == ([], f"{10_004:06}")
    assert second.entries == []
    assert _keys(await _page({**gaps, "x": PLACE}, Window("", "024000"))) == ["x"]


async def test_keys_begin_with_the_path_of_the_container() -> None:
    """So do the prefix and the key to begin behind."""
    page = await _page("abc", Window("lab/", "lab/a"), 1, container="lab/")

    assert (_keys(page), page.after) == (["lab/b"], "lab/b")


@pytest.mark.parametrize(
    ("after", "expected"),
    [("lab", ["lab/a"]), ("kab/z", ["lab/a"]), ("lab/", ["lab/a"]), ("lac", []), ("z", [])],
)
async def test_a_listing_may_begin_outside_of_the_container(
    after: str, expected: list[str]
) -> None:
    """Before it all is listed, behind it nothing."""
    page = await _page("a", Window("lab/", after), container="lab/")

    assert _keys(page) == expected


async def test_entries_are_told_like_entities() -> None:
    """Length and version are those that a GET tells; of a part only the length is known.

    Of what is stored as gzip it is the length of that.
    """
    stored = Stored(REF, ByteRange(3, 9), Fixed(ETag('"id"')))
    inline = Inline(b"four", ETag('"four"'))
    page = await _page(
        {
            "a": stored,
            "b": Referenced(stored, "by", is_lasting=True),
            "c": Referenced(inline, "", is_lasting=False),
            "d": Referenced(Part(REF, ByteRange(0, 8)), "by", is_lasting=False),
            "e": Gzipped(stored),
            "f/": None,
        }
    )
    entity = Entity.at(stored)

    assert [(entry.nbytes, entry.etag) for entry in page.entries] == [
        (6, entity.etag),
        (6, entity.referenced("by", is_lasting=True).etag),
        (4, '"four"'),
        (8, None),
        (6, entity.etag),
        (None, None),
    ]
