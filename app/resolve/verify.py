"""Read every shard index below a root, and every inner chunk if asked, and tell what is damaged."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Final, NamedTuple

from app.errors import (
    DamagedError,
    OfflineError,
    StorageError,
    StorageUnavailableError,
    VersionChangedError,
    lost,
)
from app.formats.surveying import (
    ARRAYS,
    Collection,
    Counted,
    Enclosed,
    Finding,
    Flaw,
    NeededObject,
    Shard,
    Shards,
    Stateful,
    Unchecked,
)
from app.model import ByteRange, Part, Stored, condition_of
from app.resolve.perform import DirectFetch
from app.resolve.shard_check import Damage, Report, ShardCheck
from app.resolve.walk import Root, Visited, collections_of, find_containers, list_names
from app.storage.contract import Found, ObjectReader
from app.storage.memory import MemoryStore

SHARDS_AT_ONCE: Final = 8
_ATTEMPTS: Final = 4


type OnShard = Callable[[Report], None]


type _Job = Callable[[], Awaitable[Report]]


class _Found(NamedTuple):
    store: ObjectReader
    path: str
    """What keys of the shard are relative to."""
    shard: Shard


async def verify(
    root: Root,
    *,
    chunks: bool,
    ref: str = "",
    on_shard: OnShard = lambda _: None,
) -> Report:
    """Check every shard of every collection below *root*; *chunks* reads the chunks too.

    Of an Icechunk repository the references of *ref* are followed, of its default branch if that
    is empty. What cannot be read is reported beside what is damaged: neither is known to be right.

    Raises: `UnknownRefError`, `StorageError` where the collections or shards cannot be found out.
    """
    report = Report()
    gate = asyncio.Semaphore(SHARDS_AT_ONCE)

    async def run(job: _Job) -> None:
        try:
            report.add(await job())
        finally:
            gate.release()
        on_shard(report)

    try:
        async with asyncio.TaskGroup() as group:
            async for job in _jobs(root, report, ref, on_shard, chunks=chunks):
                await gate.acquire()
                group.create_task(run(job))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    report.damages.sort(key=lambda damage: (damage.object, damage.key))
    return report


async def _check(found: _Found, *, chunks: bool) -> Report:
    """Check a shard, again from its beginning if it is replaced meanwhile."""
    for attempt in range(1, _ATTEMPTS + 1):
        check = ShardCheck(found.store, found.path, found.shard, chunks=chunks)
        try:
            await check.run()
        except (StorageError, DamagedError) as error:
            if isinstance(error, VersionChangedError) and attempt < _ATTEMPTS:
                continue
            check.damage(error.ref, found.shard.key, error.reason)
        break
    return check.report


async def _expect(store: ObjectReader, path: str, expected: NeededObject) -> Report:
    """Check that an object exists and is long enough, with one request."""
    report = Report()
    if (reason := await _find_fault(store, expected.place)) is not None:
        ref = expected.place.ref
        report.damages.append(Damage(str(ref), _join(path, expected.key), reason))
    return report


async def _find_fault(store: ObjectReader, place: Stored | Part) -> str | None:
    ref, stop = place.ref, place.byte_range.stop
    try:
        size = await _measure(store, place)
    except VersionChangedError as error:
        return error.reason if place.version is None else lost(ref, place.version).reason
    except StorageError as error:
        return error.reason
    if size is None:
        return "does not exist, though it is referred to"
    return f"has {size} bytes, and bytes up to {stop} are referred to" if size < stop else None


async def _measure(store: ObjectReader, place: Stored | Part) -> int | None:
    """Return the size of an object; a condition on its version takes a read."""
    condition = condition_of(place.version)
    if condition is not None:
        found = await store.get(place.ref, ByteRange(0, 1), if_match=condition)
        return found.size if isinstance(found, Found) else None
    stat = await store.stat(place.ref)
    return None if stat is None else stat.size


async def _jobs(
    root: Root, report: Report, ref: str, on_shard: OnShard, *, chunks: bool
) -> AsyncGenerator[_Job]:
    async for opened in find_containers(root):
        if isinstance(opened.found, Stateful):
            fetch = DirectFetch(root.store)
            try:
                async for finding in opened.found.findings(ref, fetch, chunks=chunks):
                    if (job := _take(root, opened.path, finding, report, chunks=chunks)) is None:
                        on_shard(report)
                    else:
                        yield job
            except OfflineError as error:
                report.skip(opened.path, str(error))
            except DamagedError as error:
                key = root.key_of(error.ref)
                report.damages.append(Damage(str(error.ref), key, error.reason))
            continue
        for visited in await collections_of(root, opened):
            async for shard in _shards(root, visited, report):
                yield partial(_check, _Found(root.store, visited.container, shard), chunks=chunks)


def _take(root: Root, path: str, finding: Finding, report: Report, *, chunks: bool) -> _Job | None:
    """Put *finding* into *report*, or tell what is to be done about it."""
    match finding:
        case Flaw(ref, key, reason):
            report.damages.append(Damage(str(ref), _join(path, key), reason))
        case Unchecked(key, reason):
            report.skip(_join(path, key), reason)
        case Counted(things, number) if things == ARRAYS:
            report.arrays += number
        case Counted(things, number):
            report.counts[things] = report.counts.get(things, 0) + number
        case NeededObject():
            return partial(_expect, root.store, path, finding)
        case Enclosed(below, shard, data):
            store: ObjectReader = root.store
            if data is not None:
                store = MemoryStore()
                store.place(shard.ref, data)
            return partial(_check, _Found(store, _join(path, below), shard), chunks=chunks)
    return None


async def _shards(root: Root, visited: Visited, report: Report) -> AsyncGenerator[Shard]:
    match visited.found:
        case DamagedError(ref=ref, reason=reason):
            report.damages.append(Damage(str(ref), root.key_of(ref), reason))
        case Collection(description, None):
            report.arrays += 1
            report.skip(visited.path, description.why_sharded or "it is not sharded")
        case Collection(_, shards) if shards is not None:
            report.arrays += 1
            try:
                async for shard in _stored_shards(root, visited.container, shards):
                    yield shard
            except StorageUnavailableError as error:
                if not error.lasting:
                    raise
                reason = f"{error.reason}, and its shards may be too many to try each"
                report.damages.append(Damage(str(error.ref), visited.path, reason))


def _join(path: str, key: str) -> str:
    return f"{path}/{key}".strip("/")


async def _stored_shards(root: Root, container: str, shards: Shards) -> AsyncGenerator[Shard]:
    """Find *shards* by listing, or give all there could be where that is impossible.

    Raises: `StorageError`, a lasting one where they can neither be listed nor tried each.
    """
    try:
        async for name in list_names(root.store, root.ref.join(container), shards.prefix):
            if (shard := shards.named(name)) is not None:
                yield shard
    except StorageUnavailableError as error:
        if not error.lasting or (every := shards.every()) is None:
            raise
        for shard in every:
            yield shard
