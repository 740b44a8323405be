"""Lookups of chunks and the reads that they take; TensorStore agrees on the places."""

import asyncio
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardgate.errors import DamagedError, VersionChangedError
from shardgate.model import MISSING, Coded, Stored, VirtualKey, Whole
from tests.support.formats.case import Container
from tests.support.formats.neuroglancer_precomputed.case import (
    GZIP_DATA,
    IDS,
    annotation_info,
    build,
    build_meshes,
    encode_manifest,
    mesh_info,
    volume_info,
)
from tests.support.formats.neuroglancer_precomputed.shards import (
    RAW_SHARDING,
    address,
    build_shards,
    container,
    decoded,
    part,
)
from tests.support.formats.zarr.building import chunk_bytes
from tests.support.resolving import ROOT

FIRST, SECOND, THIRD, _, LAST = IDS
_CHUNKS = {key: chunk_bytes(number) for key, number in IDS.items() if number != 3}
_OBJECTS = build(_CHUNKS)
"""Shard 0 has ids 0 and 1 in its first minishard, 2 in its second; shard 1 has 4 in its first."""


async def test_cold_chunk_takes_three_reads_of_one_version() -> None:
    """A chunk takes reads of shard index, minishard index and data under one ETag."""
    case = Container(_OBJECTS)
    await case.warm("info")
    assert await case.read(THIRD) == _CHUNKS[THIRD]
    at = 32 + 3 + 5 + 3 + 6 + 48 + 3
    etag = case.etags["s0/0.shard"]

    assert case.reads == [
        ("s0/0.shard", part(0, 32)),
        ("s0/0.shard", part(at + 7, 24)),
        ("s0/0.shard", part(at, 7)),
    ]
    assert [call.if_match for call in case.store.calls] == [None, etag, etag]


@pytest.mark.parametrize(("bits", "request_nbytes"), [(12, 2**16), (13, 16)])
async def test_shard_index_above_64_kib_is_read_by_entry(bits: int, request_nbytes: int) -> None:
    """A shard index above 64 KiB is read by entry, whatever the limit for whole indexes."""
    sharding = {**RAW_SHARDING, "minishard_bits": bits}
    case = Container(build(_CHUNKS, sharding=sharding), whole_index_nbytes=2**22)
    await case.warm("info")
    assert await case.read(FIRST) == _CHUNKS[FIRST]

    assert case.reads[0] == ("s0/0.shard", part(0, request_nbytes))


@pytest.mark.parametrize(
    ("known", "key", "keys"),
    [
        (FIRST, THIRD, ["s0/0.shard"] * 2),
        (THIRD, "s0/2-5_8-10_0-1", []),
        (LAST, "s0/5-6_8-10_0-1", []),
        *(
            ("info", f"s0/{bounds}_0-1", [])
            for bounds in ("5-8_5-8", "8-11_5-8", "-4--1_5-8", "0-3_5-8", "900-903_5-8")
        ),
    ],
)
async def test_cached_indexes_are_not_read_again(known: str, key: str, keys: list[str]) -> None:
    """Cached documents and indexes are not read again, and prove absence without a read."""
    case = Container(_OBJECTS)
    await case.warm(known)

    assert await case.read(key) == _CHUNKS.get(key)
    assert case.keys == keys


async def test_absent_shard_is_looked_for_once() -> None:
    """An absent shard takes one read of ``.shard`` and one of ``.index`` for all its chunks."""
    case = Container(build({FIRST: b"first"}))
    await case.warm(FIRST)
    assert await case.read(LAST) is None
    assert await case.read("s0/5-6_8-10_0-1") is None

    assert case.keys == ["s0/1.shard", "s0/1.index"]


async def test_malformed_scale_damages_only_its_own_chunks() -> None:
    """Chunks of a malformed scale are damage that names it, and its shards are plain objects."""
    info = volume_info(RAW_SHARDING)
    info["scales"] += volume_info(RAW_SHARDING, key="s1", chunk_sizes=[[3, 3]])["scales"]
    case = Container({**_OBJECTS, "info": json.dumps(info).encode(), "s1/0.shard": b"a shard"})

    assert await case.read(FIRST) == _CHUNKS[FIRST]
    with pytest.raises(DamagedError, match="info: scales s1: chunk_sizes"):
        await case.read(FIRST.replace("s0", "s1"))
    with pytest.raises(DamagedError):
        await case.target(FIRST.replace("s0", "s1"))
    assert await case.read("s1/0.shard") == b"a shard"


@pytest.mark.parametrize("key", ["s0", "a/b/8_8_8", "a/b/"])
async def test_no_container_is_searched_below_a_scale(key: str) -> None:
    """A chunk of a scale with a deep path takes reads of the root's markers and its shard only."""
    objects = build_shards({0: b"first"}, RAW_SHARDING)
    path = key.rstrip("/")
    shards = {f"{path}/{name}": data for name, data in objects.items()}
    case = container(volume_info(RAW_SHARDING, key=key), **shards)
    assert await case.read(f"{path}/-1-2_5-8_0-1") == b"first"

    markers = {"zarr.json", "info", "repo", "refs/branch.main/ref.json"}
    assert set(case.keys) == {*markers, f"{path}/0.shard"}
    assert case.keys.count("info") == 1


async def test_keys_below_scales_are_enclosed() -> None:
    """Keys below the path of any of 1,000 scales are enclosed, and no others."""
    layout = await container({"scales": [{"key": f"{n}"} for n in range(1000)]}).open()
    keys = ["7/x", "7/", "999/x/y", "7", "/7/", "1000/x", "x/7/", ""]

    assert [key for key in keys if layout.encloses(VirtualKey(key))] == keys[:3]


@pytest.mark.parametrize(
    "key",
    [
        *("s0/0.shard", "provenance", "s0/notes.txt", "s0/-1-02_5-8_0-1", "-1-2_5-8_0-1", "7"),
        *("s0", "plain/-1-2_5-8_0-1", "future/0.shard", "future/-1-2_5-8_0-1"),
    ],
)
async def test_other_key_is_the_object_of_that_name(key: str) -> None:
    """A key that is no chunk of a scale with known sharding, shards included, names an object."""
    info = volume_info(RAW_SHARDING)
    info["scales"] += volume_info(None, key="plain")["scales"]
    info["scales"] += volume_info({"@type": "from_the_future"}, key="future")["scales"]

    assert await container(info).locate(key) == Whole(ROOT.join(key))


async def test_mesh_takes_reads_of_manifest_and_fragments() -> None:
    """A mesh's fragments lie before its manifest and are read under the same ETag."""
    case = Container(build_meshes({"2": b"fragments"}, sharding=RAW_SHARDING))
    manifest = encode_manifest([[2], [7]])
    await case.warm("info")
    assert await case.read("2") == b"fragments"
    place = part(32 + 9, len(manifest))
    assert case.keys == ["0.shard"] * 4
    assert case.reads[2:] == [("0.shard", place), ("0.shard", part(32, 9))]
    of_manifest, of_fragments = case.store.calls[-2:]
    assert of_manifest.if_match == of_fragments.if_match is not None

    case.store.calls.clear()
    assert await case.read("2.index") == manifest
    assert case.reads == [("0.shard", place)]


async def test_fragments_of_gzip_manifests_are_not_compressed() -> None:
    """Fragments of gzip manifests are read as stored; a mesh without fragments is empty."""
    case = Container(build_meshes({"2": b"fragments"}, sharding=GZIP_DATA))
    objects = build_shards({2: encode_manifest([])}, RAW_SHARDING)
    empty = container(mesh_info(RAW_SHARDING), **objects)

    assert isinstance(await case.locate("2"), Stored)
    assert isinstance(await case.locate("2.index"), Coded)
    assert await case.read("2.index") == encode_manifest([[2], [7]])
    assert [await empty.read(key) for key in ("2", "3")] == [b"", None]


_OLD = build(_CHUNKS, old=True)


async def test_chunk_of_a_shard_in_two_objects_rereads_its_index() -> None:
    """A chunk of a shard in two objects takes a second read of its index after its data's ETag."""
    case = Container(_OLD)
    await case.warm("info")
    assert await case.read(FIRST) == _CHUNKS[FIRST]

    assert case.keys == [
        *("s0/0.shard", "s0/0.index", "s0/0.data", "s0/0.index"),
        *("s0/0.data", "s0/0.data"),
    ]
    assert [call.if_match for call in case.store.calls[-2:]] == [case.etags["s0/0.data"]] * 2


@pytest.mark.parametrize(
    ("objects", "limit", "expected"),
    [
        *((_OBJECTS, limit, ("s0/0.shard", part(32 + 3 + 5 + 3, 6))) for limit in (2**20, 0)),
        (_OLD, 2**20, ("s0/0.data", part(3 + 5 + 3, 6))),
    ],
)
async def test_chunk_of_a_cached_minishard_takes_one_read(
    objects: dict[str, bytes], limit: int, expected: Any
) -> None:
    """A chunk of a cached minishard index takes one read of exactly its bytes."""
    case = Container(objects, whole_index_nbytes=limit)
    await case.warm(FIRST)
    assert await case.read(SECOND) == _CHUNKS[SECOND]

    assert case.reads == [expected]


async def test_index_deleted_between_reads_has_changed() -> None:
    """An index object deleted between reads raises VersionChangedError."""
    case = Container(_OLD)
    layout, rest = await case.open(), VirtualKey(FIRST)
    await case.fetch.stat(ROOT.join("s0/0.index"))
    await layout.locate(rest, case.fetch)
    case.store.place(ROOT.join("s0/0.data"), b"another")
    case.store.remove(ROOT.join("s0/0.index"))
    case.fetch.forget(ROOT.join("s0/0.data"))
    with pytest.raises(VersionChangedError):
        await layout.locate(rest, case.fetch)


@pytest.mark.parametrize("hash_name", ["identity", "murmurhash3_x86_128"])
@pytest.mark.parametrize(
    ("preshift_bits", "minishard_bits", "shard_bits"),
    [(0, 0, 0), (3, 2, 1), (0, 1, 4), (60, 2, 2), (1, 3, 5), (64, 2, 3), (0, 0, 64), (5, 6, 58)],
)
def test_tensorstore_agrees_on_shard_and_minishard_of_ids(
    hash_name: str, preshift_bits: int, minishard_bits: int, shard_bits: int
) -> None:
    """TensorStore writes random ids to the shards and minishards that the builder computes."""
    import tensorstore as ts  # noqa: PLC0415 - the only test of it

    document = {
        **RAW_SHARDING,
        "hash": hash_name,
        "preshift_bits": preshift_bits,
        "minishard_bits": minishard_bits,
        "shard_bits": shard_bits,
    }
    numbers = random.Random(minishard_bits)
    ids = {0, 1, 2**64 - 1, *(numbers.getrandbits(numbers.randint(1, 64)) for _ in range(20))}
    base = ts.KvStore.open("memory://", context=(context := ts.Context())).result()
    spec = {"driver": "neuroglancer_uint64_sharded", "base": "memory://", "metadata": document}
    sharded = ts.KvStore.open(spec, context=context).result()
    with ts.Transaction() as transaction:
        kvstore = sharded.with_transaction(transaction)
        for chunk_id in ids:
            kvstore[chunk_id.to_bytes(8, "big")] = b"%d" % chunk_id

    found = {}
    for key in base.list().result():
        for minishard, chunks in enumerate(decoded(base[key], document)):
            for chunk_id, (start, stop) in chunks.items():
                assert base[key][start:stop] == b"%d" % chunk_id
                found[chunk_id] = (key.decode().removesuffix(".shard"), minishard)
    assert found == {chunk_id: address(chunk_id, document) for chunk_id in ids}


_NUMBERED = {
    **build({key: chunk_bytes(number) for key, number in IDS.items()}),
    "s0/2": b"an object",
    "s0/3": b"",
}
"""A volume with all chunks, and objects that are named like the ids of two."""
_TAKEN = ("2", "3")


@settings(max_examples=200)
@given(st.text("-+_ .0123456789٣", max_size=4) | st.integers(-1, 2**65).map(str))
def test_only_the_id_of_a_possible_chunk_names_it(text: str) -> None:
    """A chunk is located by the canonical decimal text of its id, and an object before it."""
    located = asyncio.run(Container(_NUMBERED).locate(f"s0/{text}"))
    names = {str(number): key for key, number in IDS.items() if str(number) not in _TAKEN}
    if text in names:
        expected = asyncio.run(Container(_NUMBERED).locate(names[text]))
        assert isinstance(expected, Stored)
        assert located == expected
    elif text == "6":  # on the grid, and stored by no name
        assert located == MISSING
    else:
        assert located == Whole(ROOT.join(f"s0/{text}"))


async def test_id_of_a_possible_chunk_is_written_into_its_shard() -> None:
    """A chunk is written by its id where no object has that name; other numbers name objects."""
    case = Container(_NUMBERED)

    assert await case.target("s0/1") == await case.target(SECOND)
    for key in ("s0/2", "s0/3", "s0/5", "s0/01"):
        assert await case.target(key) == Whole(ROOT.join(key))


async def test_chunk_of_a_spatial_level_is_located_by_its_id() -> None:
    """In a spatial level, where no number names an object, a number is the id of a chunk."""
    shard = build_shards({5: b"a cell"}, RAW_SHARDING)
    objects = {f"spatial1/{name}": data for name, data in shard.items()}
    case = container(annotation_info(RAW_SHARDING), **objects, **{"spatial1/5": b"an object"})

    assert await case.read("spatial1/5") == await case.read("spatial1/1_0_2") == b"a cell"
    assert await case.target("spatial1/5") == await case.target("spatial1/1_0_2")


@pytest.mark.parametrize("bits", [True, 64, -1, "1"])
def test_values_with_a_malformed_sharding_are_served_as_stored(bits: Any) -> None:
    """A number beside a malformed sharding, of no known type, names an object."""
    case = container({**RAW_SHARDING, "shard_bits": bits})

    assert asyncio.run(case.locate("7")) == Whole(ROOT.join("7"))
