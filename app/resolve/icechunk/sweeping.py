"""Removing files of a repository that nothing refers to, many at a time, and counting them."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from app.errors import StorageError
from app.formats.icechunk.ids import decode_id
from app.model import ObjectRef
from app.storage.contract import Listed, ObjectStore

_AT_ONCE: Final = 32
_BATCH: Final = 4096
_MOST_FAILURES: Final = 50
"""After so many the others are not tried: nobody may be allowed to remove anything."""
_ROUNDING_US: Final = 1_000_000
"""Stores may tell when something was written in whole seconds, and leave the rest out."""

type Held = Callable[[list[bytes]], list[bool]]
"""Tells which files, by their ids, something refers to."""


class File(NamedTuple):
    """A file whose name is an id."""

    ref: ObjectRef
    object_id: bytes
    nbytes: int
    modified_us: int | None

    def is_older(self, limit_us: int) -> bool:
        """Tell whether it was certainly written before *limit_us*."""
        return self.modified_us is not None and self.modified_us + _ROUNDING_US <= limit_us


@dataclass(slots=True)
class Tally:
    """How many files, and their bytes."""

    count: int = 0
    nbytes: int = 0

    def add(self, file: File) -> None:
        """Count a file."""
        self.count += 1
        self.nbytes += file.nbytes


@dataclass(slots=True)
class Swept:
    """What was removed of a folder, or would be, and what stays there."""

    removed: Tally = field(default_factory=Tally)
    kept: Tally = field(default_factory=Tally)
    failed: int = 0
    """How many files could not be removed."""
    first_failure: str | None = None
    is_complete: bool = True
    """Whether all of the folder was looked at."""


async def list_files(store: ObjectStore, folder: ObjectRef) -> AsyncGenerator[File]:
    """List the files in *folder* that have ids for names."""
    async for each in store.list(folder):
        if (file := _file(folder, each)) is not None:
            yield file


async def sweep(
    store: ObjectStore, folder: ObjectRef, *, limit_us: int, held: Held, execute: bool
) -> Swept:
    """Remove the files in *folder* that were written before *limit_us* and nothing refers to.

    Raises: `StorageError` where they cannot be listed.
    """
    swept = Swept()

    async def unneeded() -> AsyncGenerator[File]:
        async for batch in _batches(list_files(store, folder)):
            if swept.failed >= _MOST_FAILURES:
                swept.is_complete = False
                return
            for file, is_held in zip(batch, held([f.object_id for f in batch]), strict=True):
                if not is_held and file.is_older(limit_us):
                    yield file
                else:
                    swept.kept.add(file)

    await _each(partial(_remove, store, swept, execute=execute), unneeded())
    return swept


async def _remove(store: ObjectStore, swept: Swept, file: File, *, execute: bool) -> None:
    if swept.failed >= _MOST_FAILURES:
        swept.is_complete = False
        return
    try:
        if execute:
            await store.delete(file.ref, expected=None)
    except StorageError as error:
        swept.failed += 1
        swept.first_failure = swept.first_failure or str(error)
        swept.kept.add(file)
    else:
        swept.removed.add(file)


async def _each[T](call: Callable[[T], Awaitable[None]], source: AsyncIterator[T]) -> None:
    """Call *call* with each of *source*, some at a time."""
    gate = asyncio.Semaphore(_AT_ONCE)

    async def run(item: T) -> None:
        try:
            await call(item)
        finally:
            gate.release()

    try:
        async with asyncio.TaskGroup() as group:
            async for item in source:
                await gate.acquire()
                group.create_task(run(item))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


async def _batches(files: AsyncIterator[File]) -> AsyncGenerator[list[File]]:
    batch: list[File] = []
    async for file in files:
        batch.append(file)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _file(folder: ObjectRef, listed: Listed) -> File | None:
    object_id = decode_id(listed.ref.key.removeprefix(folder.key))
    if object_id is None or listed.size is None:
        return None
    modified_us = None if listed.modified_s is None else round(listed.modified_s * 1_000_000)
    return File(listed.ref, object_id, listed.size, modified_us)
