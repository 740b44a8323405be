"""The arrays of a hierarchy, their shards, and what the indexes of those name."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from app.errors import DamagedError, StorageUnavailableError
from app.formats.surveying import Collection, Entry, Fault, Shards
from app.formats.zarr_storage_transformer.layout import HierarchyLayout, Zarr2022
from app.formats.zarr_storage_transformer.metadata import parse_array, parse_hierarchy
from app.formats.zarr_storage_transformer.survey import shards_of
from app.model import ByteRange, ObjectRef, VirtualKey
from app.resolve.perform import DirectFetch
from app.resolve.walk import list_names
from app.storage.contract import Listed
from app.storage.memory import MemoryStore
from tests.formats.zarr_storage_transformer.case import (
    BY_ZARR_PYTHON,
    ENTRY_POINT,
    array_metadata,
    build,
    encode,
    sharding,
)
from tests.resolving import ROOT

_ARRAY = parse_array(array_metadata([5, 7], [2, 2], [sharding([2, 3])]))
_FOO = shards_of(ROOT, "foo", _ARRAY)


class _Unlisted(MemoryStore):
    """A store that cannot list, as HTTP cannot."""

    lasting = True

    async def list(
        self, prefix: ObjectRef, *, delimiter: str = "", after: str = ""
    ) -> AsyncIterator[Listed]:
        """Raise when iterated."""
        nothing: list[Listed] = []
        for listed in nothing:
            yield listed
        raise StorageUnavailableError(prefix, "cannot be listed", lasting=self.lasting)


async def _collections(
    objects: dict[str, bytes],
    store: MemoryStore | None = None,
    entry_point: dict[str, Any] = ENTRY_POINT,
) -> Sequence[Collection | DamagedError]:
    store = store or MemoryStore()
    for key, data in objects.items():
        store.place(ROOT.join(key), data)
    hierarchy = parse_hierarchy(entry_point)
    assert hierarchy is not None
    layout = HierarchyLayout(ROOT, hierarchy, Zarr2022(2**20, 2**20))
    return await layout.collections(DirectFetch(store), lambda p: list_names(store, ROOT, p))


def _paths(found: Sequence[Collection | DamagedError]) -> list[str]:
    return [
        each.description.path if isinstance(each, Collection) else str(each.ref) for each in found
    ]


@pytest.mark.parametrize("key", ["data/root/foo/c0/0", "data/root/foo/c1/1"])
def test_a_stored_key_on_the_grid_is_a_shard(key: str) -> None:
    """The grid of shards has two by two places."""
    shard = _FOO.named(key)

    assert shard is not None
    assert shard.ref == ROOT.join(key)


@pytest.mark.parametrize(
    "key",
    ["data/root/foo/c2/0", "data/root/foo/c0/2", "data/root/c0/0", "data/root/foo/c00/0", "c0/0"],
)
def test_other_keys_are_no_shards(key: str) -> None:
    """Neither those off the grid nor those of another array."""
    assert _FOO.named(key) is None


@pytest.mark.parametrize(("chunk", "shard"), [("0/0", "0/0"), ("1/2", "0/0"), ("2/3", "1/1")])
def test_a_chunk_is_in_one_shard(chunk: str, shard: str) -> None:
    """Its identifier, divided by the chunks per shard."""
    found = _FOO.holding(VirtualKey(f"data/root/foo/c{chunk}"))

    assert found is not None
    assert found == _FOO.named(f"data/root/foo/c{shard}")


def test_a_chunk_off_the_grid_is_in_none() -> None:
    """Three by four chunks there are."""
    assert _FOO.holding(VirtualKey("data/root/foo/c3/0")) is None
    assert _FOO.holding(VirtualKey("data/root/foo/c0/4")) is None


@pytest.mark.parametrize(("path", "prefix"), [("", "data/root/"), ("a/b", "data/root/a/b/")])
def test_shards_lie_below_the_path_of_their_array(path: str, prefix: str) -> None:
    """Even where that is the root."""
    shards: Shards = shards_of(ROOT, path, _ARRAY)
    every = shards.every()

    assert shards.prefix == prefix
    assert every is not None
    assert [shard.key for shard in every] == [
        f"{prefix}c{chunk}" for chunk in ("0/0", "0/3", "2/0", "2/3")
    ]


async def test_entries_are_named_by_their_chunks() -> None:
    """And what cannot be right is a fault of one."""
    data = build({"data/root/foo/c0/1": b"first"}, path="/foo", per_shard=(2, 3))
    shard = bytearray(data["data/root/foo/c0/0"])
    shard[-16:] = (99).to_bytes(8, "little") * 2
    store = MemoryStore()
    store.place(ROOT.join("data/root/foo/c0/0"), bytes(shard))
    found = _FOO.named("data/root/foo/c0/0")

    assert found is not None
    survey = await found.survey(DirectFetch(store))
    assert survey is not None
    table = survey.table()
    (entry,) = table.entries

    assert (entry, survey.key(entry)) == (Entry(1, ByteRange(0, 5)), "data/root/foo/c0/1")
    assert (survey.index_location, survey.inner, survey.check(entry, b"four")) == (
        "end",
        None,
        None,
    )
    assert (table.empty, list(table.faults)) == (
        4,
        [
            Fault(
                VirtualKey("data/root/foo/c1/2"),
                "inner chunk 5 at [99, 198) ends past 104 bytes",
            )
        ],
    )


async def test_every_array_of_a_hierarchy_is_described() -> None:
    """The root too, and what of them is damaged."""
    objects = build({}, path="/foo/bar") | build({}) | {"meta/root/a.array.json": b"{"}
    objects |= {
        "meta/root/foo.group.json": b"{}",
        "meta/root/plain.array.json": encode(
            {
                name: value
                for name, value in BY_ZARR_PYTHON.items()
                if name != "storage_transformers"
            }
        ),
        "meta/root/b.array.json": encode(array_metadata([5], [2]) | {"shape": 5}),
    }

    found = await _collections(objects)

    assert _paths(found) == [
        "",
        f"{ROOT}/meta/root/a.array.json",
        f"{ROOT}/meta/root/b.array.json",
        "foo/bar",
        "plain",
    ]
    assert [isinstance(each, Collection) and each.shards is not None for each in found] == [
        True,
        False,
        False,
        True,
        False,
    ]


async def test_without_a_listing_gathered_metadata_lead_on() -> None:
    """What they name and is not there, is damage."""
    objects = build({}, path="/foo")
    gathered: dict[str, Any] = {"meta/root/foo.array.json": {}, "meta/root/gone.array.json": {}}
    objects["meta/root/consolidated/.zmetadata"] = encode({"metadata": gathered})

    found = await _collections(objects, _Unlisted())

    assert _paths(found) == ["foo", f"{ROOT}/meta/root/gone.array.json"]
    assert "does not exist, though other metadata name it" in str(found[1])


async def test_without_a_listing_the_root_may_be_the_array() -> None:
    """Then there is no other."""
    assert _paths(await _collections(build({}), _Unlisted())) == [""]


async def test_gathered_metadata_may_be_damaged() -> None:
    """It is told."""
    damaged = {"meta/root/consolidated/.zmetadata": b"{"}

    assert _paths(await _collections(damaged, _Unlisted())) == [
        f"{ROOT}/meta/root/consolidated/.zmetadata"
    ]


async def test_without_a_listing_and_gathered_metadata_nothing_is_claimed() -> None:
    """Nor where the store cannot list for a moment only."""
    store = _Unlisted()
    store.lasting = False
    for objects, unlisted in ((build({}, path="/foo"), _Unlisted()), (build({}), store)):
        with pytest.raises(StorageUnavailableError):
            await _collections(objects, unlisted)


async def test_a_hierarchy_that_is_not_understood_tells_why() -> None:
    """Its arrays are served as they are, whatever they are."""
    extensions = [{"extension": "https://example.org/moon", "must_understand": True}]

    (found,) = await _collections(build({}), entry_point={**ENTRY_POINT, "extensions": extensions})

    assert isinstance(found, Collection)
    assert (found.description.kind, found.shards) == ("hierarchy", None)
    assert "https://example.org/moon" in found.description.why_sharded
