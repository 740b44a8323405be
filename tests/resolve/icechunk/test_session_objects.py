"""Session documents: reads are never older than the call, pending edits share one swap."""

import asyncio
from dataclasses import replace

import pytest

from app.errors import ConflictError
from app.formats.icechunk.session import (
    SessionDocument,
    decode_session,
    encode_session,
)
from app.resolve.icechunk.session_objects import Edit, SessionDocumentStore
from app.storage.contract import Found
from tests.resolve.stores import REF, WatchedStore

BEGUN = SessionDocument("main", "P", 512, 0, 1e9)
_LIMIT = 2**20


def placed() -> WatchedStore:
    """Return a store with a session."""
    store = WatchedStore()
    store.place(REF, encode_session(BEGUN))
    return store


def counting() -> Edit:
    """Return an edit that counts."""
    return lambda document: document and replace(document, attempt=document.attempt + 1)


async def test_a_call_during_a_read_waits_for_the_next_read() -> None:
    """Its result is not older than the call; all waiting calls share one read."""
    store = placed()
    documents = SessionDocumentStore(store, REF, limit_nbytes=_LIMIT)
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


async def test_pending_edits_share_one_swap() -> None:
    """Each applies to the result of the one before."""
    store = placed()
    documents = SessionDocumentStore(store, REF, limit_nbytes=_LIMIT)
    made = await asyncio.gather(*(documents.edit(counting()) for _ in range(5)))
    found = await store.get(REF)

    assert sorted(each.attempt for each in made if each) == [1, 2, 3, 4, 5]
    assert isinstance(found, Found)
    assert decode_session(found.data, _LIMIT).attempt == 5


async def test_two_replicas_lose_no_edit() -> None:
    """The loser of a race applies its edit to the new document."""
    store = placed()
    stores = [SessionDocumentStore(store, REF, limit_nbytes=_LIMIT) for _ in range(2)]
    await asyncio.gather(*(stores[n % 2].edit(counting()) for n in range(20)))
    document = await stores[0].read()

    assert document is not None
    assert document.attempt == 20


async def test_a_refused_edit_affects_no_other() -> None:
    """Only its caller gets the error."""
    documents = SessionDocumentStore(placed(), REF, limit_nbytes=_LIMIT)

    def refuse(_: SessionDocument | None) -> SessionDocument:
        raise ConflictError("not this one")

    good, bad = await asyncio.gather(
        documents.edit(counting()), documents.edit(refuse), return_exceptions=True
    )
    assert isinstance(bad, ConflictError)
    assert isinstance(good, SessionDocument)
    assert good.attempt == 1


async def test_a_missing_document_is_none() -> None:
    """It cannot be edited."""
    documents = SessionDocumentStore(WatchedStore(), REF, limit_nbytes=_LIMIT)

    assert await documents.read() is None
    with pytest.raises(ConflictError):
        await documents.edit(_demand_none)


def _demand_none(document: SessionDocument | None) -> SessionDocument | None:
    assert document is None
    raise ConflictError("there is none")


async def test_the_loop_runs_between_many_edits() -> None:
    """Each edit may copy thousands of nodes."""
    documents = SessionDocumentStore(placed(), REF, limit_nbytes=_LIMIT)
    turns, seen = 0, set[int]()

    def change(document: SessionDocument | None) -> SessionDocument | None:
        seen.add(turns)
        return counting()(document)

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        others = group.create_task(take_turns())
        await asyncio.gather(*(documents.edit(change) for _ in range(1000)))
        others.cancel()
    assert len(seen) > 10
