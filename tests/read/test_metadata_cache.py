"""Reads of metadata: performed, shared, cached and revalidated."""

import asyncio
import threading
from dataclasses import dataclass
from math import inf

import pytest

from shardgate.errors import DamagedError, VersionChangedError
from shardgate.formats.icechunk.flatbuffers import memory_nbytes
from shardgate.formats.reading import DecodedMetadata, DecodeError, Opaque, Read, Versioned
from shardgate.model import ByteRange, ETag, Fixed, ObjectRef, VolatileBucket
from shardgate.read.budget import ByteBudget
from shardgate.read.metadata_cache import (
    OVERHEAD_NBYTES,
    MetadataCache,
    ReadCache,
    SizedLRUCache,
    uncached_reads,
)
from shardgate.read.perform import perform
from shardgate.storage.contract import Found, ObjectHeaders, Stat
from tests.support.clocks import Clock
from tests.support.formats.icechunk.building import REPO_INFO, envelope
from tests.support.read.stores import REF, WatchedStore, settle
from tests.support.records import replaced
from tests.support.zipped import encoded

_TTL_S = 60.0
_MAX = 10


class _Case:
    """A cache over a watched store."""

    def __init__(self, data: bytes | None = b"old", max_bytes: int = 2**20) -> None:
        self.store = WatchedStore()
        self.clock = Clock()
        self.memory = MetadataCache(max_bytes)
        self.fetch = ReadCache(self.store, self.memory, ttl_s=_TTL_S, clock=self.clock)
        self.decoded = 0
        self.read = Read("metadata", REF, None, self._decode, is_marker=True)
        if data is not None:
            self.store.place(REF, data)

    def _decode(self, data: bytes) -> Opaque:
        self.decoded += 1
        return Opaque(data)

    async def data(self) -> bytes | None:
        """Fetch the object."""
        found = await self.fetch(self.read)
        return None if found is None else found.value.data


@pytest.mark.parametrize("old", [b"old", None])
async def test_result_is_fresh_for_ttl(old: bytes | None) -> None:
    """A changed object is read again after `ttl_s` and not before, like an absent one."""
    case = _Case(old)
    assert await case.data() == old
    case.store.place(REF, b"new")
    case.clock.now += _TTL_S - 0.001
    assert await case.data() == old
    assert len(case.store.calls) == 1
    case.clock.now += 0.001

    assert await case.data() == b"new"


async def test_expired_result_is_revalidated() -> None:
    """An expired result is revalidated by its ETag, not decoded again, and fresh for `ttl_s`."""
    case = _Case()
    etag = case.store.place(REF, b"old")
    first = await case.fetch(case.read)
    case.clock.now += _TTL_S
    assert await case.fetch(case.read) is first
    case.clock.now += _TTL_S - 0.001
    assert await case.fetch(case.read) is first

    assert [call.if_none_match for call in case.store.calls] == [None, etag]
    assert case.decoded == 1


async def test_written_state_is_for_stale_reads_only() -> None:
    """What was just written spares a stale read; any other reads it whole, with its time."""
    case = _Case()
    etag = case.store.place(REF, b"new")
    case.fetch.forget(REF)
    case.fetch.put_written(case.read, written := Versioned(Opaque(b"new"), etag, 3))

    assert await case.fetch(case.read, allow_stale=True) is written
    assert await case.fetch(case.read) is not written
    assert [call.if_none_match for call in case.store.calls] == [None]


async def test_ttl_begins_with_the_request() -> None:
    """A result's `ttl_s` begins with the request, not with the answer."""
    case = _Case()
    case.store.gate.clear()
    task = asyncio.create_task(case.data())
    await settle()
    case.clock.now += _TTL_S
    case.store.gate.set()
    await task
    await case.data()

    assert len(case.store.calls) == 2


@pytest.mark.parametrize("others", [0, 2**16 + 1])
async def test_forgotten_object_is_read_unconditionally(others: int) -> None:
    """After `forget` the read is unconditional, however many other objects are forgotten."""
    case = _Case()
    await case.data()
    case.fetch.forget(ObjectRef("memory://bucket", "data/other"))
    case.clock.now += 0.001
    await case.data()
    assert len(case.store.calls) == 1
    case.store.place(REF, b"new")
    case.fetch.forget(REF)
    for number in range(others):
        case.fetch.forget(ObjectRef("memory://bucket", str(number)))

    assert await case.data() == b"new"
    assert case.store.calls[-1].if_none_match is None


@pytest.mark.parametrize("is_under_way", [False, True])
async def test_read_before_forget_is_not_cached(*, is_under_way: bool) -> None:
    """A read that began before `forget` is neither joined nor cached."""
    case = _Case()
    case.store.gate.clear()
    before = asyncio.create_task(case.data())
    await settle()
    case.clock.now += 0.001
    case.fetch.forget(REF)
    case.clock.now += 0.001
    if is_under_way:
        after = asyncio.create_task(case.data())
        await settle()
        case.store.gate.set()
        await asyncio.gather(before, after)
    else:
        case.store.gate.set()
        await before
        await case.data()

    assert len(case.store.calls) == 2


_FIXED = Fixed(ETag('"name"'))


@pytest.mark.parametrize("is_fixed", [False, True])
async def test_read_of_a_version_never_expires(*, is_fixed: bool) -> None:
    """A read of one version is outdated neither by time nor by `forget`.

    A read of an immutable object has no condition.
    """
    case = _Case()
    version = _FIXED if is_fixed else case.store.place(REF, b"old")
    pinned = replaced(case.read, version=version)
    first = await case.fetch(pinned)
    case.store.place(REF, b"new")
    case.clock.now += 1000 * _TTL_S
    case.fetch.forget(REF)
    case.clock.now += 0.001

    assert first is not None
    assert first.value.data == b"old"
    assert await case.fetch(pinned) is first
    (call,) = case.store.calls
    assert (call.if_match, call.if_none_match) == (None if is_fixed else version, None)


@pytest.mark.parametrize("allow_stale", [False, True])
async def test_absence_expires(*, allow_stale: bool) -> None:
    """The absence of an object expires after `ttl_s`, for immutable objects and stale reads too."""
    case = _Case(None)
    read = case.read if allow_stale else replaced(case.read, version=_FIXED)
    assert await case.fetch(read, allow_stale=allow_stale) is None
    case.store.place(REF, b"new")
    assert await case.fetch(read, allow_stale=allow_stale) is None
    entry = await case.fetch.get_or_fetch(read, allow_stale=allow_stale)
    assert entry.expires_at == case.clock.now + _TTL_S
    case.clock.now += _TTL_S
    found = await case.fetch(read, allow_stale=allow_stale)

    assert found is not None
    assert found.value.data == b"new"
    case.clock.now += 1000 * _TTL_S
    assert await case.fetch(read, allow_stale=allow_stale) is found


async def test_stale_read_returns_any_known_version() -> None:
    """A read with `allow_stale` returns the known version until a read or `forget` replaces it."""
    case = _Case()
    first = await case.fetch(case.read, allow_stale=True)
    case.store.place(REF, b"new")
    case.clock.now += 1000 * _TTL_S
    assert await case.fetch(case.read, allow_stale=True) is first
    assert (await case.fetch.get_or_fetch(case.read, allow_stale=True)).expires_at == inf
    assert len(case.store.calls) == 1
    assert await case.data() == b"new"
    expires_at = case.clock.now + _TTL_S
    assert (await case.fetch.get_or_fetch(case.read)).expires_at == expires_at
    for data, reads in ((b"new", 2), (b"newer", 3)):
        found = await case.fetch(case.read, allow_stale=True)

        assert found is not None
        assert (found.value.data, len(case.store.calls)) == (data, reads)
        case.store.place(REF, b"newer")
        case.fetch.forget(REF)


@pytest.mark.parametrize("data", [b"old", None])
async def test_a_stat_is_cached(data: bytes | None) -> None:
    """A stat is cached like a read, and can be put by other responses."""
    case = _Case(data)
    assert case.fetch.cached_stat(REF) is None
    first = await case.fetch.stat(REF)

    assert first.known == (None if data is None else Stat(3, case.store.place(REF, data)))
    assert first == await case.fetch.stat(REF) == case.fetch.cached_stat(REF)
    other, told = ObjectRef("memory://bucket", "data/other"), Stat(3, ETag('"told"'))
    case.fetch.put(other, told, case.clock.now)
    assert (await case.fetch.stat(other)).known == told
    assert case.store.methods == ["stat"]


async def test_too_large_result_is_not_cached() -> None:
    """A result larger than the cache is returned, not cached, and evicts nothing."""
    case = _Case(bytes(5000), max_bytes=4000)
    small = replaced(case.read, request=ByteRange(0, 10))
    await case.fetch(small)
    assert await case.data() == bytes(5000)
    assert await case.data() == bytes(5000)
    await case.fetch(small)

    assert [call.request for call in case.store.calls] == [small.request, None, None]


def test_entry_weight_includes_its_name() -> None:
    """An entry weighs its value, its name and an overhead."""
    memory = MetadataCache(2**20)
    fetch = ReadCache(WatchedStore(), memory, ttl_s=_TTL_S)
    fetch.put(ObjectRef("memory://bucket", "\N{GRINNING FACE}" * 250), None, 0.0)
    assert memory.currsize >= OVERHEAD_NBYTES + 1000

    cache = SizedLRUCache[str, int](_MAX, lambda key, value: len(key) + value)
    cache.put("a" * _MAX, 1)
    cache.put("b", 1)
    assert (cache.get("a" * _MAX), cache.currsize) == (None, 2)


def refuse(_: bytes) -> Opaque:
    """Raise DecodeError for any bytes."""
    raise DecodeError("not that")


async def test_undecodable_object_is_damage() -> None:
    """An object that cannot be decoded raises DamagedError with its name.

    The error has no reference to the data, which a traceback would keep in memory.
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
async def test_slow_decoding_runs_in_a_thread(kind: str, data: bytes, *, is_apart: bool) -> None:
    """Large, slow or compressed data is decoded in a thread."""
    store = WatchedStore()
    store.place(REF, data)
    read = Read(kind, REF, ByteRange(0, 2**20), lambda _: _Thread(threading.get_ident()))
    read = replaced(read, is_slow=kind == "config")
    if kind == "memory":  # however short: a few bytes of zstd can hold many
        read = replaced(read, memory_nbytes=lambda *_: 1)
    found = await uncached_reads(store)(read)

    assert found is not None
    assert (found.value.ident != threading.get_ident()) is is_apart


_LARGE = bytes(2**25) + b"the rest"


@pytest.mark.parametrize("start", [0, 5])
async def test_a_large_object_is_read_in_two_parts(start: int) -> None:
    """A large object is read in two parts, the second of the first's version."""
    store = WatchedStore()
    etag = store.place(REF, _LARGE)
    found = await uncached_reads(store)(Read("all", REF, ByteRange(start, 2**40), Opaque))

    assert found is not None
    assert (found.value.data, found.size) == (_LARGE[start:], len(_LARGE))
    assert [(call.request, call.if_match) for call in store.calls] == [
        (ByteRange(start, start + 2**25), None),
        (ByteRange(start + 2**25, len(_LARGE)), etag),
    ]


async def test_large_object_replaced_between_its_parts_is_refused() -> None:
    """A large object that is replaced between its two parts raises VersionChangedError."""

    def replace(found: Found) -> Found:
        store.place(REF, _LARGE + b"!")
        return found

    store = WatchedStore()
    store.place(REF, _LARGE)
    store.spoil = replace
    with pytest.raises(VersionChangedError):
        await uncached_reads(store)(Read("all", REF, ByteRange(0, 2**40), Opaque))


_FILE = envelope(bytes(2**20), REPO_INFO)


@pytest.mark.parametrize(
    ("data", "read"),
    [
        (_LARGE, Read("all", REF, ByteRange(0, 2**40), Opaque)),
        (_FILE, Read("n", REF, ByteRange(0, 2**22), Opaque, memory_nbytes=memory_nbytes)),
    ],
)
async def test_large_decoding_waits_for_room(data: bytes, read: Read[Opaque]) -> None:
    """Decoding a large object or repository file waits until the budget has room."""
    store = WatchedStore()
    store.place(REF, data)
    held, max_nbytes = (2**26, 2**26) if data is _LARGE else (1, memory_nbytes(_FILE, 2**22))
    budget = ByteBudget(max_nbytes, wait_s=20)
    await budget.acquire(held)
    waiting = asyncio.create_task(perform(store, read, decoding=budget))
    await settle()

    assert not waiting.done()
    assert store.calls == [] or data is _FILE
    budget.release(held)
    found = await waiting
    assert budget.held_bytes == 0
    assert isinstance(found, Versioned)
    assert found.value.nbytes == len(data)
    assert len(_FILE) < 1000 < 2**20 <= memory_nbytes(_FILE, 2**22)


@pytest.mark.parametrize("coding", ["gzip", "br", "zstd", "deflate"])
async def test_content_coding_of_a_document_is_removed(
    monkeypatch: pytest.MonkeyPatch, coding: str
) -> None:
    """A document is inflated within a limit and cut to its range; a part is read as stored."""
    store, data = WatchedStore(), encoded(coding, b"text" * 1000)
    store.place(REF, data, headers=ObjectHeaders(coding))
    whole = await perform(store, Read("metadata", REF, ByteRange(0, 4000), Opaque))
    part = await perform(store, Read("index-entry", REF, ByteRange(1, 9), Opaque))

    assert isinstance(whole, Versioned)
    assert (whole.value.data, whole.coding, whole.size) == (b"text" * 1000, coding, len(data))
    assert isinstance(part, Versioned)
    assert (part.value.data, part.coding) == (data[1:9], "")
    first = await perform(store, Read("metadata", REF, ByteRange(0, 3999), Opaque))
    assert isinstance(first, Versioned)
    assert first.value.data == whole.value.data[:3999]
    monkeypatch.setattr("shardgate.read.perform._CONTENT_NBYTES", 3999)
    with pytest.raises(DamagedError):
        await perform(store, Read("metadata", REF, ByteRange(0, 3999), Opaque))


async def test_content_coding_of_a_repository_file_is_removed() -> None:
    """A file that reserves memory for its decoding is inflated first."""
    store, read = (
        WatchedStore(),
        Read("n", REF, ByteRange(0, 2**22), Opaque, memory_nbytes=memory_nbytes),
    )
    store.place(REF, encoded("br", _FILE), headers=ObjectHeaders("br"))
    found = await perform(store, read, decoding=ByteBudget(2**30, wait_s=1))

    assert isinstance(found, Versioned)
    assert found.value.data == _FILE


async def test_damage_behind_an_unknown_coding_names_the_coding() -> None:
    """A document with an unknown coding is decoded as stored; its damage names the coding."""

    def decode(data: bytes) -> Opaque:
        raise DecodeError(f"no JSON: {data!r}")

    store = WatchedStore()
    store.place(REF, b"x", headers=ObjectHeaders("compress"))
    with pytest.raises(DamagedError, match=r"no JSON: b'x' .*Content-Encoding: compress"):
        await perform(store, Read("metadata", REF, ByteRange(0, 9), decode))


@dataclass(frozen=True, slots=True)
class _Unsharded(DecodedMetadata):
    why_sharded: str = ""
    nbytes: int = 0


async def test_reason_for_serving_as_stored_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each version of metadata that is served as stored is logged once."""
    caplog.set_level("INFO", logger="shardgate")
    case = _Case()
    read = Read("metadata", REF, None, lambda _: _Unsharded("it is odd"))
    for data in (b"old", b"new"):
        case.store.place(REF, data)
        for _ in range(2):
            case.fetch.forget(REF)
            await case.fetch(read)

    assert [each.message for each in caplog.records] == [f"{REF}: served as stored: it is odd"] * 2


async def test_state_of_a_volatile_bucket_is_read_for_each_call() -> None:
    """Each call for an object of a volatile bucket reads it anew, joins no read under way, and
    decodes it again only if it has changed. Once it is removed it is absent, also a marker.

    Its changes leave the generation as it is.
    """
    case = _Case(None)
    ref = ObjectRef(VolatileBucket("volatile+session", "session"), "zarr.json")
    case.store.place(ref, b"old")
    read = Read("metadata", ref, None, case.read.decode, is_marker=True)
    case.store.gate.clear()
    both = [asyncio.create_task(case.fetch(read)) for _ in range(2)]
    await settle()
    assert len(case.store.calls) == 2
    case.store.gate.set()
    await asyncio.gather(*both)
    case.decoded = 0
    await case.fetch(read)
    assert case.decoded == 0
    case.store.place(ref, b"new")

    found = await case.fetch(read)
    assert found is not None
    assert found.value.data == b"new"
    await case.store.delete(ref, expected=None)
    assert await case.fetch(read) is None
    case.fetch.forget(ref)
    assert case.fetch.generation == 0
