"""The bound on bytes in flight."""

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import BusyError
from app.resolve.budget import ByteBudget
from app.resolve.opening import Held
from tests.resolve.stores import holding, settle

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


async def test_what_fits_does_not_wait() -> None:
    """Holders whose bytes fit together are inside together."""
    budget = ByteBudget(_MAX, wait_s=0)
    async with holding(budget, 6), holding(budget, 4):
        assert budget.held_bytes == 10
    assert budget.held_bytes == 0


async def test_what_does_not_fit_waits_for_room() -> None:
    """A holder gets in when another one leaves."""
    budget = ByteBudget(_MAX, wait_s=60)
    first, second = _Holder(budget, 6), _Holder(budget, 6)
    await settle()
    assert (first.is_inside, second.is_inside) == (True, False)
    first.release.set()
    await settle()

    assert (second.is_inside, budget.held_bytes) == (True, 6)
    second.release.set()
    await second.task


async def test_first_come_first_served() -> None:
    """A small holder does not overtake a large one."""
    budget = ByteBudget(_MAX, wait_s=60)
    first, large, small = (_Holder(budget, nbytes) for nbytes in (6, 8, 1))
    await settle()
    assert not small.is_inside
    first.release.set()
    await settle()

    assert (large.is_inside, small.is_inside) == (True, True)
    large.release.set()
    small.release.set()
    await asyncio.gather(large.task, small.task)


async def test_what_is_larger_than_everything_is_let_through_alone() -> None:
    """It waits for all others, and all others wait for it."""
    budget = ByteBudget(_MAX, wait_s=60)
    first, huge, last = (_Holder(budget, nbytes) for nbytes in (1, 1000, 1))
    await settle()
    assert [holder.is_inside for holder in (first, huge, last)] == [True, False, False]
    first.release.set()
    await settle()
    assert [holder.is_inside for holder in (first, huge, last)] == [False, True, False]
    huge.release.set()
    await settle()

    assert last.is_inside
    last.release.set()
    await last.task


async def test_waiting_ends_with_busy() -> None:
    """Who does not get in within the time hears `BusyError`, and holds nothing."""
    budget = ByteBudget(_MAX, wait_s=0.01)
    async with holding(budget, _MAX):
        with pytest.raises(BusyError, match="no room for 3"):
            await budget.acquire(3)
        assert budget.held_bytes == _MAX
    assert budget.held_bytes == 0


async def test_one_who_gave_up_holds_up_nobody() -> None:
    """Behind a waiter that timed out or was cancelled the next one gets in."""
    budget = ByteBudget(_MAX, wait_s=60)
    first, huge, small = (_Holder(budget, nbytes) for nbytes in (6, 1000, 3))
    await settle()
    huge.task.cancel()
    await settle()

    assert (small.is_inside, budget.held_bytes) == (True, 9)
    first.release.set()
    small.release.set()
    await asyncio.gather(first.task, small.task)


async def test_a_cancelled_waiter_gives_nothing_away() -> None:
    """What was granted at the moment of the cancellation goes back."""
    budget = ByteBudget(_MAX, wait_s=60)
    first, second = _Holder(budget, 6), _Holder(budget, 6)
    await settle()
    first.release.set()
    await asyncio.sleep(0)  # the first leaves and lets the second in, which has not woken yet
    assert budget.held_bytes == 6
    assert not second.is_inside
    second.task.cancel()
    await settle()

    assert second.task.cancelled()
    assert budget.held_bytes == 0


async def test_holders_who_want_more_do_not_wait_for_one_another() -> None:
    """One after the other is let through, though all is held by those who wait."""
    budget, inside = ByteBudget(_MAX, wait_s=60), list[int]()

    async def grow() -> None:
        async with holding(budget, 5):
            await settle()
            await budget.acquire(5, held_nbytes=5)
            inside.append(budget.held_bytes)
            await settle()
            budget.release(5)

    async with asyncio.timeout(5):
        await asyncio.gather(*(grow() for _ in range(6)))

    assert len(inside) == 6
    assert max(inside) == _MAX + 10
    assert budget.held_bytes == 0


async def test_a_holder_that_stands_still_does_not_keep_others_from_their_end() -> None:
    """As a client that sends slowly, or takes nothing of its answer, does."""
    budget = ByteBudget(_MAX, wait_s=60)
    async with holding(budget, 2), holding(budget, 4), holding(budget, 4):
        async with asyncio.timeout(5):
            await budget.acquire(6, held_nbytes=4)
        assert budget.held_bytes == _MAX + 6
        budget.release(6)


async def test_one_body_after_the_other_passes_the_limit() -> None:
    """Of many that arrive at the same pace all come to their end, one beyond the limit at most."""
    budget, most = ByteBudget(256, wait_s=60), 0

    async def arrive() -> None:
        nonlocal most
        held = Held(budget)
        for nbytes in range(1, 65):
            await held.reserve(nbytes)
            most = max(most, budget.held_bytes)
            await asyncio.sleep(0)
        await held.release()

    async with asyncio.timeout(5):
        await asyncio.gather(*(arrive() for _ in range(128)))

    assert 256 < most <= 256 + 64
    assert budget.held_bytes == 0


async def test_a_failure_inside_gives_back() -> None:
    """Whatever ends the block, its bytes are free again."""
    budget = ByteBudget(_MAX, wait_s=60)
    with pytest.raises(LookupError):
        async with holding(budget, 4):
            raise LookupError
    assert budget.held_bytes == 0


@dataclass
class _Play:
    """A random run: who came, and what must hold of it."""

    budget: ByteBudget = field(default_factory=lambda: ByteBudget(_MAX, wait_s=60))
    holders: list[_Holder] = field(default_factory=list)

    async def step(self, verb: str, number: int) -> None:
        """Do one thing."""
        match verb:
            case "come":
                self.holders.append(_Holder(self.budget, number))
            case "turn":
                await asyncio.sleep(0)
            case "settle":
                await settle()
                self.check()
            case _ if not self.holders:
                pass
            case "release":
                self.holders[number % len(self.holders)].release.set()
            case "cancel":
                self.holders[number % len(self.holders)].task.cancel()
        assert self.budget.held_bytes >= 0

    def check(self) -> None:
        """Compare with what a bystander sees."""
        inside = [holder for holder in self.holders if holder.is_inside]
        held = sum(holder.nbytes for holder in inside)
        assert self.budget.held_bytes == held
        assert held <= _MAX or sum(holder.nbytes > 0 for holder in inside) == 1
        waiting = [h for h in self.holders if not h.is_inside and not h.task.done()]
        if waiting:
            assert held + waiting[0].nbytes > _MAX
            assert all(self.holders.index(h) < self.holders.index(waiting[0]) for h in inside)


_verbs = st.sampled_from(["come", "come", "turn", "settle", "release", "cancel"])


@settings(max_examples=200)
@given(st.lists(st.tuples(_verbs, st.integers(0, 14)), max_size=60))
def test_random_comings_and_goings_are_counted(steps: list[tuple[str, int]]) -> None:
    """Never negative, never too much, in order, nobody forgotten, and nothing left at the end."""

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


class _Body:
    """A body of *size* units, each of which is reserved before it is read."""

    def __init__(self, budget: ByteBudget, size: int) -> None:
        self.nbytes = 0
        self.is_waiting = False
        self.sent = asyncio.Semaphore(0)
        self.task = asyncio.create_task(self._read(Held(budget), size))

    async def _read(self, held: Held, size: int) -> None:
        try:
            for nbytes in range(1, size + 1):
                await self.sent.acquire()
                self.is_waiting = True
                await held.reserve(nbytes)
                self.is_waiting, self.nbytes = False, nbytes
        finally:
            self.is_waiting, self.nbytes = False, 0
            await held.release()


_sending = st.tuples(st.sampled_from(["send", "send to all", "cancel"]), st.integers(0, 7))


@settings(max_examples=100)
@given(
    st.lists(st.integers(0, 14), min_size=2, max_size=8),
    st.lists(_sending, min_size=10, max_size=60),
)
def test_random_bodies_grow_within_the_limit_but_for_one(
    sizes: list[int], steps: list[tuple[str, int]]
) -> None:
    """All but the largest fit, not all wait, and all come to their end."""

    async def run() -> None:
        budget = ByteBudget(_MAX, wait_s=60)
        bodies = [_Body(budget, size) for size in sizes]
        for verb, number in steps:
            one = bodies[number % len(bodies)]
            if verb == "cancel":
                one.task.cancel()
            for body in bodies if verb == "send to all" else [one]:
                body.sent.release()
            for _ in range(number):
                await asyncio.sleep(0)
            assert budget.held_bytes <= _MAX + max(body.nbytes for body in bodies) + 1
        await settle()
        holders = [body for body in bodies if body.nbytes]
        assert budget.held_bytes == sum(body.nbytes for body in holders)
        assert not holders or not all(body.is_waiting for body in holders)
        for body in bodies:
            for _ in range(14):
                body.sent.release()
        async with asyncio.timeout(5):
            await asyncio.gather(*(body.task for body in bodies), return_exceptions=True)
        assert budget.held_bytes == 0

    asyncio.run(run())
