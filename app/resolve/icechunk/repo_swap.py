"""Replacement of ``repo``, the only mutable file of a repository, by compare-and-swap.

A plan maps the file as it is to a change. The old file is kept in ``overwritten/`` first. After a
lost race the plan is made again.
"""

import asyncio
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

from app.concurrency import Backoff, retry_conflicts
from app.errors import (
    ClockSkewError,
    ConflictError,
    DamagedError,
    ReadOnlyError,
    UnknownRepositoryError,
)
from app.formats.icechunk.envelope import fits, memory_nbytes
from app.formats.icechunk.ids import OBJECT_ID_NBYTES, encode_id
from app.formats.icechunk.repo_info import RepoInfo, RepoInfoDecoder
from app.formats.icechunk.repo_writer import (
    FutureError,
    RepoChange,
    StatusChanged,
    moment_after,
    rewrite_repo,
)
from app.formats.icechunk.repository import RepoRefs
from app.formats.reading import DecodeError
from app.model import ByteRange, ETag, ObjectRef
from app.resolve.icechunk.repository import OpenedRepository, require_unlocked
from app.resolve.metadata_cache import ReadCache
from app.storage.contract import ABSENT, CONFLICT, Conflict, Found, ObjectStore

_ATTEMPTS: Final = 100
_COPIES: Final = 2
BACKOFF: Final = Backoff(first_s=0.05, longest_s=2.0, at_once=5)
_YEAR_3000_MS: Final = 32_503_680_000_000


class Planned[T](NamedTuple):
    """Decision of a plan."""

    answer: T
    """Result of `RepoSwaps.update`, once the change is made."""
    change: RepoChange | None = None


class _Prepared[T](NamedTuple):
    answer: T
    data: bytes | None
    backup: str


class RepoSwaps:
    """Changes ``repo``, one change of a repository at a time; readers here see it at once."""

    def __init__(
        self,
        store: ObjectStore,
        fetch: ReadCache,
        *,
        clock: Callable[[], float] = time.time,
        backoff: Backoff = BACKOFF,
    ) -> None:
        self.store = store
        self.fetch = fetch
        self._clock = clock
        self._backoff = backoff
        self._turns = WeakValueDictionary[ObjectRef, asyncio.Lock]()

    def now_us(self) -> int:
        return int(self._clock() * 1_000_000)

    async def update[T](
        self, opened: OpenedRepository, plan: Callable[[RepoInfo], Planned[T]]
    ) -> T:
        """Make the change that *plan* decides on for the current file, and return its answer.

        *plan* runs in a worker thread, again for each file that another writer has put there in
        between. Its exceptions are passed on.

        Raises: `LockedError`, `ClockSkewError`, `ReadOnlyError` for version 1 of the format,
        `ConflictError` if the file would get too large, `UnknownRepositoryError`,
        `DamagedError`, `BusyError`, `UnwritableError`, `StorageError`; after the last the change
        may have been made.
        """
        if not isinstance(opened.repository.refs, RepoRefs):
            raise ReadOnlyError(f"{opened.directory} follows version 1 of Icechunk's format")
        turn = self._turns.setdefault(opened.repo, asyncio.Lock())
        async with turn:
            prepared = await retry_conflicts(
                partial(self._attempt, opened, plan),
                Conflict,
                opened.repo,
                attempts=_ATTEMPTS,
                backoff=self._backoff,
            )
        return prepared.answer

    async def _attempt[T](
        self, opened: OpenedRepository, plan: Callable[[RepoInfo], Planned[T]]
    ) -> _Prepared[T] | Conflict:
        ref, limit, began_s = opened.repo, opened.repository.limit_nbytes, self._clock()
        found = await self.store.get(ref, ByteRange(0, limit + 1))
        if not isinstance(found, Found):
            self.fetch.forget(ref)
            raise UnknownRepositoryError(f"there is no repository any more at {opened.directory}")
        try:
            weight = _COPIES * await asyncio.to_thread(memory_nbytes, found.data, limit)
        except DecodeError as error:
            raise DamagedError(ref, str(error)) from error
        async with self.fetch.cache.decoding.room(weight):
            prepared = await asyncio.to_thread(self._prepare, ref, limit, found.data, plan)
        if prepared.data is None:
            self.fetch.forget(ref)
            return prepared
        backup = opened.directory.join(f"overwritten/{prepared.backup}")
        if await self.store.put(backup, [found.data], expected=ABSENT) is CONFLICT:
            return CONFLICT
        await demand_clock(self.store, backup, began_s)
        swapped = await self._swap(ref, prepared.data, found.etag)
        return CONFLICT if swapped is CONFLICT else prepared

    async def _swap(self, ref: ObjectRef, data: bytes, expected: ETag) -> ETag | Conflict:
        try:
            return await self.store.put(ref, [data], expected=expected)
        finally:
            self.fetch.forget(ref)

    def _prepare[T](
        self, ref: ObjectRef, limit: int, data: bytes, plan: Callable[[RepoInfo], Planned[T]]
    ) -> _Prepared[T]:
        now_us = self.now_us()
        backup = _backup_name(now_us // 1000)
        try:
            info = RepoInfoDecoder(limit)(data)
            answer, change = plan(info)
            if change is None:
                return _Prepared(answer, None, backup)
            if not isinstance(change, StatusChanged):
                require_unlocked(info, ref)
            at_us = moment_after(info.newest_update_us(), now_us)
            data = rewrite_repo(info, change, at_us, backup)
        except FutureError as error:
            raise ClockSkewError(f"{ref}: {error}") from error
        except DecodeError as error:
            raise DamagedError(ref, str(error)) from error
        demand_readable(ref, data, limit)
        return _Prepared(answer, data, backup)


def demand_readable(name: ObjectRef, data: bytes, limit_nbytes: int) -> None:
    """Check that the new file *data* can be read within *limit_nbytes*. Raises: `ConflictError`."""
    if not fits(data, limit_nbytes):
        raise ConflictError(
            f"{name} would exceed {limit_nbytes} bytes, and could not be read again: "
            "limits.repository_file_bytes"
        )


def _backup_name(now_ms: int) -> str:
    """Return a name that sorts before those of earlier backups."""
    number = max(0, _YEAR_3000_MS - now_ms)
    return f"repo.{number:014d}.{encode_id(secrets.token_bytes(OBJECT_ID_NBYTES))}"


SKEW_S: Final = 600
"""Largest difference of clocks; the library has the same limit."""


async def demand_clock(store: ObjectStore, written: ObjectRef, now_s: float) -> None:
    """Check that *written*, an object whose PUT began at *now_s*, has about that time."""
    stat = await store.stat(written)
    if stat is None or stat.modified_s is None:
        return
    skew_s = stat.modified_s - int(now_s)
    if abs(skew_s) > SKEW_S:
        raise ClockSkewError(f"{written}: the store's clock is {skew_s} s ahead of ours")
