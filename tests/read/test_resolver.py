"""Reads of virtual keys: the requests they take, and outdated metadata."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from shardgate.errors import BusyError
from shardgate.model import (
    EVERYTHING,
    ByteRange,
    ByteRequest,
    ObjectRef,
    VirtualKey,
    VolatileBucket,
)
from shardgate.read.containers import Dataset
from tests.support.formats.neuroglancer_precomputed import case as precomputed
from tests.support.formats.neuroglancer_precomputed.case import volume_info
from tests.support.formats.neuroglancer_precomputed.shards import RAW_SHARDING
from tests.support.formats.zarr import building as zarr
from tests.support.formats.zarr.building import build, build_nested, chunk_bytes
from tests.support.read.stores import WatchedStore, Watching, holding, settle
from tests.support.resolving import NOTHING, ROOT, everything, reading

_CHUNKS = {key: chunk_bytes(i) for i, key in enumerate(["c/0/0", "c/0/1", "c/2/3", "c/0/3"])}
_SHARD = ROOT.join("c/0/0")
_TTL_S = 60.0
_STREAM_BYTES = 4096
_MARKERS = ("info", "repo", "refs/branch.main/ref.json")
"""Markers of other formats."""


def _case(objects: Mapping[str, bytes], **options: Any) -> Watching:
    return Watching(objects, gap_bytes=64, stream_bytes=_STREAM_BYTES, **options)


def _array(**options: Any) -> Watching:
    return _case(build(_CHUNKS), **options)


async def test_known_metadata_is_not_read_again() -> None:
    """A cold chunk takes two reads, a warm one one read, and a cached one none."""
    case = _array()
    await case.warm("zarr.json")
    assert await case.read("c/0/1") == _CHUNKS["c/0/1"]
    assert [(call.method, call.ref) for call in case.store.calls] == [("get", _SHARD)] * 2
    case.store.calls.clear()

    assert await case.read("c/0/0", (1, 3)) == _CHUNKS["c/0/0"][1:3]  # a part is not cached
    assert await case.read("c/0/0") == _CHUNKS["c/0/0"]
    requests = [ByteRange(1, 3), ByteRange(0, len(_CHUNKS["c/0/0"]))]
    assert [call.request for call in case.store.calls] == requests
    assert all(call.if_match is not None for call in case.store.calls)

    assert await case.read("c/0/0") == _CHUNKS["c/0/0"]
    assert await case.read("c/0/0", (1, 3)) == _CHUNKS["c/0/0"][1:3]
    assert len(case.store.calls) == 2


async def test_headers_kept_with_an_entity_take_room_in_the_cache() -> None:
    """Headers that are kept with a cached entity count in the size of the cache."""
    case = _array()
    await case.read("c/0/0")
    resolver, memory, place = case.data.resolver, case.data.fetch.cache, VirtualKey("c/0/0")
    found, before = resolver.get_cached(case.data.dataset, place), memory.currsize
    assert found is not None

    resolver.keep_head(case.data.dataset, place, found, NOTHING, b"etag: x\r\n")
    kept = resolver.get_cached(case.data.dataset, place)
    assert kept is not None
    assert dict(kept.heads) == {NOTHING: b"etag: x\r\n"}
    assert memory.currsize - before == len(b"etag: x\r\n")
    assert not found.heads


async def test_concurrent_callers_share_each_read() -> None:
    """Concurrent requests share one read each of metadata, index, chunk and object."""
    case = _array()
    await asyncio.gather(*(case.read("c/0/0") for _ in range(100)))
    assert [key for key in case.keys if key not in _MARKERS] == ["zarr.json", *["c/0/0"] * 2]

    case = _array()
    await case.warm("c/0/0")
    keys = ("c/0/0", "c/0/1")
    assert await asyncio.gather(*map(case.read, keys)) == [_CHUNKS[key] for key in keys]
    assert len(case.store.calls) == 1

    case = _case({"a.bin": b"bytes"})
    await case.warm("zarr.json")
    assert await asyncio.gather(*(case.read("a.bin") for _ in range(100))) == [b"bytes"] * 100
    assert case.store.methods == ["get"]


async def test_callers_share_no_read_of_a_volatile_bucket() -> None:
    """Each caller that reads an object of a volatile bucket gets bytes read after its call."""
    store, root = WatchedStore(), ObjectRef(VolatileBucket("volatile+session", "session"), "")
    data = reading(store, root=root, formats=())
    store.place(root.join("a"), b"old")
    store.gate.clear()
    first = asyncio.create_task(data.read("a", EVERYTHING))
    await settle()
    store.place(root.join("a"), b"new")
    second = asyncio.create_task(data.read("a", EVERYTHING))
    await settle()
    assert len(store.calls) == 2
    store.gate.set()

    assert await second == b"new"
    await first


async def test_index_or_missing_shard_proves_absence() -> None:
    """A chunk is absent by its index, or by its missing shard, without further reads."""
    case = _array(chunk_bytes=0)
    await case.warm("c/0/0")
    assert await case.read("c/1/1") is None
    assert case.store.calls == []

    assert [await case.read(f"c/2/{j}") for j in (0, 1)] == [None, None]
    assert len(case.store.calls) == 1
    case.store.remove(_SHARD)
    assert await case.read("c/0/0") is None


async def test_chunk_of_a_nested_shard_is_one_read() -> None:
    """A chunk of a shard in a shard is one read if both indexes are known."""
    case = _case(build_nested({"c/0": b"zero", "c/1": b"one"}))
    await case.warm("c/0")
    assert await case.read("c/1") == b"one"
    assert len(case.store.calls) == 1


async def test_object_of_unknown_range_is_measured_first() -> None:
    """An object is measured before a range that depends on its size.

    An empty object is not absent, and a replaced one is read in its new version.
    """
    case = _case({"a.bin": b"bytes", "empty.bin": b""}, chunk_bytes=0)
    await case.warm("zarr.json")

    assert await case.read("a.bin", (1, 3), asked=None) == b"yt"
    assert case.store.methods == ["stat", "get"]
    case.write({"a.bin": b"newer bytes"})
    assert await case.read("a.bin") == b"newer bytes"
    assert await case.read("empty.bin") == b""


@pytest.mark.parametrize("asked", [EVERYTHING, None])
async def test_a_large_object_streams(asked: ByteRequest | None) -> None:
    """An object or chunk above `stream_bytes` is streamed."""
    data = bytes(i % 251 for i in range(3 * _STREAM_BYTES))
    case = _case(build({"c/0/0": data}) | {"large.bin": data}, chunk_bytes=0)
    await case.warm("c/0/0")
    assert await case.read("large.bin", asked=asked) == data
    assert case.store.methods == ["get" if asked else "stat", "stream"]

    pieces = await _stream(case)
    assert b"".join(pieces) == data
    assert len(pieces) > 1
    assert case.store.methods[2:] == ["stream"]


async def test_a_large_chunk_is_cached_as_it_streams() -> None:
    """A large chunk is cached while it streams, and then sent in pieces or in part from memory."""
    data = bytes(3 * 2**20)
    case = _case(build({"c/0/0": data}), chunk_bytes=16 * len(data))
    await case.warm("c/0/0")

    assert b"".join(await _stream(case)) == data
    assert [len(piece) for piece in await _stream(case)] == [2**20] * 3
    assert await case.read("c/0/0", (1, 2 * 2**20)) == data[1 : 2 * 2**20]
    assert case.store.methods == ["stream"]
    assert case.data.budget.held_bytes == 0


@pytest.mark.parametrize("why", ["cache", "budget", "client", "part"])
async def test_large_chunk_is_not_always_cached(why: str) -> None:
    """A large chunk is not cached beyond a part of the cache, without room, or if read in part."""
    data = bytes(3 * 2**20)
    case = _case(build({"c/0/0": data}), chunk_bytes=16 * len(data) - (why == "cache"))
    await case.warm("c/0/0")
    async with holding(
        case.data.budget, case.data.budget.max_bytes - 2 * 2**20 if why == "budget" else 0
    ):
        if why == "part":
            await case.read("c/0/0", (0, len(data) - 1))
        else:
            await _stream(case, pieces=1 if why == "client" else None)

    assert case.data.chunks.cache.currsize == 0
    assert case.data.budget.held_bytes == 0


async def _stream(case: Watching, *, pieces: int | None = None) -> list[bytes | memoryview]:
    """Read the streamed chunk, or its first *pieces*."""
    taken = []
    opening = case.data.resolver.open(case.data.dataset, VirtualKey("c/0/0"), everything)
    async with opening as opened:
        assert opened is not None
        assert not isinstance(opened.body, bytes)
        async for piece in opened.body:
            taken.append(piece)
            if len(taken) == pieces:
                break
    return taken


@pytest.mark.parametrize("is_forgotten", [False, True])
async def test_a_known_key_is_resolved_again(*, is_forgotten: bool) -> None:
    """A known key is resolved again after `ttl_s`, or `forget` of its shard, and not before."""
    case = _array()
    before = await case.stat("c/0/0")
    case.write(build({"c/0/0": b"new"}))
    case.clock.now += _TTL_S - 0.001
    assert await case.stat("c/0/0") == before
    if is_forgotten:
        case.data.fetch.forget(_SHARD)
    case.clock.now += 0.0005 if is_forgotten else 0.001
    after = await case.stat("c/0/0")

    assert before is not None
    assert after is not None
    assert before.etag != after.etag


@pytest.mark.parametrize("objects", [{}, {"zarr.json": build({})["zarr.json"]}])
async def test_known_absence_expires(objects: dict[str, bytes]) -> None:
    """A chunk or array that is written after it was absent is found after `ttl_s`."""
    case = _case(objects)
    assert await case.read("c/0/0") is None
    case.write(build(_CHUNKS))
    assert await case.read("c/0/0") is None
    case.clock.now += _TTL_S

    assert await case.read("c/0/0") == _CHUNKS["c/0/0"]


async def test_rewritten_array_is_not_damaged() -> None:
    """An array that was rewritten with another index encoding is read with its new metadata."""
    case = _array()
    await case.warm("c/0/0")
    case.write(build(_CHUNKS, endian=">"))
    case.clock.now += 2

    assert await case.read("c/0/1") == _CHUNKS["c/0/1"]


async def test_readers_of_a_replaced_shard_share_its_reads() -> None:
    """Fifty readers of a replaced shard share a failed read, an index and a chunk."""
    case = _array()
    await case.warm("c/0/0")
    case.write(build({"c/0/0": b"new"}))
    case.clock.now += 0.001

    assert await asyncio.gather(*(case.read("c/0/0") for _ in range(50))) == [b"new"] * 50
    assert len(case.store.calls) == 3


async def test_object_of_unknown_size_is_reserved() -> None:
    """`stream_bytes` are reserved while the first bytes of an object of unknown size are read."""
    case = _case({"a.bin": b"bytes"})
    await case.warm("zarr.json")
    case.store.gate.clear()
    task = asyncio.create_task(case.read("a.bin"))
    await settle()
    held = case.data.budget.held_bytes
    case.store.gate.set()

    assert (await task, held) == (b"bytes", _STREAM_BYTES)
    assert case.data.budget.held_bytes == 0


async def test_chunk_needs_room_in_the_budget() -> None:
    """A chunk without room raises BusyError and is not read; its bytes are held until sent."""
    case = _array(in_flight_bytes=8)
    await case.warm("c/0/0")
    async with holding(case.data.budget, 8):
        with pytest.raises(BusyError):
            await case.read("c/0/0")
    assert case.store.calls == []

    async with case.data.resolver.open(
        case.data.dataset, VirtualKey("c/0/0"), everything
    ) as opened:
        assert opened is not None
        assert opened.body == _CHUNKS["c/0/0"]
        assert case.data.budget.held_bytes == len(_CHUNKS["c/0/0"])
    assert case.data.budget.held_bytes == 0


@pytest.mark.parametrize("key", ["c/0/0", "zarr.json", "notes.txt"])
@pytest.mark.parametrize("turns", range(8))
async def test_cancelled_read_releases_its_bytes(key: str, turns: int) -> None:
    """A cancelled read leaves no bytes reserved, and the next one succeeds."""
    case = _case({**build(_CHUNKS), "notes.txt": b"notes"})
    expected = await _case({**build(_CHUNKS), "notes.txt": b"notes"}).read(key)
    task = asyncio.create_task(case.read(key))
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await settle()

    assert case.data.budget.held_bytes == 0
    assert await case.read(key) == expected


async def test_datasets_do_not_share_keys() -> None:
    """One key in two datasets names two entities."""
    case = _array()
    case.write({f"sub/{key}": data for key, data in build({"c/0/0": b"other"}).items()})
    other = Dataset("other", ROOT.join("sub"), case.data.dataset.containers, "auto")
    first = await case.read("c/0/0")
    case.data.dataset = other

    assert (first, await case.read("c/0/0")) == (_CHUNKS["c/0/0"], b"other")


async def test_listing_of_a_root_has_no_neighbours() -> None:
    """A listing of a root has no objects of a root whose name begins alike."""
    case = _case({"zarr.json": build({})["zarr.json"], "notes.txt": b"notes"})
    case.store.place(ObjectRef(ROOT.bucket, f"{ROOT.key}-secret/a.bin"), b"secret")
    assert await case.data.names("") == ["notes.txt", "zarr.json"]


_OLD = {key: chunk_bytes(number) for key, number in precomputed.IDS.items() if number != 3}
_NEW = {key: b"a longer " + chunk for key, chunk in _OLD.items()}
_LONG_S = 30.0
"""Time shorter than the `ttl_s` of metadata."""


def _rewrite(case: Watching, objects: Mapping[str, bytes]) -> None:
    """Replace all objects by *objects*, and advance the clock."""
    for key in case.etags:
        case.store.remove(ROOT.join(key))
    case.etags = case.write(objects)
    case.clock.now += _LONG_S


@pytest.mark.parametrize("known", [[], [next(iter(_OLD))], list(_OLD)])
@pytest.mark.parametrize(
    "change",
    [
        {"data_encoding": "gzip"},
        {"minishard_index_encoding": "gzip"},
        {"minishard_bits": 2},
        {"preshift_bits": 0},
        {"shard_bits": 5},
        {"hash": "murmurhash3_x86_128"},
        None,
    ],
    ids=str,
)
async def test_resharded_volume_is_read_with_its_new_info(
    change: dict[str, Any] | None, known: list[str]
) -> None:
    """Chunks of a volume that was resharded or unsharded are read with its new ``info``."""
    case = Watching(precomputed.build(_OLD, sharding=RAW_SHARDING), chunk_bytes=0)
    await case.warm("info", *known)
    if change is None:
        _rewrite(case, {"info": json.dumps(volume_info(None)).encode(), **_NEW})
    else:
        _rewrite(case, precomputed.build(_NEW, sharding={**RAW_SHARDING, **change}))

    assert {key: await case.data.read(key) for key in _NEW} == _NEW


async def test_reordered_array_is_read_with_its_new_metadata() -> None:
    """Chunks of an array whose order changed are read with its new metadata."""
    chunks = {"c/0/0": b"first", "c/0/1": b"second", "c/1/0": b"third"}
    case = Watching(zarr.build(chunks))
    await case.warm("zarr.json")
    other = zarr.build({"c/0/0": b"first", "c/0/1": b"third", "c/1/0": b"second"})
    transpose = {"name": "transpose", "configuration": {"order": [1, 0]}}
    metadata = json.loads(other["zarr.json"])
    metadata["codecs"].insert(0, transpose)
    _rewrite(case, {**other, "zarr.json": json.dumps(metadata).encode()})

    assert {key: await case.read(key) for key in chunks} == chunks


async def test_metadata_are_revalidated_beside_a_new_index() -> None:
    """Metadata older than seconds are revalidated by one conditional read beside a new index."""
    case = Watching(precomputed.build(_OLD, sharding=RAW_SHARDING))
    await case.warm("info")
    case.clock.now += 4
    await case.read("s0/-1-2_5-8_0-1")
    assert "info" not in case.keys

    case = Watching(precomputed.build(_OLD, sharding=RAW_SHARDING))
    await case.warm("info")
    case.clock.now += _LONG_S
    await case.read("s0/-1-2_5-8_0-1")
    confirmed = [call for call in case.store.calls if call.ref == ROOT.join("info")]
    await case.read("s0/5-6_5-8_0-1")

    assert [call.if_none_match is None for call in confirmed] == [False]
    assert case.keys.count("info") == 1
