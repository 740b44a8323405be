"""Shards made anew: all changes that wait for one shard go into one rewrite."""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, Protocol

from app.concurrency import is_many, run_in_thread, yield_to_loop
from app.errors import (
    BusyError,
    ConflictError,
    DamagedError,
    VersionChangedError,
)
from app.formats.contract import Entry, NewShard, OpenShard, ShardRewriter
from app.formats.reading import Versioned
from app.model import Stored
from app.resolve.budget import ByteBudget
from app.resolve.changes import Change, Request, cancel, fail, sort_out, tell
from app.resolve.fetch import ReadCache
from app.resolve.sealing import Sealing, length_of
from app.resolve.waiting import Waiting
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
"""Of larger shards no store holds all in memory, but what it is given as bytes."""


class OnRewrite(Protocol):
    """Hears of each shard that was made anew."""

    def __call__(self, changes: int, lost: int, /) -> None:
        """Take note of how many *changes* it has, and how often others were faster before."""
        ...


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
        self._waiting: dict[ShardRewriter[Any], Waiting] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(_AT_ONCE)

    async def make(self, shard: ShardRewriter[Any], request: Request) -> None:
        """Return when each change of *request* is durable, or its `done` tells why it is not."""
        waiting = self._waiting.get(shard)
        if waiting is None:
            waiting = self._waiting[shard] = Waiting()
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

    async def _run(self, shard: ShardRewriter[Any], waiting: Waiting) -> None:
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
            cancel([*requests, *waiting.requests])

    async def _settle(self, shard: ShardRewriter[Any], requests: Sequence[Request]) -> None:
        """Make the changes of *requests*, and report the outcome to all callers that wait."""
        try:
            await self._repeat(shard, [change for request in requests for change in request])
        except Exception as error:  # noqa: BLE001  they hear of it
            fail(requests, error)

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
        sorted_out = await run_in_thread(
            sort_out, shard, old, changes, is_long=is_many(len(changes))
        )
        if is_first and sorted_out.relies_on_old:
            return False
        places: Mapping[Entry, Stored] = {}
        if sorted_out.made:
            plan = await asyncio.to_thread(shard.plan, old, sorted_out.made)
            swapped = await self._swap(shard, old, plan)
            if isinstance(swapped, Conflict):
                return False
            places = swapped
        for number, change in enumerate(changes):
            tell(change, shard.ref, sorted_out, places)
            await yield_to_loop(number)
        return True

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
        return await self._put(shard, old, plan or shard.plan_empty())

    async def _put(
        self, shard: ShardRewriter[Any], old: OpenShard | None, plan: NewShard
    ) -> Mapping[Entry, Stored] | Conflict:
        version = None if old is None else old.etag
        size = length_of(plan.pieces)
        sealing = await asyncio.to_thread(Sealing.of, plan.pieces)
        async with self._held(size, sealing):
            pieces = await sealing.seal(self._store, shard.ref, version)
            expected = ABSENT if version is None else version
            etag = await self._store.put(shard.ref, pieces, expected=expected)
        if isinstance(etag, Conflict):
            return etag
        self._fetch.forget(shard.ref)
        modified_s = int(time.time())
        for read, value in plan.indexes:
            self._fetch.keep(read, Versioned(value, etag, size, modified_s))
        for read, value in plan.indexes_of_version:
            known = Versioned(value, etag, size, modified_s)
            self._fetch.keep(read._replace(version=etag), known)
        return {entry: Stored(shard.ref, place, etag) for entry, place in plan.places.items()}

    @asynccontextmanager
    async def _held(self, size: int, sealing: Sealing) -> AsyncGenerator[None]:
        """Hold room for a shard of *size*, as far as it is held in memory."""
        nbytes = sealing.kept_nbytes + max(sealing.read_nbytes, min(_HELD_NBYTES, size))
        await self._budget.acquire(nbytes)
        try:
            yield
        finally:
            self._budget.release(nbytes)


async def _pause(lost: int) -> None:
    """Let others finish, the longer the more often they were faster."""
    if lost > 1:
        longest = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**lost)
        await asyncio.sleep(random.uniform(0, longest))  # noqa: S311
