"""Registry of sessions: bounds of memory and calls, expiry, and fresh documents."""

import asyncio
import gc
import json
import time
import tracemalloc
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from shardgate.errors import ConflictError, ShardgateError, UnknownSessionError
from shardgate.formats.icechunk.manifest import InlineChunk
from shardgate.formats.icechunk.snapshot import StoredSnapshot
from shardgate.icechunk.sessions.document import (
    ChangedNode,
    ChunkAddress,
    SessionDocument,
    encode_session,
)
from shardgate.icechunk.sessions.journal import SessionDocumentStore
from shardgate.model import ObjectRef
from shardgate.storage.memory import MemoryStore
from tests.support.clocks import Clock
from tests.support.icechunk.sessions.replicas import (
    ROOT,
    Counting,
    Late,
    Replica,
    document,
    stored,
)
from tests.support.read.stores import REF, CallOn, Tapped, WatchedStore, settle
from tests.support.sessions import array_document

MIB = 1024**2
ROOM_NBYTES = 4 * MIB
CHUNKS = 100
FEW = 64


class Watched(Tapped):
    """A store that answers late, and records its largest numbers of concurrent calls and tasks."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self._running: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

    async def around(self, name: str, ref: ObjectRef, call: CallOn) -> Any:
        """Count the call, and let others run."""
        self._running[name] += 1
        self.most |= Counter({name: self._running[name], "tasks": len(asyncio.all_tasks())})
        await asyncio.sleep(0)
        try:
            return await call()
        finally:
            self._running[name] -= 1


@contextmanager
def growing_at_most(nbytes: int) -> Generator[None]:
    """Assert that the block leaves at most *nbytes* of memory allocated."""
    gc.collect()
    tracemalloc.start()
    try:
        yield
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < nbytes
    finally:
        tracemalloc.stop()


async def test_large_inline_chunks_are_not_all_cached(files: Mapping[str, bytes]) -> None:
    """Reading fifty large inline chunks of a session holds a bounded amount of memory."""
    kept, count = stored(files), 50
    replica = await Replica.of(kept)
    session_id = await replica.begin()
    await replica.write(session_id, "b/zarr.json", document(2 * count))
    session = (await replica.enter(session_id)).session
    node = (await session.view()).node("b")
    assert node is not None
    for at in range(count):
        large = InlineChunk(at.to_bytes(MIB, "little"))
        await session.journal.put(ChunkAddress(node, (at,)), large, expected=None)
    reader = await (await Replica.of(kept)).enter(session_id)
    with growing_at_most(36 * MIB):
        for at in range(count):
            assert await reader.get(ObjectRef("", f"b/c/{at}")) is not None


def count_snapshots() -> int:
    """Count the snapshots in memory of this process."""
    gc.collect()
    return sum(isinstance(each, StoredSnapshot) for each in gc.get_objects())


@pytest.fixture
def _little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a process remember sessions up to a small size."""
    monkeypatch.setattr("shardgate.icechunk.sessions.registry._MAX_STORES_NBYTES", ROOM_NBYTES)


@pytest.mark.usefixtures("_little_room")
async def test_snapshots_of_old_sessions_are_released(files: Mapping[str, bytes]) -> None:
    """Sessions started from different snapshots release those of earlier sessions."""
    large = json.dumps(array_document((4,), (2,), attributes={"note": " " * (MIB // 4)})).encode()
    replica = await Replica.of(stored(files), cached_nbytes=ROOM_NBYTES)
    first, before = None, count_snapshots()
    for number in range(40):
        session_id = await replica.begin()
        first = first or session_id
        await replica.write(session_id, "b/zarr.json", large)
        await replica.write(session_id, "b/c/0", bytes([1, number]))
        await replica.commit(session_id)
    assert count_snapshots() - before < 30
    assert first is not None
    assert (await replica.contents(first))["b/c/0"] == bytes([1, 0])


@pytest.mark.usefixtures("_little_room")
async def test_memory_of_sessions_is_bounded(files: Mapping[str, bytes]) -> None:
    """Sessions with large documents that are opened once hold a bounded amount of memory."""
    large = json.dumps(
        array_document((4,), (2,), attributes={"note": " " * (ROOM_NBYTES // 3)})
    ).encode()
    memory = stored(files)
    writer, reader = await Replica.of(memory), await Replica.of(memory)
    ids = [await writer.begin() for _ in range(8)]
    for session_id in ids:
        await writer.write(session_id, "b/zarr.json", large)
    with growing_at_most(7 * MIB):
        for session_id in ids:
            await (await reader.enter(session_id)).session.view()


async def test_a_session_expires(files: Mapping[str, bytes]) -> None:
    """A session that is not written to expires; the next one that begins removes its objects."""
    memory = stored(files, clock := Clock(time.time()))
    replica = await Replica.of(memory, clock)
    kept, left = await replica.begin(), await replica.begin()
    for session_id in (kept, left):
        await replica.write(session_id, "a/c/1", b"\x09\x09")
    clock.now += 20 * 3600
    await replica.write(kept, "a/c/0", b"\x09\x09")
    clock.now += 20 * 3600

    assert b"\x09\x09" in (await replica.contents(kept)).values()
    with pytest.raises(ShardgateError, match="expired"):
        await replica.enter(left)
    await replica.begin()
    await settle()
    names = [each.ref.key async for each in memory.list(ROOT)]
    assert not [name for name in names if left in name]
    assert [name for name in names if kept in name]


async def test_begin_sees_the_last_commit_of_any_replica(files: Mapping[str, bytes]) -> None:
    """A session begins at the newest commit, also where an older one was just made."""
    memory = stored(files)
    replicas = [await Replica.of(memory), await Replica.of(memory)]
    for replica, other in (replicas, replicas[::-1], replicas):
        await committed(replica)
        made = await other.commit(await committed(other))
        _, begun = await replica.sessions.create(replica.opened, "main")
        assert begun.parent_id == made.snapshot_id


async def test_commit_of_a_session_that_another_replica_ended_finds_its_end(
    files: Mapping[str, bytes],
) -> None:
    """A replica that last read the session as open returns the commit of another, or refuses."""
    memory = stored(files)
    replica, other = await Replica.of(memory), await Replica.of(memory)
    session_id = await replica.begin()
    await replica.write(session_id, "a/c/1", b"\x09\x09")
    made = await other.commit(session_id, "key")
    assert await replica.commit(session_id, "key") == made

    session_id = await replica.begin()
    await replica.write(session_id, "a/c/1", b"\x09\x08")
    await other.sessions.discard((await other.enter(session_id)).session)
    with pytest.raises(UnknownSessionError):
        await replica.commit(session_id)


async def test_commit_near_a_known_end_sees_that_it_was_postponed(
    files: Mapping[str, bytes],
) -> None:
    """A session that another replica has renewed does not expire while its commit waits."""
    memory = stored(files, clock := Clock(time.time()))
    replica, other = await Replica.of(memory, clock), await Replica.of(memory, clock)
    session_id = await replica.begin()
    await replica.write(session_id, "a/c/1", b"\x09\x09")
    clock.now += 23.5 * 3600
    await other.write(session_id, "a/c/0", b"\x09\x09")

    session = (await replica.enter(session_id, is_edited=True)).session
    clock.now += 3600
    session.require_live(session.documents.known)


async def test_begin_does_not_wait_for_a_sweep(files: Mapping[str, bytes]) -> None:
    """Beginning a session does not wait for a slow sweep; another one continues it after a stop."""
    memory = stored(files, clock := Clock(time.time()))
    session_id = await committed(await Replica.of(memory, clock))
    entries = ROOT.join(f"sessions/{session_id}/")
    clock.now += 700
    stuck = Late(memory)
    stuck.before("delete", "", asyncio.Event().wait)
    slow = await Replica.of(stuck, clock)

    await slow.begin()
    await slow.begin()
    await settle()
    assert [each async for each in memory.list(entries)]
    await slow.sessions.aclose()
    await slow.begin()
    await settle()
    assert not [each async for each in memory.list(entries)]


async def test_sessions_that_begin_in_one_minute_share_a_sweep(files: Mapping[str, bytes]) -> None:
    """Expired sessions are looked for once a minute, however many sessions begin."""
    store = Counting(stored(files, clock := Clock(time.time())))
    replica = await Replica.of(store, clock)
    for _ in range(4):
        await replica.begin()
        await settle()
        clock.now += 25

    assert store.calls["list", "sessions"] == 2


async def test_cycle_of_a_session_takes_few_calls(files: Mapping[str, bytes]) -> None:
    """A session, the write of a chunk and the commit read ``repo`` twice, and list once."""
    store = Counting(stored(files))
    replica = await Replica.of(store)
    await committed(replica)
    await settle()
    store.calls.clear()

    await committed(replica)
    assert store.calls == {
        ("get", "repo"): 2,
        ("put", "repo"): 1,
        # Before and after the write of the chunk.
        ("get", "sessions"): 2,
        # The document, the entry, and the document sealed and committed.
        ("put", "sessions"): 4,
        ("list", "sessions"): 1,
        **{("put", folder): 1 for folder in ("manifests", "snapshots", "transactions")},
        ("put", "overwritten"): 1,
    }


async def test_files_of_a_committed_session_stay_ten_minutes_after_its_commit(
    files: Mapping[str, bytes],
) -> None:
    """A sweep of any replica spares the files of a session that was committed lately."""
    memory = stored(files, clock := Clock(time.time()))
    replica = await Replica.of(memory, clock)
    session_id = await replica.begin()
    await replica.write(session_id, "a/c/0", b"99")
    clock.now += 700
    await replica.commit(session_id)
    entries = ROOT.join(f"sessions/{session_id}/")

    clock.now += 590
    await (await Replica.of(memory, clock)).begin()
    await settle()
    assert [each async for each in memory.list(entries)]
    clock.now += 20
    await replica.begin()
    await settle()
    assert not [each async for each in memory.list(entries)]


async def committed(replica: Replica) -> str:
    """Commit a session of one chunk."""
    session_id = await replica.begin()
    await replica.write(session_id, "a/c/0", b"99")
    await replica.commit(session_id)
    return session_id


async def written(replica: Replica) -> str:
    """Begin a session, and write many chunks of ``b`` in it."""
    session_id = await replica.begin()
    await replica.write(session_id, "b/zarr.json", document(2 * CHUNKS))
    for at in range(CHUNKS):
        await replica.write(session_id, f"b/c/{at}", bytes([1, at % 256]))
    return session_id


async def test_commit_reads_few_chunks_at_a_time(files: Mapping[str, bytes]) -> None:
    """A commit of many chunks, and a discard, run a bounded number of calls and tasks at once."""
    session_id = await written(await Replica.of(store := Watched(stored(files))))
    store.most.clear()
    other = await Replica.of(store)
    await other.commit(session_id)

    assert 1 < store.most["get"] <= store.most["tasks"] <= FEW
    found = await other.contents(session_id)
    assert found[f"b/c/{CHUNKS - 1}"] == bytes([1, (CHUNKS - 1) % 256])

    left = (await other.enter(await written(other))).session
    await other.sessions.discard((await other.enter(session_id)).session)
    store.most.clear()
    await other.sessions.discard(left)
    assert 1 < store.most["delete"] <= FEW
    assert [key async for key in store.list(ROOT.join("sessions/"))] == []


async def test_damaged_session_does_not_stop_a_sweep(files: Mapping[str, bytes]) -> None:
    """A damaged session document stays where it is, and other sessions can begin."""
    replica = await Replica.of(memory := stored(files))
    name = ROOT.join(f"sessions/{await replica.begin()}.session")
    memory.place(name, b"damaged")
    await replica.begin()
    assert await memory.stat(name) is not None


BEGUN = SessionDocument("main", "P", 512, 0, 1e9)
_LIMIT = 2**20


def documents_of(store: MemoryStore) -> SessionDocumentStore:
    """Open the document in *store*, as a replica does."""
    return SessionDocumentStore(store, REF, limit_nbytes=_LIMIT)


def placed() -> WatchedStore:
    """Return a store with a session."""
    store = WatchedStore()
    store.place(REF, encode_session(BEGUN))
    return store


async def test_a_call_during_a_read_waits_for_the_next_read() -> None:
    """Calls during a read of a document share the next read, so none gets an older document."""
    store = placed()
    documents = documents_of(store)
    store.gate.clear()
    first = asyncio.create_task(documents.read())
    await settle()
    assert len(store.calls) == 1
    store.place(REF, encode_session(replace(BEGUN, attempt=7)))
    late = [asyncio.create_task(documents.read()) for _ in range(10)]
    await asyncio.sleep(0)
    store.gate.set()
    await first

    assert [each and each.attempt for each in await asyncio.gather(*late)] == [7] * 10
    assert len(store.calls) == 2


async def test_too_large_document_is_not_written() -> None:
    """An edit that makes a document too large raises ConflictError and leaves it unchanged."""
    documents = documents_of(placed())
    large = ChangedNode(bytes(8), bytes(_LIMIT))

    with pytest.raises(ConflictError, match="repository_file_bytes"):
        await documents.edit(lambda document: document and replace(document, nodes={"a": large}))
    assert await documents.read() == BEGUN
