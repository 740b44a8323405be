"""From keys to places."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardgate.errors import (
    BadKeyError,
    DamagedError,
    VersionChangedError,
)
from shardgate.formats.contract import Document
from shardgate.formats.reading import DecodeError
from shardgate.formats.zarr.index import IndexCodec, IndexLocation
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
from tests.formats.case import Container, filled
from tests.formats.zarr.building import (
    CRC,
    EMPTY,
    LITTLE,
    WrittenArray,
    array_metadata,
    build,
    build_nested,
    checksum,
    chunk_bytes,
    encode_index,
    encode_shard,
    one_dimension,
    sharding,
)
from tests.formats.zarr.nesting import Nesting, nestings
from tests.read.stores import WatchedStore
from tests.support.resolving import ROOT, reading

_CHUNKS = {"c/0/0": b"first", "c/0/1": b"second", "c/2/3": b"third"}


@settings(max_examples=60)
@given(nestings(), st.data())
def test_every_chunk_of_every_nesting_is_read(nesting: Nesting, data: st.DataObject) -> None:
    """Whatever is nested, transposed and checksummed how, chunks are exact and others absent."""
    coords = list(nesting.coords())
    written = data.draw(st.sets(st.sampled_from(coords), max_size=8))
    chunks = {c: chunk_bytes(number) for number, c in enumerate(sorted(written))}
    store = WatchedStore()
    filled(nesting.build(chunks), store)

    async def read(limit: int) -> dict[tuple[int, ...], bytes | None]:
        resolver = reading(store, whole_index_nbytes=limit)
        return {c: await resolver.read("/".join(["c", *map(str, c)])) for c in coords[:200]}

    for limit in (2**20, 40, 0):
        assert asyncio.run(read(limit)) == {c: chunks.get(c) for c in coords[:200]}


async def test_nested_indexes_are_read_of_one_version() -> None:
    """The inner index is read with the ETag that came with the outer one."""
    case = Container(build_nested({"c/1": b"one"}))
    await case.locate("c/1")

    assert [call.if_match for call in case.store.calls] == [None, case.etags["c/0"]]


@pytest.mark.parametrize("key", ["c/3/0", "c/0/4", "c/999999/0"])
async def test_off_the_grid_nothing_is_read(key: str) -> None:
    """A key past the edge is proved absent by the metadata; what is not sharded is an object."""
    case = Container(build(_CHUNKS))
    plain = Container({"zarr.json": json.dumps(array_metadata([4], [2], [LITTLE])).encode()})

    assert await case.locate(key) == MISSING
    assert await plain.locate("c/0") == Whole(ROOT.join("c/0"))
    assert case.store.calls == plain.store.calls == []


@pytest.mark.parametrize("key", ["notes.txt", "c/00/0", "c/0/0/0", "c", "sub/zarr.json"])
async def test_what_is_no_chunk_is_the_object_of_that_name(key: str) -> None:
    """Other keys name objects below the container."""
    assert await Container(build(_CHUNKS)).locate(key) == Whole(ROOT.join(key))


async def test_an_array_encloses_and_hides_its_shards() -> None:
    """Only below a group there can be containers; names of shards now mean inner chunks."""
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
async def test_a_large_index_is_read_entry_by_entry(location: str) -> None:
    """Below the limit one read brings the index, size and version of the shard.

    Above the limit the last byte tells the size, and one entry of that version is read.
    """
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
    """Make an array of one shard of two inner chunks."""
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
async def test_a_damaged_shard_is_named(shard: bytes, reason: str, whole_index_nbytes: int) -> None:
    """An index that contradicts its shard is damage, never absence."""
    case = Container(_array_of_two(shard), whole_index_nbytes=whole_index_nbytes)
    with pytest.raises(DamagedError, match=reason) as caught:
        await case.locate("c/0")

    assert caught.value.ref == ROOT.join("c/0")


async def test_a_shard_without_its_trailing_checksum_is_truncated() -> None:
    """An index that happens to be the whole rest of a shard proves no absence."""
    index = encode_index([EMPTY, EMPTY])
    whole = index + checksum(index)

    assert await Container(_array_of_two(whole, trailer=True)).locate("c/0") == MISSING
    with pytest.raises(DamagedError, match="truncated"):
        await Container(_array_of_two(index, trailer=True)).locate("c/0")


async def test_damage_inside_of_a_nested_shard_names_the_object() -> None:
    """The inner index of a nested shard is checked against the inner shard."""
    inner = encode_shard([b"a", b"b"])
    wrong = b"ab" + encode_index([(0, 1), (1, 100)])
    codec = sharding([4], [sharding([2])])
    document = json.dumps(array_metadata([8], [8], [codec])).encode()
    case = Container({"zarr.json": document, "c/0": encode_shard([wrong, inner])})

    assert isinstance(await case.locate("c/2"), Stored)
    with pytest.raises(DamagedError, match=r"data/c/0: inner chunk 1 .* ends past 38 bytes"):
        await case.locate("c/1")


async def test_a_shard_that_vanishes_between_its_reads_has_changed() -> None:
    """Once its end was seen, an entry that cannot be read is no absence."""
    case = Container(build(_CHUNKS), whole_index_nbytes=0)
    layout = await case.open()
    await layout.locate(VirtualKey("c/0/0"), case.fetch)
    case.store.remove(ROOT.join("c/0/0"))
    with pytest.raises(VersionChangedError):
        await layout.locate(VirtualKey("c/0/1"), case.fetch)


_SHARD = encode_shard([b"a", None])
_ELSEWHERE = ObjectRef("memory://bucket", "chunks/abc")
_FIXED = Fixed(ETag('"name"'))
_INDEX = IndexCodec(2, IndexLocation.END, big_endian=False, has_checksum=True)

type _Locate = Callable[[ShardPlace, int], Awaitable[Chunk]]


def _around(
    store: WatchedStore, whole_index_nbytes: int = 2**20, index: IndexCodec = _INDEX
) -> _Locate:
    fetch = ReadCache(store, MetadataCache(2**20), ttl_s=60)
    return lambda shard, entry: locate_entry(shard, index, entry, fetch, whole_index_nbytes)


async def test_a_shard_cached_body_gives_chunks_cached_body() -> None:
    """Bytes with a version of their own; they have no object to be named when damaged."""
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


@_whole_or_by_entry
async def test_a_chunk_of_a_part_is_of_the_version_of_its_index(whole_index_nbytes: int) -> None:
    """Of an object as it is now the index tells which version that is."""
    store = WatchedStore()
    etag = store.place(_ELSEWHERE, b"before" + _SHARD + b"after")
    reader = _around(store, whole_index_nbytes)
    part = Part(_ELSEWHERE, ByteRange(6, 6 + len(_SHARD)))

    assert await reader(part, 0) == Stored(_ELSEWHERE, ByteRange(6, 7), etag)
    assert await reader(part, 1) == MISSING
    assert {call.if_match for call in store.calls} == {None}


@_whole_or_by_entry
@pytest.mark.parametrize("condition", [None, ETag('"x"')])
async def test_a_chunk_of_a_fixed_shard_is_as_fixed(
    condition: Condition | None, whole_index_nbytes: int
) -> None:
    """Its index is read under the condition that was told, and the chunk will be."""
    store = WatchedStore()
    etag = store.place(_ELSEWHERE, b"before" + _SHARD, modified_s=5)
    condition = etag if isinstance(condition, str) else condition
    version = Fixed(ETag('"name"'), condition)
    place = Stored(_ELSEWHERE, ByteRange(6, 6 + len(_SHARD)), version)
    found = await _around(store, whole_index_nbytes)(place, 0)

    assert found == Stored(_ELSEWHERE, ByteRange(6, 7), version)
    assert [call.if_match for call in store.calls] == [condition]


@_whole_or_by_entry
async def test_a_time_does_not_tell_all_versions_apart(whole_index_nbytes: int) -> None:
    """The chunk has to be of the version of the index, which is as old as was told."""
    store = WatchedStore()
    etag = store.place(_ELSEWHERE, b"before" + _SHARD, modified_s=5)
    place = Part(_ELSEWHERE, ByteRange(6, 6 + len(_SHARD)), UnmodifiedSince(5))
    found = await _around(store, whole_index_nbytes)(place, 0)

    assert found == Stored(_ELSEWHERE, ByteRange(6, 7), etag)
    assert [call.if_match for call in store.calls] == [UnmodifiedSince(5)]
    store.place(_ELSEWHERE, b"before" + _SHARD, modified_s=6)
    with pytest.raises(DamagedError, match="not as it was"):
        await _around(store, whole_index_nbytes)(place, 0)


@_whole_or_by_entry
@pytest.mark.parametrize("data", [None, b"", _SHARD[:-1], _SHARD[:20]])
@pytest.mark.parametrize("is_fixed", [True, False])
async def test_a_shard_that_is_referred_to_has_to_be_there(
    data: bytes | None, *, is_fixed: bool, whole_index_nbytes: int
) -> None:
    """That it is missing or too short is no absence of its chunks; the object is named."""
    store = WatchedStore()
    if data is not None:
        store.place(_ELSEWHERE, data)
    place = ByteRange(0, len(_SHARD))
    shard = Stored(_ELSEWHERE, place, _FIXED) if is_fixed else Part(_ELSEWHERE, place)
    for entry in (0, 1):
        with pytest.raises(DamagedError, match=f"{_ELSEWHERE}: "):
            await _around(store, whole_index_nbytes)(shard, entry)


@_whole_or_by_entry
async def test_a_shard_is_neither_longer_than_its_object_nor_too_short(
    whole_index_nbytes: int,
) -> None:
    """Also where the index could be read; of a range too short for it nothing is read."""
    index = IndexCodec(2, IndexLocation.START, big_endian=False, has_checksum=True)
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
async def test_what_is_no_chunk_of_the_grid_is_refused(key: str) -> None:
    """It would be an object that nobody finds, or one in the place of a shard."""
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
async def test_other_keys_are_objects(array: WrittenArray, key: str) -> None:
    """Beside the chunks of the array, or chunks that are not sharded or served with the shards."""
    target = await Container(array.stored).target(key)

    assert isinstance(target, Whole if key == "c/0" else Whole | Document)
    assert target.ref == ROOT.join(key)
