"""Precomputed containers that clients write by virtual keys."""

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest

from app.errors import BadBodyError, BadKeyError, ConflictError, ShardgateError
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
    encode_manifest,
    mesh_info,
    skeleton_info,
    volume_info,
)
from tests.formats.neuroglancer_precomputed.shards import RAW_SHARDING
from tests.resolve.writers import Between, Replica, replica
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


async def put_each(one: Replica, given: Mapping[str, bytes | None]) -> list[ShardgateError]:
    """Write keys at once; give what went wrong."""
    changes = [Given(VirtualKey(key), body) for key, body in given.items()]
    found = await one.writer.put_each(one.reading.dataset, changes)
    return [each for each in found if isinstance(each, ShardgateError)]


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


async def test_manifests_that_were_written_are_not_read_back() -> None:
    """The next rewrite knows how long all fragments are."""
    store = Between(filled(spelled(mesh_info(GZIP_DATA))))
    one = replica(store)
    for segment in (4, 8, 12):
        bodies = {f"{segment}": b"fragments", f"{segment}.index": encode_manifest([[9]])}
        assert not await put_each(one, bodies)
    store.calls.clear()

    await one.put("8", b"fractures")
    assert [call for call in store.calls if "shard" in call[1]] == [("put", "0.shard")]
    assert await one.read("8") == b"fractures"
    assert await one.read("12.index") == encode_manifest([[9]])


async def test_the_last_chunk_goes_with_its_shard() -> None:
    """Nothing is left but the document."""
    store = filled(build({KEY: b"chunk", OTHER_SHARD: b"other"}))
    one = replica(store)
    await one.put(KEY, None)
    await one.put(OTHER_SHARD, None)

    assert [each.ref.key async for each in store.list(ROOT.prefix)] == [f"{ROOT.key}/info"]


async def test_meshes_are_written_whole() -> None:
    """Half of one is a conflict; without its manifest a mesh is gone."""
    one = replica(filled(build_meshes({"8": b"eight"}, sharding=RAW_SHARDING)))
    both = {"12": b"twelve", "12.index": encode_manifest([[6]])}
    (error,) = await put_each(one, {"4": b"four"})
    assert isinstance(error, ConflictError)

    assert not await put_each(one, both)
    assert await one.read("12") == b"twelve"
    await one.put("8.index", None)
    assert [await one.read(key) for key in ("8", "8.index", "4")] == [None] * 3


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
