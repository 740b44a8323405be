"""Reads that are performed each time."""

import asyncio
import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest

from app.errors import DamagedError, VersionChangedError
from app.formats.icechunk.envelope import memory_nbytes
from app.formats.reading import DecodeError, Opaque, Read, Versioned
from app.model import ByteRange, ETag
from app.resolve.budget import ByteBudget
from app.resolve.perform import DirectFetch, perform
from app.storage.contract import Found, NotModified
from tests.formats.icechunk.building import REPO_INFO, envelope
from tests.resolve.stores import REF, WatchedStore


def refuse(_: bytes) -> Opaque:
    """Refuse any bytes."""
    raise DecodeError("not that")


async def test_nothing_is_remembered() -> None:
    """Each read asks the store, and returns the current version."""
    store = WatchedStore()
    fetch, read = DirectFetch(store), Read("all", REF, ByteRange(1, 3), Opaque)

    assert await fetch(read) is None
    for data in (b"abcd", b"efgh"):
        etag = store.place(REF, data)
        found = await fetch(read)
        assert found is not None
        assert (found.value.data, found.etag, found.size) == (data[1:3], etag, 4)
    assert store.methods == ["get"] * 3


async def test_bytes_that_cannot_be_decoded_are_damage() -> None:
    """The error names the object, decoded in a thread or not, and holds nothing of the payload.

    A traceback would keep it until the request is answered.
    """
    store = WatchedStore()
    for size in (1, 2**20):
        store.place(REF, bytes(size))
        with pytest.raises(DamagedError, match="not that") as caught:
            await perform(store, Read("all", REF, None, refuse))
        assert (caught.value.__cause__, caught.value.__context__) == (None, None)
    store.place(REF, b"")
    with pytest.raises(DamagedError, match="0 bytes are too few for its shard-index"):
        await perform(store, Read("shard-index", REF, ByteRange(0, 4), Opaque))


@dataclass(frozen=True)
class _Thread:
    """The thread that decoded something."""

    ident: int
    nbytes: int = 0


@pytest.mark.parametrize(
    ("kind", "data", "is_apart"),
    [
        ("memory", b"a", True),
        ("all", bytes(2**18), False),
        ("all", bytes(2**18 + 1), True),
        ("all", b"\x1f\x8b" + bytes(4094), False),
        ("all", b"\x1f\x8b" + bytes(4095), True),
        ("config", b"a", True),
    ],
)
async def test_what_takes_long_is_decoded_apart(kind: str, data: bytes, *, is_apart: bool) -> None:
    """Large, slow or compressed data is decoded in a thread."""
    store = WatchedStore()
    store.place(REF, data)
    read = Read(kind, REF, ByteRange(0, 2**20), lambda _: _Thread(threading.get_ident()))
    if kind == "memory":  # however short: a few bytes of zstd can hold many
        read = read._replace(memory_nbytes=lambda *_: 1)
    found = await DirectFetch(store)(read)

    assert found is not None
    assert (found.value.ident != threading.get_ident()) is is_apart


async def test_a_version_that_is_gone_has_changed() -> None:
    """A replaced or deleted version is not absence; a known ETag is sent, and confirmed."""
    store = WatchedStore()
    read = Read("all", REF, None, Opaque, ETag('"other"'))
    with pytest.raises(VersionChangedError):
        await perform(store, read)
    etag = store.place(REF, b"abcd")
    with pytest.raises(VersionChangedError):
        await perform(store, read)
    assert isinstance(await perform(store, Read("all", REF, None, refuse), etag), NotModified)


_LARGE = bytes(2**25) + b"the rest"


@pytest.mark.parametrize("start", [0, 5])
async def test_a_large_object_is_read_in_two_parts(start: int) -> None:
    """The second part is the rest, of the same version."""
    store = WatchedStore()
    etag = store.place(REF, _LARGE)
    found = await DirectFetch(store)(Read("all", REF, ByteRange(start, 2**40), Opaque))

    assert found is not None
    assert (found.value.data, found.size) == (_LARGE[start:], len(_LARGE))
    assert [(call.request, call.if_match) for call in store.calls] == [
        (ByteRange(start, start + 2**25), None),
        (ByteRange(start + 2**25, len(_LARGE)), etag),
    ]


async def test_a_large_object_that_is_replaced_between_its_parts_has_changed() -> None:
    """Parts of two versions are never joined."""

    class Replacing(WatchedStore):
        async def get(self, *args: Any, **conditions: Any) -> Found | NotModified | None:
            found = await super().get(*args, **conditions)
            self.place(REF, _LARGE + b"!")
            return found

    store = Replacing()
    store.place(REF, _LARGE)
    with pytest.raises(VersionChangedError):
        await DirectFetch(store)(Read("all", REF, ByteRange(0, 2**40), Opaque))


async def test_what_takes_much_memory_waits_for_room() -> None:
    """A large object is read once others have released memory."""
    store = WatchedStore()
    store.place(REF, _LARGE)
    budget = ByteBudget(2**26, wait_s=20)
    await budget.acquire(2**26)
    read = Read("all", REF, ByteRange(0, 2**40), Opaque)
    waiting = asyncio.create_task(perform(store, read, decoding=budget))
    await asyncio.sleep(0.01)

    assert (len(store.calls), waiting.done()) == (0, False)
    budget.release(2**26)
    found = await waiting
    assert budget.held_bytes == 0
    assert isinstance(found, Versioned)
    assert found.value.nbytes == len(_LARGE)


async def test_all_decodes_of_repository_files_together_are_bounded() -> None:
    """Each reserves its decoded size, however small the file is."""
    store, counting = WatchedStore(), threading.Lock()
    at_once: list[int] = [0]
    running = 0

    def decode(data: bytes) -> Opaque:
        nonlocal running
        with counting:
            running += 1
            at_once.append(running)
        time.sleep(0.01)
        with counting:
            running -= 1
        return Opaque(data)

    file = envelope(bytes(2**20), REPO_INFO)
    store.place(REF, file)
    budget = ByteBudget(2 * memory_nbytes(file, 2**22), wait_s=20)
    request = ByteRange(0, 2**22)
    reads = [Read(f"{n}", REF, request, decode, memory_nbytes=memory_nbytes) for n in range(8)]
    await asyncio.gather(*(perform(store, read, decoding=budget) for read in reads))

    assert max(at_once) == 2
    assert len(file) < 1000
