"""From names to places, and the reads for that; TensorStore agrees on the places."""

import json
import random
from typing import Any

import pytest
import tensorstore as ts

from shardgate.errors import DamagedError, VersionChangedError
from shardgate.model import Coded, Inline, Stored, VirtualKey, Whole
from tests.formats.case import Container
from tests.formats.neuroglancer_precomputed.case import (
    GZIP_DATA,
    IDS,
    build,
    build_meshes,
    chunk_bytes,
    encode_manifest,
    mesh_info,
    volume_info,
)
from tests.formats.neuroglancer_precomputed.shards import (
    RAW_SHARDING,
    address,
    build_shards,
    decoded,
    part,
)
from tests.support.resolving import ROOT

FIRST, SECOND, THIRD, _, LAST = IDS
_CHUNKS = {key: chunk_bytes(number) for key, number in IDS.items() if number != 3}
_OBJECTS = build(_CHUNKS)
"""Shard 0 has ids 0 and 1 in its first minishard, 2 in its second; shard 1 has 4 in its first."""


async def test_a_cold_chunk_is_three_reads_of_one_version() -> None:
    """After the document: the shard index, and of its version the minishard index, the chunk."""
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
async def test_a_shard_index_of_over_64_kib_is_large(bits: int, request_nbytes: int) -> None:
    """Whatever the setting, which is meant for indexes that have to be read whole."""
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
async def test_nothing_known_is_read_again(known: str, key: str, keys: list[str]) -> None:
    """A known document, shard index or minishard index proves absence without a read."""
    case = Container(_OBJECTS)
    await case.warm(known)

    assert await case.read(key) == _CHUNKS.get(key)
    assert case.keys == keys


async def test_an_absent_shard_is_looked_for_once_in_either_form() -> None:
    """As ``.shard`` and as ``.index``; what is known of it is good for its other chunks."""
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
async def test_no_container_is_looked_for_in_a_scale(key: str) -> None:
    """However deep it is, nothing but the markers above and the shard is asked for."""
    objects = build_shards({0: b"first"}, RAW_SHARDING)
    path = key.rstrip("/")
    case = Container(
        {
            "info": json.dumps(volume_info(RAW_SHARDING, key=key)).encode(),
            **{f"{path}/{name}": data for name, data in objects.items()},
        }
    )
    assert await case.read(f"{path}/-1-2_5-8_0-1") == b"first"

    markers = {"zarr.json", "info", "repo", "refs/branch.main/ref.json"}
    assert set(case.keys) == {*markers, f"{path}/0.shard"}
    assert case.keys.count("info") == 1


async def test_a_key_below_any_of_many_scales_is_enclosed() -> None:
    """Whole names of directories count, not how they begin."""
    case = Container(
        {"info": json.dumps({"scales": [{"key": f"{n}"} for n in range(1000)]}).encode()}
    )
    layout = await case.open()
    keys = ["7/x", "7/", "999/x/y", "7", "/7/", "1000/x", "x/7/", ""]

    assert [key for key in keys if layout.encloses(VirtualKey(key))] == keys[:3]


async def test_a_rewritten_document_has_a_version_of_its_own() -> None:
    """What is served is not what is stored, and its ETag says so."""
    case = Container(_OBJECTS)
    found = await case.locate("info")

    assert isinstance(found, Inline)
    assert found.etag == f'{case.etags["info"][:-1]}-u1"'
    assert json.loads(found.data) == volume_info(None)


@pytest.mark.parametrize(
    "key",
    ["s0/0.shard", "provenance", "s0/notes.txt", "s0/-1-02_5-8_0-1", "-1-2_5-8_0-1", "7", "s0"],
)
async def test_what_is_no_chunk_is_the_object_of_that_name(key: str) -> None:
    """Shards too can be asked for by their names."""
    layout = await Container(_OBJECTS).locate(key)

    assert layout == Whole(ROOT.join(key))


async def test_what_is_not_sharded_is_served_as_it_is() -> None:
    """Of two scales the other is in objects of its own."""
    document = volume_info(RAW_SHARDING)
    document["scales"] += volume_info(None, key="s1")["scales"]
    document["scales"] += volume_info({"@type": "from_the_future"}, key="s2")["scales"]
    case = Container(
        {
            **_OBJECTS,
            "info": json.dumps(document).encode(),
            "s1/-1-2_5-8_0-1": b"object",
            "s2/0.shard": b"shard",
        }
    )
    await case.warm("info")

    assert await case.read("s1/-1-2_5-8_0-1") == b"object"
    assert await case.read("s2/0.shard") == b"shard"
    assert await case.read(FIRST) == _CHUNKS[FIRST]
    assert {key for key in case.keys if not key.startswith("s0/")} == {
        "s1/-1-2_5-8_0-1",
        "s2/0.shard",
    }


async def test_a_mesh_is_its_manifest_and_its_fragments() -> None:
    """The fragments lie right before the manifest of the same version, which has their length."""
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


async def test_fragments_of_gzip_manifests_are_stored_as_they_are() -> None:
    """Only the manifest is compressed; a mesh without fragments is empty, which is not absence."""
    case = Container(build_meshes({"2": b"fragments"}, sharding=GZIP_DATA))
    objects = build_shards({2: encode_manifest([])}, RAW_SHARDING)
    empty = Container({"info": json.dumps(mesh_info(RAW_SHARDING)).encode(), **objects})

    assert isinstance(await case.locate("2"), Stored)
    assert isinstance(await case.locate("2.index"), Coded)
    assert await case.read("2.index") == encode_manifest([[2], [7]])
    assert [await empty.read(key) for key in ("2", "3")] == [b"", None]


_OLD = build(_CHUNKS, old=True)


async def test_a_shard_of_the_older_form_is_two_objects() -> None:
    """Its index is read again beside the version of the data: nothing else ties the two."""
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
async def test_a_chunk_of_a_known_minishard_is_one_read(
    objects: dict[str, bytes], limit: int, expected: Any
) -> None:
    """Exactly its bytes, in the older form of the version of the data."""
    case = Container(objects, whole_index_nbytes=limit)
    await case.warm(FIRST)
    assert await case.read(SECOND) == _CHUNKS[SECOND]

    assert case.reads == [expected]


async def test_an_index_that_vanishes_has_changed() -> None:
    """Once it was seen beside nothing, its absence beside the data is no absence of chunks."""
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
def test_ids_are_in_the_shards_that_the_builder_says(
    hash_name: str, preshift_bits: int, minishard_bits: int, shard_bits: int
) -> None:
    """Random ids, by either hash and with shards of every padding."""
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
