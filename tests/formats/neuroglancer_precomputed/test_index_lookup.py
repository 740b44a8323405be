"""Lookups in damaged indexes, and manifests of meshes."""

import json
import struct
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgate.errors import DamagedError
from shardgate.formats.neuroglancer_precomputed.index import decode_manifest
from shardgate.formats.reading import DecodeError
from tests.support.formats.case import Container
from tests.support.formats.neuroglancer_precomputed.case import (
    build,
    encode_manifest,
    mesh_info,
    skeleton_info,
)
from tests.support.formats.neuroglancer_precomputed.shards import (
    SINGLE,
    Sharding,
    encode_minishard,
    single_shard,
)
from tests.support.resolving import ROOT
from tests.support.zipped import zipped

_LIMIT = 2**14
_BODY = b"0123456789"
_whole_or_entry = pytest.mark.parametrize("whole_index_nbytes", [2**20, 0])


def _entries(start: int, stop: int) -> bytes:
    return struct.pack("<2Q", start, stop)


_shard = partial(single_shard, body=_BODY)


def _skeletons(shard: bytes, sharding: Sharding = SINGLE) -> dict[str, bytes]:
    return {"info": json.dumps(skeleton_info(sharding)).encode(), "0.shard": shard}


async def _damage(objects: dict[str, bytes], key: str, reason: str, limit: int = 2**20) -> None:
    """Assert that reading *key* raises DamagedError of the shard with *reason*."""
    case = Container(objects, whole_index_nbytes=limit, decoded_bytes=_LIMIT)
    with pytest.raises(DamagedError, match=reason) as caught:
        await case.read(key)
    assert caught.value.ref == ROOT.join("0.shard")


@_whole_or_entry
@pytest.mark.parametrize(
    ("shard", "reason"),
    [
        (b"", r"0 bytes are too few"),
        (b"x", "1 bytes of shard index instead of 16: it is truncated"),
        (_shard((7, 0, 5))[:15], "15 bytes of shard index instead of 16: it is truncated"),
        (_shard((7, 0, 5))[:16], r"minishard index 0 at \[10, 34\) ends past 0 bytes"),
        (_shard((7, 0, 5))[:-1], r"minishard index 0 at \[10, 34\) ends past 33 bytes"),
        (_entries(1, 0) + _BODY, "minishard index 0 ends at 0, before 1"),
        (_entries(2**64 - 1, 0) + _BODY, "ends at 0, before"),
        (_entries(0, 2**64 - 1) + _BODY, "ends past 10 bytes"),
        (_entries(2**64 - 2, 2**64 - 1) + _BODY, "ends past 10 bytes"),
        (_entries(0, 11) + _BODY, "ends past 10 bytes"),
        (_entries(11, 12) + _BODY, "ends past 10 bytes"),
        (_entries(0, 10) + _BODY, "10 bytes, no multiple of 24"),
        (_entries(0, _LIMIT + 24) + bytes(2 * _LIMIT), "has over 16384 bytes"),
    ],
)
async def test_damaged_shard_or_minishard_index_is_damage(
    shard: bytes, reason: str, whole_index_nbytes: int
) -> None:
    """A truncated, reversed, misplaced or too large index raises DamagedError of the shard."""
    await _damage(_skeletons(shard), "7", reason, whole_index_nbytes)
    await _damage(_skeletons(shard), "8", reason, whole_index_nbytes)


@_whole_or_entry
@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        ((7, 2**40, 5), r"chunk 7 at \[1099511627776, 1099511627781\) ends past 58 bytes"),
        ((7, 0, 59), r"chunk 7 at \[0, 59\) ends past 58 bytes"),
        ((7, 58, 1), "ends past 58 bytes"),
        ((7, 0, 58), "overlaps its minishard index"),
        ((7, 0, 11), "overlaps its minishard index"),
        ((7, 57, 1), "overlaps its minishard index"),
        ((7, 20, 2), "overlaps its minishard index"),
    ],
)
async def test_damaged_entry_affects_only_its_chunk(
    chunk: tuple[int, int, int], reason: str, whole_index_nbytes: int
) -> None:
    """An entry past the shard or over its index raises DamagedError; its neighbour is read."""
    objects = _skeletons(_shard((3, 0, 4), chunk))
    await _damage(objects, "7", reason, whole_index_nbytes)

    assert await Container(objects).read("3") == b"0123"


@_whole_or_entry
@pytest.mark.parametrize("chunk", [(7, 2**64 - 2, 5), (7, 2, 2**64 - 1)])
@pytest.mark.parametrize("key", ["3", "7", "9"])
async def test_entry_past_64_bits_is_damage_of_its_minishard(
    key: str, chunk: tuple[int, int, int], whole_index_nbytes: int
) -> None:
    """An entry that ends past 2^64 raises DamagedError for every id of its minishard."""
    objects = _skeletons(_shard((3, 0, 4), chunk))

    await _damage(objects, key, r"chunk 7 ends past 2\^64", whole_index_nbytes)


@pytest.mark.parametrize("chunk", [(7, 0, 10), (7, 10, 0), (7, 34, 0), (7, 9, 1)])
async def test_chunk_may_fill_all_bytes_before_its_index(chunk: tuple[int, int, int]) -> None:
    """A chunk may reach up to its minishard index, and an empty chunk may lie anywhere."""
    _, start, size = chunk

    assert await Container(_skeletons(_shard(chunk))).read("7") == _BODY[start : start + size]


async def test_chunks_may_share_bytes() -> None:
    """Chunks that share bytes are read."""
    case = Container(_skeletons(_shard((3, 0, 6), (7, 0, 6), (8, 2, 4))))

    assert [await case.read(key) for key in ("3", "7", "8")] == [b"012345", b"012345", b"2345"]


_BOMB = zipped(bytes(_LIMIT + 24))


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        (_BOMB, "more than 16384 bytes once inflated"),
        (zipped(encode_minishard([(7, 0, 5)]))[:-1], "the gzip data ends early"),
        (zipped(bytes(25)), "25 bytes, no multiple of 24"),
    ],
)
async def test_minishard_index_that_does_not_inflate_is_damage(index: bytes, reason: str) -> None:
    """A gzip minishard index that is truncated, of a wrong size or a bomb raises DamagedError."""
    sharding = {**SINGLE, "minishard_index_encoding": "gzip"}
    shard = _entries(10, 10 + len(index)) + _BODY + index
    await _damage(_skeletons(shard, sharding), "7", reason)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (_BOMB, "more than 16384 bytes once inflated"),
        (b"plain", "no gzip"),
        (b"", "the gzip data ends early"),
        (bytes(_LIMIT + 1), "16385 bytes of gzip are too many to inflate"),
    ],
)
async def test_gzip_chunk_that_does_not_inflate_is_damage(data: bytes, reason: str) -> None:
    """A gzip chunk that is malformed, empty or a bomb raises DamagedError."""
    shard = _shard((7, 0, len(data)), body=data)
    await _damage(_skeletons(shard, {**SINGLE, "data_encoding": "gzip"}), "7", reason)


def _meshes(manifest: bytes, sharding: Sharding) -> dict[str, bytes]:
    shard = _shard((7, 10, len(manifest)), body=_BODY + manifest)
    return {"info": json.dumps(mesh_info(sharding)).encode(), "0.shard": shard}


_TOO_LONG = encode_manifest([[1] * 2000])


@pytest.mark.parametrize(
    ("encoding", "manifest", "reason"),
    [
        ("raw", encode_manifest([[5, 6]]), "is of 11 bytes of fragments, more than lie before it"),
        ("raw", encode_manifest([[2**32 - 1] * 3]), "is of 12884901885 bytes of fragments"),
        ("raw", encode_manifest([[5, 6]])[:-1], "the mesh manifest ends after 79 bytes, early"),
        ("raw", b"", "the mesh manifest ends after 0 bytes, early"),
        ("raw", _TOO_LONG, "is longer than 16384 bytes"),
        ("gzip", zipped(_TOO_LONG), "more than 16384 bytes once inflated"),
        ("gzip", zipped(encode_manifest([[5]]))[:-1], "the gzip data ends early"),
        ("gzip", zipped(encode_manifest([[11]])), "is of 11 bytes of fragments"),
    ],
)
async def test_damaged_manifest_is_damage(encoding: str, manifest: bytes, reason: str) -> None:
    """A manifest that is truncated, too long or without room for its fragments is damage.

    A raw manifest itself is served as stored.
    """
    objects = _meshes(manifest, {**SINGLE, "data_encoding": encoding})
    await _damage(objects, "7", reason)

    assert encoding == "gzip" or await Container(objects).read("7.index") == manifest


async def test_fragments_over_a_minishard_index_are_damage() -> None:
    """Fragments that would overlap the minishard index raise DamagedError."""
    manifest = encode_manifest([[11]])
    index = encode_minishard([(7, 34, len(manifest))])
    shard = _entries(10, 34) + _BODY + index + manifest
    objects = {"info": json.dumps(mesh_info(SINGLE)).encode(), "0.shard": shard}

    await _damage(objects, "7", r"the fragments at \[39, 50\) overlap their minishard index")


@pytest.mark.parametrize("minishard_bits", [40, 60, 64])
async def test_shard_too_short_for_its_minishards_is_damage(minishard_bits: int) -> None:
    """A shard too short for 2^40 minishards or more raises DamagedError; an absent one does not."""
    sharding = {**SINGLE, "minishard_bits": minishard_bits, "shard_bits": 64 - minishard_bits}
    name = "0" * max(1, (64 - minishard_bits + 3) // 4) + ".shard"
    objects = _skeletons(b"", sharding)
    del objects["0.shard"]
    assert await Container(objects).read("7") is None

    case = Container({**objects, name: bytes(1000)})
    with pytest.raises(DamagedError, match="bytes") as caught:
        await case.read(str(2**64 - 1 >> 64 - minishard_bits))
    assert caught.value.ref == ROOT.join(name)


async def test_shard_shorter_than_its_index_is_damage_where_one_entry_is_read() -> None:
    """A shard that ends within its index raises DamagedError, though the wanted entry is there."""
    sharding = {**SINGLE, "minishard_bits": 13}
    objects = _skeletons(bytes(2**16), sharding)

    await _damage(objects, "7", "65536 bytes are too few for its shard index")


_VOLUME = build({"s0/-1-2_5-8_0-1": b"chunk"}, old=True)


@pytest.mark.parametrize(
    ("damage", "name", "reason"),
    [
        ({"s0/0.data": None}, "data", "does not exist, though its index does"),
        ({"s0/0.index": b""}, "index", "too few"),
        ({"s0/0.index": bytes(31)}, "index", "31 bytes of shard index instead of 32"),
        ({"s0/0.index": _entries(9, 8) * 2}, "index", "ends at 8, before 9"),
        ({"s0/0.data": _VOLUME["s0/0.data"][:-1]}, "data", "ends past 31 bytes"),
        ({"s0/0.data": b""}, "data", "too few"),
    ],
)
async def test_damage_of_a_shard_in_two_objects_names_the_object(
    damage: dict[str, bytes | None], name: str, reason: str
) -> None:
    """Damage of a shard in two objects raises DamagedError that names the faulty one."""
    objects = {key: data for key, data in {**_VOLUME, **damage}.items() if data is not None}
    case = Container(objects)
    with pytest.raises(DamagedError, match=reason) as caught:
        await case.read("s0/-1-2_5-8_0-1")

    assert caught.value.ref == ROOT.join(f"s0/0.{name}")


_decode_manifest = partial(decode_manifest, encoding="raw", most_nbytes=2**16)
_inflate = partial(decode_manifest, encoding="gzip", most_nbytes=2**16)
_lods = st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=6), max_size=5)


@given(_lods, st.binary(max_size=20))
def test_fragments_of_a_manifest_are_summed(lods: list[list[int]], more: bytes) -> None:
    """The fragments' length is the sum over all levels, in raw and gzip manifests."""
    manifest = encode_manifest(lods)

    assert _decode_manifest(manifest).fragments_nbytes == sum(map(sum, lods))
    assert _inflate(zipped(manifest)).fragments_nbytes == sum(map(sum, lods))
    assert _decode_manifest(manifest + more) == _decode_manifest(manifest)


@given(_lods)
def test_truncated_manifest_is_refused(lods: list[list[int]]) -> None:
    """A manifest truncated at any byte raises DecodeError."""
    manifest = encode_manifest(lods)
    for length in range(len(manifest)):
        with pytest.raises(DecodeError, match=f"ends after {length} bytes, early"):
            _decode_manifest(manifest[:length])


@pytest.mark.parametrize("count", [2, 2**16, 2**31, 2**32 - 1])
def test_manifest_with_too_large_counts_is_refused(count: int) -> None:
    """A manifest with more levels or fragments than it has room for raises DecodeError."""
    manifest = encode_manifest([[5]])
    levels = manifest[:24] + struct.pack("<I", count) + manifest[28:]
    fragments = manifest[:44] + struct.pack("<I", count) + manifest[48:]

    for damaged in (levels, fragments):
        with pytest.raises(DecodeError, match="early"):
            _decode_manifest(damaged)


@pytest.mark.parametrize(("count", "is_read"), [(1024, True), (1025, False), (5000, False)])
def test_levels_of_detail_are_limited(count: int, *, is_read: bool) -> None:
    """A manifest of 1,024 levels of detail is read; one of more raises DecodeError."""
    manifest = encode_manifest([[1]] * count)
    if is_read:
        assert _decode_manifest(manifest).fragments_nbytes == count
    else:
        with pytest.raises(DecodeError, match=f"is of {count} levels of detail"):
            _decode_manifest(manifest)
