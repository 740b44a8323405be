"""What must hold of an object whose bytes are read: each store keeps to it, whatever servers do."""

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import obstore
import pytest
from obstore.store import LocalStore as ObstoreLocalStore

from app.errors import RangeNotSatisfiedError, VersionChangedError
from app.model import ByteRange, ByteRequest, ETag, ObjectRef, SuffixRange, UnmodifiedSince
from app.storage.contract import Found, ObjectReader
from app.storage.http_store import HttpStore
from app.storage.local import LocalStore
from tests.storage.conftest import Backend
from tests.storage.faulty import Fault, FaultyServer

DATA = bytes(range(256)) * 4
REQUESTS: list[ByteRequest | None] = [
    None,
    ByteRange(1, 2),
    ByteRange(0, 0),
    ByteRange(900, 9999),
    SuffixRange(5),
]
LONG_AGO = UnmodifiedSince(1_000_000_000)
SIXTH_OF_JULY = int(datetime(2026, 7, 6, 10, tzinfo=UTC).timestamp())
"""When the objects of the faulty server were modified."""
MTIME_NS = 1_700_000_000_123_456_789


def tomorrow() -> UnmodifiedSince:
    """Ask for what has not been modified until a time that is still to come."""
    return UnmodifiedSince(int(time.time()) + 86_400)


async def streamed(
    store: ObjectReader, ref: ObjectRef, byte_range: ByteRange, condition: UnmodifiedSince | None
) -> bytes:
    """Read a stream to its end."""
    async with store.stream(ref, byte_range, if_match=condition) as pieces:
        return b"".join([piece async for piece in pieces])


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
async def test_the_time_of_the_last_change_counts(
    backend: Backend, request_: ByteRequest | None
) -> None:
    """A condition that holds changes nothing; a newer object, and an absent one, has changed."""
    ref = backend.put("object", DATA)

    answer = await backend.store.get(ref, request_, if_match=tomorrow())
    assert answer == await backend.store.get(ref, request_)
    for name, condition in (("object", LONG_AGO), ("absent", tomorrow())):
        with pytest.raises(VersionChangedError):
            await backend.store.get(backend.ref(name), request_, if_match=condition)


@pytest.mark.parametrize("byte_range", [ByteRange(0, 5_120_000), ByteRange(3, 4), ByteRange(9, 9)])
async def test_a_stream_needs_no_condition(backend: Backend, byte_range: ByteRange) -> None:
    """A stream gives the version that there is, or that a condition holds of."""
    data = DATA * 5000
    ref = backend.put("large", data)

    for condition in (None, tomorrow()):
        got = await streamed(backend.store, ref, byte_range, condition)
        assert got == data[byte_range.start : byte_range.stop]


@pytest.mark.parametrize(
    ("name", "byte_range", "condition", "error"),
    [
        ("object", ByteRange(1, 4), LONG_AGO, VersionChangedError),
        ("object", ByteRange(9, 9), LONG_AGO, VersionChangedError),
        ("absent", ByteRange(1, 4), None, VersionChangedError),
        ("absent", ByteRange(9, 9), None, VersionChangedError),
        ("object", ByteRange(1000, 1025), None, VersionChangedError),
        ("object", ByteRange(0, 5_000_000), None, VersionChangedError),
        ("object", ByteRange(1024, 1025), None, RangeNotSatisfiedError),
    ],
    ids=str,
)
async def test_a_stream_that_cannot_be_whole_is_not_entered(
    backend: Backend,
    name: str,
    byte_range: ByteRange,
    condition: UnmodifiedSince | None,
    error: type[Exception],
) -> None:
    """Neither of a modified object, nor of an absent one, nor of one that is too short."""
    backend.put("object", DATA)

    with pytest.raises(error):
        await streamed(backend.store, backend.ref(name), byte_range, condition)


@asynccontextmanager
async def reading(server: FaultyServer) -> AsyncIterator[tuple[HttpStore, ObjectRef]]:
    """Open a store that waits however long the server takes, and put an object there."""
    server.put("bucket", "key", DATA)
    store = HttpStore(timeout_s=60)
    yield store, ObjectRef(server.url, "bucket/key")
    await store.aclose()


@pytest.mark.parametrize("faults", [(), (Fault.IGNORE_CONDITIONS,)], ids=["honoured", "ignored"])
@pytest.mark.parametrize("request_", REQUESTS, ids=str)
async def test_a_second_decides(
    faulty: FaultyServer, faults: tuple[Fault, ...], request_: ByteRequest | None
) -> None:
    """What was modified in the second of the condition is read, and what was a second later not."""
    async with reading(faulty) as (store, ref):
        for fault in faults:
            faulty.fail(fault)

        assert await store.get(ref, request_, if_match=UnmodifiedSince(SIXTH_OF_JULY))
        with pytest.raises(VersionChangedError):
            await store.get(ref, request_, if_match=UnmodifiedSince(SIXTH_OF_JULY - 1))
    if request_ != ByteRange(0, 0):
        sent = faulty.seen[0].headers["If-Unmodified-Since"]
        assert sent == "Mon, 06 Jul 2026 10:00:00 GMT"


@pytest.mark.parametrize("fault", [Fault.NO_DATE, Fault.BAD_DATE])
@pytest.mark.parametrize("request_", REQUESTS, ids=str)
async def test_what_tells_no_time_is_not_believed(
    faulty: FaultyServer, fault: Fault, request_: ByteRequest | None
) -> None:
    """Without ``Last-Modified`` nobody can tell that the condition holds."""
    async with reading(faulty) as (store, ref):
        faulty.fail(fault)

        with pytest.raises(VersionChangedError):
            await store.get(ref, request_, if_match=tomorrow())


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[tuple[LocalStore, ObjectRef]]:
    """Open a store of a folder with a file of a known time."""
    (tmp_path / "key").write_bytes(DATA)
    os.utime(tmp_path / "key", ns=(MTIME_NS, MTIME_NS))
    store = LocalStore()
    yield store, ObjectRef(tmp_path.as_uri(), "key")
    await store.aclose()


async def test_of_a_file_whole_seconds_count(local: tuple[LocalStore, ObjectRef]) -> None:
    """A file counts as a server would tell its time: without the fraction of a second."""
    store, ref = local

    assert await store.get(ref, if_match=UnmodifiedSince(MTIME_NS // 10**9))
    with pytest.raises(VersionChangedError):
        await store.get(ref, if_match=UnmodifiedSince(MTIME_NS // 10**9 - 1))


@pytest.mark.parametrize("mtime_ns", [MTIME_NS, 1_700_000_000_000_000_999, 999, -1_500_000_000])
async def test_the_etag_of_obstore_names_the_file(
    local: tuple[LocalStore, ObjectRef], tmp_path: Path, mtime_ns: int
) -> None:
    """Icechunk writes down what obstore tells; warm or not, it is read, until it changes."""
    store, ref = local
    os.utime(tmp_path / "key", ns=(mtime_ns, mtime_ns))
    etag = ETag(str(obstore.head(ObstoreLocalStore(tmp_path), "key")["e_tag"]))

    for _ in range(3):
        found = await store.get(ref, ByteRange(1, 3), if_match=etag)
        assert isinstance(found, Found)
        assert found.data == DATA[1:3]
    os.utime(tmp_path / "key", ns=(1, 2_000_000_000))
    with pytest.raises(VersionChangedError):
        await store.get(ref, ByteRange(1, 3), if_match=etag)


async def test_a_stream_without_condition_is_of_one_version(
    local: tuple[LocalStore, ObjectRef], tmp_path: Path
) -> None:
    """A file that is replaced between two pieces ends the stream."""
    store, ref = local
    (tmp_path / "key").write_bytes(bytes(3_000_000))

    async with store.stream(ref, ByteRange(0, 3_000_000), if_match=None) as pieces:
        await anext(pieces)
        (tmp_path / "new").write_bytes(bytes(3_000_000))
        (tmp_path / "new").rename(tmp_path / "key")
        with pytest.raises(VersionChangedError):
            await anext(pieces)


async def test_a_file_without_condition_is_read_anew(
    local: tuple[LocalStore, ObjectRef], tmp_path: Path
) -> None:
    """A pinned read keeps a file open; others see at once what the name means now."""
    store, ref = local
    stat = await store.stat(ref)
    assert stat is not None
    await store.get(ref, ByteRange(0, 3), if_match=stat.etag)
    (tmp_path / "key").rename(tmp_path / "old")
    (tmp_path / "key").write_bytes(b"new")

    found = await store.get(ref, ByteRange(0, 3), if_match=tomorrow())

    assert isinstance(found, Found)
    assert found.data == b"new"
