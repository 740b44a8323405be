"""The document of a session is asked for afresh, and changes that wait go together."""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from app.errors import ConflictError
from app.formats.icechunk.session import (
    ChangedNode,
    SessionDocument,
    decode_session,
    encode_session,
)
from app.resolve.icechunk.ledger import Edit, Ledger
from app.storage.contract import Found
from tests.resolve.stores import REF, WatchedStore

BEGUN = SessionDocument("main", "P", 512, 0, 1e9)
_LIMIT = 2**20


def placed() -> WatchedStore:
    """Store a session."""
    store = WatchedStore()
    store.place(REF, encode_session(BEGUN))
    return store


def counting() -> Edit:
    """Make a change that others can see."""
    return lambda document: document and replace(document, attempt=document.attempt + 1)


async def test_who_comes_during_an_ask_waits_for_the_next() -> None:
    """What he is told was asked for after he came; all who wait share that one."""
    store = placed()
    ledger = Ledger(store, REF, limit_nbytes=_LIMIT)
    store.gate.clear()
    first = asyncio.create_task(ledger.ask())
    await asyncio.sleep(0.01)
    assert len(store.calls) == 1
    store.place(REF, encode_session(replace(BEGUN, attempt=7)))
    late = [asyncio.create_task(ledger.ask()) for _ in range(10)]
    await asyncio.sleep(0)
    store.gate.set()
    await first

    assert [each and each.attempt for each in await asyncio.gather(*late)] == [7] * 10
    assert len(store.calls) == 2


async def test_changes_that_wait_go_into_one_replacement() -> None:
    """Each is made to what the one before has left."""
    store = placed()
    ledger = Ledger(store, REF, limit_nbytes=_LIMIT)
    made = await asyncio.gather(*(ledger.change(counting()) for _ in range(5)))
    found = await store.get(REF)

    assert sorted(each.attempt for each in made if each) == [1, 2, 3, 4, 5]
    assert isinstance(found, Found)
    assert decode_session(found.data, _LIMIT).attempt == 5


async def test_two_ledgers_lose_no_change() -> None:
    """Who is overtaken makes his change to what the other has left."""
    store = placed()
    ledgers = [Ledger(store, REF, limit_nbytes=_LIMIT) for _ in range(2)]
    await asyncio.gather(*(ledgers[n % 2].change(counting()) for n in range(20)))
    document = await ledgers[0].ask()

    assert document is not None
    assert document.attempt == 20


async def test_a_refused_change_harms_no_other() -> None:
    """Only who asked for it hears of it."""
    ledger = Ledger(placed(), REF, limit_nbytes=_LIMIT)

    def refuse(_: SessionDocument | None) -> SessionDocument:
        raise ConflictError("not this one")

    good, bad = await asyncio.gather(
        ledger.change(counting()), ledger.change(refuse), return_exceptions=True
    )
    assert isinstance(bad, ConflictError)
    assert isinstance(good, SessionDocument)
    assert good.attempt == 1


async def test_there_may_be_no_document() -> None:
    """That is a value, and cannot be changed."""
    ledger = Ledger(WatchedStore(), REF, limit_nbytes=_LIMIT)

    assert await ledger.ask() is None
    with pytest.raises(ConflictError):
        await ledger.change(_demand_none)


def _demand_none(document: SessionDocument | None) -> SessionDocument | None:
    assert document is None
    raise ConflictError("there is none")


async def test_others_have_their_turn_between_many_changes() -> None:
    """Each of them may copy what thousands of nodes are told by."""
    ledger = Ledger(placed(), REF, limit_nbytes=_LIMIT)
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
        await asyncio.gather(*(ledger.change(change) for _ in range(1000)))
        others.cancel()
    assert len(seen) > 10


class Told(dict[str, ChangedNode | None]):
    """Nodes that remember which threads asked for all of them to spell them."""

    def items(self) -> Any:
        """Give all."""
        THREADS.add(threading.get_ident())
        return super().items()


THREADS: set[int] = set()


async def test_large_documents_are_spelled_in_a_thread() -> None:
    """That takes a while, and others go on meanwhile."""
    ledger = Ledger(placed(), REF, limit_nbytes=_LIMIT)
    nodes = Told(a=ChangedNode(bytes(8), bytes(100_000)))
    THREADS.clear()
    await ledger.change(lambda document: document and replace(document, nodes=nodes))

    assert THREADS
    assert threading.get_ident() not in THREADS
