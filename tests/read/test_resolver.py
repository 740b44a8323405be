"""From a virtual key to bytes: the reads that takes, and metadata that are known and outdated."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from shardgate.errors import BusyError, DamagedError
from shardgate.model import EVERYTHING, ByteRange, ByteRequest, ObjectRef, VirtualKey
from shardgate.read.containers import Dataset
from tests.formats.neuroglancer_precomputed import case as precomputed
from tests.formats.neuroglancer_precomputed.case import volume_info
from tests.formats.neuroglancer_precomputed.shards import RAW_SHARDING
from tests.formats.zarr import building as zarr
from tests.formats.zarr.building import build, build_nested, chunk_bytes, encode_index
from tests.read.stores import Watching, holding, settle
from tests.support.resolving import ROOT, everything

_CHUNKS = {key: chunk_bytes(i) for i, key in enumerate(["c/0/0", "c/0/1", "c/2/3", "c/0/3"])}
_SHARD = ROOT.join("c/0/0")
_TTL_S = 60.0
_STREAM_BYTES = 4096
_MARKERS = ("info", "repo", "refs/branch.main/ref.json")
"""Of other formats."""


def _case(objects: Mapping[str, bytes], **options: Any) -> Watching:
    return Watching(objects, gap_bytes=64, stream_bytes=_STREAM_BYTES, **options)


def _array(**options: Any) -> Watching:
    return _case(build(_CHUNKS), **options)


async def test_what_is_known_is_not_read_again() -> None:
    """A cold chunk takes its index and its bytes, a warm one its bytes, a cached one no read."""
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


async def test_a_hundred_callers_share_each_read() -> None:
    """Metadata, index and chunk are read once each, and neighbours in one range; so are objects."""
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


async def test_looking_at_a_key_reads_no_chunk() -> None:
    """HEAD and 304 read the index of an unknown shard, and are decided from the cache then."""
    case = _array()
    await case.warm("zarr.json")
    for _ in range(2):
        entity = await case.stat("c/0/0")

        assert entity is not None
        assert entity.length == len(_CHUNKS["c/0/0"])
        assert len(case.store.calls) == 1


async def test_an_index_proves_absence() -> None:
    """So does the absence of the shard, for all its chunks by one read; and its deletion."""
    case = _array(chunk_bytes=0)
    await case.warm("c/0/0")
    assert await case.read("c/1/1") is None
    assert case.store.calls == []

    assert [await case.read(f"c/2/{j}") for j in (0, 1)] == [None, None]
    assert len(case.store.calls) == 1
    case.store.remove(_SHARD)
    assert await case.read("c/0/0") is None


async def test_a_chunk_of_a_shard_in_a_shard_is_one_read() -> None:
    """If both indexes are known."""
    case = _case(build_nested({"c/0": b"zero", "c/1": b"one"}))
    await case.warm("c/0")
    assert await case.read("c/1") == b"one"
    assert len(case.store.calls) == 1


async def test_an_object_whose_part_is_unknown_is_measured_first() -> None:
    """An empty object is not absent; a known one that was replaced is read in its new version."""
    case = _case({"a.bin": b"bytes", "empty.bin": b""}, chunk_bytes=0)
    await case.warm("zarr.json")

    assert await case.read("a.bin", (1, 3), asked=None) == b"yt"
    assert case.store.methods == ["stat", "get"]
    case.write({"a.bin": b"newer bytes"})
    assert await case.read("a.bin") == b"newer bytes"
    assert await case.read("empty.bin") == b""


@pytest.mark.parametrize("asked", [EVERYTHING, None])
async def test_a_large_object_streams(asked: ByteRequest | None) -> None:
    """More than the limit is streamed, an object or a range of a shard."""
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
    """It is read once, and sent in pieces again; a part of it is cut from what is cached."""
    data = bytes(3 * 2**20)
    case = _case(build({"c/0/0": data}), chunk_bytes=16 * len(data))
    await case.warm("c/0/0")

    assert b"".join(await _stream(case)) == data
    assert [len(piece) for piece in await _stream(case)] == [2**20] * 3
    assert await case.read("c/0/0", (1, 2 * 2**20)) == data[1 : 2 * 2**20]
    assert case.store.methods == ["stream"]
    assert case.data.budget.held_bytes == 0


@pytest.mark.parametrize("why", ["cache", "budget", "client", "part"])
async def test_a_large_chunk_is_not_cached(why: str) -> None:
    """Not beyond a part of the cache, where memory is scarce, or where the client took a part."""
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
    """Read the chunk that the resolver gives in pieces, or the first *pieces* of it."""
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
    """After `ttl_s` or `forget` of its shard, and not before."""
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
async def test_a_known_absence_ends_with_its_time(objects: dict[str, bytes]) -> None:
    """A chunk that is written, or the array around it, appears after `ttl_s`."""
    case = _case(objects)
    assert await case.read("c/0/0") is None
    case.write(build(_CHUNKS))
    assert await case.read("c/0/0") is None
    case.clock.now += _TTL_S

    assert await case.read("c/0/0") == _CHUNKS["c/0/0"]


async def test_damage_names_the_shard_and_is_not_remembered() -> None:
    """It costs one read with fresh metadata, and is an error until the shard is mended."""
    case = _array()
    whole = build(_CHUNKS)["c/0/0"]
    for damaged, reason in (
        (whole[:-1] + bytes([whole[-1] ^ 1]), "the checksum"),
        (b"short" + encode_index([(0, 99)] * 4), ""),
    ):
        case.write({"c/0/0": damaged})
        with pytest.raises(DamagedError, match=f"data/c/0/0: {reason}"):
            await case.read("c/0/0")
        case.clock.now += 0.1
    assert [key for key in case.keys if key not in _MARKERS] == ["zarr.json", *["c/0/0"] * 2]
    case.write({"c/0/0": whole})

    assert await case.read("c/0/0") == _CHUNKS["c/0/0"]


async def test_an_array_rewritten_otherwise_is_not_damaged() -> None:
    """Metadata and index are read again before damage is reported."""
    case = _array()
    await case.warm("c/0/0")
    case.write(build(_CHUNKS, endian=">"))
    case.clock.now += 2

    assert await case.read("c/0/1") == _CHUNKS["c/0/1"]


async def test_many_who_learn_that_a_shard_was_replaced_read_its_index_once() -> None:
    """Fifty readers of a replaced shard share a failed read, an index and a chunk."""
    case = _array()
    await case.warm("c/0/0")
    case.write(build({"c/0/0": b"new"}))
    case.clock.now += 0.001

    assert await asyncio.gather(*(case.read("c/0/0") for _ in range(50))) == [b"new"] * 50
    assert len(case.store.calls) == 3


async def test_what_is_read_before_its_size_is_known_is_in_flight() -> None:
    """The first bytes of an object are reserved before they are read."""
    case = _case({"a.bin": b"bytes"})
    await case.warm("zarr.json")
    case.store.gate.clear()
    task = asyncio.create_task(case.read("a.bin"))
    await settle()
    held = case.data.budget.held_bytes
    case.store.gate.set()

    assert (await task, held) == (b"bytes", _STREAM_BYTES)
    assert case.data.budget.held_bytes == 0


async def test_without_room_a_chunk_is_not_read() -> None:
    """The request ends with `BusyError`; with room its bytes are held until they are sent."""
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
async def test_whoever_leaves_leaves_nothing_behind(key: str, turns: int) -> None:
    """After a cancellation no bytes stay reserved, and the next request works."""
    case = _case({**build(_CHUNKS), "notes.txt": b"notes"})
    expected = await _case({**build(_CHUNKS), "notes.txt": b"notes"}).read(key)
    task = asyncio.create_task(case.read(key))
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await settle()

    assert case.data.budget.held_bytes == 0
    assert await case.read(key) == expected


async def test_two_datasets_do_not_share_what_keys_name() -> None:
    """The same key in another dataset is another entity."""
    case = _array()
    case.write({f"sub/{key}": data for key, data in build({"c/0/0": b"other"}).items()})
    other = Dataset("other", ROOT.join("sub"), case.data.dataset.containers, "auto")
    first = await case.read("c/0/0")
    case.data.dataset = other

    assert (first, await case.read("c/0/0")) == (_CHUNKS["c/0/0"], b"other")


async def test_the_root_is_listed_and_not_its_neighbours() -> None:
    """A listing of a root has no objects of a root whose name begins alike."""
    case = _case({"zarr.json": build({})["zarr.json"], "notes.txt": b"notes"})
    case.store.place(ObjectRef(ROOT.bucket, f"{ROOT.key}-secret/a.bin"), b"secret")
    listed = [
        entry.name async for entry in case.data.resolver.list(case.data.dataset, VirtualKey(""))
    ]

    assert listed == ["notes.txt", "zarr.json"]


_OLD = {
    key: precomputed.chunk_bytes(number) for key, number in precomputed.IDS.items() if number != 3
}
_NEW = {key: b"a longer " + chunk for key, chunk in _OLD.items()}
_LONG_S = 30.0
"""Less than metadata are good for."""


def _rewrite(case: Watching, objects: Mapping[str, bytes]) -> None:
    """Replace all objects by *objects*, a while later."""
    case.store._objects.clear()
    case.write(objects)
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
async def test_a_volume_sharded_otherwise(change: dict[str, Any] | None, known: list[str]) -> None:
    """Its shards are never read with an outdated ``info``; missing ones do not prove absence."""
    case = Watching(precomputed.build(_OLD, sharding=RAW_SHARDING), chunk_bytes=0)
    await case.warm("info", *known)
    if change is None:
        _rewrite(case, {"info": json.dumps(volume_info(None)).encode(), **_NEW})
    else:
        _rewrite(case, precomputed.build(_NEW, sharding={**RAW_SHARDING, **change}))

    assert {key: await case.data.read(key) for key in _NEW} == _NEW


async def test_an_array_in_another_order() -> None:
    """Only the metadata say which chunk is where; index and checksum look alike."""
    chunks = {"c/0/0": b"first", "c/0/1": b"second", "c/1/0": b"third"}
    case = Watching(zarr.build(chunks))
    await case.warm("zarr.json")
    other = zarr.build({"c/0/0": b"first", "c/0/1": b"third", "c/1/0": b"second"})
    transpose = {"name": "transpose", "configuration": {"order": [1, 0]}}
    metadata = json.loads(other["zarr.json"])
    metadata["codecs"].insert(0, transpose)
    _rewrite(case, {**other, "zarr.json": json.dumps(metadata).encode()})

    assert {key: await case.read(key) for key in chunks} == chunks


async def test_metadata_are_confirmed_beside_a_new_index() -> None:
    """By one conditional read, and none for a while; what was read within seconds belongs to it."""
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
