"""Sessions and their documents: bounded in memory and calls, swept, never older than the call."""

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

from shardgate.errors import ConflictError, ShardgateError
from shardgate.formats.icechunk.manifest import InlineChunk
from shardgate.formats.icechunk.snapshot import StoredSnapshot
from shardgate.icechunk.sessions.document import (
    ChangedNode,
    ChunkAddress,
    SessionDocument,
    encode_session,
)
from shardgate.icechunk.sessions.journal import DocumentEdit, SessionDocumentStore
from shardgate.icechunk.sessions.store import SessionStore
from shardgate.model import ObjectRef
from shardgate.storage.contract import Found
from shardgate.storage.memory import MemoryStore
from tests.icechunk.sessions.replicas import (
    ROOT,
    Late,
    Replica,
    contents,
    document,
    ref,
    stored,
)
from tests.read.stores import REF, CallOn, Clock, Tapped, WatchedStore
from tests.support.sessions import array_document

MIB = 1024**2
CHUNKS = 300
FEW = 64


class Watched(Tapped):
    """Store that answers late, and counts the calls and tasks at its busiest moment."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self._running: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

    async def around(self, name: str, ref: ObjectRef, call: CallOn) -> Any:
        """Count, and let others run."""
        self._running[name] += 1
        self.most |= Counter({name: self._running[name], "tasks": len(asyncio.all_tasks())})
        await asyncio.sleep(0)
        try:
            return await call()
        finally:
            self._running[name] -= 1


@contextmanager
def growing_at_most(nbytes: int) -> Generator[None]:
    """Show that no more than *nbytes* of memory are held afterwards."""
    gc.collect()
    tracemalloc.start()
    try:
        yield
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < nbytes
    finally:
        tracemalloc.stop()


async def test_large_inline_chunks_are_not_all_remembered(files: Mapping[str, bytes]) -> None:
    """Their size limit is configured in the repository."""
    kept, count = stored(files), 100
    replica = await Replica.of(kept)
    store = await replica.enter(await replica.begin())
    await store.put(ref("b/zarr.json"), [document(2 * count)], expected=None)
    session = store.session
    node = (await session.view()).node("b")
    assert node is not None
    for at in range(count):
        large = InlineChunk(at.to_bytes(MIB, "little"))
        await session.journal.put(ChunkAddress(node, (at,)), large, expected=None)
    reader = await (await Replica.of(kept)).enter(session.location.session_id)
    with growing_at_most(36 * MIB):
        for at in range(count):
            assert await reader.get(ref(f"b/c/{at}")) is not None


def count_snapshots() -> int:
    """Count the snapshots in memory of this process."""
    gc.collect()
    return sum(isinstance(each, StoredSnapshot) for each in gc.get_objects())


async def test_what_sessions_build_on_is_not_held_for_ever(files: Mapping[str, bytes]) -> None:
    """Sessions started from different snapshots release those of earlier ones."""
    large = json.dumps(array_document((4,), (2,), attributes={"note": " " * 4 * MIB})).encode()
    replica, first, before = await Replica.of(stored(files)), None, count_snapshots()
    for number in range(40):
        session_id = await replica.begin()
        first = first or session_id
        store = await replica.enter(session_id)
        await store.put(ref("b/zarr.json"), [large], expected=None)
        await store.put(ref("b/c/0"), [bytes([1, number])], expected=None)
        await replica.commit(session_id)
    assert count_snapshots() - before < 30
    assert first is not None
    assert (await contents(await replica.enter(first)))["b/c/0"] == bytes([1, 0])


async def test_what_sessions_grow_to_is_counted(files: Mapping[str, bytes]) -> None:
    """Also of those that are asked for once."""
    large = json.dumps(array_document((4,), (2,), attributes={"note": " " * 24 * MIB})).encode()
    memory = stored(files)
    writer, reader = await Replica.of(memory), await Replica.of(memory)
    ids = [await writer.begin() for _ in range(8)]
    for session_id in ids:
        await (await writer.enter(session_id)).put(ref("b/zarr.json"), [large], expected=None)
    with growing_at_most(110 * MIB):
        for session_id in ids:
            await (await reader.enter(session_id)).session.view()


async def test_a_session_in_use_is_known(files: Mapping[str, bytes]) -> None:
    """However many others are opened."""
    replica = await Replica.of(stored(files))
    store = await replica.enter(await replica.begin())
    stores = replica.sessions.stores
    for number in range(1100):
        stores.keep(SessionStore(store.session, ObjectRef(f"other {number}", "")))

    found = await stores.get(store.root.join("a/c/0"))
    assert isinstance(found, Found)
    assert found.data == bytes([1, 2])
    del store


async def test_a_session_expires(files: Mapping[str, bytes]) -> None:
    """Unless it is written to; the next session that begins removes all of it."""
    memory = stored(files, clock := Clock(time.time()))
    replica = await Replica.of(memory, clock)
    kept, left = await replica.begin(), await replica.begin()
    for store in (await replica.enter(kept), await replica.enter(left)):
        await store.put(ref("a/c/1"), [b"\x09\x09"], expected=None)
    clock.now += 20 * 3600
    await (await replica.enter(kept)).put(ref("a/c/0"), [b"\x09\x09"], expected=None)
    clock.now += 20 * 3600

    assert b"\x09\x09" in (await contents(await replica.enter(kept))).values()
    with pytest.raises(ShardgateError, match="expired"):
        await replica.enter(left)
    await replica.begin()
    names = [each.ref.key async for each in memory.list(ref("")._replace(bucket="memory://repo"))]
    assert not [name for name in names if left in name]
    assert [name for name in names if kept in name]


async def test_a_long_sweep_is_broken_off_and_resumed(files: Mapping[str, bytes]) -> None:
    """The client that begins a session does not wait for it; the next one goes on."""
    memory = stored(files)
    replica = await Replica.of(memory)
    store = await replica.enter(session_id := await replica.begin())
    await store.put(ref("a/c/0"), [b"99"], expected=None)
    await replica.commit(session_id)
    entries = ROOT.join(f"sessions/{session_id}/")
    stuck = Late(memory)
    stuck.before("delete", "", asyncio.Event().wait)
    slow = await Replica.of(stuck)

    async with asyncio.timeout(10):
        await slow.begin()
    assert [each async for each in memory.list(entries)]
    await slow.begin()
    assert not [each async for each in memory.list(entries)]


async def written(replica: Replica) -> str:
    """Begin a session, and give ``b`` many chunks in it."""
    session_id = await replica.begin()
    store = await replica.enter(session_id)
    await store.put(ref("b/zarr.json"), [document(2 * CHUNKS)], expected=None)
    for at in range(CHUNKS):
        await store.put(ref(f"b/c/{at}"), [bytes([1, at % 256])], expected=None)
    return session_id


async def test_a_commit_asks_for_a_few_chunks_at_a_time(files: Mapping[str, bytes]) -> None:
    """Tasks and reads are bounded, whatever the number of chunks, and deletions of a journal."""
    session_id = await written(await Replica.of(store := Watched(stored(files))))
    store.most.clear()
    other = await Replica.of(store)
    await other.commit(session_id)

    assert 1 < store.most["get"] <= store.most["tasks"] <= FEW
    found = await contents(await other.enter(session_id))
    assert found[f"b/c/{CHUNKS - 1}"] == bytes([1, (CHUNKS - 1) % 256])

    left = (await other.enter(await written(other))).session
    await other.sessions.discard((await other.enter(session_id)).session)
    store.most.clear()
    await other.sessions.discard(left)
    assert 1 < store.most["delete"] <= FEW
    assert [key async for key in store.list(ROOT.join("sessions/"))] == []


async def test_a_damaged_session_is_left_where_it_is(files: Mapping[str, bytes]) -> None:
    """It stops no sweep."""
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


def counting() -> DocumentEdit:
    """Return an edit that counts."""
    return lambda document: document and replace(document, attempt=document.attempt + 1)


async def test_a_call_during_a_read_waits_for_the_next_read() -> None:
    """Its result is not older than the call; all waiting calls share one read."""
    store = placed()
    documents = documents_of(store)
    store.gate.clear()
    first = asyncio.create_task(documents.read())
    await asyncio.sleep(0.01)
    assert len(store.calls) == 1
    store.place(REF, encode_session(replace(BEGUN, attempt=7)))
    late = [asyncio.create_task(documents.read()) for _ in range(10)]
    await asyncio.sleep(0)
    store.gate.set()
    await first

    assert [each and each.attempt for each in await asyncio.gather(*late)] == [7] * 10
    assert len(store.calls) == 2


async def test_two_replicas_lose_no_edit() -> None:
    """The loser of a race applies its edit to the new document."""
    store = placed()
    stores = [documents_of(store) for _ in range(2)]
    await asyncio.gather(*(stores[n % 2].edit(counting()) for n in range(20)))

    assert await stores[0].read() == replace(BEGUN, attempt=20)


async def test_a_document_that_could_not_be_read_again_is_not_written() -> None:
    """What was there before stays."""
    documents = documents_of(placed())
    large = ChangedNode(bytes(8), bytes(_LIMIT))

    with pytest.raises(ConflictError, match="repository_file_bytes"):
        await documents.edit(lambda document: document and replace(document, nodes={"a": large}))
    assert await documents.read() == BEGUN
