"""Damage is kept for a second: a viewer that repeats its request costs no reads of the store."""

import json
from collections.abc import Mapping

import pytest

from shardgate.errors import DamagedError, StorageUnavailableError
from shardgate.formats.members import refer
from shardgate.model import ByteRange, Part, UnmodifiedSince
from tests.formats.neuroglancer_precomputed import case as precomputed
from tests.formats.zarr.building import array_metadata, encode_index, encode_shard, sharding
from tests.read.pointers import Pointers
from tests.read.stores import REF, Watching
from tests.support.resolving import ROOT
from tests.support.zipped import zipped

_ARRAY = {
    "zarr.json": json.dumps(array_metadata([2], [2], [sharding([1])])).encode(),
    "c/0": encode_shard([b"a", b"b"]),
}
_VOLUME_KEY, *_ = precomputed.IDS


def _inflated() -> dict[str, bytes]:
    """Return a volume with a chunk that is no gzip, though its metadata say so."""
    raw = {**precomputed.GZIP_DATA, "data_encoding": "raw"}
    info = precomputed.build({}, sharding=precomputed.GZIP_DATA)["info"]
    broken = zipped(bytes(5000))[:-1]
    return {**precomputed.build({_VOLUME_KEY: broken}, sharding=raw), "info": info}


_DAMAGED = {
    "metadata": ({"zarr.json": b"{"}, "c/0"),
    "index": ({**_ARRAY, "c/0": _ARRAY["c/0"][:-1] + b"!"}, "c/0"),
    "truncated": ({**_ARRAY, "c/0": b"short"}, "c/0"),
    "entry": ({**_ARRAY, "c/0": encode_index([(0, 999), (0, 1)])}, "c/0"),
    "archive": ({"a.zip": b"PK" + bytes(100)}, "a.zip/c/0"),
    "gzip": (_inflated(), _VOLUME_KEY),
}


async def _fail(case: Watching, key: str) -> int:
    """Read *key*, which is damaged, and return the number of calls of the store until now."""
    with pytest.raises(DamagedError):
        await case.data.read(key)
    return len(case.store.calls)


@pytest.mark.parametrize("name", _DAMAGED)
async def test_damage_is_read_once_a_second(name: str) -> None:
    """Requests for something damaged read the store once, and again after a second."""
    objects, key = _DAMAGED[name]
    case = Watching(objects)
    first = await _fail(case, key)
    assert [await _fail(case, key) for _ in range(3)] == [first] * 3
    case.clock.now += 1.1
    assert await _fail(case, key) > first


@pytest.mark.parametrize("condition", [None, UnmodifiedSince(1)])
@pytest.mark.parametrize("objects", [{}, {"object": b"short"}])
async def test_missing_source_is_looked_for_once_a_second(
    objects: Mapping[str, bytes], condition: UnmodifiedSince | None
) -> None:
    """A reference to more than there is costs one look at its object in a second."""
    place = refer(Part(REF, ByteRange(2, 9), condition))
    case = Watching(objects, formats=(Pointers({"key": place}),))
    first = await _fail(case, "key")
    assert await _fail(case, "key") == first
    case.clock.now += 1.1
    assert await _fail(case, "key") > first


async def test_keys_that_are_damaged_keep_apart() -> None:
    """Damage of one chunk is kept while other chunks are found to be damaged."""
    case = Watching({**_ARRAY, "c/0": encode_index([(0, 999), (0, 888)])})
    await _fail(case, "c/0")
    first = await _fail(case, "c/1")
    assert await _fail(case, "c/0") == first
    assert await _fail(case, "c/1") == first


@pytest.mark.parametrize("name", ["metadata", "index", "truncated", "entry"])
async def test_write_of_this_process_ends_kept_damage(name: str) -> None:
    """After a write of this process the next read finds what was written."""
    objects, key = _DAMAGED[name]
    case = Watching(objects)
    await _fail(case, key)
    case.write(_ARRAY)
    case.clock.now += 0.1
    for written in _ARRAY:
        case.fetch.forget(ROOT.join(written))
    case.clock.now += 0.1
    assert await case.data.read(key) == b"a"


async def test_failure_that_may_pass_is_not_kept() -> None:
    """A store that failed is asked again at once."""
    case = Watching(_ARRAY)
    case.store.failure = StorageUnavailableError(ROOT, "for the test")
    with pytest.raises(StorageUnavailableError):
        await case.data.read("c/0")
    assert await case.data.read("c/0") == b"a"
