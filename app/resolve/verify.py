"""Read every shard index below a root, and every inner chunk if asked, and tell what is damaged."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Final, NamedTuple

from app.errors import (
    DamagedError,
    StorageError,
    StorageUnavailableError,
    VersionChangedError,
)
from app.formats.contract import Collection, Shard, Shards
from app.resolve.shard_check import Damage, Report, ShardCheck
from app.resolve.walk import Root, find_collections, list_names
from app.storage.contract import ObjectReader

SHARDS_AT_ONCE: Final = 8
_ATTEMPTS: Final = 4


type OnShard = Callable[[Report], None]


class _Found(NamedTuple):
    container: str
    shard: Shard


async def verify(
    root: Root,
    *,
    chunks: bool,
    on_shard: OnShard = lambda _: None,
) -> Report:
    """Check every shard of every collection below *root*; *chunks* reads the chunks too.

    What cannot be read is told beside what is damaged: neither is known to be right.

    Raises: `StorageError` where the collections or shards cannot be found out.
    """
    report = Report()
    gate = asyncio.Semaphore(SHARDS_AT_ONCE)

    async def run(found: _Found) -> None:
        try:
            report.add(await _check(root.store, found, chunks=chunks))
        finally:
            gate.release()
        on_shard(report)

    try:
        async with asyncio.TaskGroup() as group:
            async for found in _shards(root, report):
                await gate.acquire()
                group.create_task(run(found))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    report.damages.sort(key=lambda damage: (damage.object, damage.key))
    return report


async def _check(store: ObjectReader, found: _Found, *, chunks: bool) -> Report:
    """Check a shard, again from its beginning if it is replaced meanwhile."""
    for attempt in range(1, _ATTEMPTS + 1):
        check = ShardCheck(store, found.container, found.shard, chunks=chunks)
        try:
            await check.run()
        except (StorageError, DamagedError) as error:
            if isinstance(error, VersionChangedError) and attempt < _ATTEMPTS:
                continue
            check.damage(error.ref, found.shard.key, error.reason)
        break
    return check.report


async def _shards(root: Root, report: Report) -> AsyncGenerator[_Found]:
    async for visited in find_collections(root):
        match visited.found:
            case DamagedError(ref=ref, reason=reason):
                report.damages.append(Damage(str(ref), root.key_of(ref), reason))
            case Collection(description, None):
                report.arrays += 1
                report.not_checked[visited.path] = description.why_sharded or "it is not sharded"
            case Collection(_, shards) if shards is not None:
                report.arrays += 1
                try:
                    async for shard in _stored_shards(root, visited.container, shards):
                        yield _Found(visited.container, shard)
                except StorageUnavailableError as error:
                    if not error.lasting:
                        raise
                    reason = f"{error.reason}, and its shards may be too many to try each"
                    report.damages.append(Damage(str(error.ref), visited.path, reason))


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
