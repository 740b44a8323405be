"""Data that are rewritten in another form under the same names, while their metadata are known."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.formats.neuroglancer_precomputed import case as precomputed
from tests.formats.neuroglancer_precomputed.case import volume_info
from tests.formats.neuroglancer_precomputed.shards import RAW_SHARDING, Watched
from tests.formats.zarr import building as zarr
from tests.resolve.stores import Clock
from tests.resolving import ROOT

_OLD = {
    key: precomputed.chunk_bytes(number) for key, number in precomputed.IDS.items() if number != 3
}
_NEW = {key: b"a longer " + chunk for key, chunk in _OLD.items()}
_LONG_S = 30.0
"""Less than metadata are good for."""


def _rewrite(case: Watched, objects: Mapping[str, bytes]) -> None:
    """Replace all objects by *objects*."""
    for key in case.etags:
        case.store.remove(ROOT.join(key))
    for key, data in objects.items():
        case.store.place(ROOT.join(key), data)


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
    ],
    ids=str,
)
async def test_a_volume_sharded_otherwise(change: dict[str, Any], known: list[str]) -> None:
    """Its shards are never read with an outdated ``info``."""
    clock = Clock()
    case = Watched(precomputed.build(_OLD, sharding=RAW_SHARDING), clock=clock, chunk_bytes=0)
    await case.warm("info", *known)
    _rewrite(case, precomputed.build(_NEW, sharding={**RAW_SHARDING, **change}))
    clock.now += _LONG_S

    assert {key: await case.read(key) for key in _NEW} == _NEW


async def test_a_volume_without_shards_any_more() -> None:
    """Missing shards do not prove that chunks are absent."""
    clock = Clock()
    case = Watched(precomputed.build(_OLD, sharding=RAW_SHARDING), clock=clock, chunk_bytes=0)
    await case.warm(*_OLD)
    _rewrite(case, {"info": json.dumps(volume_info(None)).encode(), **_NEW})
    clock.now += _LONG_S

    assert {key: await case.read(key) for key in _NEW} == _NEW


async def test_an_array_in_another_order() -> None:
    """Only the metadata say which chunk is where; index and checksum look alike."""
    clock = Clock()
    chunks = {"c/0/0": b"first", "c/0/1": b"second", "c/1/0": b"third"}
    case = Watched(zarr.build(chunks), clock=clock)
    await case.warm("zarr.json")
    other = zarr.build({"c/0/0": b"first", "c/0/1": b"third", "c/1/0": b"second"})
    transpose = {"name": "transpose", "configuration": {"order": [1, 0]}}
    metadata = json.loads(other["zarr.json"])
    metadata["codecs"].insert(0, transpose)
    _rewrite(case, {**other, "zarr.json": json.dumps(metadata).encode()})
    clock.now += _LONG_S

    assert {key: await case.read(key) for key in chunks} == chunks


async def test_metadata_are_confirmed_beside_a_new_index() -> None:
    """One conditional read confirms them, and none follows for a while."""
    clock = Clock()
    case = Watched(precomputed.build(_OLD, sharding=RAW_SHARDING), clock=clock)
    await case.warm("info")
    clock.now += _LONG_S
    await case.read("s0/-1-2_5-8_0-1")
    confirmed = [call for call in case.store.calls if call.ref == ROOT.join("info")]
    await case.read("s0/5-6_5-8_0-1")

    assert [call.if_none_match for call in confirmed] == [case.etags["info"]]
    assert case.keys.count("info") == 1


async def test_metadata_that_are_new_enough_are_believed() -> None:
    """Metadata read within seconds of an index belong to it."""
    clock = Clock()
    case = Watched(precomputed.build(_OLD, sharding=RAW_SHARDING), clock=clock)
    await case.warm("info")
    clock.now += 4
    await case.read("s0/-1-2_5-8_0-1")

    assert "info" not in case.keys
