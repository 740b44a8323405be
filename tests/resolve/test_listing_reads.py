"""What a page of keys costs upstream."""

import json
from itertools import product

import pytest

from app.errors import DamagedError, StorageUnavailableError
from app.formats.listing import Window
from app.model import VirtualKey
from app.storage.memory import MemoryStore
from app.storage.traced import Call, TracedStore
from tests.formats.zarr.building import array_metadata, encode_shard, sharding
from tests.resolve.stores import Unlisted
from tests.resolving import ROOT, Reading, reading

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
    """A thousand keys in a row are in a hundred and some shards of a thousand."""
    traced = _Traced(_cube(separator))
    found = await traced.page(Window(""))
    keys = [key for key in found if key.startswith("c")]
    shards = {tuple(int(n) // _INNER for n in key.split(separator)[1:]) for key in keys}

    assert len(keys) == 1000
    assert len(shards) < 140
    assert traced.count("get", f"c{separator}") <= len(shards) + 1
    assert traced.count("list") <= 30


async def test_a_page_that_begins_in_the_middle_lists_no_more() -> None:
    """What is before it is not looked at."""
    traced = _Traced(_cube())
    found = await traced.page(Window("", "c/27/3/5"), 50)

    assert len(found) == 50
    assert traced.count("get", "c/") <= 15
    assert traced.count("list") <= 8


async def test_folded_keys_take_one_index_each() -> None:
    """One chunk that is there is enough."""
    traced = _Traced(_cube())
    found = await traced.page(Window("c/", "", "/"))

    assert found == sorted(f"c/{n}/" for n in range(_SIDE))
    assert traced.count("get", "c/") <= _SHARDS
    assert traced.count("list") <= 40


async def test_a_sparse_array_of_any_size_is_listed_at_once() -> None:
    """Only what is stored is walked."""
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
    """To leave its chunks out would say that they are absent."""
    store = _cube()
    store.place(ROOT.join("c/0/0/0"), b"short")
    traced = _Traced(store)

    with pytest.raises(DamagedError, match="c/0/0/0"):
        await traced.page(Window("c/0/"))
    assert len(await traced.page(Window("c/4/"), 10)) == 10


async def test_an_array_that_is_replaced_between_pages_is_listed_as_it_is() -> None:
    """What was known of the shards that it had is asked for again."""
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
    """An empty page would say that there is nothing."""
    store = Unlisted()
    store.place(ROOT.join("a"), b"1")
    data = reading(store)

    with pytest.raises(StorageUnavailableError, match="cannot be listed"):
        await data.resolver.page(data.dataset, Window(""), 1000)


async def test_the_page_of_links_of_an_array_names_its_chunks() -> None:
    """People can go down into it."""
    data = reading(_cube())
    found = [name async for name in data.resolver.list(data.dataset, VirtualKey("c/0/0/"))]

    assert sorted(found) == sorted((str(n), 1) for n in range(_SIDE))
