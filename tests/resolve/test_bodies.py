"""Bodies that are inflated: what is held for them, and which damage is believed."""

import asyncio
from random import randbytes

import pytest

from app.errors import BusyError, DamagedError, StorageDeniedError
from app.model import ByteRange, VirtualKey
from app.resolve.bodies import Coding, Entity
from tests.formats.neuroglancer_precomputed.case import GZIP_DATA, IDS, build, build_skeletons
from tests.resolve.stores import WatchedStore, holding
from tests.resolving import ROOT, All, Reading, reading
from tests.zipped import zipped

_KEY, _NEIGHBOUR, *_ = IDS
_CHUNK = b"what a chunk holds " * 500
_STORED = zipped(_CHUNK)
_OBJECTS = build({_KEY: _CHUNK, _NEIGHBOUR: b"neighbour"}, sharding=GZIP_DATA)
_SHARD = ROOT.join("s0/0.shard")
_LIMIT = 2**16


def _with(stored: bytes) -> dict[str, bytes]:
    """Write the volume with *stored* in the place of the gzip."""
    raw = build({_KEY: stored}, sharding={**GZIP_DATA, "data_encoding": "raw"})
    return {**raw, "info": _OBJECTS["info"]}


def _put(store: WatchedStore, objects: dict[str, bytes]) -> WatchedStore:
    for key, data in objects.items():
        store.place(ROOT.join(key), data)
    return store


def _reading(store: WatchedStore, in_flight_bytes: int = 2**26) -> Reading:
    return reading(store, decoded_bytes=_LIMIT, in_flight_bytes=in_flight_bytes)


async def _read_stored(data: Reading) -> None:
    """Read the gzip without inflating it, so that all of it is cached."""

    def everything(entity: Entity) -> All:
        assert entity.coding is Coding.GZIP
        return All(ByteRange(0, entity.length))

    async with data.resolver.open(data.dataset, VirtualKey(_KEY), everything):
        pass


_BAD = {
    "cached": _STORED[:-1],
    "empty": b"",
    "too long": bytes(_LIMIT + 1),
    "a bomb": zipped(bytes(_LIMIT + 1)),
}


@pytest.mark.parametrize("name", _BAD)
async def test_damage_is_confirmed_by_one_look(name: str) -> None:
    """A cached chunk is checked against the object, which may be mended, or gone, since."""
    store = _put(WatchedStore(), _with(_BAD[name]))
    data = _reading(store)
    await _read_stored(data)
    store.calls.clear()
    with pytest.raises(DamagedError, match=r"s0/0\.shard"):
        await data.read(_KEY)
    assert store.methods == ["stat"]

    for change, expected in ((_put, _CHUNK), (lambda store, _: store.remove(_SHARD), None)):
        store = _put(WatchedStore(), _with(_BAD[name]))
        data = _reading(store)
        await _read_stored(data)
        change(store, _OBJECTS)
        assert await data.read(_KEY) == expected


async def test_damage_that_cannot_be_confirmed_is_not_told() -> None:
    """If the store refuses the stat, that is the error."""
    store = _put(WatchedStore(), _with(b""))
    data = _reading(store)
    await _read_stored(data)
    store.failure = StorageDeniedError(_SHARD, "for the test")
    with pytest.raises(StorageDeniedError):
        await data.read(_KEY)


async def test_room_is_made_before_anything_is_inflated() -> None:
    """The gzip and the size announced in its trailer are reserved before inflating."""
    damaged = bytearray(_STORED)
    damaged[-8] ^= 1
    store = _put(WatchedStore(), _with(bytes(damaged)))
    data = _reading(store, in_flight_bytes=len(_CHUNK))
    await _read_stored(data)
    async with holding(data.budget, 1):
        with pytest.raises(BusyError):
            await data.read(_KEY)
    with pytest.raises(DamagedError):
        await data.read(_KEY)

    assert data.budget.held_bytes == 0


async def test_many_at_once_are_inflated_one_after_the_other() -> None:
    """All hold their gzip, and the budget has room to inflate only one."""
    chunks = {str(segment): randbytes(1000) for segment in range(50)}
    store = _put(WatchedStore(), build_skeletons(chunks, sharding=GZIP_DATA))
    data = _reading(store, in_flight_bytes=20_000)

    assert await asyncio.gather(*map(data.read, chunks)) == list(chunks.values())
    assert data.budget.held_bytes == 0


async def test_gzip_and_what_it_holds_are_held_together() -> None:
    """Both stay reserved until the client has the body; the ETag of the gzip is another one."""
    data = _reading(_put(WatchedStore(), _OBJECTS))
    seen: list[Entity] = []

    def inflated(entity: Entity) -> All | None:
        seen.append(entity)
        return None if entity.coding is Coding.GZIP else All(ByteRange(3, 9))

    async with data.resolver.open(data.dataset, VirtualKey(_KEY), inflated) as opened:
        assert opened is not None
        assert opened.body == _CHUNK[3:9]
        assert opened.entity.coding is Coding.INFLATED
        assert data.budget.held_bytes == len(_STORED) + len(_CHUNK)
    assert data.budget.held_bytes == 0
    compressed, whole = seen
    assert (compressed.length, whole.length) == (len(_STORED), len(_CHUNK))
    assert whole.etag == compressed.etag != compressed.gzip_etag


@pytest.mark.parametrize("told", [0, 2**32 - 1])
async def test_a_size_that_lies_changes_nothing(told: int) -> None:
    """The trailer gives the size of the last member only; the output is counted."""
    more = zipped(b"")
    stored = _STORED + more if told == 0 else _STORED[:-4] + told.to_bytes(4, "little")
    data = _reading(_put(WatchedStore(), _with(stored)))
    if told == 0:
        assert await data.read(_KEY) == _CHUNK
    else:
        with pytest.raises(DamagedError, match="no gzip"):
            await data.read(_KEY)
    assert data.budget.held_bytes == 0
