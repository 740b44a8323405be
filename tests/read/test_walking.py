"""Walks that find arrays of Zarr v2: by listings, by consolidated metadata, without a listing."""

import json
from pathlib import Path
from typing import Any

import pytest
import zarr
from zarr.storage import MemoryStore as MemoryOfZarr

from shardgate.configuration import RootOptions
from shardgate.datasets import open_containers, with_root
from shardgate.errors import DamagedError
from shardgate.formats.surveying import LEFT_OUT, ChunkCollection
from shardgate.read.listing import Root
from shardgate.read.walking import explain_emptiness, find_collections
from shardgate.settings import DatasetSettings, LimitSettings
from shardgate.storage.contract import ObjectStore
from shardgate.storage.memory import MemoryStore
from shardgate.storage.wrappers import Call, TracedStore
from shardgate.survey.inspect import summarize
from shardgate.survey.verify import verify
from tests.support.formats.case import filled
from tests.support.formats.zarr.building import array_metadata, sharding
from tests.support.read.stores import Unlisted
from tests.support.resolving import reading

PATHS = ["flat", "g/nested"]


def written(*, is_consolidated: bool = False) -> dict[str, bytes]:
    """Return the objects of a group with two arrays of many chunks, by their keys."""
    objects: dict[str, Any] = {}
    group = zarr.open_group(MemoryOfZarr(objects), mode="w", zarr_format=2)
    for path, separator in zip(PATHS, "./", strict=True):
        array = group.create_array(
            path,
            shape=(40, 40),
            dtype="u1",
            chunks=(4, 4),
            chunk_key_encoding={"name": "v2", "separator": separator},
            attributes={"_ARRAY_DIMENSIONS": ["y", "x"]},
        )
        array[...] = 1
    if is_consolidated:
        zarr.consolidate_metadata(group.store, zarr_format=2)
    return {key: data.to_bytes() for key, data in objects.items()}


async def names_of(store: ObjectStore) -> dict[str, tuple[str | None, ...] | None]:
    """Return the names of dimensions of the arrays found in *store*, by their paths."""
    found = {}
    async for path, _, collection in find_collections(reading(store).root):
        assert not isinstance(collection, DamagedError)
        assert collection.description.format == "zarr2"
        found[path] = collection.description.dimension_names
    return found


@pytest.mark.parametrize("is_consolidated", [False, True])
async def test_walk_finds_arrays_and_lists_no_chunks(*, is_consolidated: bool) -> None:
    """A walk finds the arrays, with consolidated metadata by these alone, and lists no folder of
    chunks; groups may have other arrays.
    """
    calls: list[Call] = []
    store = TracedStore(filled(written(is_consolidated=is_consolidated)), calls.append)
    found = await names_of(store)
    lists = [call.ref.key.removeprefix("data/") for call in calls if call.method == "list"]

    assert found == dict.fromkeys(PATHS, ("y", "x"))
    assert lists == (["", "g/"] if is_consolidated else ["", "flat/", "g/", "g/nested/"])


async def test_array_beside_consolidated_metadata_is_found() -> None:
    """An array that was written after its group was consolidated is found by its own folder."""
    objects = written(is_consolidated=True)
    store = filled(objects | {"new/.zarray": objects["flat/.zarray"]})

    assert set(await names_of(store)) == {*PATHS, "new"}


@pytest.mark.parametrize("name", ["../up/.zarray", "a//.zarray", "\ud800/.zarray"])
async def test_catalog_names_only_arrays_with_keys(name: str) -> None:
    """An array in consolidated metadata whose name cannot be in a key is left out."""
    objects = written(is_consolidated=True)
    catalog = json.loads(objects[".zmetadata"])
    catalog["metadata"][name] = catalog["metadata"]["flat/.zarray"]
    objects[".zmetadata"] = json.dumps(catalog).encode()

    assert set(await names_of(filled(objects))) == set(PATHS)


async def test_catalog_hides_no_other_collection() -> None:
    """Shards of Zarr v3 in a group of consolidated arrays, and in the place of one, are found and
    verified; no array is found twice, though the group has a catalog of its own.
    """
    objects = written(is_consolidated=True)
    documents = json.loads(objects[".zmetadata"])["metadata"]
    below = {"nested/.zarray": documents["g/nested/.zarray"]}
    sharded = json.dumps(array_metadata([8], [4], [sharding([1])])).encode()
    for path in ("g/sharded", "flat"):
        objects |= {f"{path}/zarr.json": sharded, f"{path}/c/0": b"damaged"}
    objects["g/.zmetadata"] = json.dumps({"metadata": below}).encode()
    opened = reading(filled(objects))
    seen = await summarize(opened.resolver, opened.dataset, within_s=60)
    report = await verify(opened.root, chunks=False)

    assert sorted(each.path for each in seen.collections) == [*PATHS, "g/sharded"]
    assert seen.is_all
    assert [damage.key for damage in report.damages] == ["flat/c/0", "g/sharded/c/0"]


async def test_odd_attributes_cost_no_array() -> None:
    """An array whose `.zattrs` is no JSON is found, without names of its dimensions."""
    assert await names_of(filled(written() | {"flat/.zattrs": b"{"})) == {
        "flat": None,
        "g/nested": ("y", "x"),
    }


async def test_store_without_listing_has_what_its_root_tells() -> None:
    """A store that cannot list has the arrays of consolidated metadata, or one at its root."""
    objects = written(is_consolidated=True)

    assert set(await names_of(filled(objects, Unlisted()))) == set(PATHS)
    assert await names_of(filled({".zarray": objects["flat/.zarray"]}, Unlisted())) == {"": None}


async def test_catalog_of_a_reference_set_is_not_taken() -> None:
    """The catalog of a set in Parquet, read as plain objects, has no arrays: it has no chunks."""
    metadata = {"a/.zarray": json.loads(written()["flat/.zarray"])}
    document = {"metadata": metadata, "record_size": 9}
    store = filled({".zmetadata": json.dumps(document).encode(), "a/refs.0.parq": b""})

    assert await names_of(store) == {}


async def test_damaged_catalog_hides_no_array() -> None:
    """Consolidated metadata that are damaged, or truncated, hide none of the arrays."""
    for data in (b"", b'{"metadata": {', b'{"metadata": []}', b"7"):
        assert set(await names_of(filled(written() | {".zmetadata": data}))) == set(PATHS)


async def test_array_of_a_refused_source_is_left_out(tmp_path: Path) -> None:
    """An array of a set whose metadata lie where no reference may lead is left out, no other."""
    refused = ["file:///elsewhere/zarray"]
    references = {"a/.zarray": refused, "b/.zarray": written()["flat/.zarray"].decode()}
    (tmp_path / "set.json").write_text(json.dumps(references))

    async def find(root: Root) -> dict[str, ChunkCollection | DamagedError]:
        return {path: each async for path, _, each in find_collections(root)}

    found = await with_root(str(tmp_path / "set.json"), find, RootOptions())
    left_out, sound = found["a"], found["b"]
    assert isinstance(left_out, ChunkCollection)
    assert left_out.description.kind == LEFT_OUT
    assert "virtual_chunk_prefixes" in left_out.description.why_sharded
    assert isinstance(sound, ChunkCollection)
    assert sound.description.shape == (40, 40)


async def test_damaged_array_is_reported() -> None:
    """An array whose metadata are invalid is damage of its document."""
    root = reading(filled({"a/.zarray": b"{}"})).root
    ((path, _, damage),) = [each async for each in find_collections(root)]

    assert path == "a"
    assert isinstance(damage, DamagedError)
    assert str(damage).endswith("a/.zarray: no Zarr v2 array: zarr_format is not 2")


@pytest.mark.parametrize("name", ["auto", "zarr", "precomputed"])
async def test_named_format_alone_is_looked_for(name: Any) -> None:
    """Arrays of Zarr v2 are looked for in datasets of Zarr, or of any format."""
    dataset = DatasetSettings(url="memory://data", format=name)
    containers = open_containers(dataset, LimitSettings())

    assert (containers.walked is not None) == (name != "precomputed")


async def test_empty_root_says_what_was_looked_for() -> None:
    """The explanation of an empty root names the markers, that of Zarr v2 too."""
    explained = await explain_emptiness(reading(MemoryStore()).root)

    assert "zarr.json, info" in explained
    assert explained.endswith(", .zarray")
