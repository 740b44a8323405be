"""`app.http.start.glances`: what a view of the page costs."""

import asyncio
import logging
from dataclasses import replace

import pytest

from app.http.start.glances import Glances
from app.model import ObjectRef
from tests.resolve.stores import Clock, WatchedStore
from tests.resolve.test_inspect import ARRAY, filled
from tests.resolving import ROOT, reading


async def test_what_was_seen_is_kept_for_a_while() -> None:
    """Views of the page cost no reads until then."""
    clock, store = Clock(), filled(WatchedStore(), a=ARRAY)
    opened = reading(store, ttl_s=0)
    glances = Glances(opened.resolver, clock=clock)
    first = await glances.look_at([opened.dataset])
    reads = len(store.calls)

    assert await glances.look_at([opened.dataset]) == first
    assert len(store.calls) == reads
    clock.now += 30
    assert await glances.look_at([opened.dataset]) == first
    assert len(store.calls) > reads


async def test_all_who_ask_at_once_share_a_look() -> None:
    """A crowd costs as much as one."""
    alone, crowd = filled(WatchedStore(), a=ARRAY), filled(WatchedStore(), a=ARRAY)
    for store, views in ((alone, 1), (crowd, 20)):
        opened = reading(store, ttl_s=0)
        glances = Glances(opened.resolver)
        await asyncio.gather(*(glances.look_at([opened.dataset]) for _ in range(views)))

    assert crowd.calls == alone.calls


async def test_datasets_are_looked_at_together() -> None:
    """Many that hang hold the page up as long as one."""
    store = filled(WatchedStore(), a=ARRAY)
    store.gate.clear()
    opened = reading(store)
    many = [replace(opened.dataset, name=f"d{n}", root=ROOT.join(str(n))) for n in range(50)]

    async with asyncio.timeout(2):
        seen = await Glances(opened.resolver, within_s=0.05).look_at(many)

    assert {glance.reason for glance in seen} == {"the store took longer than 0.05 s"}


async def test_a_fault_of_ours_stays_with_its_dataset(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, and the others are shown."""
    store = filled(WatchedStore(), a=ARRAY)
    opened = reading(store)
    odd = replace(opened.dataset, name="odd", root=ObjectRef("memory://other", "odd"))
    store.failure = ZeroDivisionError("of ours")

    with caplog.at_level(logging.ERROR, logger="app"):
        broken, sound = await Glances(opened.resolver).look_at([odd, opened.dataset])

    assert broken.reason == "a fault of this service"
    assert [each.path for each in sound.collections] == ["a"]
    assert "odd" in caplog.text
