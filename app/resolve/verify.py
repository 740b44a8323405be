"""Read every shard index below a root, and every inner chunk if asked, and tell what is damaged."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from itertools import product
from typing import Final

from app.errors import (
    DamagedError,
    ShardgateError,
    StorageUnavailableError,
    VersionChangedError,
)
from app.formats.zarr_sharding_indexed.layout import ZarrLayout
from app.formats.zarr_sharding_indexed.metadata import ArraySpec
from app.model import ObjectRef
from app.resolve.shard_check import Damage, Report, Shard, ShardCheck
from app.resolve.walk import Root, find_arrays
from app.storage.contract import ObjectReader

SHARDS_AT_ONCE: Final = 8
_ATTEMPTS: Final = 4


type OnShard = Callable[[Report], None]


async def verify(
    root: Root,
    *,
    chunks: bool,
    on_shard: OnShard = lambda _: None,
) -> Report:
    """Check every shard of every array below *root*; *chunks* reads the inner chunks too.

    What cannot be read is told beside what is damaged: neither is known to be right.

    Raises: `StorageError` where the arrays or shards cannot be found out.
    """
    report = Report()
    gate = asyncio.Semaphore(SHARDS_AT_ONCE)

    async def run(shard: Shard) -> None:
        try:
            report.add(await _check(root.store, shard, chunks=chunks))
        finally:
            gate.release()
        on_shard(report)

    try:
        async with asyncio.TaskGroup() as group:
            async for shard in _shards(root, report):
                await gate.acquire()
                group.create_task(run(shard))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    report.damages.sort(key=lambda damage: (damage.object, damage.key))
    return report


async def _check(store: ObjectReader, shard: Shard, *, chunks: bool) -> Report:
    """Check *shard*, again from its beginning if it is replaced meanwhile."""
    for attempt in range(1, _ATTEMPTS + 1):
        check = ShardCheck(store, shard, chunks=chunks)
        try:
            await check.run()
        except ShardgateError as error:
            if isinstance(error, VersionChangedError) and attempt < _ATTEMPTS:
                continue
            check.damage(shard.origin, str(error).removeprefix(f"{shard.ref}: "))
        break
    return check.report


async def _shards(root: Root, report: Report) -> AsyncGenerator[Shard]:
    async for visited in find_arrays(root):
        if isinstance(visited.found, DamagedError):
            key = f"{visited.path}/zarr.json".lstrip("/")
            report.damages.append(Damage(str(visited.found.ref), key, visited.found.reason))
            continue
        report.arrays += 1
        node = visited.found.node.value
        if node.array is None:
            report.not_checked[visited.path] = node.why_sharded or "it is not sharded"
            continue
        async for coords in _stored_shards(root.store, visited.found, node.array):
            shard_shape = node.array.shard_shape
            origin = tuple(at * size for at, size in zip(coords, shard_shape, strict=True))
            ref = visited.found.directory.join(node.array.keys.format(coords))
            yield Shard(visited.path, node.array, ref, origin)


async def _stored_shards(
    store: ObjectReader, layout: ZarrLayout, array: ArraySpec
) -> AsyncGenerator[tuple[int, ...]]:
    """Name the shards of *array* by listing, or all of its grid where that is impossible."""
    counts = tuple(-(-n // size) for n, size in zip(array.shape, array.shard_shape, strict=True))
    directory = layout.directory
    prefix = ObjectRef(directory.bucket, f"{directory.key}/".lstrip("/"))
    try:
        async for listed in store.list(prefix):
            coords = array.keys.parse(listed.ref.key.removeprefix(prefix.key))
            if coords is not None and all(at < n for at, n in zip(coords, counts, strict=True)):
                yield coords
    except StorageUnavailableError as error:
        if not error.lasting:
            raise
        for coords in product(*map(range, counts)):
            yield coords
