"""Reads that are performed each time."""

import threading
from dataclasses import dataclass

import pytest

from app.errors import DamagedError, VersionChangedError
from app.formats.contract import DecodeError, Opaque, Read
from app.model import ByteRange, ETag
from app.resolve.perform import DirectFetch, perform
from app.storage.contract import NotModified
from tests.resolve.stores import REF, WatchedStore


def refuse(_: bytes) -> Opaque:
    """Decode nothing."""
    raise DecodeError("not that")


async def test_nothing_is_remembered() -> None:
    """Each read asks the store, and sees what is there now."""
    store = WatchedStore()
    fetch, read = DirectFetch(store), Read("all", REF, ByteRange(1, 3), Opaque)

    assert await fetch(read) is None
    for data in (b"abcd", b"efgh"):
        etag = store.put(REF, data)
        found = await fetch(read)
        assert found is not None
        assert (found.value.data, found.etag, found.size) == (data[1:3], etag, 4)
    assert store.methods == ["get"] * 3


async def test_bytes_that_cannot_be_decoded_are_damage() -> None:
    """The object is named, whether it is small or decoded in a thread."""
    store = WatchedStore()
    for size in (1, 2**20):
        store.put(REF, bytes(size))
        with pytest.raises(DamagedError, match="not that"):
            await perform(store, Read("all", REF, None, refuse))


@dataclass(frozen=True)
class _Thread:
    """The thread that decoded something."""

    ident: int
    nbytes: int = 0


@pytest.mark.parametrize(
    ("data", "is_apart"),
    [
        (bytes(2**18), False),
        (bytes(2**18 + 1), True),
        (b"\x1f\x8b" + bytes(4094), False),
        (b"\x1f\x8b" + bytes(4095), True),
    ],
)
async def test_what_takes_long_is_decoded_apart(data: bytes, *, is_apart: bool) -> None:
    """The event loop goes on meanwhile: 60 KiB of gzip can hold an index of 60 MiB."""
    store = WatchedStore()
    store.put(REF, data)
    read = Read("all", REF, None, lambda _: _Thread(threading.get_ident()))
    found = await DirectFetch(store)(read)

    assert found is not None
    assert (found.value.ident != threading.get_ident()) is is_apart


async def test_an_object_without_the_range_is_damage() -> None:
    """It is too short for what is read of it."""
    store = WatchedStore()
    store.put(REF, b"")

    with pytest.raises(DamagedError, match="0 bytes are too few for its shard-index"):
        await perform(store, Read("shard-index", REF, ByteRange(0, 4), Opaque))


async def test_a_version_that_is_gone_has_changed() -> None:
    """Replaced or removed, it is not absent."""
    store = WatchedStore()
    read = Read("all", REF, None, Opaque, ETag('"other"'))

    with pytest.raises(VersionChangedError):
        await perform(store, read)
    store.put(REF, b"abcd")
    with pytest.raises(VersionChangedError):
        await perform(store, read)


async def test_what_is_known_is_not_read_again() -> None:
    """The version tells."""
    store = WatchedStore()
    etag = store.put(REF, b"abcd")

    assert isinstance(await perform(store, Read("all", REF, None, refuse), etag), NotModified)
