"""From keys to places."""

import json
from typing import Any

import pytest

from app.errors import DamagedError, VersionChangedError
from app.formats.zarr_storage_transformer.layout import HierarchyLayout
from app.model import (
    MISSING,
    ByteRange,
    Inline,
    Location,
    Stored,
    SuffixRange,
    VirtualKey,
    Whole,
)
from app.resolve.fetch import Memory, ReadCache
from tests.formats.zarr_sharding_indexed.case import build as build_v3
from tests.formats.zarr_storage_transformer.case import (
    CORE,
    EMPTY,
    ENTRY_POINT,
    array_metadata,
    build,
    encode,
    encode_index,
    sharding,
)
from tests.resolve.stores import Clock, WatchedStore
from tests.resolving import ROOT, known_formats, reading

_LIMIT = 2**16
_META = "meta/root/foo/bar.array.json"
_DATA = "data/root/foo/bar"
_CHUNKS = {f"{_DATA}/c0/0": b"first", f"{_DATA}/c0/1": b"second", f"{_DATA}/c2/3": b"third"}


class _Case:
    """A hierarchy in a watched store."""

    def __init__(self, objects: dict[str, bytes], whole_index_nbytes: int = 2**20) -> None:
        self.store = WatchedStore()
        self.clock = Clock()
        self.etags = {key: self.store.place(ROOT.join(key), data) for key, data in objects.items()}
        self.format, *_ = known_formats(
            metadata_nbytes=_LIMIT, whole_index_nbytes=whole_index_nbytes
        )
        self.fetch = ReadCache(self.store, Memory(2**20), ttl_s=60, clock=self.clock)

    async def open(self) -> HierarchyLayout:
        """Open the hierarchy, and forget the reads of that."""
        layout = await self.format.open(ROOT, self.fetch)
        assert isinstance(layout, HierarchyLayout)
        self.store.calls.clear()
        return layout

    async def locate(self, key: str) -> Location:
        """Open the hierarchy and find *key*."""
        return await (await self.open()).locate(VirtualKey(key), self.fetch)


def _bar(**options: Any) -> dict[str, bytes]:
    return build(_CHUNKS, path="/foo/bar", **options)


def _plain(document: dict[str, Any] | None = None) -> dict[str, bytes]:
    """Make an array without the transformer."""
    metadata = array_metadata([4], [2]) if document is None else document
    return {"zarr.json": encode(ENTRY_POINT), "meta/root/plain.array.json": encode(metadata)}


def _array_of_two(shard: bytes) -> dict[str, bytes]:
    """Make an array of one shard of two chunks, at the root."""
    metadata = array_metadata([4], [2], [sharding([2])])
    return {
        "zarr.json": encode(ENTRY_POINT),
        "meta/root.array.json": encode(metadata),
        "data/root/c0": shard,
    }


async def test_a_hierarchy_has_everything_below_it() -> None:
    """No other container is looked for, however deep the key."""
    layout = await _Case(_bar()).open()

    assert layout.encloses(VirtualKey(""))
    assert layout.encloses(VirtualKey("data/root/foo/bar/c0/0"))


async def test_the_final_specification_is_still_read() -> None:
    """Its ``zarr.json`` are nodes, not entry points."""
    chunks = {"c/0/0": b"first", "c/2/3": b"second"}
    store = WatchedStore()
    for key, data in build_v3(chunks).items():
        store.place(ROOT.join(key), data)
    final = reading(store)

    assert {key: await final.read(key) for key in chunks} == chunks


async def test_a_chunk_is_a_range_of_its_shard() -> None:
    """The place is the object, the bytes in it and the version whose index told."""
    case = _Case(_bar())
    shard = f"{_DATA}/c0/0"

    assert await case.locate(f"{_DATA}/c0/1") == Stored(
        ROOT.join(shard), ByteRange(8, 14), case.etags[shard]
    )


async def test_metadata_are_served_without_the_transformer() -> None:
    """The document has a version of its own, made of that of the stored one."""
    case = _Case(_bar())
    location = await case.locate(_META)

    assert isinstance(location, Inline)
    assert "storage_transformers" not in json.loads(location.data)
    assert location.etag not in case.etags.values()
    assert location.etag.startswith(case.etags[_META][:-1])


async def test_consolidated_metadata_are_served_without_the_transformer() -> None:
    """zarr-python reads these instead of each array's own."""
    objects = _bar()
    key = "meta/root/consolidated/.zmetadata"
    consolidated = {"metadata": {_META: json.loads(objects[_META])}}
    case = _Case({**objects, key: encode(consolidated)})
    location = await case.locate(key)

    assert isinstance(location, Inline)
    assert "storage_transformers" not in json.loads(location.data)["metadata"][_META]
    assert location.etag != case.etags[key]


@pytest.mark.parametrize(
    "transformers",
    [
        None,
        [],
        [{"extension": "https://example.org/mirror/1.0", "type": "mirror"}],
        [sharding([2]), {"extension": "https://example.org/mirror/1.0", "type": "mirror"}],
        [{**sharding([2]), "type": "sorted"}],
    ],
)
async def test_an_array_as_it_is_keeps_document_version_and_chunks(transformers: Any) -> None:
    """What is not understood, or needs nothing, is passed on untouched."""
    objects = _plain(array_metadata([4], [2], transformers))
    key = "meta/root/plain.array.json"
    case = _Case(objects)

    assert await case.locate(key) == Inline(objects[key], case.etags[key])
    assert await case.locate("data/root/plain/c0") == Whole(ROOT.join("data/root/plain/c0"))


@pytest.mark.parametrize("key", ["meta/root.array.json", "meta/root/bar.array.json"])
async def test_metadata_that_are_not_there_are_missing(key: str) -> None:
    """An array that does not exist has no document."""
    assert await _Case(_bar()).locate(key) == MISSING


@pytest.mark.parametrize(
    "key",
    [
        "zarr.json",
        "meta/root.group.json",
        "meta/root/foo.group.json",
        "notes.txt",
        "data/root/foo/bar",
        f"{_DATA}/checksums",
        f"{_DATA}/c00/0",
        f"{_DATA}/c0/0/0",
        f"{_DATA}/c0",
        f"{_DATA}/c",
        f"{_DATA}/c0.0",
        "data/root/other/c0/0",
        "data/root/c0/0",
        "c0/0",
    ],
)
async def test_what_is_no_chunk_is_the_object_of_that_name(key: str) -> None:
    """Other keys, and those of unknown arrays, name objects below the hierarchy."""
    assert await _Case(_bar()).locate(key) == Whole(ROOT.join(key))


@pytest.mark.parametrize("key", ["c3/0", "c0/4", "c999999/0", "c0/9999999999999999999"])
async def test_off_the_grid_no_shard_is_read(key: str) -> None:
    """A key past the edge of the array is proved absent by its metadata."""
    case = _Case(_bar())

    assert await case.locate(f"{_DATA}/{key}") == MISSING
    assert [call.ref.key for call in case.store.calls] == [f"data/{_META}"]


@pytest.mark.parametrize("key", ["c1/1", "c2/1"])
async def test_what_was_not_written_is_missing(key: str) -> None:
    """An empty entry and an absent shard are absence."""
    assert await _Case(_bar()).locate(f"{_DATA}/{key}") == MISSING


async def test_a_shard_at_the_edge_has_an_index_of_full_shape() -> None:
    """Entries count all chunks of a shard, those outside of the array too."""
    case = _Case(_bar())

    assert await case.locate(f"{_DATA}/c2/3") == Stored(
        ROOT.join(f"{_DATA}/c1/1"), ByteRange(0, 5), case.etags[f"{_DATA}/c1/1"]
    )


async def test_a_chunk_costs_its_metadata_and_its_index() -> None:
    """One read tells of the array, one of the shard; each is as long as it must be."""
    case = _Case(_bar())
    await case.locate(f"{_DATA}/c0/0")

    assert [(call.ref.key, call.request) for call in case.store.calls] == [
        (f"data/{_META}", ByteRange(0, _LIMIT + 1)),
        (f"data/{_DATA}/c0/0", SuffixRange(64)),
    ]


async def test_a_large_index_is_read_entry_by_entry() -> None:
    """Above the limit the last byte tells the size, and one entry of that version is read."""
    case = _Case(_bar(), whole_index_nbytes=63)
    await case.locate(f"{_DATA}/c0/1")
    start = len(_bar()[f"{_DATA}/c0/0"]) - 64 + 16

    assert [(call.request, call.if_match) for call in case.store.calls[1:]] == [
        (SuffixRange(1), None),
        (ByteRange(start, start + 16), case.etags[f"{_DATA}/c0/0"]),
    ]


@pytest.mark.parametrize("key", [*_CHUNKS, f"{_DATA}/c1/1", "data/root/other/c0", _META])
async def test_when_warm_nothing_is_read(key: str) -> None:
    """Which array owns a key, that none does too, is known for as long as any metadata."""
    case = _Case(_bar())
    await case.locate(key)
    layout = await case.open()
    await layout.locate(VirtualKey(key), case.fetch)

    assert case.store.calls == []


async def test_after_a_while_metadata_are_asked_for_again() -> None:
    """An array that became another is served as that one when its time is over."""
    case = _Case(_bar())
    assert isinstance(await case.locate(f"{_DATA}/c0/1"), Stored)
    case.store.place(ROOT.join(_META), encode(array_metadata([5, 7], [2, 2])))
    case.clock.now += 61

    assert await case.locate(f"{_DATA}/c0/1") == Whole(ROOT.join(f"{_DATA}/c0/1"))


@pytest.mark.parametrize("key", [_META, f"{_DATA}/c0/0"])
@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        (b"{", "no JSON"),
        (b"[]", "no object"),
        (encode(array_metadata([5, 7], [2, 2], [sharding([0, 2])])), "chunks_per_shard"),
        (b" " * (_LIMIT + 1), "metadata of more than 65536 bytes"),
    ],
)
async def test_damaged_metadata_are_named(key: str, stored: bytes, reason: str) -> None:
    """Neither the array nor its chunks are absent when their metadata cannot be right."""
    with pytest.raises(DamagedError, match=reason) as caught:
        await _Case({**_bar(), _META: stored}).locate(key)

    assert caught.value.ref == ROOT.join(_META)


async def test_a_damaged_entry_point_is_named() -> None:
    """What is no suffix stops everything below."""
    entry_point = {**ENTRY_POINT, "metadata_key_suffix": 3}
    with pytest.raises(DamagedError, match="no string") as caught:
        await _Case({"zarr.json": encode(entry_point)}).open()

    assert caught.value.ref == ROOT.join("zarr.json")


async def test_a_hierarchy_that_is_not_understood_is_served_as_it_is() -> None:
    """Nothing of it is rewritten, and nothing hidden."""
    entry_point = {"zarr_format": CORE, "metadata_encoding": "https://example.org/cbor"}
    layout = await _Case({**_bar(), "zarr.json": encode(entry_point)}).open()
    case = _Case({**_bar(), "zarr.json": encode(entry_point)})

    for key in (_META, f"{_DATA}/c0/0"):
        assert await case.locate(key) == Whole(ROOT.join(key))
    assert (await layout.shelf(VirtualKey(f"{_DATA}/"), case.fetch)).is_plain


@pytest.mark.parametrize(
    ("key", "is_shown"),
    [
        ("zarr.json", True),
        ("meta/", True),
        (_META, True),
        ("data/root/", True),
        ("data/root/foo/bar/", True),
        (f"{_DATA}/notes.txt", True),
        (f"{_DATA}/c0/", False),
        (f"{_DATA}/c/", True),
        (f"{_DATA}/c0.0", False),
        ("data/root/c0/", True),
    ],
)
async def test_shards_are_hidden(key: str, *, is_shown: bool) -> None:
    """Objects whose names mean chunks cannot be asked for."""
    case = _Case(_bar())
    layout = await case.open()
    path = key[: key.rstrip("/").rfind("/") + 1]
    shelf = await layout.shelf(VirtualKey(path), case.fetch)

    assert shelf.shows is not None
    assert shelf.shows(key.removeprefix(path)) is is_shown


def _shard(first: tuple[int, int], second: tuple[int, int] = EMPTY) -> bytes:
    return b"0123456789" + encode_index([first, second])


@pytest.mark.parametrize("whole_index_nbytes", [2**20, 0])
@pytest.mark.parametrize(
    ("shard", "reason"),
    [
        (_shard((0, 11)), "overlaps the shard index"),
        (_shard((9, 2)), "overlaps the shard index"),
        (_shard((12, 4)), "overlaps the shard index"),
        (_shard((0, 42)), "overlaps the shard index"),
        (_shard((0, 43)), "ends past 42 bytes"),
        (_shard((2**40, 4)), "ends past 42 bytes"),
        (_shard((2**64 - 2, 4)), r"ends past 2\^64"),
        (_shard((2**64 - 1, 4)), "half an empty marker"),
        (_shard((0, 2**64 - 1)), "half an empty marker"),
        (_shard((0, 1))[11:], "31 bytes"),
        (b"x", "1 bytes"),
        (b"", "0 bytes"),
    ],
)
async def test_a_damaged_shard_is_named(shard: bytes, reason: str, whole_index_nbytes: int) -> None:
    """An index that contradicts its shard is damage, never absence."""
    case = _Case(_array_of_two(shard), whole_index_nbytes)
    with pytest.raises(DamagedError, match=reason) as caught:
        await case.locate("data/root/c0")

    assert caught.value.ref == ROOT.join("data/root/c0")


@pytest.mark.parametrize("whole_index_nbytes", [2**20, 0])
async def test_a_chunk_may_end_where_the_index_begins(whole_index_nbytes: int) -> None:
    """All bytes of a shard but its index may be one chunk."""
    case = _Case(_array_of_two(_shard((0, 10))), whole_index_nbytes)

    assert await case.locate("data/root/c0") == Stored(
        ROOT.join("data/root/c0"), ByteRange(0, 10), case.etags["data/root/c0"]
    )


async def test_more_chunks_than_any_shard_can_hold_are_damage() -> None:
    """However large a shard is said to be, no memory is taken for it."""
    metadata = array_metadata([4] * 8, [2] * 8, [sharding([2**63 - 1] * 8)])
    key = "data/root/c" + "/".join("0" * 8)
    objects = {
        "zarr.json": encode(ENTRY_POINT),
        "meta/root.array.json": encode(metadata),
        key: bytes(1000),
    }
    with pytest.raises(DamagedError, match="truncated"):
        await _Case(objects).locate(key)


async def test_a_shard_that_vanishes_between_its_reads_has_changed() -> None:
    """Once its end was seen, an entry that cannot be read is no absence."""
    case = _Case(_bar(), whole_index_nbytes=0)
    layout = await case.open()
    await layout.locate(VirtualKey(f"{_DATA}/c0/0"), case.fetch)
    case.store.remove(ROOT.join(f"{_DATA}/c0/0"))
    with pytest.raises(VersionChangedError):
        await layout.locate(VirtualKey(f"{_DATA}/c0/1"), case.fetch)


async def test_hierarchies_are_found_at_any_depth() -> None:
    """A bucket may hold hierarchies of the draft beside containers of other formats."""
    store = WatchedStore()
    for key, data in _bar().items():
        store.place(ROOT.join(f"lab/old/{key}"), data)
    for key, data in build_v3({"c/0/0": b"new"}).items():
        store.place(ROOT.join(f"lab/new/{key}"), data)
    bucket = reading(store)

    assert await bucket.read(f"lab/old/{_DATA}/c0/1") == b"second"
    assert await bucket.read("lab/new/c/0/0") == b"new"
