"""Listings of keys in pages, and the requests they take."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import pytest

from shardgate.errors import DamagedError, NotAllowedError, StorageUnusableError
from shardgate.formats.listing import Window
from shardgate.model import VirtualKey
from shardgate.read import listing
from shardgate.read.listing import Page
from shardgate.read.walking import find_collections, find_containers
from shardgate.storage.memory import MemoryStore
from shardgate.storage.wrappers import Call, TracedStore
from tests.support.formats.case import filled
from tests.support.formats.icechunk.building import Ref
from tests.support.formats.icechunk.repositories import Builder
from tests.support.formats.neuroglancer_precomputed import case as precomputed_case
from tests.support.formats.neuroglancer_precomputed.shards import RAW_SHARDING, build_shards, morton
from tests.support.formats.zarr.building import (
    LITTLE,
    array_metadata,
    encode_shard,
    rectilinear,
    regular,
    sharding,
)
from tests.support.formats.zip.archives import Entry, archive
from tests.support.read.listing import BUCKET, pages_of, store_of
from tests.support.read.stores import Unlisted, WatchedStore
from tests.support.resolving import ROOT, Reading, reading

_SHARDS = 10
_INNER = 4
_SIDE = _SHARDS * _INNER


def _array(metadata: Mapping[str, Any], shards: Mapping[str, bytes]) -> MemoryStore:
    return filled({"zarr.json": json.dumps(metadata).encode(), **shards})


def _cube(separator: str = "/") -> MemoryStore:
    """Store a full array of 1,000 shards of 64 chunks, one element each."""
    encoding = {"name": "default", "configuration": {"separator": separator}}
    codec = sharding([1, 1, 1])
    metadata = array_metadata([_SIDE] * 3, [_INNER] * 3, [codec], chunk_key_encoding=encoding)
    places = product(range(_SHARDS), repeat=3)
    keys = [separator.join(["c", *map(str, at)]) for at in places]
    return _array(metadata, dict.fromkeys(keys, encode_shard([b"x"] * _INNER**3)))


class _Traced:
    """A resolver over a store whose calls are recorded."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.calls: list[tuple[str, str]] = []

        def note(call: Call) -> None:
            self.calls.append((call.method, str(call.ref)))

        self.data: Reading = reading(TracedStore(store, note))

    async def page(self, window: Window, limit: int = 1000) -> list[str]:
        """List a page, and forget the earlier calls."""
        self.calls.clear()
        return [entry.key for entry in (await self.data.page(window, limit)).entries]

    def count(self, method: str, part: str = "") -> int:
        """Count the calls of *method* whose object or prefix has *part* in its name."""
        return sum(name == method and part in key for name, key in self.calls)


@pytest.mark.parametrize("separator", ["/", "."])
async def test_page_reads_few_indexes_and_folders(separator: str) -> None:
    """A page of 1,000 keys of an array of 1,000 shards reads fewer than 140 indexes."""
    traced = _Traced(_cube(separator))
    found = await traced.page(Window(""))
    keys = [key for key in found if key.startswith("c")]
    shards = {tuple(int(n) // _INNER for n in key.split(separator)[1:]) for key in keys}

    assert len(keys) == 1000
    assert len(shards) < 140
    assert traced.count("get", f"c{separator}") <= len(shards) + 1
    assert traced.count("list") <= 30


async def test_folded_keys_take_one_index_each() -> None:
    """A common prefix needs one shard index; keys before the start are not examined."""
    traced = _Traced(_cube())
    found = await traced.page(Window("c/", "", "/"))
    assert found == sorted(f"c/{n}/" for n in range(_SIDE))
    assert traced.count("get", "c/") <= _SHARDS
    assert traced.count("list") <= 40

    traced = _Traced(traced.store)
    assert len(await traced.page(Window("", "c/27/3/5"), 50)) == 50
    assert traced.count("get", "c/") <= 15
    assert traced.count("list") <= 8


_HUGE = [2, 2, [4, 2**58 - 1]]


@pytest.mark.parametrize(
    ("grid", "row", "column"),
    [
        (regular(4, 4), 4 * 123456789012345678, 28),
        (rectilinear(_HUGE, [8, [4, 2**58]]), 4 * 123456789012345678 - 4, 32),
    ],
)
async def test_huge_sparse_array_is_listed(grid: dict[str, Any], row: int, column: int) -> None:
    """An array of 2^120 elements with one shard is listed with fewer than 20 calls."""
    metadata = array_metadata([2**60, 2**60], [], [sharding([1, 1])], chunk_grid=grid)
    shards = {"c/123456789012345678/7": encode_shard([b"x"] * 16)}
    traced = _Traced(_array(metadata, shards))
    expected = [f"c/{row + i}/{column + j}" for i in range(4) for j in range(4)]

    assert await traced.page(Window("c/")) == sorted(expected)
    assert await traced.page(Window("", expected[3])) == [*sorted(expected)[4:], "zarr.json"]
    assert len(traced.calls) < 20


async def test_page_ends_after_many_missing_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page ends after many missing chunks of a large index, and says where to continue."""
    monkeypatch.setattr(listing, "_INDEXES_NBYTES", 2**10)
    metadata = array_metadata([12_000], [12_000], [sharding([1])])
    shard = encode_shard([None] * 9 + [b"x"] + [None] * 11_990)
    data = reading(_array(metadata, {"c/0": shard}))
    pages = await pages_of(data, Window("c/"), 5)

    assert [[entry.key for entry in page] for page in pages] == [[], ["c/9"]]
    assert await data.page(Window("c/"), 0) == Page([], None)


def _sparse_volume(grid: int, algorithm: str, cells: Sequence[tuple[int, ...]]) -> dict[str, bytes]:
    """Store *cells* of a volume of *grid* chunks of 2048 voxels along each axis."""
    bits = {"preshift_bits": 9, "minishard_bits": 6, "shard_bits": 15}
    sharding = RAW_SHARDING | {"hash": algorithm, **bits}
    members = {"size": [2048 * grid] * 3, "chunk_sizes": [[2048] * 3], "voxel_offset": [0] * 3}
    info = json.dumps(precomputed_case.volume_info(sharding, **members)).encode()
    chunks = {morton(cell, (grid,) * 3): b"x" for cell in cells}
    shards = build_shards(chunks, sharding)
    return {"info": info, **{f"s0/{name}": shard for name, shard in shards.items()}}


@pytest.mark.parametrize("limit", [1000, 1])
@pytest.mark.parametrize("algorithm", ["identity", "murmurhash3_x86_128"])
async def test_sparse_volume_is_listed_by_its_shards(algorithm: str, limit: int) -> None:
    """The chunks of a volume of 2^60 cells are listed from the indexes of its three shards."""
    grid = 2**20
    cells = [(5, 700_001, 12), (999_999, 3, 524_288), (77, 1_048_575, 9)]
    data = reading(store_of(_sparse_volume(grid, algorithm, cells)), root=BUCKET)
    names = ("_".join(f"{2048 * n}-{2048 * n + 2048}" for n in cell) for cell in cells)
    expected = sorted(f"s0/{name}" for name in names)

    pages = await pages_of(data, Window("s0/"), limit)
    below = await pages_of(data, Window("s0/2047997952-2048000000_6"), limit)

    assert [entry.key for page in pages for entry in page] == expected
    assert [entry.key for page in below for entry in page] == [expected[2]]
    assert len(pages) <= len(cells) + 2


@pytest.mark.parametrize("nested", [False, True])
async def test_large_sparse_shards_are_listed_by_their_indexes(*, nested: bool) -> None:
    """The chunks of an array of 2^40 elements are listed from the index of its shard.

    Those of a shard in a shard are listed from both indexes.
    """
    inner = sharding([1], [sharding([1])]) if nested else sharding([1])
    metadata = array_metadata([2**40], [2**15], [inner])
    number = 2**20
    places = [2**15 * number + 30_000, 2**15 * number + 7]
    entries: list[bytes | None] = [None] * 2**15
    for place in places:
        entries[place % 2**15] = encode_shard([b"x"]) if nested else b"x"
    data = reading(_array(metadata, {f"c/{number}": encode_shard(entries)}))

    pages = await pages_of(data, Window("c/"), 1)

    expected = sorted(f"c/{place}" for place in places)
    assert [entry.key for page in pages for entry in page] == expected
    assert len(pages) <= len(places) + 1


def _sparse_line(shards: int, size: int) -> tuple[MemoryStore, list[str]]:
    """Store every fifth of *shards* of *size* chunks each, with one chunk; return its keys too."""
    metadata = array_metadata([5 * shards * size], [size], [sharding([1])])
    shard, numbers = encode_shard([None] * (size - 1) + [b"x"]), range(0, 5 * shards, 5)
    store = _array(metadata, {f"c/{number}": shard for number in numbers})
    return store, sorted(f"c/{number * size + size - 1}" for number in numbers)


async def test_many_sparse_shards_are_listed_by_their_indexes() -> None:
    """The chunks of an array with 1,100 sparse shards are listed in two pages."""
    store, expected = _sparse_line(1100, 128)

    pages = await pages_of(reading(store, index_bytes=2**24), Window("c/"), 1000)

    assert [entry.key for page in pages for entry in page] == expected
    assert len(pages) == 2


@pytest.mark.parametrize("limit", ["_MAX_SHARDS", "_MAX_CHUNKS"])
async def test_sparse_array_beyond_a_limit_is_listed_chunk_by_chunk(
    monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """A sparse array with more stored shards, or chunks, than are read at once is listed whole."""
    store, expected = _sparse_line(20, 200)
    monkeypatch.setattr(listing, limit, 2)

    assert await reading(store).keys(Window("c/")) == expected


async def test_damaged_shard_outside_of_the_prefix_does_not_fail_a_sparse_page() -> None:
    """A page of a sparse array is whole though a shard is damaged that has no key in it."""
    store, every = _sparse_line(20, 200)
    store.place(ROOT.join("c/15"), b"short")  # c/3000 to c/3199

    expected = [key for key in every if key.startswith("c/1")]
    assert await reading(store).keys(Window("c/1")) == expected


async def test_page_ends_when_reading_indexes_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page ends when reading indexes takes long; the next page continues behind it."""
    store, expected = _sparse_line(20, 1000)
    data = reading(store)
    monkeypatch.setattr(listing, "_READING_S", 0)
    first = await data.page(Window("c/"), 1000)
    monkeypatch.undo()

    assert first.after is not None
    assert len(first.entries) < len(expected)
    rest = await data.page(Window("c/", first.after), 1000)
    assert [entry.key for entry in (*first.entries, *rest.entries)] == expected


async def test_a_damaged_shard_fails_the_page() -> None:
    """A page with a damaged shard raises DamagedError.

    A replaced array is listed by its new metadata.
    """
    store = _cube()
    store.place(ROOT.join("c/0/0/0"), b"short")
    traced = _Traced(store)
    with pytest.raises(DamagedError, match="c/0/0/0"):
        await traced.page(Window("c/0/"))
    assert len(await traced.page(Window("c/4/"), 10)) == 10

    traced = _Traced(store := _cube())
    await traced.page(Window(""))
    metadata = array_metadata([4, 4, 4], [4, 4, 4], [sharding([2, 2, 2])])
    replaced = {"zarr.json": json.dumps(metadata).encode(), "c/0/0/0": encode_shard([b"x"] * 8)}
    for key, data in replaced.items():
        store.place(ROOT.join(key), data)
        traced.data.fetch.forget(ROOT.join(key))
    expected = ["/".join(["c", *map(str, cell)]) for cell in product(range(2), repeat=3)]
    assert await traced.page(Window("c/")) == sorted(expected)


async def test_objects_below_metadata_too_long_to_be_read_are_listed() -> None:
    """Below a group whose metadata are too long to be read all other keys are listed."""
    long = b'{"zarr_format": 3, "node_type": "group"}'.ljust(2**20 + 1)
    array = json.dumps(array_metadata([2], [2], [sharding([1])])).encode()
    shard = encode_shard([b"a", b"b"])
    data = reading(filled({"zarr.json": long, "a/zarr.json": array, "a/c/0": shard}))

    assert await data.keys(Window("")) == ["a/c/0", "a/c/1", "a/zarr.json", "zarr.json"]


async def test_refused_shards_fail_only_pages_with_their_keys() -> None:
    """A page with chunks of virtual shards that are not allowed raises NotAllowedError; pages of
    other keys, or of folders, do not.
    """
    builder = Builder()
    builder.group("/")
    builder.array("/a", array_metadata([2], [2], [LITTLE]), [1], [Ref(index=[0], inline=b"xy")])
    shards = [Ref(index=[0], location="s3://elsewhere/x", offset=0, length=84)]
    builder.array("/s", array_metadata([8], [4], [sharding([1])]), [2], shards)
    data = reading(filled(builder.build()))

    assert await data.keys(Window("a/")) == ["a/c/0", "a/zarr.json"]
    assert await data.keys(Window("", delimiter="/")) == ["a/", "s/", "zarr.json"]
    assert await data.keys(Window("s/", delimiter="/")) == ["s/c/", "s/zarr.json"]
    for window in (Window("s/"), Window("s/c/", delimiter="/")):
        with pytest.raises(NotAllowedError, match="s3://elsewhere"):
            await data.keys(window)


@pytest.mark.parametrize("marker", ["zarr.json", "b/zarr.json", "info", "b/info", "b/repo"])
async def test_listing_continues_below_a_damaged_marker(marker: str) -> None:
    """Containers below a damaged marker are listed as such, and its other objects as stored."""
    store = filled({marker: b"", "b/a/zarr.json": json.dumps(
        array_metadata([4], [4], [sharding([2])])).encode(), "b/c/0": b"unknown",
        "b/a/c/0": encode_shard([b"xx", b"yy"])})  # fmt: skip
    data = reading(store)
    expected = sorted([marker, "b/a/zarr.json", "b/a/c/0", "b/a/c/1", "b/c/0"])

    assert await data.keys(Window("")) == expected
    assert {"a/", "c/"} <= set(await data.names("b/"))
    found = {each.path: each.found async for each in find_collections(data.root)}
    damage = found.pop(marker.rpartition("/")[0])
    assert isinstance(damage, DamagedError)
    assert set(found) == {"b/a"}


async def test_chunk_directories_below_a_damaged_array_are_not_searched() -> None:
    """The search for containers skips directories of chunks unless they hold a marker."""
    array = json.dumps(array_metadata([4], [4], [LITTLE])).encode()
    objects = dict.fromkeys(("0/zarr.json", "g/1/zarr.json"), array)
    store = WatchedStore()
    filled({"zarr.json": b"{", "c/0/1": b"", "1/2/x": b"", **objects}, store)
    data = reading(store)
    found = [each.path async for each in find_containers(data.root)]

    assert found == ["", "0", "g/1"]
    assert not any(call.ref.key.startswith(ROOT.join("c/0").key) for call in store.calls)


async def test_listing_that_begins_within_an_archive_goes_on_behind_it() -> None:
    """A listing from above has no key of an archive, even if it begins after one of these."""
    data = reading(filled({"a.zip": archive(Entry(b"x"), Entry(b"y")), "b": b""}))

    assert await data.keys(Window("", "a.zip/x")) == ["b"]


async def test_search_in_an_archive_lets_others_run() -> None:
    """Other tasks run while many folders of an archive, in memory, are searched for containers."""
    folders, turns = 640, 0
    members = {"zarr.json": b"{", **{f"{number}/x": b"" for number in range(folders)}}
    store = MemoryStore()
    store.place(ROOT.join("a.zip"), archive(*(Entry(k.encode(), v) for k, v in members.items())))
    data = reading(store)

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        counting = group.create_task(count())
        async for _ in find_containers(data.root):
            turns = 0  # the damaged one: behind it lie only folders that are passed over
        counting.cancel()

    assert turns >= 4 * folders // 64  # three of four are of the listing


async def test_folder_of_an_array_lists_its_chunks() -> None:
    """A folder of an array lists its chunks.

    A store that cannot list raises StorageUnusableError.
    """
    data = reading(_cube())
    found = [name async for name in data.resolver.list(data.dataset, VirtualKey("c/0/0/"))]
    assert sorted(found) == sorted((str(n), 1) for n in range(_SIDE))

    store = Unlisted()
    store.place(ROOT.join("a"), b"1")
    data = reading(store)
    with pytest.raises(StorageUnusableError, match="cannot be listed"):
        await data.page(Window(""), 1000)
