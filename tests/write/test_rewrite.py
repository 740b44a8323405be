"""Rewrites of shards: changes that are combined, conflicts, and preconditions."""

import asyncio
import json
from collections.abc import Awaitable
from typing import Any

import pytest

from shardgate.errors import BusyError, PreconditionFailedError, StorageUnavailableError
from shardgate.model import ObjectRef
from shardgate.storage.memory import MemoryStore
from tests.support.read.stores import CallOn, settle
from tests.support.resolving import ROOT
from tests.support.storage.reading import found
from tests.support.write.writers import (
    CHUNK_NBYTES,
    PER_SHARD,
    Between,
    Replica,
    absent,
    before,
    chunks_of,
    replica,
    the_same,
    zarr_json,
)

SHARD = ROOT.join("a/c/0")


async def stored(memory: MemoryStore) -> dict[int, bytes]:
    """Return the chunks of the stored shard."""
    return chunks_of((await found(memory, SHARD)).data)


async def put_all(one: Replica, chunks: range) -> None:
    """Write many inner chunks concurrently."""
    async with asyncio.TaskGroup() as group:
        for number in chunks:
            group.create_task(one.put(f"a/c/{number}", b"%04d" % number))


async def test_concurrent_changes_share_a_rewrite(memory: MemoryStore) -> None:
    """Concurrent changes of a shard share at most two rewrites.

    A rewrite does not read back the index it wrote.
    """
    store = Between(memory)
    one = replica(store)
    await put_all(one, range(8))

    assert await stored(memory) == {number: b"%04d" % number for number in range(8)}
    assert sum(changes for changes, _ in one.rewrites) == 8
    assert len(one.rewrites) <= 2
    for number in range(8):
        await one.put(f"a/c/{number}", None if number else b"new!")
    store.calls.clear()
    await one.put("a/c/0", b"more")
    assert [call for call in store.calls if call[1] == "a/c/0"] == [("put", "a/c/0")]


async def test_lost_swap_is_repeated_with_the_new_shard(memory: MemoryStore) -> None:
    """After a lost swap the shard is read again, and no chunk is lost.

    If every swap is lost BusyError is raised.
    """
    store = Between(memory)
    one, other = replica(store), replica(memory)
    await one.put("a/c/0", b"0000")
    store.between = before(
        "put", lambda: other.put("a/c/1", b"1111"), lambda: other.put("a/c/2", b"2222")
    )
    await one.put("a/c/3", b"3333")

    assert await stored(memory) == {0: b"0000", 1: b"1111", 2: b"2222", 3: b"3333"}
    assert one.rewrites[-1] == (1, 2)

    async def be_always_faster() -> None:
        await other.put("a/c/1", b"%04d" % len(store.calls))

    store.between = lambda call, _: be_always_faster() if call == "put" else None
    with pytest.raises(BusyError, match="a/c/0"):
        await one.put("a/c/3", b"4444")


async def test_failed_write_of_a_new_shard_outdates_its_absence(memory: MemoryStore) -> None:
    """A chunk whose write was done, though it failed, is read, where it was known to be absent."""
    store = Between(memory)
    one = replica(store)
    assert await one.read("a/c/0") is None

    async def fail_after(_: str) -> None:
        await replica(memory).put("a/c/0", b"done")
        raise StorageUnavailableError(ROOT, "the answer was lost")

    store.between = lambda call, _: fail_after(call) if call == "put" else None
    with pytest.raises(StorageUnavailableError):
        await one.put("a/c/0", b"done")

    assert await one.read("a/c/0") == b"done"


async def test_demand_is_checked_against_the_stored_shard(memory: MemoryStore) -> None:
    """A demand is checked against the stored shard, not a cached index.

    Of several in one rewrite each is checked after the changes before it.
    """
    one, other = replica(memory), replica(memory)
    assert await one.read("a/c/3") is None

    await other.put("a/c/3", b"them")

    with pytest.raises(PreconditionFailedError):
        await one.put("a/c/3", b"us!!", absent)
    assert await other.put("a/c/3", None) is None
    puts = [one.put("a/c/3", b"%04d" % number, absent) for number in range(8)]
    outcomes = await asyncio.gather(*puts, return_exceptions=True)
    refused = [each for each in outcomes if isinstance(each, PreconditionFailedError)]
    assert len(refused) == 7
    at = next(n for n, each in enumerate(outcomes) if isinstance(each, str))
    assert await stored(memory) == {3: b"%04d" % at}


async def test_refusal_by_a_new_index_reads_it_once(memory: MemoryStore) -> None:
    """A precondition that an index read for the request refutes is refused without another read."""
    store = Between(memory)
    await replica(memory).put("a/c/3", b"them")

    with pytest.raises(PreconditionFailedError):
        await replica(store).put("a/c/3", b"us!!", absent)

    assert store.calls.count(("get", "a/c/0")) == 1


async def test_overwritten_version_fulfils_no_demand(memory: MemoryStore) -> None:
    """A version that another write of the same rewrite replaced fulfils no demand."""
    one = replica(memory)
    assert await one.read("a/c/3") is None
    first, last = await asyncio.gather(one.put("a/c/3", b"1111"), one.put("a/c/3", b"2222"))
    assert await one.read("a/c/3") == b"2222"

    with pytest.raises(PreconditionFailedError):
        await one.put("a/c/3", b"3333", the_same(first))
    again = await one.put("a/c/3", b"4444", the_same(last))
    with pytest.raises(PreconditionFailedError):
        await one.put("a/c/3", b"lost", the_same(last))
    assert again != last
    assert await stored(memory) == {3: b"4444"}


async def test_deleting_the_last_chunk_removes_the_shard(memory: MemoryStore) -> None:
    """Deleting the last chunk deletes the shard; deleting an absent chunk writes nothing."""
    store = Between(memory)
    one, other = replica(store), replica(memory)
    await one.put("a/c/1", None)
    assert {call for call, _ in store.calls} == {"verify_conditional_writes", "get"}
    await put_all(other, range(2))

    await one.put("a/c/0", None)
    assert await stored(memory) == {1: b"0001"}
    await one.put("a/c/1", None)
    assert await memory.stat(SHARD) is None
    assert await one.read("a/c/1") is None


async def test_empty_shard_is_kept_without_conditional_deletes(memory: MemoryStore) -> None:
    """A store without conditional deletes keeps an empty shard when its last chunk is deleted."""

    class Undeletable(Between):
        async def around(self, name: str, ref: ObjectRef, call: CallOn) -> Any:
            assert name != "delete" or call.keywords["expected"] is not None
            return False if name == "delete" else await super().around(name, ref, call)

    one = replica(Undeletable(memory))
    await one.put("a/c/0", b"0000")
    await one.put("a/c/0", None)

    assert await stored(memory) == {}
    assert await one.read("a/c/0") is None


async def test_failed_rewrite_fails_all_its_writes(memory: MemoryStore) -> None:
    """A failed rewrite raises its error for all its writes, and the next write succeeds."""
    store = Between(memory)
    one = replica(store)

    def fail(call: str, ref: ObjectRef) -> None:
        if call == "put":
            raise StorageUnavailableError(ref, "is away")

    store.between = fail
    puts = [one.put(f"a/c/{number}", b"lost") for number in range(8)]
    outcomes = await asyncio.gather(*puts, return_exceptions=True)
    store.between = lambda *_: None
    await one.put("a/c/5", b"5555")

    assert all(isinstance(each, StorageUnavailableError) for each in outcomes)
    assert await stored(memory) == {5: b"5555"}


async def test_cancelled_waiting_write_is_dropped(memory: MemoryStore) -> None:
    """A cancelled write that waits is dropped, and one in a running rewrite is written."""
    store = Between(memory)
    one = replica(store)
    has_begun, going_on = asyncio.Event(), asyncio.Event()

    def hold(call: str, _: ObjectRef) -> Awaitable[object] | None:
        if call != "put":
            return None
        has_begun.set()
        return going_on.wait()

    store.between = hold
    written = asyncio.create_task(one.put("a/c/0", b"0000"))
    await has_begun.wait()
    waiting = asyncio.create_task(one.put("a/c/1", b"1111"))
    other = asyncio.create_task(one.put("a/c/2", b"2222"))
    await settle()

    written.cancel()
    waiting.cancel()
    going_on.set()
    await other

    assert await stored(memory) == {0: b"0000", 2: b"2222"}


@pytest.mark.parametrize("checksums", [0, 1, 2])
async def test_room_is_reserved_for_the_larger_shard(memory: MemoryStore, checksums: int) -> None:
    """A rewrite reserves the larger of the old and new shard's sizes, with checksums too."""
    document = json.loads(zarr_json())
    document["codecs"] += [{"name": "crc32c"}] * checksums
    memory.place(ROOT.join("a/zarr.json"), json.dumps(document).encode())
    held: list[tuple[str, int]] = []
    one = replica(Between(memory, lambda call, _: held.append((call, one.room.held_bytes))))

    for chunk, body in enumerate((b"0000", b"1111", None)):
        await one.put(f"a/c/{chunk % 2}", body)

    size = 2 * CHUNK_NBYTES + 16 * PER_SHARD + 4 * checksums
    puts = [nbytes for call, nbytes in held if call == "put"]
    assert puts == [size - CHUNK_NBYTES, size, size]
    assert checksums == 0 or ("get", size) in held
    assert one.room.held_bytes == 0
    assert await one.read("a/c/1") == b"1111"


async def test_chunk_written_during_the_deletion_of_the_last_other_is_kept(
    memory: MemoryStore,
) -> None:
    """A chunk that is written before a shard is deleted with its last other chunk is kept."""
    store = Between(memory)
    one, other = replica(store), replica(memory)
    await other.put("a/c/0", b"1234")
    store.between = before("delete", lambda: other.put("a/c/1", b"5678"))
    await one.put("a/c/0", None)

    assert await stored(memory) == {1: b"5678"}
