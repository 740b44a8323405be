"""The container and the shard of a key, found from metadata alone."""

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from shardgate.errors import BadKeyError, DamagedError, MetadataMissingError, StorageDeniedError
from shardgate.formats.icechunk.layout import Icechunk
from shardgate.formats.listing import Window
from shardgate.formats.reading import Read, Weighable
from shardgate.formats.zarr.layout import ZarrLayout
from shardgate.model import ObjectRef, VirtualKey
from shardgate.read.containers import LIKE_A_CHUNK, Containers, PassThrough
from shardgate.read.metadata_cache import MetadataCache, ReadCache, uncached_reads
from shardgate.storage.memory import MemoryStore
from tests.support.formats.case import Case
from tests.support.formats.case import filled as put_together
from tests.support.formats.icechunk.case import CASES as REPOSITORIES
from tests.support.formats.neuroglancer_precomputed.case import CASES as PRECOMPUTED
from tests.support.formats.zarr.building import array_metadata, consolidated, sharding
from tests.support.formats.zarr.case import CASES as ZARR
from tests.support.read.stores import CallOn, WatchedStore
from tests.support.resolving import ROOT, known_containers, reading
from tests.support.write.writers import (
    Between,
    Replica,
    chunks_of,
    filled,
    replica,
    stored,
    zarr_json,
)

_MARKER = r"(^|/)(zarr\.json|info|repo|refs/branch\.main/ref\.json)$"
_GROUP = {"zarr_format": 3, "node_type": "group", "attributes": {}}
_ARRAY = array_metadata([4, 4], [4, 4], [sharding([2, 2])])


class _Case:
    """Nodes below a root."""

    def __init__(self, **nodes: object) -> None:
        self.store = WatchedStore()
        for directory, document in nodes.items():
            marker = ROOT.join(directory.replace("_", "/")).join("zarr.json")
            self.store.place(marker, json.dumps(document).encode())
        self.containers = known_containers()
        self.fetch = ReadCache(self.store, MetadataCache(2**20), ttl_s=60)

    async def find(self, key: str) -> tuple[ObjectRef, str]:
        """Return the directory of the container of *key*, and the rest of *key* in it."""
        layout, rest, *_ = await self.containers.find(ROOT, VirtualKey(key), self.fetch)
        assert isinstance(layout, ZarrLayout | PassThrough)
        return layout.directory, rest

    @property
    def looked_at(self) -> list[str]:
        """Directories whose markers were read, in order, each marker once."""
        asked = [call.ref.key.removeprefix(f"{ROOT.key}/") for call in self.store.calls]
        assert len(set(asked)) == len(asked)
        directories = [re.sub(_MARKER, "", key) for key in asked]
        assert not {key for key in asked if re.search(_MARKER, key) is None}
        return list(dict.fromkeys(directories))


@pytest.mark.parametrize(
    ("key", "directory", "rest"),
    [
        ("lab1/vol/c/0/0", "lab1/vol", "c/0/0"),
        ("lab1/vol/zarr.json", "lab1/vol", "zarr.json"),
        ("lab1/zarr.json", "lab1", "zarr.json"),
        ("lab1/notes/a.txt", "lab1", "notes/a.txt"),
        ("lab1/vol", "lab1", "vol"),
        ("lab1/vol/", "lab1/vol", ""),
        ("lab2/plain/a.bin", "", "lab2/plain/a.bin"),
        ("lab3/sub/vol/c/0/0", "lab3/sub/vol", "c/0/0"),
        ("a.bin", "", "a.bin"),
        ("zarr.json", "", "zarr.json"),
        ("", "", ""),
    ],
)
async def test_key_belongs_to_the_nearest_container(key: str, directory: str, rest: str) -> None:
    """A key belongs to the nearest ancestor directory with a marker, or to none."""
    case = _Case(lab1=_GROUP, lab1_vol=_ARRAY, lab3_sub_vol=_ARRAY)

    assert await case.find(key) == (ROOT.join(directory), rest)


async def test_array_encloses_all_keys_below() -> None:
    """A key below a known array, sharded or not, needs no look-up of markers."""
    case = _Case(lab1=_GROUP, lab1_vol=_ARRAY, vol=array_metadata([4], [2], []), vol_sub=_GROUP)
    await case.find("lab1/vol/c/0/0")
    assert case.looked_at == ["", "lab1", "lab1/vol"]
    case.store.calls.clear()
    for key in ("lab1/vol/c/1/1", "lab1/vol/c/0/0/0/0", "lab1/vol/a/b/c/d"):
        await case.find(key)
    assert case.looked_at == []

    assert await case.find("vol/sub/zarr.json") == (ROOT.join("vol"), "sub/zarr.json")
    assert case.looked_at == ["vol"]


async def test_absence_of_a_marker_is_remembered() -> None:
    """A missing marker is looked up once. For very deep keys only 32 directories are searched."""
    case = _Case()
    for key in ("a/b/x", "a/b/y", "a/z"):
        await case.find(key)
    assert case.looked_at == ["", "a", "a/b"]

    await case.find("a/" * 500 + "x")
    assert len(case.looked_at) == 2 + 32 - 1


async def test_unreadable_marker_is_an_error() -> None:
    """A key below a damaged marker is damage, and one below a denied marker StorageDeniedError."""
    case = _Case(vol={"zarr_format": 4})
    layout, rest, *_ = await case.containers.find(ROOT, VirtualKey("vol/c/0/0"), case.fetch)
    with pytest.raises(DamagedError, match=r"vol/zarr\.json"):
        await layout.locate(rest, case.fetch)
    with pytest.raises(DamagedError, match=r"vol/zarr\.json"):
        await case.find("vol/zarr.json")
    case = _Case(vol=_ARRAY)
    case.store.failure = StorageDeniedError(ROOT, "for the test")
    with pytest.raises(StorageDeniedError):
        await case.find("vol/c/0/0")


_BROKEN = [b"", b"{", b"\0" * 9, b'{"zarr_format": 4}']


@pytest.mark.parametrize(
    ("name", "marker", "broken"),
    [
        *(("auto", "g/zarr.json", broken) for broken in _BROKEN),
        *(("zarr", "g/zarr.json", broken) for broken in _BROKEN),
        *(("auto", "g/info", broken) for broken in _BROKEN[:3]),
    ],
)
async def test_damaged_marker_hides_no_container_below(
    name: str, marker: str, broken: bytes
) -> None:
    """A container below a damaged marker is read; chunks without one are damage that names it."""
    memory = filled()
    memory.place(ROOT.join("g/a/zarr.json"), zarr_json())
    await replica(memory).put("g/a/c/0", b"0000")
    for key in ("c/0", "README.md"):
        memory.place(ROOT.join(f"g/{key}"), b"some bytes")
    memory.place(ROOT.join(marker), broken)
    one = replica(memory)
    if name == "zarr":
        _configure(one, name)

    assert await one.read("g/a/c/0") == b"0000"
    assert await one.read("g/a/zarr.json") is not None
    assert await one.read("g/README.md") == b"some bytes"
    for key in ("g/c/0", "g/b/0.0", marker):
        with pytest.raises(DamagedError, match=marker):
            await one.read(key)
    with pytest.raises(BadKeyError):
        await one.put("g/c/5", b"0000")


async def test_damaged_repository_has_no_absent_keys() -> None:
    """A key below a damaged ``repo`` is damage, unless a nearer container has it."""
    memory = filled()
    memory.place(ROOT.join("r/repo"), b"\0" * 100)
    memory.place(ROOT.join("r/b/zarr.json"), _PLAIN)
    one = replica(memory)

    for key in ("r/x/zarr.json", "r/@branch.main/x/c/0", "r/README.md", "r/repo"):
        with pytest.raises(DamagedError, match="r/repo"):
            await one.read(key)
    assert await one.read("r/b/zarr.json") == _PLAIN


async def test_repository_behind_an_error_page_has_no_absent_keys() -> None:
    """Each key of a dataset named as a repository raises an error while ``repo`` is a page."""
    memory = MemoryStore()
    memory.place(ROOT.join("repo"), b"<html></html>")
    opened = reading(memory, formats=(Icechunk(2**20, 2**20, is_named=True),))

    for key in ("zarr.json", "@branch.main/x/c/0"):
        with pytest.raises(MetadataMissingError, match="repo: an error page"):
            await opened.read(key)


@pytest.mark.parametrize("key", ["a/zarr.json", "b/zarr.json", "b/info"])
async def test_damaged_marker_can_be_replaced(key: str) -> None:
    """A damaged marker is removed by DELETE and repaired by PUT of its own key."""
    memory = filled()
    memory.place(ROOT.join(key), b"{")
    one = replica(memory)
    with pytest.raises(DamagedError):
        await one.read(key)
    await one.put(key, None)
    assert await one.read(key) is None
    memory.place(ROOT.join(key), b"{")
    await one.put(key, _PLAIN)

    assert await one.read(key) == _PLAIN


async def test_note_with_the_name_of_a_marker_is_served() -> None:
    """A document that is no marker can be written under its name, and is served."""
    memory = filled()
    one = replica(memory)
    await one.put("n/info", b"{}")

    assert await one.read("n/info") == b"{}"
    assert await one.read("n/README.md") is None


class _Losing(Between):
    """A store that does not find the marker of ``a`` at the reads *lost*, counted from 0."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.lost = range(0)
        self.reads = 0

    async def around(self, name: str, ref: ObjectRef, call: CallOn) -> Any:
        """Read or measure, or return nothing."""
        found = await super().around(name, ref, call)
        if name not in ("get", "stat") or ref != ROOT.join("a/zarr.json"):
            return found
        self.reads += 1
        return None if self.reads - 1 in self.lost else found


_ALWAYS = range(10**9)
_PLAIN = zarr_json(codecs=[{"name": "bytes"}])


class _Started(NamedTuple):
    memory: MemoryStore
    store: _Losing
    one: Replica
    wait: Callable[[float], None]
    """Advances the clock by seconds."""


async def _opened() -> _Started:
    """Start a process that has written three chunks of the array ``a``, in two shards."""
    memory = filled()
    store = _Losing(memory)
    later_s = [0.0]
    one = replica(store, lambda: time.monotonic() + sum(later_s))
    for number in (0, 1, 9):
        await one.put(f"a/c/{number}", b"%04d" % number)
    return _Started(memory, store, one, later_s.append)


@pytest.mark.parametrize("age_s", [0, 10, 100])
@pytest.mark.parametrize("step", range(4))
async def test_lost_marker_never_exposes_a_shard(step: int, age_s: float) -> None:
    """Whichever read misses the marker, a request fails or acts as with the marker."""
    for key, body in {"a/c/5": b"five", "a/c/0": None, "a/c/1": b"new1"}.items():
        memory, store, one, wait = await _opened()
        wait(age_s)
        store.lost = range(store.reads + step, store.reads + step + 1)
        seen: list[object] = []
        for _ in range(2):
            try:
                seen.append(await one.read("a/c/1"))
                seen.append(await one.read("a/zarr.json") == zarr_json())
                seen.append(await one.reading.keys(Window("a/")))
                await one.put(key, body)
            except MetadataMissingError:
                continue
        chunks = {0: b"0000", 1: b"0001", int(key[4:]): body}

        assert await stored(memory, "a/c/5") is None
        assert [each for each in seen if isinstance(each, bytes)] != []
        assert {each for each in seen if isinstance(each, bytes)} <= {b"0001", b"new1"}
        assert True not in seen
        assert None not in seen
        assert all("a/c/9" in each for each in seen if isinstance(each, list))
        shard = chunks_of(await stored(memory, "a/c/0") or b"")
        assert shard == {number: data for number, data in chunks.items() if data is not None}


async def test_missing_marker_is_absent_after_ttl() -> None:
    """For `ttl_s` after a marker is lost, keys that may name chunks fail, and others work."""
    memory, store, one, wait = await _opened()
    memory.place(ROOT.join("a/README.md"), b"text")
    store.lost = _ALWAYS
    wait(61)
    for _ in range(2):
        for key in ("a/c/0", "a/c/5", "a/zarr.json"):
            with pytest.raises(MetadataMissingError, match=r"a/zarr\.json"):
                await one.read(key)
        for body in (b"0000", None):
            with pytest.raises(MetadataMissingError):
                await one.put("a/c/0", body)
        with pytest.raises(MetadataMissingError):
            await one.reading.keys(Window("a/"))
        assert await one.read("a/README.md") == b"text"
        assert await one.read("notes/one") == b"one"
        wait(50)

    wait(11)
    assert await one.read("a/c/0") == await stored(memory, "a/c/0")
    assert await one.read("a/zarr.json") is None


async def test_found_marker_resets_the_time_of_absence() -> None:
    """A marker that is found again must be missed for another `ttl_s`.

    A marker that was written here counts as known.
    """
    memory, store, one, wait = await _opened()
    await one.put("b/zarr.json", _PLAIN)
    memory.remove(ROOT.join("b/zarr.json"))
    with pytest.raises(MetadataMissingError):
        await one.put("b/c/5", b"five")
    for _ in range(3):
        wait(61)
        store.lost = _ALWAYS
        with pytest.raises(MetadataMissingError):
            await one.read("a/c/0")
        store.lost = range(0)
        assert await one.read("a/c/0") == b"0000"


@pytest.mark.parametrize("prefix", ["a/", None])
async def test_deleted_array_is_absent_at_once(prefix: str | None) -> None:
    """An array that was deleted, here or by others, can be written again at once."""
    memory, _, one, _ = await _opened()
    if prefix is not None:
        await one.eraser.erase(one.reading.dataset, VirtualKey(prefix))
    else:
        for key in ("zarr.json", "c/0", "c/1", "c/9"):
            await one.put(f"a/{key}", None)
    gone = [await one.read(f"a/{key}") for key in ("zarr.json", "c/0")]
    await one.put("a/zarr.json", _PLAIN)
    await one.put("a/c/5", b"five")
    assert gone == [None, None]
    assert await one.read("a/c/5") == await stored(memory, "a/c/5") == b"five"

    for age_s in (0, 10, 100):
        memory, _, one, wait = await _opened()
        memory.remove(ROOT.join("a/zarr.json"))
        wait(age_s)
        await one.put("a/zarr.json", _PLAIN)
        assert await one.read("a/zarr.json") == _PLAIN
        assert await one.read("a/c/0") == await stored(memory, "a/c/0")


def _configure(one: Replica, name: str) -> None:
    """Configure the format *name* for a process."""
    dataset = one.reading.dataset
    formats = [each for each in dataset.containers.formats if each.name == name]
    one.reading.dataset = replace(dataset, containers=Containers(formats, name))


_GROUP_3 = json.dumps({"zarr_format": 3, "node_type": "group"}).encode()


@pytest.mark.parametrize("group", [None, _GROUP_3])
@pytest.mark.parametrize(
    ("name", "key"), [("zarr", "c/0"), ("zarr", "0.0"), ("precomputed", "0-64_0-64_0-64")]
)
async def test_chunk_without_an_array_is_not_served(
    group: bytes | None, name: str, key: str
) -> None:
    """A key like a chunk's without an array is not read or written, and can be deleted."""
    memory = filled()
    memory.place(ROOT.join(f"b/{key}"), b"a shard, perhaps")
    memory.place(ROOT.join("b/README.md"), b"text")
    if group is not None and name == "zarr":
        memory.place(ROOT.join("zarr.json"), group)
    one = replica(memory)
    _configure(one, name)

    assert await one.read(f"b/{key}") is None
    with pytest.raises(BadKeyError, match="write the metadata of its array first"):
        await one.put(f"b/{key}", b"new")
    assert await one.read("b/README.md") == b"text"
    assert await stored(memory, f"b/{key}") == b"a shard, perhaps"
    await one.put(f"b/{key}", None)
    assert await stored(memory, f"b/{key}") is None
    memory.place(ROOT.join(f"b/{key}"), b"a shard, perhaps")
    await one.eraser.erase(one.reading.dataset, VirtualKey("b/"))
    assert await stored(memory, f"b/{key}") is None


@pytest.mark.parametrize(
    ("marker", "keys"),
    [
        ("b/.zarray", ["b/0.0", "b/0/0/0"]),
        ("b/1/.zarray", ["b/1/0"]),
        (".zarray", ["0.0"]),
        ("b/zarr.json", ["b/c/0", "b/0.0"]),
    ],
)
async def test_unsharded_chunk_is_served(marker: str, keys: list[str]) -> None:
    """Chunks of Zarr v2 arrays, and of v3 arrays without shards, are objects."""
    memory = MemoryStore()
    memory.place(ROOT.join(marker), _PLAIN if marker.endswith(".json") else b"{}")
    one = replica(memory)
    _configure(one, "zarr")
    for key in keys:
        await one.put(key, b"data")

        assert await one.read(key) == await stored(memory, key) == b"data"


async def test_chunk_of_a_consolidated_array_is_not_an_object() -> None:
    """A chunk of an array in consolidated metadata is damage while the array's own are missing."""
    memory = filled()
    await replica(memory).put("a/c/0", b"0000")
    array = json.loads(zarr_json())
    nodes = {"a": array, "g/a": array, "g/plain": json.loads(_PLAIN)}
    memory.place(ROOT.join("zarr.json"), json.dumps(consolidated(nodes)).encode())
    memory.place(ROOT.join("g/zarr.json"), _GROUP_3)
    shard = await stored(memory, "a/c/0") or b""
    for key in ("g/a/c/0", "g/plain/c/0"):
        memory.place(ROOT.join(key), shard)
    memory.remove(ROOT.join("a/zarr.json"))
    one = replica(memory)

    for key in ("a/c/0", "g/a/c/0"):
        with pytest.raises(DamagedError, match="a: has no metadata"):
            await one.read(key)
        with pytest.raises(BadKeyError):
            await one.put(key, b"0000")
    assert await one.read("g/plain/c/0") == shard
    memory.place(ROOT.join("a/zarr.json"), zarr_json())
    clock = one.reading.fetch.clock
    one.reading.fetch.clock = lambda: clock() + 2
    assert await one.read("a/c/0") == b"0000"


@pytest.mark.parametrize(
    ("key", "is_like_a_chunk"),
    [
        *((key, True) for key in ("c", "c/0/1", "c.0.1", "c0/1", "0", "0.1", "7:0", "7.index")),
        *((key, True) for key in ("s0/0-64_-8-0_0-64", "mesh/7:0:1", "spatial0/0_0_1")),
        *((key, False) for key in ("README.md", "c/a.txt", "zarr.json", "info", "", "c/", "cat")),
        *((key, False) for key in ("2024-01-02.txt", "0.shard", "chunks/0A1B2C", "a/.zarray")),
    ],
)
def test_chunk_names_are_recognised(key: str, *, is_like_a_chunk: bool) -> None:
    """A key is like a chunk's by its ending, in every format, and other keys are not."""
    for name in (key, f"a/{key}"):
        assert bool(LIKE_A_CHUNK.search(name)) is is_like_a_chunk


@pytest.mark.parametrize("case", [*ZARR, *PRECOMPUTED, *REPOSITORIES], ids=str)
async def test_chunks_of_one_shard_have_one_name(case: Case) -> None:
    """Chunks have the same shard name exactly if they are in one object; documents have none.

    No shard index and no manifest is read for it.
    """
    objects = case.build(case.chunks)
    fetch, kinds = uncached_reads(put_together(objects)), set[str]()

    async def watched[T: Weighable](read: Read[T], /, *, allow_stale: bool = False) -> Any:
        kinds.add(read.kind)
        return await fetch(read, allow_stale=allow_stale)

    async def find(key: str) -> tuple[Any, VirtualKey]:
        layout, rest, *_ = await containers.find(ROOT, VirtualKey(key), watched)
        return layout, rest

    containers = known_containers(whole_index_bytes=0)
    names = {}
    for key in (*case.chunks, *case.absent, *filter(case.is_metadata, objects)):
        layout, rest = await find(key)
        names[key] = await layout.shard(rest, watched)
    assert kinds & {"metadata", "snapshot"}
    assert not {kind for kind in kinds if "index" in kind or "manifest" in kind}
    if case in REPOSITORIES:
        return
    assert {names[key] for key in objects if key.endswith(("zarr.json", "info"))} == {None}
    together = set[tuple[str, ObjectRef]]()
    for key in case.chunks:
        layout, rest = await find(key)
        shard = (await layout.shards_at(rest, watched)).holding(rest)
        together.add((names[key], (await shard.survey(watched)).whole.ref))
    assert None not in dict(together)
    assert len(together) == len(dict(together)) == len({ref for _, ref in together})
