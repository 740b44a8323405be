"""Whole prefixes taken away."""

import json
from pathlib import Path

import pytest

from app.errors import ReadOnlyError
from app.model import VirtualKey
from app.storage.memory import MemoryStore
from tests.formats.neuroglancer_precomputed.case import build_meshes
from tests.formats.neuroglancer_precomputed.shards import RAW_SHARDING
from tests.repositories import create
from tests.resolve.writers import (
    filled,
    put_each,
    replica,
    stored,
    zarr_json,
)
from tests.resolving import ROOT


@pytest.fixture
def memory() -> MemoryStore:
    """Store what most of them begin with."""
    return filled()


async def test_a_prefix_is_taken_away_with_all_below(memory: MemoryStore) -> None:
    """Shards and metadata of a whole array, and nothing beside it."""
    one = replica(memory)
    await put_each(one, {f"a/c/{n}": b"%04d" % n for n in range(16)})
    memory.place(ROOT.join("ab"), b"beside")

    count = await one.eraser.erase(one.reading.dataset, VirtualKey("a/"))

    assert count == 3
    assert [listed.ref.key async for listed in memory.list(ROOT.prefix)] == [
        ROOT.join("ab").key,
        ROOT.join("notes/one").key,
    ]
    assert await one.read("a/c/3") is None


async def test_sharded_meshes_are_taken_away_as_a_whole(memory: MemoryStore) -> None:
    """Though no single one can be written."""
    for name, data in build_meshes({"8": b"eight"}, sharding=RAW_SHARDING).items():
        memory.place(ROOT.join(f"mesh/{name}"), data)
    one = replica(memory)

    assert await one.eraser.erase(one.reading.dataset, VirtualKey("mesh/")) == 2
    assert [listed async for listed in memory.list(ROOT.join("mesh/").prefix)] == []


def _files_of_repository(folder: Path) -> dict[str, bytes]:
    create(folder)
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


async def test_a_repository_is_not_taken_away_with_what_is_around_it(
    memory: MemoryStore, tmp_path: Path
) -> None:
    """It changes by commits only; what is beside it stays too."""
    files = _files_of_repository(tmp_path)
    for name, data in files.items():
        memory.place(ROOT.join(f"x/lab/{name}"), data)
    memory.place(ROOT.join("x/beside"), b"it")
    one = replica(memory)

    with pytest.raises(ReadOnlyError):
        await one.eraser.erase(one.reading.dataset, VirtualKey("x/"))

    assert len([each async for each in memory.list(ROOT.join("x/"))]) == len(files) + 1 > 4


async def test_chunks_are_taken_away_without_their_array(memory: MemoryStore) -> None:
    """What is right below the array's own directory stays."""
    one = replica(memory)
    await put_each(one, {f"a/c/{n}": b"%04d" % n for n in range(16)})

    assert await one.eraser.erase(one.reading.dataset, VirtualKey("a/c/")) == 16

    assert await stored(memory, "a/c/0") is await stored(memory, "a/c/1") is None
    assert await one.read("a/zarr.json") is not None


async def test_shards_of_an_array_made_elsewhere_are_no_objects(memory: MemoryStore) -> None:
    """Below the prefix lies a shard, and in that a chunk whose key begins otherwise."""
    one, other = replica(memory), replica(memory)
    assert await one.read("b/c/0/0") is None
    grid = {"name": "regular", "configuration": {"chunk_shape": [8, 4]}}
    codecs = json.loads(zarr_json())["codecs"]
    codecs[0]["configuration"]["chunk_shape"] = [4, 4]
    document = zarr_json(shape=[8, 4], chunk_grid=grid, codecs=codecs)
    memory.place(ROOT.join("b/zarr.json"), document)
    await put_each(other, {"b/c/0/0": bytes(16), "b/c/1/0": b"\1" * 16})

    await one.eraser.erase(one.reading.dataset, VirtualKey("b/c/0/"))

    assert [await other.read(f"b/c/{n}/0") for n in range(2)] == [None, b"\1" * 16]
