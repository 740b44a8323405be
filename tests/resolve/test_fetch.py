"""Reads that are described, performed, shared and remembered."""

import asyncio
import threading
from dataclasses import dataclass, field
from math import inf

import pytest

from app.errors import (
    DamagedError,
    StorageDeniedError,
    StorageUnavailableError,
    VersionChangedError,
)
from app.formats.reading import DecodeError, Opaque, Read
from app.model import ByteRange, Condition, ETag, Fixed, ObjectRef, UnmodifiedSince
from app.resolve.fetch import OVERHEAD_NBYTES, Memory, ReadCache
from app.storage.contract import Stat
from tests.resolve.stores import REF, Clock, WatchedStore, settle

_TTL_S = 60.0


@dataclass(frozen=True)
class _Decoder:
    """Wraps bytes and notes on which thread; refuses those that begin with ``bad``."""

    threads: list[int] = field(default_factory=list, compare=False)

    def __call__(self, data: bytes) -> Opaque:
        """Decode."""
        self.threads.append(threading.get_ident())
        if data.startswith(b"bad"):
            raise DecodeError("it begins with bad")
        return Opaque(data)


class _Case:
    """A cache over a watched store."""

    def __init__(self, data: bytes | None = b"old", max_bytes: int = 2**20) -> None:
        self.store = WatchedStore()
        self.clock = Clock()
        self.memory = Memory(max_bytes)
        self.fetch = ReadCache(self.store, self.memory, ttl_s=_TTL_S, clock=self.clock)
        self.decoder = _Decoder()
        self.read = Read("metadata", REF, None, self.decoder)
        if data is not None:
            self.store.place(REF, data)

    async def data(self) -> bytes | None:
        """Fetch the object."""
        found = await self.fetch(self.read)
        return None if found is None else found.value.data


async def test_an_answer_is_good_for_its_ttl() -> None:
    """Until the time is over the store is asked once and a change is not seen."""
    case = _Case()
    assert await case.data() == b"old"
    case.store.place(REF, b"new")
    case.clock.now += _TTL_S - 0.001

    assert await case.data() == b"old"
    assert len(case.store.calls) == 1


async def test_after_its_ttl_an_answer_is_asked_for_anew() -> None:
    """When the time is over a change is seen."""
    case = _Case()
    await case.data()
    case.store.place(REF, b"new")
    case.clock.now += _TTL_S

    assert await case.data() == b"new"


async def test_the_answer_carries_version_and_size_of_the_object() -> None:
    """A part is told together with the ETag and the length of the whole."""
    case = _Case()
    found = await case.fetch(case.read._replace(request=ByteRange(0, 2)))

    assert found is not None
    assert (found.value.data, found.etag, found.size) == (b"ol", case.store.place(REF, b"old"), 3)


async def test_revalidation_sends_the_known_version() -> None:
    """The second read names the ETag of the first in If-None-Match."""
    case = _Case()
    etag = case.store.place(REF, b"old")
    await case.data()
    case.clock.now += _TTL_S
    await case.data()

    assert [call.if_none_match for call in case.store.calls] == [None, etag]


async def test_what_is_confirmed_is_not_decoded_again() -> None:
    """The decoded value of an unchanged object is kept."""
    case = _Case()
    first = await case.fetch(case.read)
    case.clock.now += _TTL_S
    second = await case.fetch(case.read)

    assert first is second
    assert len(case.decoder.threads) == 1


async def test_what_is_confirmed_is_good_for_another_ttl() -> None:
    """A revalidated answer needs no read until its time is over again."""
    case = _Case()
    await case.data()
    case.clock.now += _TTL_S
    await case.data()
    case.clock.now += _TTL_S - 0.001
    await case.data()

    assert len(case.store.calls) == 2


async def test_the_time_runs_from_the_question() -> None:
    """An answer that took a while is good for that much less."""
    case = _Case()
    case.store.gate.clear()
    task = asyncio.create_task(case.data())
    await settle()
    case.clock.now += _TTL_S
    case.store.gate.set()
    await task
    await case.data()

    assert len(case.store.calls) == 2


async def test_absence_is_remembered() -> None:
    """What was absent stays absent for as long as what was there."""
    case = _Case(None)
    assert await case.data() is None
    case.store.place(REF, b"new")
    case.clock.now += _TTL_S - 0.001
    assert await case.data() is None
    case.clock.now += 0.001

    assert await case.data() == b"new"


async def test_a_failure_is_not_remembered() -> None:
    """After a failure the next read asks again."""
    case = _Case()
    case.store.failure = StorageDeniedError(REF, "for the test")
    with pytest.raises(StorageDeniedError):
        await case.data()

    assert await case.data() == b"old"


async def test_a_failed_revalidation_is_a_failure() -> None:
    """What is over its time is not given because the store cannot be asked."""
    case = _Case()
    await case.data()
    case.clock.now += _TTL_S
    case.store.failure = StorageUnavailableError(REF, "for the test")
    with pytest.raises(StorageUnavailableError):
        await case.data()


async def test_damage_names_the_object() -> None:
    """What cannot be decoded is an error with the object and the reason in it."""
    case = _Case(b"bad")
    with pytest.raises(DamagedError) as caught:
        await case.data()

    assert (caught.value.ref, caught.value.reason) == (REF, "it begins with bad")


async def test_damage_is_not_remembered() -> None:
    """Once the object is mended it is read."""
    case = _Case(b"bad")
    with pytest.raises(DamagedError):
        await case.data()
    case.store.place(REF, b"mended")

    assert await case.data() == b"mended"


async def test_an_object_too_short_for_the_read_is_damaged() -> None:
    """An empty object where metadata should be is damage, not absence."""
    case = _Case(b"")
    with pytest.raises(DamagedError, match="0 bytes are too few for its metadata"):
        await case.fetch(case.read._replace(request=ByteRange(0, 10)))


async def test_callers_of_one_read_share_it() -> None:
    """A hundred callers make one read and decode it once."""
    case = _Case()
    found = await asyncio.gather(*(case.data() for _ in range(100)))

    assert found == [b"old"] * 100
    assert (len(case.store.calls), len(case.decoder.threads)) == (1, 1)


async def test_what_was_forgotten_is_read_anew() -> None:
    """After `forget` the answer comes from the store, without a condition."""
    case = _Case()
    await case.data()
    case.store.place(REF, b"new")
    case.fetch.forget(REF)
    case.clock.now += 0.001

    assert await case.data() == b"new"
    assert case.store.calls[-1].if_none_match is None


async def test_forgetting_concerns_one_object() -> None:
    """What is known of other objects stays."""
    case = _Case()
    await case.data()
    case.fetch.forget(ObjectRef("memory://bucket", "data/other"))
    case.clock.now += 0.001
    await case.data()

    assert len(case.store.calls) == 1


async def test_what_was_forgotten_is_not_known_again() -> None:
    """However many other objects are forgotten after it."""
    case = _Case()
    await case.data()
    case.store.place(REF, b"new")
    case.fetch.forget(REF)

    for number in range(2**16 + 1):
        case.fetch.forget(ObjectRef("memory://bucket", str(number)))

    assert await case.data() == b"new"


async def test_a_read_under_way_is_not_joined_after_forgetting() -> None:
    """A read that began before `forget` may tell the old; who asks afterwards gets the new."""
    case = _Case()
    case.store.gate.clear()
    before = asyncio.create_task(case.data())
    await settle()
    case.clock.now += 0.001
    case.fetch.forget(REF)
    case.clock.now += 0.001
    after = asyncio.create_task(case.data())
    await settle()
    case.store.gate.set()
    await asyncio.gather(before, after)

    assert len(case.store.calls) == 2


async def test_a_read_that_began_before_forgetting_is_not_believed() -> None:
    """Its answer is for those who waited; the next caller asks again."""
    case = _Case()
    case.store.gate.clear()
    before = asyncio.create_task(case.data())
    await settle()
    case.clock.now += 0.001
    case.fetch.forget(REF)
    case.clock.now += 0.001
    case.store.gate.set()
    await before
    await case.data()

    assert len(case.store.calls) == 2


async def test_a_read_of_a_version_never_goes_stale() -> None:
    """Neither time nor `forget` makes a pinned answer wrong."""
    case = _Case()
    pinned = case.read._replace(version=case.store.place(REF, b"old"))
    await case.fetch(pinned)
    case.clock.now += 1000 * _TTL_S
    case.fetch.forget(REF)
    case.clock.now += 0.001
    found = await case.fetch(pinned)

    assert found is not None
    assert (found.value.data, len(case.store.calls)) == (b"old", 1)


@pytest.mark.parametrize("data", [b"new", None])
async def test_a_read_of_another_version_is_refused(data: bytes | None) -> None:
    """A pinned read of an object that was replaced or removed is no absence."""
    case = _Case(data)
    with pytest.raises(VersionChangedError) as caught:
        await case.fetch(case.read._replace(version=ETag('"old"')))

    assert caught.value.ref == REF


_FIXED = Fixed(ETag('"name"'))


async def test_a_read_of_what_never_changes_never_goes_stale() -> None:
    """It needs no condition, and neither time nor `forget` makes it wrong."""
    case = _Case()
    fixed = case.read._replace(version=_FIXED)
    first = await case.fetch(fixed)
    case.store.place(REF, b"new")
    case.clock.now += 1000 * _TTL_S
    case.fetch.forget(REF)

    assert await case.fetch(fixed) is first
    (call,) = case.store.calls
    assert (call.if_match, call.if_none_match) == (None, None)


async def test_the_absence_of_what_never_changes_ends() -> None:
    """A file may be read before it is written: its absence is good for its ttl."""
    case = _Case(None)
    fixed = case.read._replace(version=_FIXED)
    assert await case.fetch(fixed) is None
    case.store.place(REF, b"new")
    assert await case.fetch(fixed) is None
    case.clock.now += _TTL_S
    found = await case.fetch(fixed)

    assert found is not None
    assert found.value.data == b"new"
    case.clock.now += 1000 * _TTL_S
    assert await case.fetch(fixed) is found


@pytest.mark.parametrize("data", [b"old", None])
@pytest.mark.parametrize("condition", [ETag('"other"'), UnmodifiedSince(0)])
async def test_what_must_not_have_changed_is_damaged_where_it_has(
    data: bytes | None, condition: Condition
) -> None:
    """Whoever refers to it told how it was: to ask again would not help."""
    case = _Case(data)
    with pytest.raises(DamagedError, match="not as it was"):
        await case.fetch(case.read._replace(version=Fixed(ETag('"name"'), condition)))
    assert case.store.calls[0].if_match == condition


async def test_what_was_there_once_can_be_enough() -> None:
    """Asked for so, what is known is never asked for again, however old."""
    case = _Case()
    first = await case.fetch(case.read, ever=True)
    case.store.place(REF, b"new")
    case.clock.now += 1000 * _TTL_S

    assert await case.fetch(case.read, ever=True) is first
    assert len(case.store.calls) == 1


async def test_what_was_there_once_may_be_asked_for_anew_by_others() -> None:
    """Who wants to know how it is now asks, and who took it as it was learns of that."""
    case = _Case()
    await case.fetch(case.read, ever=True)
    case.store.place(REF, b"new")
    case.clock.now += _TTL_S
    assert await case.data() == b"new"
    found = await case.fetch(case.read, ever=True)

    assert found is not None
    assert found.value.data == b"new"
    assert len(case.store.calls) == 2


async def test_what_was_there_once_can_be_forgotten() -> None:
    """Who finds that it cannot be right makes everyone ask."""
    case = _Case()
    await case.fetch(case.read, ever=True)
    case.store.place(REF, b"new")
    case.fetch.forget(REF)
    found = await case.fetch(case.read, ever=True)

    assert found is not None
    assert found.value.data == b"new"


async def test_what_was_not_there_once_is_asked_for_again() -> None:
    """Absence is good for its ttl, whoever asks."""
    case = _Case(None)
    assert await case.fetch(case.read, ever=True) is None
    case.store.place(REF, b"new")
    assert await case.fetch(case.read, ever=True) is None
    case.clock.now += _TTL_S

    assert await case.fetch(case.read, ever=True) is not None


async def test_what_was_there_once_is_good_for_ever() -> None:
    """So an answer that rests on it alone expires never, but absence does."""
    case = _Case()
    other = case.read._replace(ref=ObjectRef("memory://bucket", "data/none"))

    assert (await case.fetch.remember(case.read, ever=True)).expires_at == inf
    assert (await case.fetch.remember(case.read)).expires_at == case.clock.now + _TTL_S
    assert (await case.fetch.remember(other, ever=True)).expires_at == case.clock.now + _TTL_S


async def test_a_stat_is_remembered() -> None:
    """Size and version are asked for once."""
    case = _Case()
    first = await case.fetch.stat(REF)
    second = await case.fetch.stat(REF)

    assert first == second
    assert first.known == Stat(3, case.store.place(REF, b"old"))
    assert case.store.methods == ["stat"]


async def test_what_was_learned_needs_no_stat() -> None:
    """What another answer told about an object is known."""
    case = _Case()
    stat = Stat(3, ETag('"told"'))
    case.fetch.learn(REF, stat, case.clock.now)

    assert (await case.fetch.stat(REF)).known == stat
    assert case.store.calls == []


async def test_nothing_is_recalled_of_what_was_not_asked() -> None:
    """`recall` tells nothing rather than that there is nothing."""
    case = _Case(None)
    assert case.fetch.recall(REF) is None
    await case.fetch.stat(REF)
    known = case.fetch.recall(REF)

    assert known is not None
    assert known.known is None


@pytest.mark.parametrize(("nbytes", "is_here"), [(256 * 1024, True), (256 * 1024 + 1, False)])
async def test_a_large_decode_leaves_the_loop_alone(nbytes: int, *, is_here: bool) -> None:
    """More than 256 KiB are decoded on another thread."""
    case = _Case(bytes(nbytes))
    await case.fetch(case.read)

    assert (case.decoder.threads == [threading.get_ident()]) is is_here


async def test_damage_found_off_the_loop_names_the_object_too() -> None:
    """A failure on another thread is the same failure."""
    case = _Case(b"bad" + bytes(300 * 1024))
    with pytest.raises(DamagedError, match="data/object: it begins with bad"):
        await case.data()


@pytest.mark.parametrize("old", [b"old", None])
@pytest.mark.parametrize("new", [b"old", b"new", None])
async def test_the_generation_grows_when_something_known_changed(
    old: bytes | None, new: bytes | None
) -> None:
    """A new version, disappearance and appearance count; confirmation does not."""
    case = _Case(old)
    case.read = case.read._replace(kind="shard-index")
    await case.data()
    case.store.remove(REF)
    if new is not None:
        case.store.place(REF, new)
    case.clock.now += _TTL_S
    await case.data()

    assert case.fetch.generation == (old != new)


async def test_the_generation_does_not_grow_by_what_is_new() -> None:
    """To read something for the first time contradicts nothing."""
    case = _Case()
    await case.data()
    await case.fetch.stat(REF)
    await case.fetch(case.read._replace(request=ByteRange(0, 1)))

    assert case.fetch.generation == 0


async def test_the_generation_grows_by_forgetting() -> None:
    """What was found with the help of something forgotten may be wrong."""
    case = _Case()
    case.fetch.forget(REF)

    assert case.fetch.generation == 1


async def test_the_bound_of_the_memory_is_kept() -> None:
    """However much is read, no more than the bound is held."""
    case = _Case(bytes(3000), max_bytes=20_000)
    for start in range(30):
        await case.fetch(case.read._replace(request=ByteRange(start, 2900)))
        assert case.memory.nbytes <= 20_000

    assert len(case.memory) in {4, 5}


async def test_what_is_heavier_than_the_memory_is_told_but_not_kept() -> None:
    """An index that does not fit works, at the price of a read each time, and evicts nothing."""
    case = _Case(bytes(5000), max_bytes=4000)
    small = case.read._replace(request=ByteRange(0, 10))
    await case.fetch(small)
    assert await case.data() == bytes(5000)
    assert await case.data() == bytes(5000)
    await case.fetch(small)

    assert [call.request for call in case.store.calls] == [small.request, None, None]


def test_an_entry_weighs_its_value_its_overhead_and_its_name() -> None:
    """A long name, which a client chooses, takes room in the memory."""
    memory = Memory(2**20)
    fetch = ReadCache(WatchedStore(), memory, ttl_s=_TTL_S)
    fetch.learn(ObjectRef("memory://bucket", "\N{GRINNING FACE}" * 250), None, 0.0)

    assert memory.nbytes >= OVERHEAD_NBYTES + 1000


async def test_when_all_callers_leave_the_read_is_cancelled() -> None:
    """Nobody waits, so that nothing is read or kept."""
    case = _Case()
    case.store.gate.clear()
    tasks = [asyncio.create_task(case.data()) for _ in range(3)]
    await settle()
    for task in tasks:
        task.cancel()
    await settle()

    assert (case.store.cancelled, len(case.memory)) == (1, 0)
