"""`shardgate.formats.zarr.layout`: from keys to places of chunks."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardgate.errors import BadKeyError, DamagedError, VersionChangedError
from shardgate.formats.contract import Document
from shardgate.formats.reading import DecodeError
from shardgate.formats.zarr.index import IndexCodec
from shardgate.formats.zarr.layout import Chunk, ShardPlace, locate_entry
from shardgate.model import (
    MISSING,
    ByteRange,
    Condition,
    ETag,
    Fixed,
    Inline,
    ObjectRef,
    Part,
    Stored,
    SuffixRange,
    UnmodifiedSince,
    VirtualKey,
    Whole,
)
from shardgate.read.metadata_cache import MetadataCache, ReadCache
from shardgate.storage.memory import MemoryStore
from tests.support.formats.case import Container, filled
from tests.support.formats.zarr.building import (
    CRC,
    EMPTY,
    LITTLE,
    WrittenArray,
    array_metadata,
    build,
    checksum,
    chunk_bytes,
    encode_index,
    encode_shard,
    one_dimension,
    sharding,
)
from tests.support.formats.zarr.nesting import Nesting, nestings
from tests.support.read.stores import WatchedStore
from tests.support.records import replaced
from tests.support.resolving import ROOT, reading

_CHUNKS = {"c/0/0": b"first", "c/0/1": b"second", "c/2/3": b"third"}


@settings(max_examples=25)
@given(nestings(), st.data())
def test_chunks_of_any_nesting_are_read(nesting: Nesting, data: st.DataObject) -> None:
    """Every written chunk of a random nesting is read exactly, and all others are absent."""
    coords = list(nesting.coords())
    written = data.draw(st.sets(st.sampled_from(coords), max_size=8))
    chunks = {c: chunk_bytes(number) for number, c in enumerate(sorted(written))}
    store = WatchedStore()
    filled(nesting.build(chunks), store)

    async def read(limit: int) -> dict[tuple[int, ...], bytes | None]:
        resolver = reading(store, whole_index_nbytes=limit)
        return {c: await resolver.read("/".join(["c", *map(str, c)])) for c in coords[:50]}

    for limit in (2**20, 40, 0):
        assert asyncio.run(read(limit)) == {c: chunks.get(c) for c in coords[:50]}


@pytest.mark.parametrize("key", ["c/3/0", "c/0/4", "c/999999/0"])
async def test_key_off_the_grid_is_absent_without_a_read(key: str) -> None:
    """A key past the edge is absent without a read; a chunk without shards is an object."""
    case = Container(build(_CHUNKS))
    plain = Container({"zarr.json": json.dumps(array_metadata([4], [2], [LITTLE])).encode()})

    assert await case.locate(key) == MISSING
    assert await plain.locate("c/0") == Whole(ROOT.join("c/0"))
    assert case.store.calls == plain.store.calls == []


@pytest.mark.parametrize("key", ["notes.txt", "c/00/0", "c/0/0/0", "c", "sub/zarr.json"])
async def test_other_key_is_the_object_of_that_name(key: str) -> None:
    """A key that is no chunk names an object below the container."""
    assert await Container(build(_CHUNKS)).locate(key) == Whole(ROOT.join(key))


async def test_array_hides_its_shards_and_encloses_no_containers() -> None:
    """An array's shards are not listed, and containers can lie below groups only."""
    case = Container(build(_CHUNKS))
    layout = await case.open()
    rules = await layout.listing_rules(VirtualKey(""), case.fetch)
    names = {"zarr.json": True, "notes.txt": True, "a/": True, "c/": False}

    assert rules.shows is not None
    assert {name: rules.shows(name) for name in names} == names
    for kind, encloses in (("array", True), ("group", False)):
        data = json.dumps({"zarr_format": 3, "node_type": kind, "codecs": []}).encode()
        assert (await Container({"zarr.json": data}).open()).encloses(VirtualKey("x")) is encloses


@pytest.mark.parametrize("location", ["start", "end"])
async def test_index_above_the_limit_is_read_by_entry(location: str) -> None:
    """An index up to the limit is read whole; above it, the last byte and one entry are read."""
    objects = build(_CHUNKS, location=location)
    case, large = Container(objects), Container(objects, whole_index_nbytes=67)
    await case.locate("c/0/1")
    await large.locate("c/0/1")
    start = 16 if location == "start" else len(objects["c/0/0"]) - 68 + 16

    assert [call.request for call in case.store.calls] == [
        ByteRange(0, 68) if location == "start" else SuffixRange(68)
    ]
    assert [(call.request, call.if_match) for call in large.store.calls] == [
        (SuffixRange(1), None),
        (ByteRange(start, start + 16), large.etags["c/0/0"]),
    ]


def _array_of_two(shard: bytes, *, trailer: bool = False) -> dict[str, bytes]:
    """Return an array of one shard of two inner chunks."""
    codecs = [sharding([2]), *([CRC] if trailer else [])]
    document = array_metadata([4], [4], codecs)
    return {"zarr.json": json.dumps(document).encode(), "c/0": shard}


def _shard(first: tuple[int, int], second: tuple[int, int] = EMPTY) -> bytes:
    return b"0123456789" + encode_index([first, second])


@pytest.mark.parametrize("whole_index_nbytes", [2**20, 0])
@pytest.mark.parametrize(
    ("shard", "reason"),
    [(_shard((0, 11)), "overlaps the shard index"), (_shard((9, 2)), "overlaps the shard index"),
     (_shard((12, 4)), "overlaps the shard index"), (_shard((0, 46)), "overlaps the shard index"),
     (_shard((0, 47)), "ends past 46 bytes"), (_shard((2**40, 4)), "ends past 46 bytes"),
     (_shard((2**64 - 2, 4)), r"ends past 2\^64"), (_shard((2**64 - 1, 4)), "half an empty marker"),
     (_shard((0, 2**64 - 1)), "half an empty marker"), (_shard((0, 1))[11:], "35 bytes"),
     (b"x", "1 bytes"), (b"", "0 bytes")],
)  # fmt: skip
async def test_damaged_index_raises_damaged_error(
    shard: bytes, reason: str, whole_index_nbytes: int
) -> None:
    """An index that contradicts its shard raises DamagedError that names the shard."""
    case = Container(_array_of_two(shard), whole_index_nbytes=whole_index_nbytes)
    with pytest.raises(DamagedError, match=reason) as caught:
        await case.locate("c/0")

    assert caught.value.ref == ROOT.join("c/0")


async def test_shard_without_its_trailing_checksum_is_damage() -> None:
    """A shard that ends with its index instead of the trailing checksum raises DamagedError."""
    index = encode_index([EMPTY, EMPTY])
    whole = index + checksum(index)

    assert await Container(_array_of_two(whole, trailer=True)).locate("c/0") == MISSING
    with pytest.raises(DamagedError, match="truncated"):
        await Container(_array_of_two(index, trailer=True)).locate("c/0")


async def test_damage_inside_of_a_nested_shard_names_the_object() -> None:
    """An inner index that exceeds its inner shard raises DamagedError that names the object."""
    inner = encode_shard([b"a", b"b"])
    wrong = b"ab" + encode_index([(0, 1), (1, 100)])
    codec = sharding([4], [sharding([2])])
    document = json.dumps(array_metadata([8], [8], [codec])).encode()
    case = Container({"zarr.json": document, "c/0": encode_shard([wrong, inner])})

    assert isinstance(await case.locate("c/2"), Stored)
    with pytest.raises(DamagedError, match=r"data/c/0: inner chunk 1 .* ends past 38 bytes"):
        await case.locate("c/1")


async def test_shard_deleted_between_two_reads_has_changed() -> None:
    """A shard deleted between reads of its end and of an entry raises VersionChangedError."""
    case = Container(build(_CHUNKS), whole_index_nbytes=0)
    layout = await case.open()
    await layout.locate(VirtualKey("c/0/0"), case.fetch)
    case.store.remove(ROOT.join("c/0/0"))
    with pytest.raises(VersionChangedError):
        await layout.locate(VirtualKey("c/0/1"), case.fetch)


_SHARD = encode_shard([b"a", None])
_ELSEWHERE = ObjectRef("memory://bucket", "chunks/abc")
_FIXED = Fixed(ETag('"name"'))
_INDEX = IndexCodec((2,), "end", big_endian=False, checksum_count=1)

type _Locate = Callable[[ShardPlace, int], Awaitable[Chunk]]


def _around(
    store: WatchedStore, whole_index_nbytes: int = 2**20, index: IndexCodec = _INDEX
) -> _Locate:
    fetch = ReadCache(store, MetadataCache(2**20), ttl_s=60)
    return lambda shard, entry: locate_entry(shard, index, entry, fetch, whole_index_nbytes)


async def test_chunks_of_an_inline_shard_are_inline() -> None:
    """Chunks of an inline shard are inline with ETags of their own; damage is a DecodeError."""
    shard = Inline(encode_shard([b"a", b"bc"]), ETag('"v"'))
    first, second = [await _around(WatchedStore())(shard, entry) for entry in (0, 1)]

    assert isinstance(first, Inline)
    assert isinstance(second, Inline)
    assert (first.data, second.data) == (b"a", b"bc")
    assert len({shard.etag, first.etag, second.etag}) == 3
    for data in (b"", b"x" * 35, b"x" * 36, b"x" * 100):
        with pytest.raises(DecodeError):
            await _around(WatchedStore())(Inline(data, ETag('"v"')), 0)


_whole_or_by_entry = pytest.mark.parametrize("whole_index_nbytes", [2**20, 0])


_OBJECT = b"before" + _SHARD + b"after"
_PLACE = ByteRange(6, 6 + len(_SHARD))
_ETAG = MemoryStore().place(_ELSEWHERE, _OBJECT)
_SINCE = UnmodifiedSince(5)


@_whole_or_by_entry
@pytest.mark.parametrize(
    ("shard", "condition", "version"),
    [
        (Part(_ELSEWHERE, _PLACE), None, _ETAG),
        (Part(_ELSEWHERE, _PLACE, _SINCE), _SINCE, _ETAG),
        *(
            (Stored(_ELSEWHERE, _PLACE, fixed), fixed.condition, fixed)
            for fixed in (_FIXED, replaced(_FIXED, condition=_ETAG))
        ),
    ],
)
async def test_index_of_a_referenced_shard_is_read_under_its_condition(
    shard: ShardPlace,
    condition: Condition | None,
    version: ETag | Fixed,
    whole_index_nbytes: int,
) -> None:
    """The index of a referenced shard is read under the reference's condition.

    Chunks of a part have the ETag of the index; those of a fixed shard keep its version.
    """
    store = WatchedStore()
    store.place(_ELSEWHERE, _OBJECT, modified_s=5)
    reader = _around(store, whole_index_nbytes)

    assert await reader(shard, 0) == Stored(_ELSEWHERE, ByteRange(6, 7), version)
    assert [call.if_match for call in store.calls] == [condition]
    assert await reader(shard, 1) == MISSING


@_whole_or_by_entry
async def test_shard_newer_than_its_reference_is_damage(whole_index_nbytes: int) -> None:
    """A shard that was modified after the time of its reference raises DamagedError."""
    store = WatchedStore()
    store.place(_ELSEWHERE, _OBJECT, modified_s=6)
    with pytest.raises(DamagedError, match="not as it was"):
        await _around(store, whole_index_nbytes)(Part(_ELSEWHERE, _PLACE, _SINCE), 0)


@_whole_or_by_entry
@pytest.mark.parametrize("data", [None, b"", _SHARD[:-1], _SHARD[:20]])
@pytest.mark.parametrize("is_fixed", [True, False])
async def test_missing_or_short_referenced_shard_is_damage(
    data: bytes | None, *, is_fixed: bool, whole_index_nbytes: int
) -> None:
    """A referenced shard that is missing or too short raises DamagedError that names the object."""
    store = WatchedStore()
    if data is not None:
        store.place(_ELSEWHERE, data)
    place = ByteRange(0, len(_SHARD))
    shard = Stored(_ELSEWHERE, place, _FIXED) if is_fixed else Part(_ELSEWHERE, place)
    for entry in (0, 1):
        with pytest.raises(DamagedError, match=f"{_ELSEWHERE}: "):
            await _around(store, whole_index_nbytes)(shard, entry)


@_whole_or_by_entry
async def test_reference_past_its_object_or_too_short_is_damage(whole_index_nbytes: int) -> None:
    """A reference past the object's end, or too short for an index, raises DamagedError.

    The latter takes no read.
    """
    index = IndexCodec((2,), "start", big_endian=False, checksum_count=1)
    store = WatchedStore()
    data = encode_shard([b"a", None], location="start")
    store.place(_ELSEWHERE, data)
    reader = _around(store, whole_index_nbytes, index)
    with pytest.raises(DamagedError, match="too few for a shard"):
        await _around(store, whole_index_nbytes)(Part(_ELSEWHERE, ByteRange(0, 35)), 0)
    assert store.calls == []
    with pytest.raises(DamagedError, match=r"is referred to, and it has"):
        await reader(Part(_ELSEWHERE, ByteRange(0, len(data) + 1)), 0)


@pytest.mark.parametrize("key", ["c/3", "c/03", "c/0/0", "c", "c/x", "c/-1"])
async def test_write_to_a_chunk_off_the_grid_is_refused(key: str) -> None:
    """A write to a key like a chunk, but off the grid, raises BadKeyError."""
    array = one_dimension(3)
    with pytest.raises(BadKeyError, match=rf"{key} is no chunk of an array of shape \[3\]"):
        await array.slot(key)


@pytest.mark.parametrize(
    ("array", "key"),
    [
        *((one_dimension(3), key) for key in ("zarr.json", "notes.txt", "d/0", ".zattrs")),
        *(
            (WrittenArray(array_metadata([3], [3], codecs)), "c/0")
            for codecs in ([LITTLE], [sharding([1]), {"name": "gzip"}])
        ),
    ],
)
async def test_write_target_of_other_keys_is_the_object(array: WrittenArray, key: str) -> None:
    """The write target of other keys, or of chunks without shards, is an object or document."""
    target = await Container(array.stored).target(key)

    assert isinstance(target, Whole if key == "c/0" else Whole | Document)
    assert target.ref == ROOT.join(key)
