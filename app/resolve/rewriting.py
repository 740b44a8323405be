"""Shards made anew: all changes that wait for one shard go into one rewrite."""

import asyncio
import random
import secrets
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from app.errors import (
    BusyError,
    ConflictError,
    DamagedError,
    PreconditionFailedError,
    VersionChangedError,
)
from app.formats.reading import Versioned
from app.formats.writing import Entry, NewShard, OpenShard, ShardRewriter
from app.model import ETag, Stored
from app.resolve.breathing import aside, breathe
from app.resolve.budget import ByteBudget
from app.resolve.entity import Demand, Entity
from app.resolve.fetch import ReadCache
from app.resolve.sealing import length_of, seal
from app.storage.contract import ABSENT, Conflict, ObjectStore

_ATTEMPTS: Final = 20
"""How often a rewrite is begun anew because another replica was faster."""
_FIRST_PAUSE_S: Final = 0.005
_LONGEST_PAUSE_S: Final = 0.2
_LONGEST_S: Final = 0.25
"""Nobody waits longer for the changes of others."""
_BY_WHAT_IS_KNOWN: Final = (ConflictError, DamagedError)
"""What indexes may give cause for that were replaced since."""
_AT_ONCE: Final = 16
_HELD_NBYTES: Final = 64 * 1024**2
"""Of larger shards no store holds all in memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """An inner chunk that is to be stored, or taken away where *data* is `None`."""

    entry: Entry
    data: bytes | None
    demand: Demand | None = None
    done: "asyncio.Future[ETag | None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Gives the version of the inner chunk that is stored then, `None` if it is no more."""


type Request = tuple[Change, ...]
"""Changes of one shard that may not go one without the other."""


class OnRewrite(Protocol):
    """Hears of each shard that was made anew."""

    def __call__(self, changes: int, lost: int, /) -> None:
        """Take note of how many *changes* it has, and how often others were faster before."""
        ...


class _Waiting:
    """Requests that wait for one shard, and how many are likely to come together."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self._expected = 1
        self._is_full = asyncio.Event()

    def add(self, request: Request) -> None:
        """Let *request* wait."""
        self.requests.append(request)
        if len(self.requests) >= self._expected:
            self._is_full.set()

    def take(self) -> list[Request]:
        """Give all that wait; as many may come again once they are answered."""
        taken, self.requests = self.requests, []
        self._expected = len(taken)
        return taken

    async def gather(self, longest_s: float) -> None:
        """Wait until all who were answered may have come with their next change, but not longer.

        Clients who fill a shard send one change after the other. Without a pause only those would
        go into the next rewrite who came during the last one: half of them, twice as often.
        """
        self._is_full.clear()
        self._expected += len(self.requests)
        if len(self.requests) < self._expected:
            with suppress(TimeoutError):
                async with asyncio.timeout(longest_s):
                    await self._is_full.wait()


class Rewrites:
    """Makes changes of shards; those that come while a shard is rewritten go into the next one.

    A shard is replaced by compare-and-swap; who loses reads its indexes anew and plans again.
    Once a rewrite has begun it goes on, whoever leaves.
    """

    def __init__(
        self, store: ObjectStore, fetch: ReadCache, budget: ByteBudget, on_rewrite: OnRewrite
    ) -> None:
        self._store = store
        self._fetch = fetch
        self._budget = budget
        """Of shards that are put together; bodies that wait for that are counted elsewhere."""
        self._on_rewrite = on_rewrite
        self._waiting: dict[ShardRewriter[Any], _Waiting] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(_AT_ONCE)

    async def make(self, shard: ShardRewriter[Any], request: Request) -> None:
        """Return when each change of *request* is durable, or its `done` tells why it is not."""
        waiting = self._waiting.get(shard)
        if waiting is None:
            waiting = self._waiting[shard] = _Waiting()
            task = asyncio.create_task(self._run(shard, waiting))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        waiting.add(request)
        try:
            for change in request:  # one by one: when the first is done, all soon are
                if not change.done.done():
                    await asyncio.wait([change.done])
        except asyncio.CancelledError:
            with suppress(ValueError):  # it has begun
                waiting.requests.remove(request)
            raise

    async def aclose(self) -> None:
        """Break off what nobody waits for any more."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, shard: ShardRewriter[Any], waiting: _Waiting) -> None:
        """Rewrite *shard* as long as changes of it come."""
        requests: Sequence[Request] = ()
        try:
            while True:
                async with self._room:
                    began_at = self._fetch.clock()
                    if requests := waiting.take():
                        await self._settle(shard, requests)
                await waiting.gather(min(_LONGEST_S, self._fetch.clock() - began_at))
                if not waiting.requests:
                    return
        finally:
            del self._waiting[shard]
            _cancel([*requests, *waiting.requests])

    async def _settle(self, shard: ShardRewriter[Any], requests: Sequence[Request]) -> None:
        """Make the changes of *requests*, and let all who wait for one hear what came of it."""
        try:
            await self._repeat(shard, [change for request in requests for change in request])
        except ConflictError as error:
            if len(requests) > 1:
                for request in requests:
                    await self._settle(shard, [request])
            else:
                _fail(requests, error)
        except Exception as error:  # noqa: BLE001  they hear of it
            _fail(requests, error)

    async def _repeat(self, shard: ShardRewriter[Any], changes: Sequence[Change]) -> None:
        for lost in range(_ATTEMPTS):
            await _pause(lost)
            began_at = self._fetch.clock()
            with suppress(VersionChangedError, *(() if lost else _BY_WHAT_IS_KNOWN)):
                if await self._attempt(shard, changes, is_first=not lost):
                    self._on_rewrite(len(changes), lost)
                    return
            self._fetch.forget(shard.ref, began_at)
        raise BusyError(f"{shard.ref}: others have replaced it {_ATTEMPTS} times meanwhile")

    async def _attempt(
        self, shard: ShardRewriter[Any], changes: Sequence[Change], *, is_first: bool
    ) -> bool:
        """Make *changes* if the shard still is what its indexes say; else tell that it is not.

        Only a swap shows that indexes that were known before are those of the shard as it is
        now. So the first attempt neither refuses a change nor takes one for made already, and
        what it finds damaged or in the way is looked at again.
        """
        old = await shard.open({change.entry for change in changes}, self._fetch)
        sorted_out = await aside(len(changes), _sort_out, shard, old, changes)
        if is_first and sorted_out.relies_on_old:
            return False
        places: Mapping[Entry, Stored] = {}
        if sorted_out.made:
            plan = await asyncio.to_thread(shard.plan, old, sorted_out.made)
            async with self._held(plan):
                swapped = await self._swap(shard, old, plan)
            if isinstance(swapped, Conflict):
                return False
            places = swapped
        for number, change in enumerate(changes):
            _tell(change, sorted_out, places)
            await breathe(number)
        return True

    @asynccontextmanager
    async def _held(self, plan: NewShard | None) -> AsyncGenerator[None]:
        """Hold room for what is planned, as far as it is held in memory."""
        nbytes = min(_HELD_NBYTES, length_of(() if plan is None else plan.pieces))
        await self._budget.acquire(nbytes)
        try:
            yield
        finally:
            self._budget.release(nbytes)

    async def _swap(
        self, shard: ShardRewriter[Any], old: OpenShard | None, plan: NewShard | None
    ) -> Mapping[Entry, Stored] | Conflict:
        """Put what is planned in the place of *old*; tell where the changed inner chunks are."""
        if plan is None and old is None:
            return {}
        if plan is None and old is not None:
            deleted = await self._store.delete(shard.ref, expected=old.etag)
            if deleted is True:
                self._fetch.forget(shard.ref)
                return {}
            if isinstance(deleted, Conflict):
                return deleted
        plan = plan or shard.plan_empty()
        version = None if old is None else old.etag
        pieces = await seal(self._store, shard.ref, version, plan.pieces)
        expected = ABSENT if version is None else version
        etag = await self._store.put(shard.ref, pieces, expected=expected)
        if isinstance(etag, Conflict):
            return etag
        self._fetch.forget(shard.ref)
        size = length_of(pieces)
        for read, value in plan.indexes:
            self._fetch.keep(read, Versioned(value, etag, size))
        for read, value in plan.indexes_of_version:
            self._fetch.keep(read._replace(version=etag), Versioned(value, etag, size))
        return {entry: Stored(shard.ref, place, etag) for entry, place in plan.places.items()}


class _SortedOut(NamedTuple):
    """Which changes are made, in the order in which they came."""

    made: dict[Entry, bytes | None]
    refused: set[Change]
    relies_on_old: bool
    """Whether a change is refused, or needs nothing to be done, for what the indexes say."""


def _sort_out(
    shard: ShardRewriter[Any], old: OpenShard | None, changes: Sequence[Change]
) -> _SortedOut:
    made: dict[Entry, bytes | None] = {}
    refused = set()
    for change in changes:
        entry = change.entry
        if change.demand is not None:
            if entry not in made:
                names = _names(shard, old, entry)
            else:
                names = () if made[entry] is None else (_unlike(),)
            if not change.demand(names):
                refused.add(change)
                continue
        made[entry] = change.data
    deleted = [entry for entry, data in made.items() if data is None]
    idle = [entry for entry in deleted if old is None or old.lookup(entry) is None]
    for entry in idle:
        del made[entry]
    return _SortedOut(made, refused, bool(refused or idle))


def _names(shard: ShardRewriter[Any], old: OpenShard | None, entry: Entry) -> tuple[ETag, ...]:
    """Name the version of an inner chunk, nothing where there is none."""
    if old is None or (place := old.lookup(entry)) is None:
        return ()
    return Entity.at(Stored(shard.ref, place, old.etag)).names


def _tell(change: Change, sorted_out: _SortedOut, places: Mapping[Entry, Stored]) -> None:
    """Let who waits for *change* hear what came of it."""
    if change.done.done():
        return
    if change in sorted_out.refused:
        refusal = PreconditionFailedError("the inner chunk is not as the request demands")
        change.done.set_exception(refusal)
        change.done.exception()  # or asyncio logs it where nobody waits any more
    elif change.data is None:
        change.done.set_result(None)
    elif sorted_out.made.get(change.entry) is change.data and change.entry in places:
        change.done.set_result(Entity.at(places[change.entry]).etag)
    else:  # another change of the same rewrite came after it
        change.done.set_result(_unlike())


def _unlike() -> ETag:
    """Name a version that nobody will see, for it was overwritten at once."""
    return ETag(f'"{secrets.token_hex(16)}"')


async def _pause(lost: int) -> None:
    """Let others finish, the longer the more often they were faster."""
    if lost > 1:
        longest = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**lost)
        await asyncio.sleep(random.uniform(0, longest))  # noqa: S311


def _fail(requests: Sequence[Request], error: Exception) -> None:
    for change in _undone(requests):
        change.done.set_exception(error)
        change.done.exception()  # as above


def _cancel(requests: Sequence[Request]) -> None:
    for change in _undone(requests):
        change.done.cancel()


def _undone(requests: Sequence[Request]) -> Iterator[Change]:
    return (change for request in requests for change in request if not change.done.done())
