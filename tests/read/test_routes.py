"""Routes: keys of known containers are found at once, and in the right container."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from shardgate.errors import MetadataMissingError
from shardgate.model import ObjectRef
from shardgate.read.containers import Containers
from shardgate.storage.contract import Found, NotModified
from shardgate.storage.memory import MemoryStore
from tests.support.clocks import Clock
from tests.support.formats.neuroglancer_precomputed import case as precomputed
from tests.support.formats.zarr import building as zarr
from tests.support.formats.zip.archives import Entry, archive
from tests.support.read.stores import WatchedStore, settle, watch_searches
from tests.support.resolving import ROOT, Reading, known_containers, reading

_CHUNKS = {key: zarr.chunk_bytes(number) for number, key in enumerate(["c/0/0", "c/0/1", "c/2/3"])}
_GROUP = json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}).encode()


def _place(store: MemoryStore, folder: str, objects: dict[str, bytes]) -> None:
    for key, data in objects.items():
        store.place(ROOT.join(folder).join(key), data)


def _array(**options: Any) -> tuple[MemoryStore, Reading, Clock]:
    """Store an array in two groups, and a resolver without a chunk cache."""
    store, clock = MemoryStore(), Clock()
    store.place(ROOT.join("zarr.json"), _GROUP)
    store.place(ROOT.join("g/zarr.json"), _GROUP)
    _place(store, "g/a", zarr.build(_CHUNKS, **options))
    return store, reading(store, clock=clock, chunk_bytes=0), clock


async def test_route_ends_when_its_marker_is_removed() -> None:
    """A route is dropped when its array's marker is removed in this process."""
    store, data, _ = _array()
    await data.read("g/a/c/0/0")
    store.remove(ROOT.join("g/a/zarr.json"))
    for key in "g/a/zarr.json", "g/zarr.json":
        data.fetch.forget(ROOT.join(key))
        data.fetch.mark_removed(ROOT.join(key))

    found = await data.container("g/a/c/0/1")

    assert found.rest == "a/c/0/1"


async def test_route_outlasts_replaced_shards() -> None:
    """A shard that turns out to be replaced outdates no route to its array."""
    store, data, _ = _array()
    searches = watch_searches(data)
    await data.read("g/a/c/0/0")
    store.place(ROOT.join("g/a/c/0/0"), zarr.build({"c/0/1": b"new"})["c/0/0"])

    assert await data.read("g/a/c/0/1") == b"new"
    assert searches == ["g/a/c/0/0"]


async def test_route_whose_metadata_were_confirmed_still_ends_in_time() -> None:
    """A route whose metadata were read again for a new index lives no longer for it: later a
    marker that is gone from the store is missed.
    """
    store, data, clock = _array()
    await data.read("g/a/c/0/0")
    clock.now += 10
    await data.read("g/a/c/2/3")
    store.remove(ROOT.join("g/a/zarr.json"))
    clock.now += 3600

    with pytest.raises(MetadataMissingError, match="is missing now"):
        await data.container("g/a/c/0/1")


async def test_an_outer_container_keeps_its_own_keys() -> None:
    """A volume's chunk is found in the volume, though a route leads to an array in its folder."""
    store = MemoryStore()
    chunks = {key: zarr.chunk_bytes(number) for key, number in precomputed.IDS.items()}
    _place(store, "", precomputed.build(chunks))
    info = json.loads(precomputed.build(chunks)["info"])
    info["scales"].append({**info["scales"][0], "key": "other/c"})
    store.place(ROOT.join("info"), json.dumps(info).encode())
    _place(store, "other", zarr.build(_CHUNKS))
    data = reading(store)

    assert await data.read("other/zarr.json") is not None
    array = await data.container("other/d/0")
    volume = await data.container("other/c/0/0")

    assert (array.rest, volume.rest) == ("d/0", "other/c/0/0")


@pytest.mark.parametrize("first", ["g/a/c/0/0", "g/a/zarr.json", "g/zarr.json", "zarr.json"])
async def test_container_does_not_depend_on_earlier_requests(first: str) -> None:
    """Each key belongs to its nearest container, whichever key was requested first."""
    _, data, _ = _array()
    await data.read(first)

    keys = ["g/a/c/0/0", "g/a/zarr.json", "g/zarr.json", "zarr.json", "g/c/0"]
    found = [await data.container(key) for key in keys]

    assert [each.rest for each in found] == ["c/0/0", "zarr.json", "zarr.json", "zarr.json", "c/0"]


class _FarStore(MemoryStore):
    """A store that answers once no other read begins, and records which reads wait together."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[set[str]] = []
        self._answers: asyncio.Future[None] | None = None

    async def get(self, ref: ObjectRef, *args: Any, **kwargs: Any) -> Found | NotModified | None:
        """Wait, read."""
        if is_first := self._answers is None:
            self.waits.append(set())
            self._answers = asyncio.get_running_loop().create_future()
        self.waits[-1].add(ref.key.removeprefix("data/"))
        answers = self._answers
        if is_first:
            await settle()
            self._answers = None
            answers.set_result(None)
        await answers
        return await super().get(ref, *args, **kwargs)


async def _expect_of_zarr(store: _FarStore, key: str, waits: list[set[str]]) -> None:
    """Read a chunk with the format configured, and assert which reads waited together."""
    store.waits.clear()
    data = reading(store)
    known = Containers(known_containers().formats[:1], "zarr")
    data.dataset = replace(data.dataset, containers=known)
    assert await data.read(key) == _CHUNKS["c/0/0"]
    assert store.waits == waits


async def test_markers_are_read_concurrently() -> None:
    """Markers of all formats are read concurrently in a directory.

    Those of a configured format are read concurrently in all directories.
    """
    store = _FarStore()
    for key in "zarr.json", "g/zarr.json":
        store.place(ROOT.join(key), _GROUP)
    _place(store, "g/a", zarr.build(_CHUNKS))
    shard = [{"g/a/c/0/0"}] * 2
    below = {"g/zarr.json", "g/a/zarr.json"}

    assert await reading(store).read("g/a/c/0/0") == _CHUNKS["c/0/0"]
    assert store.waits == [
        {"zarr.json", "info", "repo", "refs/branch.main/ref.json"},
        below,
        *shard,
    ]

    below = {"zarr.json"} | below
    await _expect_of_zarr(store, "g/a/c/0/0", [below, *shard])
    _place(store, "", zarr.build(_CHUNKS))
    await _expect_of_zarr(store, "c/0/0", [{"zarr.json"}, {"c/0/0"}, {"c/0/0"}])


@pytest.mark.parametrize("first", [[], ["g/a/c/0/0"], ["g/a/a.zip/x"]])
async def test_archive_in_the_folder_of_an_array_is_found_through_any_route(
    first: list[str],
) -> None:
    """A key of an archive in the folder of an array is found whatever was requested first."""
    store, data, _ = _array()
    store.place(ROOT.join("g/a/a.zip"), archive(Entry(b"x", b"inside")))
    for key in first:
        await data.read(key)

    assert await data.read("g/a/a.zip/x") == b"inside"
    assert await data.read("g/a/c/0/1") == _CHUNKS["c/0/1"]


async def test_many_names_of_archives_in_a_key_cost_few_reads() -> None:
    """Archives are looked for in the first 32 folders on the way to a key."""
    store = WatchedStore()
    data = reading(store)

    assert await data.read("a.zip/" * 165 + "x") is None
    archives = {call.ref.key for call in store.calls if call.ref.key.endswith(".zip")}
    assert len(archives) == 31
