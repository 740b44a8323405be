"""Pages of keys, and the requests that they cost."""

import json
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from itertools import product
from typing import cast

import pytest

from app.errors import DamagedError, StorageUnavailableError
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
from app.resolve.bodies import Entity
from app.resolve.containers import Containers
from app.resolve.listing import Page, Root, list_page
from app.resolve.metadata_cache import MetadataCache, ReadCache
from app.storage.memory import MemoryStore
from app.storage.wrappers import Call, TracedStore
from tests.formats.zarr.building import array_metadata, encode_shard, sharding
from tests.resolve.stores import Unlisted
from tests.resolving import ROOT, Reading, reading

REF = ObjectRef("memory://bucket", "data/chunk")
PLACE = Inline(b"1", ETag('"1"'))
EVERYTHING = Window("")


@dataclass(frozen=True)
class Known:
    """A format and layout with fixed keys."""

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
    fetch = ReadCache(store, MetadataCache(2**20), ttl_s=60)
    return await list_page(
        Root(ROOT, store, Containers([known]), fetch), window, limit, lambda _: None
    )


def _keys(page: Page) -> list[str]:
    return [entry.key for entry in page.entries]


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5])
async def test_pages_follow_one_another(limit: int) -> None:
    """A page says where the next begins, unless it is the last."""
    page = await _page("abcd", limit=limit)
    found, pages = _keys(page), 1
    while page.after is not None:
        page = await _page("abcd", Window("", page.after), limit)
        found += _keys(page)
        pages += 1

    assert found == list("abcd")
    assert pages == -(-4 // limit)


async def test_a_page_of_no_keys_is_the_last() -> None:
    """A page with limit 0 has no next page."""
    assert await _page("abcd", limit=0) == Page([], None)


async def test_what_is_missing_is_passed_over_but_not_for_ever() -> None:
    """A page ends after too many missing keys, and says where to continue."""
    gaps: dict[str, Location | None] = {f"{n:06}": MISSING for n in range(25_000)}
    first = await _page({**gaps, "x": PLACE}, limit=5)
    second = await _page({**gaps, "x": PLACE}, Window("", first.after or ""), limit=5)

    assert (first.entries, first.after) == ([], f"{10_004:06}")
    assert second.entries == []
    assert _keys(await _page({**gaps, "x": PLACE}, Window("", "024000"))) == ["x"]


async def test_keys_begin_with_the_path_of_the_container() -> None:
    """So do the prefix and the start key."""
    page = await _page("abc", Window("lab/", "lab/a"), 1, container="lab/")

    assert (_keys(page), page.after) == (["lab/b"], "lab/b")


@pytest.mark.parametrize(
    ("after", "expected"),
    [("lab", ["lab/a"]), ("kab/z", ["lab/a"]), ("lab/", ["lab/a"]), ("lac", []), ("z", [])],
)
async def test_a_listing_may_begin_outside_of_the_container(
    after: str, expected: list[str]
) -> None:
    """A start before the container lists all, a start behind it nothing."""
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


_SHARDS = 10
_INNER = 4
_SIDE = _SHARDS * _INNER


def _cube(separator: str = "/") -> MemoryStore:
    """Store a full array of 1,000 shards of 64 chunks, one element each."""
    encoding = {"name": "default", "configuration": {"separator": separator}}
    codec = sharding([1, 1, 1])
    metadata = array_metadata([_SIDE] * 3, [_INNER] * 3, [codec], chunk_key_encoding=encoding)
    store = MemoryStore()
    store.place(ROOT.join("zarr.json"), json.dumps(metadata).encode())
    shard = encode_shard([b"x"] * _INNER**3)
    for at in product(range(_SHARDS), repeat=3):
        store.place(ROOT.join(separator.join(["c", *map(str, at)])), shard)
    return store


class _Traced:
    """A resolver over a store whose calls are noted."""

    def __init__(self, store: MemoryStore) -> None:
        self.calls: list[tuple[str, str]] = []

        def note(call: Call) -> None:
            self.calls.append((call.method, str(call.ref)))

        self.data: Reading = reading(TracedStore(store, note))

    async def page(self, window: Window, limit: int = 1000) -> list[str]:
        """List a page, and forget the calls before it."""
        self.calls.clear()
        found = await self.data.resolver.page(self.data.dataset, window, limit)
        return [entry.key for entry in found.entries]

    def count(self, method: str, part: str = "") -> int:
        """Count the calls of *method* whose object or prefix has *part* in its name."""
        return sum(name == method and part in key for name, key in self.calls)


@pytest.mark.parametrize("separator", ["/", "."])
async def test_a_page_reads_the_indexes_of_its_shards_and_few_folders(separator: str) -> None:
    """A thousand consecutive keys are in fewer than 140 of a thousand shards."""
    traced = _Traced(_cube(separator))
    found = await traced.page(Window(""))
    keys = [key for key in found if key.startswith("c")]
    shards = {tuple(int(n) // _INNER for n in key.split(separator)[1:]) for key in keys}

    assert len(keys) == 1000
    assert len(shards) < 140
    assert traced.count("get", f"c{separator}") <= len(shards) + 1
    assert traced.count("list") <= 30


async def test_a_page_that_begins_in_the_middle_lists_no_more() -> None:
    """Keys before the start are not examined."""
    traced = _Traced(_cube())
    found = await traced.page(Window("", "c/27/3/5"), 50)

    assert len(found) == 50
    assert traced.count("get", "c/") <= 15
    assert traced.count("list") <= 8


async def test_folded_keys_take_one_index_each() -> None:
    """One present chunk proves a common prefix."""
    traced = _Traced(_cube())
    found = await traced.page(Window("c/", "", "/"))

    assert found == sorted(f"c/{n}/" for n in range(_SIDE))
    assert traced.count("get", "c/") <= _SHARDS
    assert traced.count("list") <= 40


async def test_a_sparse_array_of_any_size_is_listed_at_once() -> None:
    """Only stored shards are walked."""
    store = MemoryStore()
    metadata = array_metadata([2**60, 2**60], [4, 4], [sharding([1, 1])])
    store.place(ROOT.join("zarr.json"), json.dumps(metadata).encode())
    store.place(ROOT.join("c/123456789012345678/7"), encode_shard([b"x"] * 16))
    traced = _Traced(store)
    rows = range(123456789012345678 * 4, 123456789012345678 * 4 + 4)
    expected = [f"c/{row}/{column}" for row in rows for column in range(28, 32)]

    assert await traced.page(Window("c/")) == sorted(expected)
    assert await traced.page(Window("", expected[3])) == [*sorted(expected)[4:], "zarr.json"]
    assert len(traced.calls) < 20


async def test_a_damaged_shard_fails_the_page() -> None:
    """A page without its chunks would say that they are absent."""
    store = _cube()
    store.place(ROOT.join("c/0/0/0"), b"short")
    traced = _Traced(store)

    with pytest.raises(DamagedError, match="c/0/0/0"):
        await traced.page(Window("c/0/"))
    assert len(await traced.page(Window("c/4/"), 10)) == 10


async def test_an_array_that_is_replaced_between_pages_is_listed_as_it_is() -> None:
    """Indexes of its former shards are read again."""
    traced = _Traced(store := _cube())
    await traced.page(Window(""))
    metadata = array_metadata([4, 4, 4], [4, 4, 4], [sharding([2, 2, 2])])
    store.place(ROOT.join("zarr.json"), json.dumps(metadata).encode())
    store.place(ROOT.join("c/0/0/0"), encode_shard([b"x"] * 8))
    traced.data.fetch.forget(ROOT.join("zarr.json"))
    traced.data.fetch.forget(ROOT.join("c/0/0/0"))

    cells = product(range(2), repeat=3)
    expected = ["/".join(["c", *map(str, cell)]) for cell in cells]
    assert await traced.page(Window("c/")) == sorted(expected)


async def test_a_store_that_cannot_list_says_so() -> None:
    """An empty page would say that there are no keys."""
    store = Unlisted()
    store.place(ROOT.join("a"), b"1")
    data = reading(store)

    with pytest.raises(StorageUnavailableError, match="cannot be listed"):
        await data.resolver.page(data.dataset, Window(""), 1000)


async def test_the_page_of_links_of_an_array_names_its_chunks() -> None:
    """The HTML listing of a folder of chunks has all of them."""
    data = reading(_cube())
    found = [name async for name in data.resolver.list(data.dataset, VirtualKey("c/0/0/"))]

    assert sorted(found) == sorted((str(n), 1) for n in range(_SIDE))
