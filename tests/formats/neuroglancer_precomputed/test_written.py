"""Precomputed containers that clients write by virtual keys."""

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest

from app.errors import BadBodyError, BadKeyError, ConflictError, ReadOnlyError
from app.model import VirtualKey
from app.resolve.containers import Containers
from app.resolve.writing import Given
from app.storage.memory import MemoryStore
from tests.formats.neuroglancer_precomputed.case import (
    GZIP_DATA,
    IDS,
    MURMUR,
    build,
    build_meshes,
    skeleton_info,
    volume_info,
)
from tests.formats.neuroglancer_precomputed.shards import RAW_SHARDING
from tests.resolve.writers import Between, replica
from tests.resolving import ROOT
from tests.zipped import zipped

KEY, NEIGHBOUR, OTHER_MINISHARD, NARROW, OTHER_SHARD = IDS
VOXELS = {KEY: bytes(9), NEIGHBOUR: b"123456789", OTHER_MINISHARD: b"abcdef", OTHER_SHARD: b"xyz"}


def filled(objects: Mapping[str, bytes]) -> MemoryStore:
    """Give a store with *objects* below the root."""
    store = MemoryStore()
    for key, data in objects.items():
        store.place(ROOT.join(key), data)
    return store


def spelled(info: object) -> dict[str, bytes]:
    """Give a container without any chunk."""
    return {"info": json.dumps(info).encode()}


@pytest.mark.parametrize("sharding", [RAW_SHARDING, GZIP_DATA, MURMUR])
async def test_chunks_are_put_and_deleted(sharding: dict[str, object]) -> None:
    """One after the other, and read back by another process."""
    store = filled(build({NARROW: b"narrow"}, sharding=sharding))
    one = replica(store)
    for key, body in VOXELS.items():
        await one.put(key, body)
    await one.put(NEIGHBOUR, None)
    expected = {**VOXELS, NEIGHBOUR: None, NARROW: b"narrow"}

    for reader in (one, replica(store)):
        assert {key: await reader.read(key) for key in expected} == expected


async def test_indexes_that_were_written_are_not_read_back() -> None:
    """Neither by whoever reads the chunk, nor for the next rewrite."""
    store = Between(filled(spelled(volume_info(RAW_SHARDING))))
    one = replica(store)
    await one.put(KEY, bytes(9))
    await one.put(NEIGHBOUR, bytes(9))
    store.calls.clear()

    await one.put(KEY, b"123456789")
    assert [call for call in store.calls if "shard" in call[1]] == [("put", "s0/0.shard")]
    assert await one.read(KEY) == b"123456789"
    assert [call for call in store.calls if "shard" in call[1]][1:] == [("get", "s0/0.shard")]


async def test_the_last_chunk_goes_with_its_shard() -> None:
    """Nothing is left but the document."""
    store = filled(build({KEY: b"chunk", OTHER_SHARD: b"other"}))
    one = replica(store)
    await one.put(KEY, None)
    await one.put(OTHER_SHARD, None)

    assert [each.ref.key async for each in store.list(ROOT.prefix)] == [f"{ROOT.key}/info"]


@pytest.mark.parametrize("body", [b"eight", None])
@pytest.mark.parametrize("key", ["8", "8.index"])
async def test_sharded_meshes_are_read_only(key: str, body: bytes | None) -> None:
    """A mesh is two keys that have to fit together, and no client writes them one by one."""
    store = filled(build_meshes({"8": b"eight"}, sharding=RAW_SHARDING))
    one = replica(store)
    with pytest.raises(ReadOnlyError, match="multi-resolution meshes can only be read"):
        await one.put(key, body)

    assert await one.read("8") == b"eight"


async def test_gzip_may_be_sent_for_any_chunk() -> None:
    """Clients that compress what they upload are understood."""
    for sharding in (RAW_SHARDING, GZIP_DATA):
        one = replica(filled(spelled(skeleton_info(sharding))))
        await one.put("7", zipped(b"a skeleton"), is_gzip=True)
        assert await one.read("7") == b"a skeleton"


async def test_what_cannot_be_is_refused() -> None:
    """Keys off the grid, and chunks of another size."""
    one = replica(filled(spelled(volume_info(RAW_SHARDING))))

    with pytest.raises(BadKeyError):
        await one.put("s0/-1-3_5-8_0-1", bytes(12))
    with pytest.raises(BadBodyError):
        await one.put(KEY, bytes(8))


async def test_an_info_that_was_served_can_be_written_back() -> None:
    """With other resolutions; its chunks are still found, and its grid cannot change."""
    one = replica(filled(build({KEY: b"chunk"})))
    served = json.loads(await one.read("info") or b"")
    served["scales"][0]["resolution"] = [4, 4, 40]
    await one.put("info", json.dumps(served).encode())

    assert json.loads(await one.read("info") or b"") == served
    assert await one.read(KEY) == b"chunk"
    served["scales"][0]["chunk_sizes"] = [[1, 1, 1]]
    with pytest.raises(ConflictError, match="chunk_sizes"):
        await one.put("info", json.dumps(served).encode())


async def test_a_shard_can_be_written_as_it_is_through_the_raw_view() -> None:
    """By programs that make whole ones; its chunks are seen at once."""
    objects = build({KEY: b"chunk"})
    one = replica(filled({"info": objects["info"]}))
    raw = replace(one.reading.dataset, containers=Containers([]))
    assert await one.read(KEY) is None
    with pytest.raises(ConflictError, match="is a shard"):
        await one.put("s0/0.shard", objects["s0/0.shard"])

    await one.writer.put(raw, Given(VirtualKey("s0/0.shard"), objects["s0/0.shard"]))
    assert await one.read(KEY) == b"chunk"
