"""Bodies that are inflated, the bytes held for them, and the bound on bytes in flight."""

import asyncio
from dataclasses import dataclass, field
from random import randbytes

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardgate.errors import BusyError, DamagedError, StorageDeniedError
from shardgate.model import ByteRange, VirtualKey
from shardgate.read.bodies import Entity, Selection
from shardgate.read.budget import BucketBudgets, ByteBudget, ByteReservation
from tests.support.formats.neuroglancer_precomputed.case import (
    GZIP_DATA,
    IDS,
    build,
    build_skeletons,
)
from tests.support.read.stores import Watching, holding, settle
from tests.support.records import replaced
from tests.support.resolving import NOTHING, ROOT
from tests.support.zipped import zipped

_KEY, _NEIGHBOUR, *_ = IDS
_CHUNK = b"what a chunk holds " * 500
_STORED = zipped(_CHUNK)
_OBJECTS = build({_KEY: _CHUNK, _NEIGHBOUR: b"neighbour"}, sharding=GZIP_DATA)
_SHARD = ROOT.join("s0/0.shard")
_LIMIT = 2**16


def _with(stored: bytes) -> dict[str, bytes]:
    """Build the volume with *stored* in the place of the gzip."""
    raw = build({_KEY: stored}, sharding={**GZIP_DATA, "data_encoding": "raw"})
    return {**raw, "info": _OBJECTS["info"]}


def _case(objects: dict[str, bytes], in_flight_bytes: int = 2**26) -> Watching:
    return Watching(objects, decoded_bytes=_LIMIT, in_flight_bytes=in_flight_bytes)


_BAD = {
    "cached": _STORED[:-1],
    "empty": b"",
    "too long": bytes(_LIMIT + 1),
    "a bomb": zipped(bytes(_LIMIT + 1)),
}


async def _known(stored: bytes, **options: int) -> Watching:
    """Read the gzip without inflating it, so that all of it is cached."""
    case = _case(_with(stored), **options)
    await case.read(_KEY)
    case.store.calls.clear()
    return case


@pytest.mark.parametrize("name", _BAD)
async def test_damage_of_a_cached_chunk_is_confirmed_by_a_stat(name: str) -> None:
    """A cached chunk that does not inflate is damage if a stat finds the same version.

    If the object was replaced or removed since, it is read again.
    """
    case = await _known(_BAD[name])
    with pytest.raises(DamagedError, match=r"s0/0\.shard"):
        await case.data.read(_KEY)
    assert case.store.methods == ["stat"]

    case = await _known(_BAD[name])
    case.write(_OBJECTS)
    assert await case.data.read(_KEY) == _CHUNK
    case = await _known(_BAD[name])
    case.store.remove(_SHARD)
    assert await case.data.read(_KEY) is None


async def test_unconfirmed_damage_raises_the_stores_error() -> None:
    """If the stat that should confirm damage is refused, StorageDeniedError is raised."""
    case = await _known(b"")
    case.store.failure = StorageDeniedError(_SHARD, "for the test")
    with pytest.raises(StorageDeniedError):
        await case.data.read(_KEY)


async def test_inflated_size_is_reserved_before_inflating() -> None:
    """The stored bytes and the size announced in their trailer are reserved before inflating."""
    damaged = bytearray(_STORED)
    damaged[-8] ^= 1
    data = (await _known(bytes(damaged), in_flight_bytes=len(_CHUNK))).data
    async with holding(data.budget, 1):
        with pytest.raises(BusyError):
            await data.read(_KEY)
    with pytest.raises(DamagedError):
        await data.read(_KEY)

    assert data.budget.held_bytes == 0


async def test_concurrent_inflations_share_the_budget() -> None:
    """Fifty concurrent requests are served with a budget for inflating one chunk at a time."""
    chunks = {str(segment): randbytes(1000) for segment in range(50)}
    data = _case(build_skeletons(chunks, sharding=GZIP_DATA), in_flight_bytes=20_000).data

    assert await asyncio.gather(*map(data.read, chunks)) == list(chunks.values())
    assert data.budget.held_bytes == 0


async def test_stored_and_inflated_forms_are_reserved_together() -> None:
    """The stored and the inflated bytes stay reserved until the client has the body."""
    data = _case(_OBJECTS).data
    seen: list[Entity] = []

    def inflated(entity: Entity) -> Selection | None:
        seen.append(entity)
        return None if entity.coding else replaced(NOTHING, reads=ByteRange(3, 9))

    async with data.resolver.open(data.dataset, VirtualKey(_KEY), inflated) as opened:
        assert opened is not None
        assert opened.body == _CHUNK[3:9]
        assert opened.entity.is_inflated
        assert data.budget.held_bytes == len(_STORED) + len(_CHUNK)
    assert data.budget.held_bytes == 0
    compressed, whole = seen
    assert (compressed.length, whole.length) == (len(_STORED), len(_CHUNK))
    assert whole.etag == compressed.inflated_etag != compressed.etag


@pytest.mark.parametrize("told", [0, 2**32 - 1])
async def test_wrong_size_in_a_gzip_trailer_is_not_trusted(told: int) -> None:
    """A gzip trailer with a size that is too small is inflated by its real size.

    One with a wrong size in the last member is damage.
    """
    more = zipped(b"")
    stored = _STORED + more if told == 0 else _STORED[:-4] + told.to_bytes(4, "little")
    data = _case(_with(stored)).data
    if told == 0:
        assert await data.read(_KEY) == _CHUNK
    else:
        with pytest.raises(DamagedError, match="no gzip"):
            await data.read(_KEY)
    assert data.budget.held_bytes == 0


_MAX = 10


class _Holder:
    """Holds bytes until it is released."""

    def __init__(self, budget: ByteBudget, nbytes: int) -> None:
        self.nbytes = nbytes
        self.is_inside = False
        self.release = asyncio.Event()
        self.task = asyncio.create_task(self._hold(budget))

    async def _hold(self, budget: ByteBudget) -> None:
        async with holding(budget, self.nbytes):
            self.is_inside = True
            try:
                await self.release.wait()
            finally:
                self.is_inside = False


async def test_full_budget_raises_busy() -> None:
    """Acquiring bytes of a full budget raises BusyError after `wait_s`, and holds nothing.

    A holder may exceed the limit to grow.
    """
    budget = ByteBudget(_MAX, wait_s=0.01)
    async with holding(budget, _MAX):
        with pytest.raises(BusyError, match="no room for 3"):
            await budget.acquire(3)
        assert budget.held_bytes == _MAX
    assert budget.held_bytes == 0

    async with holding(budget, 2), holding(budget, 4), holding(budget, 4):
        await budget.acquire(6, held_nbytes=4)
        assert budget.held_bytes == _MAX + 6
        budget.release(6)


async def test_growing_holders_do_not_deadlock() -> None:
    """Holders of all bytes that want to grow do so one after another."""
    budget, inside = ByteBudget(_MAX, wait_s=60), list[int]()

    async def grow() -> None:
        async with holding(budget, 5):
            await settle()
            await budget.acquire(5, held_nbytes=5)
            inside.append(budget.held_bytes)
            await settle()
            budget.release(5)

    async with asyncio.timeout(60):
        await asyncio.gather(*(grow() for _ in range(6)))

    assert len(inside) == 6
    assert max(inside) == _MAX + 10
    assert budget.held_bytes == 0


async def test_share_leaves_the_rest_to_others() -> None:
    """Other shares get a quarter at once while one share is full, exceeded or waited for."""
    budget = ByteBudget(8, wait_s=0.01)
    bodies = budget.share(6)
    async with holding(bodies, 6):
        with pytest.raises(BusyError):
            await bodies.acquire(1)
        await bodies.acquire(5, held_nbytes=6)
        waiting = asyncio.create_task(bodies.acquire(1))
        await asyncio.sleep(0)
        async with holding(budget, 2):
            assert budget.held_bytes == 13
            with pytest.raises(BusyError):
                await budget.acquire(1)
        with pytest.raises(BusyError):
            await waiting
        bodies.release(5)
    assert budget.held_bytes == 0


async def test_bucket_leaves_a_quarter_to_others() -> None:
    """Reads of a bucket, or of sessions, leave a quarter of the budget to reads of another."""
    budget = ByteBudget(8, wait_s=0.01)
    budgets = BucketBudgets(budget, ["s3://a", "s3://b", "s3://b"])
    for bucket in ("s3://a", "session://"):
        async with holding(budgets[bucket], 6):
            with pytest.raises(BusyError):
                await budgets[bucket].acquire(1)
            async with holding(budgets["s3://b"], 2):
                assert budget.held_bytes == 8

    async with holding(BucketBudgets(budget, ["s3://a"])["s3://a"], 8):
        assert budget.held_bytes == 8


async def test_idle_kind_of_work_may_begin_beside_all_others() -> None:
    """A share that holds nothing takes a holder while other quarters are full or exceeded."""
    budget = ByteBudget(8, wait_s=0.01)
    decoding = budget.share(6)
    first, second, third = (budget.share(2) for _ in range(3))
    async with holding(first, 5), holding(second, 2), holding(third, 2), holding(decoding, 3):
        with pytest.raises(BusyError):
            await decoding.acquire(1)


async def test_least_used_share_is_served_first() -> None:
    """A busy share of small requests does not keep out a larger request of another share."""
    budget, order = ByteBudget(8, wait_s=60), list[str]()
    busy, idle = budget.share(6), budget.share(6)

    async def enter(share: ByteBudget, nbytes: int, name: str) -> None:
        await share.acquire(nbytes)
        order.append(name)

    async with holding(idle, 2):
        for _ in range(6):
            await busy.acquire(1)
        async with asyncio.TaskGroup() as group:
            group.create_task(enter(idle, 3, "idle"))
            await asyncio.sleep(0)
            group.create_task(enter(busy, 1, "busy"))
            for _ in range(4):
                await settle()
                busy.release(1)

    assert order == ["idle", "busy"]


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(1, 14), max_size=4))))
def test_holders_of_shares_do_not_deadlock(plans: list[tuple[int, list[int]]]) -> None:
    """Holders that grow in any share always finish, however many bytes they want."""

    async def run() -> None:
        budget = ByteBudget(_MAX, wait_s=60)
        shares = (budget, budget.share(8), budget.share(8))

        async def hold(share: ByteBudget, sizes: list[int]) -> None:
            held = ByteReservation(share)
            for nbytes in sizes:
                await held.grow(nbytes)
                await asyncio.sleep(0)
            await held.release()

        async with asyncio.timeout(60):
            await asyncio.gather(*(hold(shares[number], sizes) for number, sizes in plans))
        assert budget.held_bytes == 0

    asyncio.run(run())


@dataclass
class _Play:
    """A random run and its invariants."""

    budget: ByteBudget = field(default_factory=lambda: ByteBudget(_MAX, wait_s=60))
    holders: list[_Holder] = field(default_factory=list)

    async def step(self, verb: str, number: int) -> None:
        """Do one step."""
        match verb:
            case "come":
                self.holders.append(_Holder(self.budget, number))
            case "turn":
                await asyncio.sleep(0)
            case "settle":
                for _ in range(20):
                    await asyncio.sleep(0)
                self.check()
            case _ if not self.holders:
                pass
            case "release":
                self.holders[number % len(self.holders)].release.set()
            case "cancel":
                self.holders[number % len(self.holders)].task.cancel()
        assert self.budget.held_bytes >= 0

    def check(self) -> None:
        """Assert the invariants of the budget."""
        inside = [holder for holder in self.holders if holder.is_inside]
        held = sum(holder.nbytes for holder in inside)
        assert self.budget.held_bytes == held
        assert held <= _MAX or sum(holder.nbytes > 0 for holder in inside) == 1
        waiting = [h for h in self.holders if not h.is_inside and not h.task.done()]
        if waiting:
            assert held + waiting[0].nbytes > _MAX
            assert all(self.holders.index(h) < self.holders.index(waiting[0]) for h in inside)


_verbs = st.sampled_from(["come", "come", "turn", "settle", "release", "cancel"])


_CANCELLED_WHEN_LET_IN = [
    *(("come", 6), ("come", 6), ("settle", 0), ("release", 0)),
    *(("turn", 0), ("cancel", 1), ("settle", 0)),
]


@settings(max_examples=40)
@given(st.lists(st.tuples(_verbs, st.integers(0, 14)), max_size=60))
@example(_CANCELLED_WHEN_LET_IN)
def test_random_acquisitions_keep_the_invariants(steps: list[tuple[str, int]]) -> None:
    """Held bytes exceed the limit for a single holder only, and waiters are served in order."""

    async def run() -> None:
        play = _Play()
        for verb, number in steps:
            await play.step(verb, number)
        for holder in play.holders:
            holder.release.set()
        await asyncio.wait_for(
            asyncio.gather(*(h.task for h in play.holders), return_exceptions=True), 5
        )
        assert play.budget.held_bytes == 0

    asyncio.run(run())
