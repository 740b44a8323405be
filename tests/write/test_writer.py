"""Writes of objects, documents, many keys and whole prefixes."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardgate import errors
from shardgate.errors import PreconditionFailedError, ReadOnlyError, ShardgateError
from shardgate.formats.contract import Translator
from shardgate.model import ObjectRef, VirtualKey
from shardgate.read.containers import Containers
from shardgate.storage.memory import MemoryStore
from shardgate.write.writer import KeyWrite
from tests.formats.neuroglancer_precomputed.case import build_meshes
from tests.formats.neuroglancer_precomputed.shards import RAW_SHARDING
from tests.read.stores import SearchedContainers
from tests.support.repositories import create
from tests.support.resolving import ROOT, All
from tests.support.zipped import encoded
from tests.write.writers import (
    Between,
    chunks_of,
    put_each,
    replica,
    stored,
    zarr_json,
)


async def test_demands_on_objects_hold_while_others_write(memory: MemoryStore) -> None:
    """Only the version that fulfilled it is replaced; who is never fast enough is told."""
    store = Between(memory)
    one, other = replica(store), replica(memory)
    left = [b"by another"]

    async def be_faster() -> None:
        if left:
            await other.put("notes/new", left.pop())

    store.between = lambda call, _: be_faster() if call == "put" else None
    with pytest.raises(PreconditionFailedError, match="notes/new"):
        await one.put("notes/new", b"ours", lambda names: not names)
    assert await stored(memory, "notes/new") == b"by another"

    async def be_always_faster() -> None:
        await other.put("notes/one", b"%d" % len(store.calls))

    store.between = lambda call, _: be_always_faster() if call == "put" else None
    with pytest.raises(errors.BusyError, match="notes/one"):
        await one.put("notes/one", b"ours", bool)


@pytest.mark.parametrize("coding", ["gzip", "br", "zstd", "deflate"])
@pytest.mark.parametrize("keeps_headers", [False, True])
async def test_object_keeps_its_coding_where_the_store_can(
    memory: MemoryStore, coding: str, *, keeps_headers: bool
) -> None:
    """A store with headers keeps the coded body, and another one the inflated body."""

    class Store(Between):
        def keeps_headers(self, _: object) -> bool:
            return keeps_headers

    one, data = replica(Store(memory)), encoded(coding, b"text")
    await one.put("notes/new", data, coding=coding)

    assert await stored(memory, "notes/new") == (data if keeps_headers else b"text")
    assert await one.read("notes/new") == b"text"


async def test_a_document_has_the_name_that_readers_know(memory: MemoryStore) -> None:
    """Conditions are checked against the ETag of the served document, those of a delete too."""
    one = replica(memory)
    document = json.loads(await one.read("a/zarr.json") or b"")
    etag = await one.put("a/zarr.json", json.dumps({**document, "attributes": {}}).encode())
    async with one.reading.resolver.open(
        one.reading.dataset, VirtualKey("a/zarr.json"), lambda _: All(None)
    ) as opened:
        assert opened is not None
        assert opened.entity.etag == etag

    for body in (zarr_json(), None):
        with pytest.raises(PreconditionFailedError):
            await one.put("a/zarr.json", body, lambda names: '"x"' in names)
    etag = await one.put("a/zarr.json", zarr_json(), lambda names: etag in names)
    await one.put("a/zarr.json", None, lambda names: etag in names)
    assert await stored(memory, "a/zarr.json") is None


async def test_what_failed_and_was_done_is_seen(memory: MemoryStore) -> None:
    """After an error the cached state is outdated; to delete what is absent is no error."""
    store = Between(memory)
    one = replica(store)
    assert await one.read("notes/one") == b"one"

    async def fail_after(_: str, ref: ObjectRef) -> None:
        memory.place(ref, b"two")
        raise errors.StorageUnavailableError(ref, "the answer was lost")

    store.between = lambda call, ref: fail_after(call, ref) if call == "put" else None
    with pytest.raises(errors.StorageUnavailableError):
        await one.put("notes/one", b"two")
    assert await one.read("notes/one") == b"two"

    store.between = lambda *_: None
    for body in (b"three", b"four", None, None):
        await one.put("notes/one", body)
        assert await one.read("notes/one") == body


async def test_gathered_metadata_tell_of_shards_as_they_are_now(memory: MemoryStore) -> None:
    """Consolidated metadata are written from the current metadata of the array."""
    one = replica(memory)
    seen = json.loads(await one.read("a/zarr.json") or b"")

    def group(array: object) -> bytes:
        gathered = {"kind": "inline", "must_understand": False, "metadata": {"a": array}}
        group = {"zarr_format": 3, "node_type": "group", "consolidated_metadata": gathered}
        return json.dumps(group).encode()

    await one.put("zarr.json", group(seen))
    other_grid = {"name": "regular", "configuration": {"chunk_shape": [16]}}
    memory.place(ROOT.join("a/zarr.json"), zarr_json(chunk_grid=other_grid))
    await one.put("zarr.json", group(seen))

    kept = json.loads(await stored(memory, "zarr.json") or b"")
    assert kept["consolidated_metadata"]["metadata"]["a"]["chunk_grid"] == other_grid


@pytest.mark.parametrize("later_s", [0, 10**9])
async def test_an_array_made_elsewhere_is_not_taken_for_objects(
    memory: MemoryStore, later_s: int
) -> None:
    """Before a key like a chunk's is written as an object, metadata are read again."""
    one = replica(memory)
    assert await one.read("b/c/3") is None
    memory.place(ROOT.join("b/zarr.json"), zarr_json())
    clock = one.reading.fetch.clock
    one.reading.fetch.clock = lambda: clock() + later_s

    await one.put("b/c/3", b"chnk")

    assert chunks_of(await stored(memory, "b/c/0") or b"") == {3: b"chnk"}


async def test_write_takes_the_route_of_a_read(memory: MemoryStore) -> None:
    """Chunks of an array that was read are written without another search for their container."""
    one = replica(memory)
    containers = SearchedContainers(one.reading.dataset.containers.formats)
    one.reading.dataset = replace(one.reading.dataset, containers=containers)
    await one.read("a/c/0")
    for number in range(3):
        await one.put(f"a/c/{number}", b"chnk")

    assert chunks_of(await stored(memory, "a/c/0") or b"") == dict.fromkeys(range(3), b"chnk")
    assert containers.searches == ["a/c/0"]


async def test_metadata_whose_stored_form_is_too_long_are_refused(memory: MemoryStore) -> None:
    """The stored form may be longer than what was sent; it does not replace the document."""
    one = replica(memory)
    before = await stored(memory, "a/zarr.json")
    seen = json.loads(await one.read("a/zarr.json") or b"")
    seen["attributes"] = {"k": [0] * 25_000}

    with pytest.raises(errors.TooLargeError, match="metadata"):
        await one.put("a/zarr.json", json.dumps(seen, separators=(",", ":")).encode())

    assert await stored(memory, "a/zarr.json") == before


async def test_many_keys_are_written_with_one_rewrite_for_each_shard(memory: MemoryStore) -> None:
    """Each key gets its own outcome; of one that is given twice the last counts."""
    one = replica(memory)
    given: dict[str, bytes | None] = {f"a/c/{n}": b"%04d" % n for n in range(16)}
    given |= {"a/c/99": b"0000", "notes/new": b"new", "notes/one": None, "a/c/3": b"short"}

    with pytest.raises(errors.TooLargeError, match="metadata"):
        await one.put("a/zarr.json", zarr_json(attributes={"k": "x" * 2**16}))
    outcomes = dict(zip(given, await put_each(one, given), strict=True))

    assert sorted(changes for changes, _ in one.rewrites) == [7, 8]
    assert {key for key, each in outcomes.items() if isinstance(each, ShardgateError)} == {
        "a/c/99",
        "a/c/3",
    }
    assert outcomes["notes/one"] is None
    several = [KeyWrite(VirtualKey("a/c/3"), body) for body in (b"1111", b"2222")]
    twice = await one.writer.put_each(one.reading.dataset, several)
    assert twice[0] == twice[1]
    assert chunks_of(await stored(memory, "a/c/0") or b"")[3] == b"2222"
    assert chunks_of(await stored(memory, "a/c/1") or b"") == {
        n: b"%04d" % (8 + n) for n in range(8)
    }


def huge_2022() -> dict[str, bytes]:
    """Describe an array of the draft of 2022 whose only shard has room for 2^40 chunks."""
    core, sharding = "https://purl.org/zarr/spec/core/3.0", "storage_transformers/sharding/1.0"
    entry = {"zarr_format": core, "metadata_encoding": core, "metadata_key_suffix": ".json"}
    transformer = {
        "extension": f"https://purl.org/zarr/spec/{sharding}",
        "type": "indexed",
        "configuration": {"chunks_per_shard": [2**40]},
    }
    array = {
        "shape": [2**40],
        "data_type": "|u1",
        "chunk_grid": {"type": "regular", "chunk_shape": [1], "separator": "/"},
        "fill_value": 0,
        "storage_transformers": [transformer],
    }
    documents = {"h/zarr.json": entry, "h/meta/root/x.array.json": array}
    return {key: json.dumps(document).encode() for key, document in documents.items()}


@pytest.mark.parametrize("key", ["h/c/3", "h/data/root/x/c3"])
async def test_shards_with_a_huge_index_are_not_written(memory: MemoryStore, key: str) -> None:
    """The index would take all memory with the first chunk."""
    grid = {"name": "regular", "configuration": {"chunk_shape": [2**40]}}
    documents = {"h/zarr.json": zarr_json(shape=[2**40], chunk_grid=grid)}
    for name, document in (documents if "root" not in key else huge_2022()).items():
        memory.place(ROOT.join(name), document)
    one = replica(memory)
    assert await one.read(key) is None

    with pytest.raises(ReadOnlyError, match="a shard index of"):
        await one.put(key, b"0" if "root" in key else b"0000")


async def test_an_unsafe_store_is_not_written(memory: MemoryStore) -> None:
    """A store that ignores conditions could lose writes."""

    class Unsafe(Between):
        async def verify_conditional_writes(self, root: object) -> None:
            raise errors.UnwritableError(f"{root}: ignores conditions")

    one = replica(Unsafe(memory))

    with pytest.raises(errors.UnwritableError):
        await one.put("notes/new", b"new")
    with pytest.raises(errors.UnwritableError):
        await put_each(one, {"notes/new": b"new"})
    assert await stored(memory, "notes/new") is None


@pytest.mark.parametrize("name", ["a/c/{}", "notes/{}"])
async def test_others_have_their_turn_while_many_keys_are_written(
    memory: MemoryStore, name: str
) -> None:
    """Thousands of keys in one request yield to the event loop."""
    count = 1000
    grid = {"name": "regular", "configuration": {"chunk_shape": [4 * count]}}
    memory.place(ROOT.join("a/zarr.json"), zarr_json(shape=[4 * count], chunk_grid=grid))
    one = replica(memory)
    since = longest = 0

    class Counted(Containers):
        def translator(self, ref: ObjectRef) -> Translator | None:
            nonlocal since, longest
            since += 1
            longest = max(longest, since)
            return Containers.translator(self, ref)

    async def take_turns() -> None:
        nonlocal since
        while True:
            since = 0
            await asyncio.sleep(0)

    dataset = one.reading.dataset
    dataset = replace(dataset, containers=Counted(dataset.containers.formats))
    other = asyncio.create_task(take_turns())
    given = [KeyWrite(VirtualKey(name.format(number)), b"0000") for number in range(count)]
    outcomes = await one.writer.put_each(dataset, given)
    other.cancel()

    assert not any(isinstance(outcome, ShardgateError) for outcome in outcomes)
    assert 0 < longest <= 100


@pytest.mark.parametrize(
    ("prefix", "count", "left"), [("a/", 3, []), ("a/c/", 16, ["a/zarr.json"])]
)
async def test_a_prefix_is_taken_away_with_all_below(
    memory: MemoryStore, prefix: str, count: int, left: list[str]
) -> None:
    """Shards and metadata of an array are deleted, or its chunks only, and nothing else."""
    one = replica(memory)
    await put_each(one, {f"a/c/{n}": b"%04d" % n for n in range(16)})
    memory.place(ROOT.join("ab"), b"beside")

    assert await one.eraser.erase(one.reading.dataset, VirtualKey(prefix)) == count
    assert [listed.ref.key async for listed in memory.list(ROOT.prefix)] == [
        ROOT.join(key).key for key in (*left, "ab", "notes/one")
    ]
    assert await one.read("a/c/3") is None
    assert (await one.read("a/zarr.json") is None) == (not left)


def _files_of_repository(folder: Path) -> dict[str, bytes]:
    create(folder)
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


async def test_a_repository_is_not_taken_away_with_what_is_around_it(
    memory: MemoryStore, tmp_path: Path
) -> None:
    """A prefix with a repository below is read-only; meshes go, though none can be written."""
    files = _files_of_repository(tmp_path)
    for name, data in files.items():
        memory.place(ROOT.join(f"x/lab/{name}"), data)
    memory.place(ROOT.join("x/beside"), b"it")
    for name, data in build_meshes({"8": b"eight"}, sharding=RAW_SHARDING).items():
        memory.place(ROOT.join(f"mesh/{name}"), data)
    one = replica(memory)

    with pytest.raises(ReadOnlyError):
        await one.eraser.erase(one.reading.dataset, VirtualKey("x/"))
    assert len([each async for each in memory.list(ROOT.join("x/"))]) == len(files) + 1 > 4
    assert await one.eraser.erase(one.reading.dataset, VirtualKey("mesh/")) == 2
    assert [listed async for listed in memory.list(ROOT.join("mesh/").prefix)] == []


async def test_shards_of_an_array_made_elsewhere_are_no_objects(memory: MemoryStore) -> None:
    """A shard below the prefix may hold a chunk that is not below it."""
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
