"""Writes of objects, documents, many keys and whole prefixes."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from shardgate import errors
from shardgate.errors import (
    DamagedError,
    PreconditionFailedError,
    ReadOnlyError,
    ShardgateError,
    StorageDeniedError,
    UnwritableError,
)
from shardgate.model import ETag, ObjectRef, VirtualKey
from shardgate.storage.contract import ObjectHeaders
from shardgate.storage.memory import MemoryStore
from shardgate.write.writer import KeyWrite
from tests.support.files import read_files
from tests.support.formats.neuroglancer_precomputed.case import build_meshes
from tests.support.formats.neuroglancer_precomputed.shards import RAW_SHARDING
from tests.support.formats.zarr import draft
from tests.support.formats.zarr.building import array_metadata, consolidated, regular, sharding
from tests.support.read.stores import CallOn, watch_searches
from tests.support.repositories import create
from tests.support.resolving import NOTHING, ROOT
from tests.support.write.writers import (
    Between,
    absent,
    before,
    chunks_of,
    present,
    put_each,
    replica,
    stored,
    the_same,
    zarr_json,
)
from tests.support.zipped import encoded

GROUP: Final = b'{"zarr_format": 3, "node_type": "group"}'


async def test_demand_on_an_object_holds_under_concurrent_writes(memory: MemoryStore) -> None:
    """A demand that a concurrent write no longer fulfils raises PreconditionFailedError.

    If every attempt is overtaken BusyError is raised.
    """
    store = Between(memory)
    one, other = replica(store), replica(memory)
    store.between = before("put", lambda: other.put("notes/new", b"by another"))
    with pytest.raises(PreconditionFailedError, match="notes/new"):
        await one.put("notes/new", b"ours", absent)
    assert await stored(memory, "notes/new") == b"by another"

    async def be_always_faster() -> None:
        await other.put("notes/one", b"%d" % len(store.calls))

    store.between = lambda call, _: be_always_faster() if call == "put" else None
    with pytest.raises(errors.BusyError, match="notes/one"):
        await one.put("notes/one", b"ours", present)


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


async def test_document_conditions_use_the_served_etag(memory: MemoryStore) -> None:
    """Conditions of writes and deletes are checked against the ETag of the served document."""
    one = replica(memory)
    document = json.loads(await one.read("a/zarr.json") or b"")
    etag = await one.put("a/zarr.json", json.dumps({**document, "attributes": {}}).encode())
    async with one.reading.resolver.open(
        one.reading.dataset, VirtualKey("a/zarr.json"), lambda _: NOTHING
    ) as opened:
        assert opened is not None
        assert opened.entity.etag == etag

    for body in (zarr_json(), None):
        with pytest.raises(PreconditionFailedError):
            await one.put("a/zarr.json", body, the_same(ETag('"x"')))
    etag = await one.put("a/zarr.json", zarr_json(), the_same(etag))
    await one.put("a/zarr.json", None, the_same(etag))
    assert await stored(memory, "a/zarr.json") is None


async def test_failed_write_outdates_the_cache(memory: MemoryStore) -> None:
    """After a failed write that was done, a read returns the new body.

    Deleting an absent object is no error.
    """
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


async def test_consolidated_metadata_have_the_current_shards(memory: MemoryStore) -> None:
    """Consolidated metadata are written with the shards of the array's current metadata."""
    one = replica(memory)
    seen = json.loads(await one.read("a/zarr.json") or b"")

    def group(array: object) -> bytes:
        return json.dumps(consolidated({"a": array})).encode()

    await one.put("zarr.json", group(seen))
    memory.place(ROOT.join("a/zarr.json"), zarr_json(chunk_grid=regular(16)))
    await one.put("zarr.json", group(seen))

    kept = json.loads(await stored(memory, "zarr.json") or b"")
    assert kept["consolidated_metadata"]["metadata"]["a"]["chunk_grid"] == regular(16)


@pytest.mark.parametrize("later_s", [0, 10**9])
async def test_new_array_of_others_is_found_before_a_write(
    memory: MemoryStore, later_s: int
) -> None:
    """Metadata are read again before a key like a chunk's is written as an object."""
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
    searches = watch_searches(one.reading)
    await one.read("a/c/0")
    for number in range(3):
        await one.put(f"a/c/{number}", b"chnk")

    assert chunks_of(await stored(memory, "a/c/0") or b"") == dict.fromkeys(range(3), b"chnk")
    assert searches == ["a/c/0"]


async def test_too_long_stored_metadata_are_refused(memory: MemoryStore) -> None:
    """Metadata whose stored form is too long raise TooLargeError, and change nothing."""
    one = replica(memory)
    before = await stored(memory, "a/zarr.json")
    seen = json.loads(await one.read("a/zarr.json") or b"")
    seen["attributes"] = {"k": [0] * 25_000}

    with pytest.raises(errors.TooLargeError, match="metadata"):
        await one.put("a/zarr.json", json.dumps(seen, separators=(",", ":")).encode())

    assert await stored(memory, "a/zarr.json") == before


async def test_many_keys_share_a_rewrite_for_each_shard(memory: MemoryStore) -> None:
    """Many keys are written by one rewrite for each shard, and each has its own outcome.

    Of a key that is given twice the last value counts.
    """
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


@pytest.mark.parametrize("key", ["h/c/3", "h/data/root/x/c3"])
async def test_shards_with_a_huge_index_are_not_written(memory: MemoryStore, key: str) -> None:
    """A write to an array whose shard index would be huge raises ReadOnlyError."""
    if "root" in key:
        array = draft.array_metadata([2**40], [1], [draft.sharding([2**40])])
        memory.place(ROOT.join("h/zarr.json"), draft.encode(draft.ENTRY_POINT))
        memory.place(ROOT.join("h/meta/root/x.array.json"), draft.encode(array))
    else:
        array_json = zarr_json(shape=[2**40], chunk_grid=regular(2**40))
        memory.place(ROOT.join("h/zarr.json"), array_json)
    one = replica(memory)
    assert await one.read(key) is None

    with pytest.raises(ReadOnlyError, match="a shard index of"):
        await one.put(key, b"0" if "root" in key else b"0000")


async def test_an_unsafe_store_is_not_written(memory: MemoryStore) -> None:
    """A store that ignores conditions raises UnwritableError, and stores nothing."""

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
async def test_many_keys_yield_to_the_event_loop(memory: MemoryStore, name: str) -> None:
    """A request of thousands of keys yields to the event loop at least every hundred keys."""
    count = 1000
    document = zarr_json(shape=[4 * count], chunk_grid=regular(4 * count))
    memory.place(ROOT.join("a/zarr.json"), document)
    one = replica(memory)
    keys = [VirtualKey(name.format(number)) for number in range(count)]
    since, longest = set[str](), 0

    class Counted(ObjectRef):
        def join(self, relative: str) -> ObjectRef:
            nonlocal longest
            since.add(relative)
            longest = max(longest, len(since))
            return ObjectRef.join(self, relative)

    async def take_turns() -> None:
        while True:
            since.clear()
            await asyncio.sleep(0)

    dataset = replace(one.reading.dataset, root=Counted(*ROOT))
    other = asyncio.create_task(take_turns())
    given = [KeyWrite(key, b"0000") for key in keys]
    outcomes = await one.writer.put_each(dataset, given)
    other.cancel()

    assert not any(isinstance(outcome, ShardgateError) for outcome in outcomes)
    assert 0 < longest <= 100


@pytest.mark.parametrize(
    ("prefix", "count", "left"), [("a/", 3, []), ("a/c/", 16, ["a/zarr.json"])]
)
async def test_prefix_is_erased(
    memory: MemoryStore, prefix: str, count: int, left: list[str]
) -> None:
    """Erasing a prefix deletes the array, or its chunks only, and nothing beside it."""
    one = replica(memory)
    await put_each(one, {f"a/c/{n}": b"%04d" % n for n in range(16)})
    memory.place(ROOT.join("ab"), b"beside")

    assert await one.eraser.erase(one.reading.dataset, VirtualKey(prefix)) == count
    assert [listed.ref.key async for listed in memory.list(ROOT.prefix)] == [
        ROOT.join(key).key for key in (*left, "ab", "notes/one")
    ]
    assert await one.read("a/c/3") is None
    assert (await one.read("a/zarr.json") is None) == (not left)


async def test_prefix_with_a_repository_is_not_erased(memory: MemoryStore, tmp_path: Path) -> None:
    """Erasing a prefix with a repository below raises ReadOnlyError.

    Meshes can be erased, though not written.
    """
    files = read_files(create(tmp_path).folder)
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


async def test_erasing_keeps_other_chunks_of_a_shard(memory: MemoryStore) -> None:
    """Erasing a prefix of an array that others have made keeps a shard's other chunks."""
    one, other = replica(memory), replica(memory)
    assert await one.read("b/c/0/0") is None
    document = array_metadata([8, 4], [8, 4], [sharding([4, 4])])
    memory.place(ROOT.join("b/zarr.json"), json.dumps(document).encode())
    await put_each(other, {"b/c/0/0": bytes(16), "b/c/1/0": b"\1" * 16})

    await one.eraser.erase(one.reading.dataset, VirtualKey("b/c/0/"))

    assert [await other.read(f"b/c/{n}/0") for n in range(2)] == [None, b"\1" * 16]


async def test_absent_key_is_deleted_on_the_condition_of_its_absence(memory: MemoryStore) -> None:
    """A deletion that demands the absence of its key succeeds where there is none."""
    one = replica(memory)

    assert await one.put("notes/none", None, absent) is None
    with pytest.raises(PreconditionFailedError, match="notes/one"):
        await one.put("notes/one", None, absent)


async def test_store_that_cannot_delete_one_version_refuses_a_demand(memory: MemoryStore) -> None:
    """A store that cannot remove one version only deletes without a demand, and not with one."""

    class Store(Between):
        async def around(self, name: str, ref: ObjectRef, call: CallOn) -> Any:
            is_of_version = call.keywords.get("expected") is not None
            return False if name == "delete" and is_of_version else await call()

    one = replica(Store(memory))
    with pytest.raises(UnwritableError, match="cannot remove one version and no other"):
        await one.put("notes/one", None, present)
    assert await stored(memory, "notes/one") == b"one"

    await one.put("notes/one", None)
    assert await stored(memory, "notes/one") is None


@pytest.mark.parametrize(
    ("data", "coding"), [(zarr_json(), ""), (encoded("gzip", zarr_json()), "gzip")]
)
async def test_document_is_written_over_its_coded_form(
    memory: MemoryStore, data: bytes, coding: str
) -> None:
    """A document is compared with the stored one, whatever the content coding of that.

    An empty object in its place is replaced.
    """
    one = replica(memory)
    served = await one.read("a/zarr.json")
    assert served is not None
    memory.place(ROOT.join("a/zarr.json"), data, headers=ObjectHeaders(coding))
    attributes = {"attributes": {"unit": "m"}}
    await one.put("a/zarr.json", json.dumps(json.loads(served) | attributes).encode())

    written = json.loads(await stored(memory, "a/zarr.json") or b"")
    assert written == json.loads(zarr_json()) | attributes
    memory.place(ROOT.join("a/zarr.json"), b"")
    await replica(memory).put("a/zarr.json", GROUP)
    assert await stored(memory, "a/zarr.json") == GROUP


@pytest.mark.parametrize(
    ("data", "coding", "reason"),
    [
        (b" " * (2**16 + 1), "", "metadata of more than 65536 bytes: limits.metadata_bytes"),
        (encoded("gzip", b"{}")[:-1], "gzip", "the gzip data ends early"),
        (encoded("gzip", bytes(2**16 + 1)), "gzip", "more than 65536 bytes once inflated"),
    ],
)
async def test_document_is_not_written_over_one_that_cannot_be_read(
    memory: MemoryStore, data: bytes, coding: str, reason: str
) -> None:
    """A stored document that is too long or damaged is not replaced: it may describe shards."""
    memory.place(ROOT.join("a/zarr.json"), data, headers=ObjectHeaders(coding))

    with pytest.raises(DamagedError, match=reason):
        await replica(memory).put("a/zarr.json", GROUP)
    assert await stored(memory, "a/zarr.json") == data


async def test_erasing_ends_with_the_first_error_of_a_key(memory: MemoryStore) -> None:
    """Erasing keys raises the first error of one, and counts nothing."""
    store = Between(memory)
    one = replica(store)
    await one.put("a/c/0", b"1234")

    def deny(call: str, ref: ObjectRef) -> None:
        if call in ("put", "delete"):
            raise StorageDeniedError(ref, "no")

    store.between = deny
    with pytest.raises(StorageDeniedError, match="a/c/0"):
        await one.eraser.erase(one.reading.dataset, VirtualKey("a/c/"))
    assert await one.read("a/c/0") == b"1234"
