"""Repositories at the root of a bucket, whose keys begin with a slash: Icechunk before 2.1."""

from collections.abc import Mapping

import pytest

from shardgate.model import ObjectRef
from shardgate.storage.memory import MemoryStore
from tests.support.icechunk.sessions.replicas import ROOT, Replica


@pytest.fixture
def store(files: Mapping[str, bytes]) -> MemoryStore:
    """Return a store with a repository whose keys begin with a slash."""
    store = MemoryStore()
    for name, data in files.items():
        store.place(ObjectRef(ROOT.bucket, f"/{name}"), data)
    return store


async def test_repository_whose_keys_begin_with_a_slash_is_committed_to(
    store: MemoryStore,
) -> None:
    """A session of a repository whose keys begin with a slash is read, written and committed, and
    all new files have such keys.
    """
    replica = await Replica.of(store)
    session_id = await replica.begin()
    await replica.write(session_id, "a/c/1", b"\x09" * 600)
    made = await replica.commit(session_id)

    read = await (await Replica.of(store)).contents(session_id)
    assert read["a/c/0"] == b"\x01\x02"
    assert read["a/c/1"] == b"\x09" * 600
    assert (await (await Replica.of(store)).opened.find("main")) == made.snapshot_id
    assert all([each.ref.key.startswith("/") async for each in store.list(ROOT)])


async def test_keys_without_a_slash_are_preferred(
    store: MemoryStore, files: Mapping[str, bytes]
) -> None:
    """A repository with plain keys is opened, if a bucket has two at its root."""
    for name, data in files.items():
        store.place(ROOT.join(name), data)

    assert (await Replica.of(store)).opened.directory == ROOT
