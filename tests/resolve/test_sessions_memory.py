"""What a replica remembers of sessions is bounded, whatever is asked of them."""

import gc
import json
import tracemalloc
from collections.abc import Generator, Mapping
from contextlib import contextmanager

import pytest

from app.formats.icechunk.payloads import Inlaid
from app.formats.icechunk.snapshot import StoredSnapshot
from app.model import ObjectRef
from app.resolve.icechunk.session_store import SessionStore
from app.resolve.icechunk.sessions import root_of
from app.storage.contract import Found
from tests.resolve.sessions import (
    Replica,
    contents,
    document,
    files_of_repository,
    ref,
    stored,
)
from tests.sessions import array_document

MIB = 1024**2


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    """Write a repository once."""
    return files_of_repository(tmp_path_factory.mktemp("repo"))


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


async def test_names_of_nothing_are_not_remembered(files: Mapping[str, bytes]) -> None:
    """Anyone can think of as many as he likes."""
    replica = await Replica.of(stored(files))
    store = await replica.enter(await replica.begin())
    assert await store.get(ref("a/c/0")) is not None
    with growing_at_most(MIB):
        for number in range(10_000):
            assert await store.get(ref(f"none/{number}/c/0")) is None


async def test_large_inline_chunks_are_not_all_remembered(files: Mapping[str, bytes]) -> None:
    """A repository says how large they may be."""
    kept, count = stored(files), 100
    replica = await Replica.of(kept)
    store = await replica.enter(await replica.begin())
    await store.put(ref("b/zarr.json"), [document(2 * count)], expected=None)
    session = store.session
    node = (await session.view()).node("b")
    assert node is not None
    for at in range(count):
        large = Inlaid(at.to_bytes(MIB, "little"))
        await session.journal.put(session.place, node.node_id, (at,), large, expected=None)
    reader = await (await Replica.of(kept)).enter(session.place.session_id)
    with growing_at_most(70 * MIB):
        for at in range(count):
            assert await reader.get(ref(f"b/c/{at}")) is not None


def count_snapshots() -> int:
    """Count what this process holds of them, for whomever."""
    gc.collect()
    return sum(isinstance(each, StoredSnapshot) for each in gc.get_objects())


async def test_what_sessions_build_on_is_not_held_for_ever(files: Mapping[str, bytes]) -> None:
    """Each began with another snapshot, and nobody asks for the earlier ones any more."""
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


async def test_a_session_in_use_is_known(files: Mapping[str, bytes]) -> None:
    """However many others are asked for meanwhile."""
    replica = await Replica.of(stored(files))
    root = root_of(replica.opened.repository, session_id := await replica.begin())
    store = await replica.enter(session_id)
    stores = replica.sessions.stores
    for number in range(1100):
        stores.add(ObjectRef(f"other {number}", ""), SessionStore(store.session))

    found = await stores.get(root.join("a/c/0"))
    assert isinstance(found, Found)
    assert found.data == bytes([1, 2])
    del store
