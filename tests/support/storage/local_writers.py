"""Processes that write local files, for tests in which they are killed or race.

``python -m tests.support.storage.local_writers crash FOLDER`` kills a writer before each system
call of a write, in a new process each time, and prints the number of calls of each kind of write.
``… count FOLDER TIMES`` increments an object. ``… come-and-go FOLDER SEED`` writes, reads and
removes objects of its own in folders that other processes remove.
"""

import asyncio
import itertools
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

from shardgate.model import ByteRange, ETag, ObjectRef, Piece
from shardgate.storage.contract import ABSENT, CONFLICT, TEMPORARY, Expected, Found
from shardgate.storage.local import LocalStore
from tests.support.records import replaced

OLD: Final = b"0123456789" * 1000
_WRITERS: Final = "local_write.py"
_SYSTEM: Final = ("posix", "fcntl")

type Write = Callable[[LocalStore, ObjectRef, ETag], Coroutine[Any, Any, object]]


async def replace(store: LocalStore, ref: ObjectRef, etag: ETag) -> object:
    """Write ranges of the old object and new bytes."""
    pieces: list[Piece] = [b"new", ByteRange(0, 5000), b"new", ByteRange(6000, 10000)]
    return await store.put(ref, pieces, expected=etag)


async def make(store: LocalStore, ref: ObjectRef, _: ETag) -> object:
    """Write an object in folders that do not exist."""
    return await store.put(replaced(ref, key="a/b/c"), [b"new"], expected=ABSENT)


async def remove(store: LocalStore, ref: ObjectRef, etag: ETag) -> object:
    """Remove the object."""
    return await store.delete(ref, expected=etag)


CASES: Final[dict[Write, tuple[str, set[bytes | None]]]] = {
    replace: ("key", {OLD, b"new" + OLD[:5000] + b"new" + OLD[6000:]}),
    make: ("a/b/c", {None, b"new"}),
    remove: ("key", {OLD, None}),
}
"""For each write the object that it changes, and the contents it may leave when killed."""


def crash(folder: Path) -> None:
    """Kill each write at every step, and assert what it leaves."""
    for write, (name, allowed) in CASES.items():
        seen: set[bytes | None] = set()
        for step in itertools.count():
            place = folder / f"{write.__name__}-{step}"
            has_died = _dies(write, place, step)
            file = place / name
            data = file.read_bytes() if file.exists() else None
            assert data in allowed, (write, step, data)
            seen.add(data)
            _in_a_process(partial(_go_on, ObjectRef(place.as_uri(), name)))
            assert not [each for each in place.rglob("*") if TEMPORARY in each.name], step
            if not has_died:
                break
        assert seen == allowed
        print(step)


def _dies(write: Write, place: Path, step: int) -> bool:
    """Run *write* in a process that is killed before its system call *step*."""
    place.mkdir()
    (place / "key").write_bytes(OLD)

    def run() -> None:
        _kill_before(step)
        asyncio.run(_write(write, ObjectRef(place.as_uri(), "key")))

    return _in_a_process(run)


def _in_a_process(call: Callable[[], object]) -> bool:
    """Run *call* in a process without other threads, and return whether it was killed."""
    process = multiprocessing.get_context("fork").Process(target=call)
    process.start()
    process.join()
    assert process.exitcode in {0, -signal.SIGKILL}
    return process.exitcode != 0


def _kill_before(step: int) -> None:
    calls = itertools.count()

    def watch(frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call" or not frame.f_code.co_filename.endswith(_WRITERS):
            return
        is_file = isinstance(getattr(function, "__self__", None), type(sys.stdout.buffer))
        if (is_file or function.__module__ in _SYSTEM) and next(calls) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(watch)


async def _write(write: Write, ref: ObjectRef) -> None:
    store = LocalStore()
    stat = await store.stat(ref)
    assert stat is not None
    await write(store, ref, stat.etag)


def _go_on(ref: ObjectRef) -> None:
    """Write the next version after the killed writer."""
    asyncio.run(_write_next(ref))


async def _write_next(ref: ObjectRef) -> None:
    store = LocalStore()
    stat = await store.stat(ref)
    expected: Expected = ABSENT if stat is None else stat.etag
    assert isinstance(await store.put(ref, [b"next"], expected=expected), str)
    await store.aclose()


async def count(ref: ObjectRef, times: int) -> None:
    """Increment *ref*, concurrently with other processes."""
    store = LocalStore()
    while times:
        found = await store.get(ref)
        assert isinstance(found, Found)
        counted = b"%d" % (int(found.data) + 1)
        times -= await store.put(ref, [counted], expected=found.etag) is not CONFLICT
    await store.aclose()


async def come_and_go(folder: Path, seed: int) -> None:
    """Write, read and remove keys concurrently, most often the last of a folder."""
    store, numbers = LocalStore(), random.Random(seed)

    async def turn(number: int) -> None:
        for _ in range(40):
            above = "/".join(numbers.choice("ab") for _ in range(numbers.randrange(1, 4)))
            ref = ObjectRef(folder.as_uri(), f"{above}/{seed}-{number}")
            etag = await store.put(ref, [b"1"], expected=numbers.choice([ABSENT, None]))
            assert isinstance(etag, str), ref
            found = await store.get(ref)
            assert isinstance(found, Found), ref
            assert found.etag == etag
            replaced = await store.put(ref, [ByteRange(0, 1), b"2"], expected=etag)
            assert isinstance(replaced, str), ref
            assert await store.delete(ref, expected=replaced) is True, ref
            assert await store.get(ref) is None

    await asyncio.gather(*map(turn, range(4)))
    await store.aclose()


if __name__ == "__main__":
    if sys.argv[1] == "crash":
        crash(Path(sys.argv[2]))
    elif sys.argv[1] == "come-and-go":
        asyncio.run(come_and_go(Path(sys.argv[2]), int(sys.argv[3])))
    else:
        asyncio.run(count(ObjectRef(Path(sys.argv[2]).as_uri(), "key"), int(sys.argv[3])))
