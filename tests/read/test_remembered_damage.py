"""Damage is remembered for a second, unless this process writes: repeated requests read nothing."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from shardgate.errors import DamagedError, StorageUnavailableError
from shardgate.formats.members import refer
from shardgate.formats.reading import Opaque, Read
from shardgate.model import EVERYTHING, ByteRange, ObjectRef, Part, UnmodifiedSince
from shardgate.read.metadata_cache import MetadataCache, ReadCache
from shardgate.settings import DatasetSettings, Settings
from shardgate.storage.memory import MemoryStore
from tests.support.clocks import Clock
from tests.support.formats.neuroglancer_precomputed import case as precomputed
from tests.support.formats.zarr.building import array_metadata, encode_index, encode_shard, sharding
from tests.support.formats.zip.archives import Entry, archive
from tests.support.read.pointers import Pointers
from tests.support.read.stores import REF, WatchedStore, Watching, settle
from tests.support.resolving import ROOT, reading
from tests.support.serving import client_of
from tests.support.zipped import zipped

_METADATA: Final = json.dumps(array_metadata([2], [2], [sharding([1])])).encode()
_GROUP: Final = b'{"zarr_format": 3, "node_type": "group"}'
_SHARD: Final = encode_shard([b"a", b"b"])
_ARRAY: Final = {"zarr.json": _METADATA, "c/0": _SHARD}
_NO_DEFLATE: Final = Entry(b"x", b"\xff" * 40, method=0, central={"method": 8}, local={"method": 8})
_VOLUME_KEY = next(iter(precomputed.IDS))


def _inflated() -> dict[str, bytes]:
    """Return a volume with a chunk that is no gzip, though its metadata say so."""
    raw = {**precomputed.GZIP_DATA, "data_encoding": "raw"}
    info = precomputed.build({}, sharding=precomputed.GZIP_DATA)["info"]
    broken = zipped(bytes(5000))[:-1]
    return {**precomputed.build({_VOLUME_KEY: broken}, sharding=raw), "info": info}


_DAMAGED: Final[dict[str, tuple[dict[str, bytes], str]]] = {
    "metadata": ({**_ARRAY, "zarr.json": b"{"}, "c/0"),
    "metadata in a group": ({"zarr.json": _GROUP, "a/zarr.json": b"{"}, "a/c/0"),
    "checksum of an index": ({**_ARRAY, "c/0": _SHARD[:-1] + b"!"}, "c/0"),
    "truncated shard": ({**_ARRAY, "c/0": b"short"}, "c/0"),
    "entry outside of the shard": ({**_ARRAY, "c/0": encode_index([(0, 999), (0, 1)])}, "c/0"),
    "archive": ({"a.zip": archive(Entry(b"x"))[:-30]}, "a.zip/x"),
    "member of an archive": ({"a.zip": archive(_NO_DEFLATE)}, "a.zip/x"),
    "chunk that is no gzip": (_inflated(), _VOLUME_KEY),
}
_SOUND: Final = {**_ARRAY, "a/zarr.json": _METADATA, "a.zip": archive(Entry(b"x", b"a"))}


class _LateStore(MemoryStore):
    """Store that finds objects at once, and sends them once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.found, self.sent = asyncio.Event(), asyncio.Event()

    async def get(self, ref: ObjectRef, request: Any = None, **conditions: Any) -> Any:
        """Read, and wait."""
        found = await super().get(ref, request, **conditions)
        if ref == ROOT.join("x"):
            self.found.set()
            await self.sent.wait()
        return found


async def _fail(case: Watching, key: str) -> int:
    """Read *key*, which is damaged, and return the number of calls of the store until now."""
    with pytest.raises(DamagedError):
        await case.data.read(key)
    return len(case.store.calls)


@pytest.mark.parametrize("chunk_bytes", [0, 2**20])
@pytest.mark.parametrize("name", _DAMAGED)
async def test_damage_is_read_once_a_second(name: str, chunk_bytes: int) -> None:
    """Requests for a damaged key read the store for the first of each second only."""
    objects, key = _DAMAGED[name]
    case = Watching(objects, chunk_bytes=chunk_bytes)
    first = await _fail(case, key)
    case.clock.now += 0.9
    assert [await _fail(case, key) for _ in range(3)] == [first] * 3

    case.clock.now += 0.2
    assert await _fail(case, key) > first


@pytest.mark.parametrize("condition", [None, UnmodifiedSince(1)])
@pytest.mark.parametrize("objects", [{}, {"object": b"short"}])
async def test_missing_source_is_looked_for_once_a_second(
    objects: Mapping[str, bytes], condition: UnmodifiedSince | None
) -> None:
    """A reference to bytes that its object lacks costs one look at the object in a second."""
    place = refer(Part(REF, ByteRange(2, 9), condition))
    case = Watching(objects, formats=(Pointers({"key": place}),))
    first = await _fail(case, "key")
    assert await _fail(case, "key") == first
    case.clock.now += 1.1
    assert await _fail(case, "key") > first


async def test_damaged_shard_is_read_once_for_all_its_chunks() -> None:
    """Requests for several chunks of a shard with a damaged index read that index once."""
    case = Watching(_DAMAGED["checksum of an index"][0])
    await _fail(case, "c/0")
    await _fail(case, "c/1")
    assert case.keys.count("c/0") == 1


async def test_damage_of_several_keys_is_remembered_apart() -> None:
    """Damage of one chunk stays in memory while other chunks are found to be damaged."""
    case = Watching({**_ARRAY, "c/0": encode_index([(0, 999), (0, 888)])})
    await _fail(case, "c/0")
    first = await _fail(case, "c/1")
    assert await _fail(case, "c/0") == await _fail(case, "c/1") == first


@pytest.mark.parametrize("name", list(_DAMAGED)[:-1])
async def test_damage_that_was_forgotten_is_read_again(name: str) -> None:
    """A request after this process replaced the object reads the new one."""
    objects, key = _DAMAGED[name]
    case = Watching(objects)
    await _fail(case, key)
    sound = {written: _SOUND[written] for written in objects if written in _SOUND}
    sound |= {"a/c/0": _SHARD} if "a/zarr.json" in objects else {}
    if "a/zarr.json" in objects:
        sound["zarr.json"] = _GROUP
    case.write(sound)
    for written in sound:
        case.fetch.forget(ROOT.join(written))

    assert await case.data.read(key) == b"a"


@pytest.mark.parametrize("ttl_s", [0, 0.1])
async def test_write_ends_damage_where_cached_reads_expire_sooner(ttl_s: float) -> None:
    """A request after a write reads the new object, however short `cache.ttl_s` is."""
    case = Watching(_DAMAGED["truncated shard"][0], ttl_s=ttl_s)
    await _fail(case, "c/0")
    case.clock.now += 0.2
    case.write({"c/0": _SHARD})
    case.fetch.forget(ROOT.join("c/0"))
    case.clock.now += 0.2

    assert await case.data.read("c/0") == b"a"


async def test_damage_of_one_version_is_not_reported_of_another() -> None:
    """A member of an archive is read again once the archive was read in another version."""
    case = Watching(_DAMAGED["archive"][0])
    await _fail(case, "a.zip/x")
    case.write({"a.zip": _SOUND["a.zip"]})
    assert await case.data.read("a.zip") == _SOUND["a.zip"]

    assert await case.data.read("a.zip/x") == b"a"


async def test_damage_of_a_coded_body_does_not_refuse_its_coded_form() -> None:
    """HEAD and reads without inflating work while inflating is known to fail."""
    case = Watching(_inflated())
    await _fail(case, _VOLUME_KEY)
    assert await case.read(_VOLUME_KEY, (0, 3)) == b"\x1f\x8b\x08"
    assert await case.stat(_VOLUME_KEY) is not None


async def test_failure_that_may_pass_is_not_remembered() -> None:
    """A store that failed is asked again by the next request."""
    case = Watching(_ARRAY)
    for failed in ("zarr.json", "c/0"):
        case.store.failure = StorageUnavailableError(ROOT.join(failed), "for the test")
        with pytest.raises(StorageUnavailableError):
            await case.data.read("c/0")

    assert await case.data.read("c/0") == b"a"


async def test_inspection_reads_damage_again() -> None:
    """A read outside of requests, as inspections make it, reads a repaired object at once."""
    store, clock = WatchedStore(), Clock()
    fetch = ReadCache(store, MetadataCache(2**20), ttl_s=60, clock=clock)
    read = Read("shard-index", REF, ByteRange(4, 5), Opaque)
    store.place(REF, b"")
    for _ in range(2):
        with pytest.raises(DamagedError):
            await fetch.get_or_fetch(read)
    assert len(store.calls) == 1
    store.place(REF, b"repaired")

    assert await fetch(read) is not None
    assert (await fetch.get_or_fetch(read)).known is not None


async def test_look_up_outside_of_a_request_repeats_known_damage() -> None:
    """Reads for a load balancer's look-up repeat damage of the last second without the store."""
    case = Watching({"x": b""})
    read = Read("snapshot", ROOT.join("x"), ByteRange(4, 5), Opaque)
    for _ in range(3):
        with pytest.raises(DamagedError):
            await case.data.resolver.new_tracker()(read)

    assert len(case.store.calls) == 1


async def test_damage_that_a_write_overtakes_is_not_remembered() -> None:
    """A read that began before a write, and finds damage after it, does not answer later reads."""
    case = Watching(_DAMAGED["truncated shard"][0])
    await case.warm("zarr.json")
    case.store.gate.clear()
    late = asyncio.create_task(case.data.read("c/0"))
    await settle()
    case.clock.now += 0.1
    case.fetch.forget(ROOT.join("c/0"))
    case.store.gate.set()
    with pytest.raises(DamagedError):
        await late
    case.write({"c/0": _SHARD})

    assert await case.data.read("c/0") == b"a"


async def test_read_after_a_write_does_not_join_a_read_before_it() -> None:
    """A request for an object that begins after a write does not get the bytes from before."""
    store = _LateStore()
    store.place(ROOT.join("x"), b"old")
    data = reading(store)
    early = asyncio.create_task(data.read("x", EVERYTHING))
    await store.found.wait()
    store.place(ROOT.join("x"), b"new")
    data.fetch.forget(ROOT.join("x"))
    late = asyncio.create_task(data.read("x", EVERYTHING))
    await settle()
    store.sent.set()

    assert await late == b"new"
    assert await early in (b"old", b"new")


async def test_damages_of_many_objects_take_bounded_memory() -> None:
    """The last thousands of ten thousand damaged objects are remembered."""
    fetch = ReadCache(WatchedStore(), MetadataCache(0), ttl_s=60, clock=Clock())
    refs = [ObjectRef("memory://bucket", str(number)) for number in range(10_000)]

    async def find_damage() -> None:
        raise DamagedError(ref, "damaged")

    async def find_nothing() -> None:
        pass

    for ref in refs:
        with pytest.raises(DamagedError):
            await fetch.repeat_damage(ref, ref, find_damage)

    remembered = 0
    for ref in refs:
        try:
            await fetch.repeat_damage(ref, ref, find_nothing)
        except DamagedError:
            remembered += 1
    assert 1000 < remembered < 5000


def test_write_ends_the_memory_of_damage(tmp_path: Path) -> None:
    """A GET after a PUT or DELETE through the same service shows what that has written."""
    (tmp_path / "a/c").mkdir(parents=True)
    (tmp_path / "a/zarr.json").write_bytes(_METADATA)
    (tmp_path / "a/c/0").write_bytes(b"damaged")
    (tmp_path / "x.gz").write_bytes(b"no gzip")
    dataset = DatasetSettings(url=tmp_path.as_uri(), writable=True)
    with client_of(Settings(datasets={"d": dataset})) as client:
        assert client.get("/d/a/c/0").status_code == 424
        assert client.delete("/d", params={"prefix": "a/"}).status_code == 200
        assert client.get("/d/a/c/0").status_code == 404

        identity = {"accept-encoding": "identity"}
        refusals = [client.get("/d/x", headers=identity) for _ in range(2)]
        assert [each.status_code for each in refusals] == [424, 424]
        assert refusals[0].json()["detail"] == refusals[1].json()["detail"]
        data = zipped(b"text")
        assert client.put("/d/x.gz", content=data).status_code == 200
        assert client.get("/d/x", headers=identity).content == b"text"
