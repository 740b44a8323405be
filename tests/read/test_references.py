"""Keys that refer to parts of other objects: their reads, versions and damage."""

import asyncio

import pytest

from shardgate.errors import DamagedError
from shardgate.formats.contract import Format
from shardgate.model import (
    EVERYTHING,
    ByteRange,
    ByteRequest,
    ETag,
    Fixed,
    Inline,
    Location,
    ObjectRef,
    Part,
    Referenced,
    Stored,
    SuffixRange,
    UnmodifiedSince,
)
from shardgate.read.bodies import Entity
from shardgate.storage.memory import MemoryStore
from tests.support.read.pointers import Pointers
from tests.support.read.stores import REF, WatchedStore, Watching
from tests.support.resolving import reading

DATA = bytes(i * 7 % 251 for i in range(10_000))
NAME = Fixed(ETag('"name"'))
STREAM_BYTES = 4096
TTL_S = 60.0
OTHER = ObjectRef("memory://bucket", "data/other")


class _Case(Watching):
    """A resolver of one key over a watched store."""

    def __init__(self, location: Location, data: bytes | None = DATA) -> None:
        super().__init__({}, formats=(Pointers({"key": location}),), stream_bytes=STREAM_BYTES)
        if data is not None:
            self.store.place(REF, data, modified_s=1000)

    async def part(
        self, reads: tuple[int, int] | None = None, asked: ByteRequest | None = EVERYTHING
    ) -> bytes | None:
        """Read a part, or all."""
        return await self.read("key", reads, asked)

    async def look(self) -> Entity:
        """Return the entity without reading it, as HEAD does."""
        entity = await self.stat("key")
        assert entity is not None
        return entity

    @property
    def requests(self) -> list[tuple[str, ByteRequest | None]]:
        """Requests to the store."""
        return [(call.method, call.request) for call in self.store.calls]


def _part(start: int, stop: int, by: str = "by") -> Referenced:
    return Referenced(Part(REF, ByteRange(start, stop)), by, is_immutable=False)


def _fixed(start: int, stop: int, version: Fixed = NAME) -> Referenced:
    return Referenced(Stored(REF, ByteRange(start, stop), version), "", is_immutable=True)


async def test_part_read_whole_is_cached() -> None:
    """A part is read once, with its version and size, and again after `ttl_s`."""
    case = _Case(_part(100, 200))

    assert await case.part() == DATA[100:200]
    case.store.place(REF, DATA[::-1])
    assert await case.part() == DATA[100:200]
    assert await case.part((10, 20)) == DATA[110:120]
    assert case.requests == [("get", ByteRange(100, 200))]
    case.clock.now += TTL_S
    assert await case.part() == DATA[::-1][100:200]


@pytest.mark.parametrize(
    ("asked", "reads", "request_"),
    [
        (ByteRange(10, 20), (10, 20), ByteRange(110, 120)),
        (ByteRange(90, 500), (90, 100), ByteRange(190, 200)),
        (SuffixRange(5), (95, 100), ByteRange(195, 200)),
        (SuffixRange(500), (0, 100), ByteRange(100, 200)),
    ],
)
async def test_a_range_of_a_part_is_one_read(
    asked: ByteRequest, reads: tuple[int, int], request_: ByteRange
) -> None:
    """A range of a part is one read of the object, clipped to the part."""
    case = _Case(_part(100, 200))

    assert await case.part(reads, asked) == DATA[100:200][slice(*reads)]
    assert case.requests == [("get", request_)]


@pytest.mark.parametrize("asked", [ByteRange(100, 101), ByteRange(5000, 6000), None])
async def test_empty_range_of_a_part_is_measured(asked: ByteRequest | None) -> None:
    """A range that contains no byte of a part measures the object by a stat."""
    case = _Case(_part(100, 200))

    assert await case.part((0, 0), asked) == b""
    assert case.requests[0] == ("stat", None)


async def test_etag_of_a_part_needs_a_stat_only() -> None:
    """A part's ETag has the object's version, the range and the reference, from a stat alone."""
    case = _Case(_part(100, 200))
    entity = await case.look()
    etag = case.store.place(OTHER, DATA)

    assert (entity.etag, entity.length) == (ETag(f'{etag[:-1]}-64-64-by"'), 100)
    assert (await _Case(_part(100, 200, "two")).look()).etag != entity.etag
    assert not entity.is_immutable
    assert case.requests == [("stat", None)]
    case.store.place(REF, DATA[::-1])
    assert await case.part() == DATA[::-1][100:200]
    assert (await case.look()).etag != entity.etag


@pytest.mark.parametrize("data", [None, b"", DATA[:100], DATA[:199]])
@pytest.mark.parametrize("asked", [EVERYTHING, ByteRange(0, 1), SuffixRange(1), None])
async def test_part_of_a_missing_object_is_damage(
    data: bytes | None, asked: ByteRequest | None
) -> None:
    """A part of a missing or short object raises DamagedError until the object is long enough."""
    case = _Case(_part(100, 200), data)
    with pytest.raises(DamagedError, match=f"{REF}: "):
        await case.part((0, 1), asked)
    assert len(case.requests) <= 2
    case.clock.now += TTL_S
    case.store.place(REF, DATA)
    assert await case.part() == DATA[100:200]


async def test_versions_of_one_modification_time_differ() -> None:
    """Objects of one modification time differ by ETag, and their ranges are not mixed.

    A HEAD reads one byte to check the time.
    """
    part = Part(REF, ByteRange(100, 200), UnmodifiedSince(1000))
    case = _Case(Referenced(part, "by", is_immutable=False))
    await case.data.fetch.stat(REF)
    case.store.calls.clear()
    first, data = await case.look(), await case.part()
    looked = case.store.calls[0]
    assert (looked.request, looked.if_match) == (ByteRange(100, 101), UnmodifiedSince(1000))
    case.store.place(REF, DATA[::-1], modified_s=1000)
    case.clock.now += TTL_S
    second = await case.look()

    assert data == DATA[100:200]
    assert second.etag != first.etag
    assert await case.part((0, 50)) == DATA[::-1][100:150]
    etags = {MemoryStore().place(REF, data) for data in (DATA, DATA[::-1])}
    assert {call.if_match for call in case.store.calls} <= {UnmodifiedSince(1000), *etags}


@pytest.mark.parametrize("asked", [EVERYTHING, SuffixRange(5), ByteRange(0, 5), None])
@pytest.mark.parametrize("at", [0, 100, len(DATA)])
async def test_a_part_may_be_empty(at: int, asked: ByteRequest | None) -> None:
    """An empty part may lie at the end of its object, which must exist."""
    assert await _Case(_part(at, at)).part(asked=asked) == b""
    with pytest.raises(DamagedError):
        await _Case(_part(at, at), None).part(asked=asked)


@pytest.mark.parametrize("asked", [EVERYTHING, None])
async def test_a_large_part_streams(asked: ByteRequest | None) -> None:
    """A large part is streamed, and its first bytes are not read twice."""
    case = _Case(_part(100, 9100))

    assert await case.part(asked=asked) == DATA[100:9100]
    if asked is None:
        assert case.requests == [("stat", None), ("stream", ByteRange(100, 9100))]
    else:
        assert case.requests == [
            ("get", ByteRange(100, 100 + STREAM_BYTES)),
            ("stream", ByteRange(100 + STREAM_BYTES, 9100)),
        ]


async def test_concurrent_parts_of_one_object_are_merged() -> None:
    """Concurrent reads of parts of an object of known version are merged."""
    locations = {str(at): _part(at, at + 10) for at in range(100, 150, 10)}
    case = _Case(_part(0, 1))
    formats: tuple[Format, ...] = (Pointers(locations),)
    data = reading(case.store, formats=formats)
    await data.fetch.stat(REF)
    case.store.calls.clear()
    found = await asyncio.gather(*map(data.read, locations))

    assert b"".join(filter(None, found)) == DATA[100:150]
    assert case.requests == [("get", ByteRange(100, 150))]


async def test_immutable_chunk_is_one_unconditional_read() -> None:
    """An immutable chunk is read once without a condition; its size and ETag need no read.

    An inline chunk needs no store.
    """
    case = _Case(_fixed(100, 200))
    entity = await case.look()

    assert (entity.etag, entity.length) == ('"name-64-64"', 100)
    assert entity.is_immutable
    assert case.requests == []
    assert await case.part() == DATA[100:200]
    case.clock.now += 1000 * TTL_S
    case.data.fetch.forget(REF)
    assert await case.part() == DATA[100:200]
    (call,) = case.store.calls
    assert (call.request, call.if_match) == (ByteRange(100, 200), None)

    case = _Case(Referenced(Inline(b"inline", ETag('"i"')), "", is_immutable=True))
    entity = await case.look()
    assert (await case.part(), await case.part((1, 3))) == (b"inline", b"nl")
    assert (entity.etag, entity.length, entity.is_immutable) == ('"i"', 6, True)
    assert case.requests == []


@pytest.mark.parametrize("data", [None, b"", DATA[:100], DATA[:199]])
@pytest.mark.parametrize(("stop", "method"), [(200, "get"), (8192, "stream")])
async def test_missing_immutable_chunk_is_damage(
    data: bytes | None, stop: int, method: str
) -> None:
    """An immutable chunk of a missing or short object raises DamagedError after one request."""
    for version in (NAME, Fixed(ETag('"x"'), UnmodifiedSince(1000))):
        case = _Case(_fixed(100, stop, version), data)
        with pytest.raises(DamagedError, match=f"{REF}: "):
            await case.part()
        assert [each for each, _ in case.requests] == [method]


@pytest.mark.parametrize(("stop", "method"), [(200, "get"), (8192, "stream")])
async def test_condition_of_a_reference_is_sent(stop: int, method: str) -> None:
    """A reference's ETag or time is the condition of its read; a replaced object is damage."""
    etag = WatchedStore().place(REF, DATA)
    for condition in (None, etag, UnmodifiedSince(1000), UnmodifiedSince(1001)):
        case = _Case(_fixed(100, stop, Fixed(etag, condition)))

        assert await case.part() == DATA[100:stop]
        (call,) = case.store.calls
        assert (call.method, call.if_match) == (method, condition)
    for condition in (ETag('"another"'), UnmodifiedSince(999)):
        case = _Case(_fixed(100, stop, Fixed(ETag('"told"'), condition)))
        with pytest.raises(DamagedError, match="not as it was when it was referred to"):
            await case.part()
        assert len(case.requests) == 1
