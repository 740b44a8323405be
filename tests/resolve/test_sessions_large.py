"""A commit asks for what was changed, and a few things at a time."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from app.model import ObjectRef
from app.storage.memory import MemoryStore
from tests.resolve.sessions import (
    ROOT,
    Replica,
    contents,
    document,
    files_of_repository,
    ref,
    stored,
)

CHUNKS = 300
FEW = 64


class Watched:
    """A store that answers late, and tells how much was going on at its busiest."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._going_on: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        """Calls of one kind at a time, and tasks."""
        self.listed: list[str] = []

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)
        if name not in ("get", "delete"):
            return call

        async def watched(ref: ObjectRef, *args: Any, **options: Any) -> Any:
            self._going_on[name] += 1
            now = Counter({name: self._going_on[name], "tasks": len(asyncio.all_tasks())})
            self.most |= now
            await asyncio.sleep(0)
            try:
                return await call(ref, *args, **options)
            finally:
                self._going_on[name] -= 1

        return watched

    async def list(self, prefix: ObjectRef, **options: Any) -> AsyncIterator[Any]:
        """List, and remember what."""
        self.listed.append(prefix.key)
        async for each in self._store.list(prefix, **options):
            yield each


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    """Write a repository once."""
    return files_of_repository(tmp_path_factory.mktemp("repo"))


async def written(replica: Replica) -> str:
    """Begin a session, and give ``b`` many chunks in it."""
    session_id = await replica.begin()
    store = await replica.enter(session_id)
    await store.put(ref("b/zarr.json"), [document(2 * CHUNKS)], expected=None)
    for at in range(CHUNKS):
        await store.put(ref(f"b/c/{at}"), [bytes([1, at % 256])], expected=None)
    return session_id


async def test_a_commit_asks_for_a_few_chunks_at_a_time(files: Mapping[str, bytes]) -> None:
    """Others have their turn meanwhile, however many there are."""
    session_id = await written(await Replica.of(store := Watched(stored(files))))
    store.most.clear()
    other = await Replica.of(store)
    await other.commit(session_id)

    assert 1 < store.most["get"] <= store.most["tasks"] <= FEW
    found = await contents(await other.enter(session_id))
    assert found[f"b/c/{CHUNKS - 1}"] == bytes([1, (CHUNKS - 1) % 256])


async def test_a_commit_looks_through_changed_arrays_only(files: Mapping[str, bytes]) -> None:
    """A repository may have thousands of others."""
    store = Watched(stored(files))
    replica = await Replica.of(store)
    session_id = await replica.begin()
    session = await replica.enter(session_id)
    await session.put(ref("d/zarr.json"), [document(4)], expected=None)
    await session.put(ref("a/c/1"), [b"99"], expected=None)
    store.listed.clear()
    await replica.commit(session_id)

    journals = [key for key in store.listed if key.startswith(f"sessions/{session_id}/")]
    assert len(journals) == 2  # which arrays there are, and what of ``a``
    found = await contents(await replica.enter(session_id))
    assert (found["a/c/1"], found["g/b/c/1"]) == (b"99", bytes([7, 8]))
    assert json.loads(found["g/b/zarr.json"])["shape"] == [4]


async def test_a_journal_is_removed_many_entries_at_a_time(files: Mapping[str, bytes]) -> None:
    """That takes no client's patience."""
    replica = await Replica.of(store := Watched(stored(files)))
    session = (await replica.enter(await written(replica))).session
    store.most.clear()
    await replica.sessions.discard(session)

    assert 1 < store.most["delete"] <= FEW
    assert [key async for key in store.list(ROOT.join("sessions/"))] == []


async def test_many_sessions_are_asked_for_at_a_time(files: Mapping[str, bytes]) -> None:
    """To tell of them; they are in the order of their ids."""
    replica = await Replica.of(store := Watched(stored(files)))
    begun = sorted([await replica.begin() for _ in range(40)])
    store.most.clear()

    assert [each.session_id for each in await replica.sessions.every(replica.opened)] == begun
    assert 1 < store.most["get"] <= FEW
