"""Rewrites of shards of volumes, skeletons and annotations."""

import json
import struct
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgate.errors import BadBodyError, BadKeyError, ConflictError, DamagedError, ReadOnlyError
from shardgate.formats.contract import Document
from shardgate.formats.neuroglancer_precomputed.survey import ShardTables
from shardgate.model import ByteRange, VirtualKey, Whole
from shardgate.read.consistency import FreshnessTracker
from shardgate.read.containers import Routes
from tests.support.formats.case import filled, render, write_chunks
from tests.support.formats.neuroglancer_precomputed.case import (
    GZIP_DATA,
    IDS,
    MURMUR,
    annotation_info,
    mesh_info,
    skeleton_info,
    volume_info,
)
from tests.support.formats.neuroglancer_precomputed.shards import (
    RAW_SHARDING,
    SINGLE,
    Sharding,
    address,
    build_shards,
    chunks_of,
    container,
    decoded,
    encode_minishard,
    shardings,
    single_shard,
)
from tests.support.resolving import ROOT, reading
from tests.support.zipped import zipped

_SPREAD = {**SINGLE, "minishard_bits": 2}


_ids = st.integers(0, 40) | st.integers(0, 2**64 - 1)
_changes = st.dictionaries(_ids, st.none() | st.binary(min_size=1, max_size=9), max_size=8)


async def _opened(stored: bytes, **members: Any) -> ShardTables:
    case = container(skeleton_info(_SPREAD | members), **{"0.shard": stored})
    shard, entry = await case.slot("4")
    opened = await shard.open([entry], case.fetch)
    assert isinstance(opened, ShardTables)
    return opened


async def _changed(
    sharding: Sharding, objects: Mapping[str, bytes], changes: Mapping[int, bytes | None]
) -> dict[str, bytes]:
    """Return *objects* after *changes*, with one rewrite per shard."""
    found = {**spelled(skeleton_info(sharding)), **objects}
    await write_chunks(found, {str(chunk_id): data for chunk_id, data in changes.items()})
    del found["info"]
    return found


def _all_of(objects: Mapping[str, bytes], sharding: Sharding) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for name, shard in objects.items():
        for number, minishard in enumerate(decoded(shard, sharding)):
            for chunk_id in minishard:
                assert address(chunk_id, sharding) == (name.removesuffix(".shard"), number)
        found |= chunks_of(shard, sharding)
    return found


@given(shardings(), st.lists(_changes, max_size=5))
async def test_random_rewrites_agree_with_a_dict(
    sharding: Sharding, history: list[dict[int, bytes | None]]
) -> None:
    """After each random rewrite, the shards have exactly a dictionary's chunks, without gaps, in
    bytes that depend on these chunks only.
    """
    model: dict[int, bytes] = {}
    objects: dict[str, bytes] = {}
    for changes in history:
        objects = await _changed(sharding, objects, changes)
        for chunk_id, data in changes.items():
            model.pop(chunk_id, None)
            if data is not None:
                model[chunk_id] = data
        assert _all_of(objects, sharding) == model
        for shard in objects.values():
            _check_no_holes(shard, sharding)
    assert await _changed(sharding, {}, model) == objects

    with_gaps = build_shards(model, {**sharding, "data_encoding": "raw"})
    first = dict(list(model.items())[:1])
    rewritten = {f"{address(chunk_id, sharding)[0]}.shard" for chunk_id in first}
    assert await _changed(sharding, with_gaps, first) == {
        **with_gaps,
        **{name: objects[name] for name in rewritten},
    }


def _check_no_holes(shard: bytes, sharding: Sharding) -> None:
    base = 16 * 2 ** sharding["minishard_bits"]
    chunks = [place for each in decoded(shard, sharding) for place in each.values()]
    entries = struct.iter_unpack("<2Q", shard[:base])
    indexes = [(base + start, base + stop) for start, stop in entries if start < stop]
    places = sorted([place for place in [*chunks, *indexes] if place[0] < place[1]])

    assert places[0][0] == base
    assert places[-1][1] == len(shard)
    assert all(before[1] == after[0] for before, after in pairwise(places))
    assert max(stop for _, stop in chunks) <= min(start for start, _ in indexes)


_single = partial(single_shard, spare=bytes(48))
"""Builder of a shard of four minishards."""


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        (b"", "0 bytes are too few"),
        (_single((4, 0, 6), entry=struct.pack("<2Q", 6, 29)), "no multiple of 24"),
        (_single((4, 0, 7)), "its chunks overlap one another, or an index"),
        (_single((4, 0, 4), (8, 3, 3)), "its chunks overlap one another, or an index"),
        (_single((5, 0, 6)), "chunk 5 is not in the minishard where readers look for it"),
        (struct.pack("<4Q", 6, 30, 6, 30) + bytes(32) + _single((4, 0, 6))[64:], "overlaps"),
    ],
)
async def test_rewrite_of_a_damaged_shard_is_refused(stored: bytes, reason: str) -> None:
    """A rewrite of a shard with any damage raises DamagedError."""
    with pytest.raises(DamagedError, match=reason):
        await _changed(_SPREAD, {"0.shard": stored}, {8: b"new"})


async def test_rewrite_of_a_shard_with_an_id_off_the_grid_is_refused() -> None:
    """A rewrite of a shard with an id off the volume's grid raises DamagedError."""
    info = spelled(volume_info({**_SPREAD, "minishard_bits": 0}))
    index = encode_minishard([(0, 0, 3), (7, 3, 3)])
    stored = struct.pack("<2Q", 6, 6 + len(index)) + b"chunks" + index

    with pytest.raises(DamagedError, match="chunk 7 is not on the grid"):
        await write_chunks({**info, "s0/0.shard": stored}, {"s0/-1-2_5-8_0-1": bytes(9)})


async def test_lookup_in_an_opened_shard_finds_stored_chunks() -> None:
    """Lookup in an opened shard finds stored chunks; a damaged minishard raises DamagedError."""
    opened = await _opened(_single((4, 1, 2)))
    damaged = await _opened(_single((4, 0, 6)), minishard_index_encoding="gzip")

    assert (opened.lookup((4,)), opened.lookup((8,))) == (ByteRange(65, 67), None)
    assert opened.size == len(_single((4, 1, 2)))
    with pytest.raises(DamagedError, match="minishard index 0: no gzip"):
        damaged.lookup((4,))
    assert damaged.lookup((5,)) is None


async def test_write_to_a_shard_in_two_objects_is_refused() -> None:
    """A write to a shard in two objects raises ConflictError."""
    stored = _single((4, 0, 6))
    parts = {"0.index": stored[:64], "0.data": stored[64:]}

    with pytest.raises(ConflictError, match="in two objects"):
        await _changed(_SPREAD, parts, {4: b"new"})


async def test_empty_shard_is_rewritten_like_an_absent_one() -> None:
    """An empty shard is rewritten to the same bytes as an absent one."""
    shard, _ = await container(skeleton_info(_SPREAD)).slot("4")
    empty = {"0.shard": render(shard.plan_empty().pieces)}
    filled = await _changed(_SPREAD, empty, {4: b"chunk"})

    assert empty == {"0.shard": bytes(64)}
    assert await _changed(_SPREAD, empty, {4: None}) == {}
    assert chunks_of(filled["0.shard"], _SPREAD) == {4: b"chunk"}
    assert await _changed(_SPREAD, {}, {4: b"chunk"}) == filled


KEY, NEIGHBOUR, OTHER_MINISHARD, NARROW, OTHER_SHARD = IDS
VOLUME = volume_info(RAW_SHARDING)
MESHES = mesh_info(RAW_SHARDING)
SKELETONS = skeleton_info(MURMUR)
ANNOTATIONS = annotation_info(MURMUR)


def _scales(*scales: Mapping[str, Any]) -> dict[str, Any]:
    return {**VOLUME, "scales": [{**VOLUME["scales"][0], **members} for members in scales]}


@pytest.mark.parametrize(
    ("info", "key", "error", "reason"),
    [
        (VOLUME, "s0/-1-3_5-8_0-1", BadKeyError,
         r"chunks have \[3, 3, 1\] voxels, from \[-1, 5, 0\] on"),
        (VOLUME, "s0/-4--1_5-8_0-1", BadKeyError, "chunks have"),
        (VOLUME, "s0/8-11_5-8_0-1", BadKeyError, "chunks have"),
        (VOLUME, "s0/5-8_5-8_0-1", BadKeyError, r"end where the \[7, 5, 1\] voxels of the volume"),
        (MESHES, "07", BadKeyError, "without zeros before them"),
        (MESHES, "07.index", BadKeyError, "and .index behind them"),
        (SKELETONS, str(2**64), BadKeyError, "below 2\\^64"),
        (SKELETONS, "\u0667", BadKeyError, "decimal"),
        (ANNOTATIONS, "by_id/00", BadKeyError, "decimal"),
        (ANNOTATIONS, "spatial1/2_0_0", BadKeyError, r"below \[2, 1, 3\]"),
        (ANNOTATIONS, "spatial1/0_0", BadKeyError, r"below \[2, 1, 3\]"),
        *((info, key, ConflictError, f"^{key} is a shard: .*raw")
          for info, key in ((VOLUME, "s0/0.shard"), (VOLUME, "s0/0.index"), (VOLUME, "s0/0.data"),
                            (SKELETONS, "0.shard"), (MESHES, "0.shard"),
                            (RAW_SHARDING, "0.shard"), (RAW_SHARDING, "0.index"),
                            (ANNOTATIONS, "by_id/0.shard"))),
        (_scales({"chunk_sizes": [[3, 3, 1], [2, 2, 2]]}), KEY, ReadOnlyError, "s0"),
        (_scales({}, {"key": "./s0"}), KEY, ReadOnlyError, "s0"),
        (skeleton_info({**RAW_SHARDING, "minishard_bits": 20}), "7", ReadOnlyError,
         str(16 * 2**20)),
        *((MESHES, key, ReadOnlyError, "multi-resolution meshes can only be read")
          for key in ("8", "8.index")),
    ],
)  # fmt: skip
async def test_write_without_a_readable_result_is_refused(
    info: Any, key: str, error: type[Exception], reason: str
) -> None:
    """A write to no chunk's name, to a shard, or to an ambiguous or too large part is refused."""
    with pytest.raises(error, match=reason):
        await container(info).target(key)


@pytest.mark.parametrize(
    ("info", "key"),
    [(VOLUME, "info"), (VOLUME, "0.shard"), (VOLUME, "s0/00.shard"),
     (volume_info(None), "s0/0.shard"), (VOLUME, "provenance"), (VOLUME, "s0/notes"),
     (VOLUME, "mesh/7"), (volume_info(None), "s0/-1-3_5-8_0-1"), (SKELETONS, "07.spatial"),
     (mesh_info(None), "07.index")],
)  # fmt: skip
async def test_write_target_of_other_keys_is_the_object(info: Any, key: str) -> None:
    """The write target of any other key, even one spelled like a shard, is the object."""
    assert await container(info).target(key) == Whole(ROOT.join(key))


async def test_write_target_of_an_info_is_a_document() -> None:
    """The write target of an ``info`` in any directory is a document."""
    data = reading(filled(spelled(VOLUME)))
    for key in ("info", "mesh/info"):
        tracker = FreshnessTracker(data.fetch)
        found = await Routes(data.fetch).target(data.dataset, VirtualKey(key), tracker)
        assert isinstance(found, Document)
        assert found.ref == ROOT.join(key)


@pytest.mark.parametrize(
    ("data_type", "channels", "key", "nbytes"),
    [
        ("uint8", 1, "s0/-1-2_5-8_0-1", 9),
        ("uint8", 1, "s0/5-6_8-10_0-1", 2),
        ("uint16", 3, "s0/2-5_8-10_0-1", 36),
        ("float32", 1, "s0/-1-2_5-8_0-1", 36),
        ("UINT64", 1, "s0/-1-2_5-8_0-1", 72),
    ],
)
async def test_raw_chunk_of_a_wrong_size_is_refused(
    data_type: str, channels: int, key: str, nbytes: int
) -> None:
    """A raw chunk must have the size of its clipped voxels once inflated, or BadBodyError."""
    for sharding in (RAW_SHARDING, GZIP_DATA):
        info = volume_info(sharding) | {"data_type": data_type, "num_channels": channels}
        shard, entry = await container(info).slot(key)
        for wrong in (nbytes - 1, nbytes + 1, 0):
            with pytest.raises(BadBodyError, match=str(nbytes) if wrong else "empty"):
                shard.encode(entry, bytes(wrong), coding="")
            with pytest.raises(BadBodyError):
                shard.encode(entry, zipped(bytes(wrong)), coding="gzip")
        assert shard.encode(entry, bytes(nbytes), coding="")


@pytest.mark.parametrize(
    "members", [{"encoding": "png"}, {"encoding": "compressed_segmentation"}, {"encoding": "new"}]
)
async def test_encoded_chunk_has_any_size_above_zero(members: Any) -> None:
    """A chunk in an image encoding may have any size above zero."""
    shard, entry = await container(volume_info(RAW_SHARDING, **members)).slot(next(iter(IDS)))

    assert shard.encode(entry, b"x", coding="") == b"x"
    with pytest.raises(BadBodyError):
        shard.encode(entry, b"", coding="")


async def test_gzip_body_is_stored_verbatim_in_a_gzip_shard() -> None:
    """A gzip body is stored verbatim in a gzip shard and inflated in a raw one.

    A plain body is compressed reproducibly in a gzip shard.
    """
    shard, entry = await container(skeleton_info(GZIP_DATA)).slot("7")
    plain, other = await container(skeleton_info(RAW_SHARDING)).slot("7")
    body = b"a skeleton " * 100
    stored = shard.encode(entry, body, coding="")

    assert shard.encode(entry, zipped(body), coding="gzip") == zipped(body)
    assert len(stored) < len(body)
    assert stored == shard.encode(entry, body, coding="")
    assert stored[4:8] == bytes(4)
    assert shard.encode(entry, stored, coding="gzip") == stored
    assert plain.encode(other, zipped(body), coding="gzip") == body
    assert plain.encode(other, zipped(body), coding="") == zipped(body)


@pytest.mark.parametrize(
    "body", [b"plain", b"", zipped(b"cut off")[:-1], zipped(bytes(2**20 + 1)), zipped(b"")]
)
@pytest.mark.parametrize("sharding", [RAW_SHARDING, GZIP_DATA], ids=["raw", "gzip"])
async def test_invalid_gzip_body_is_refused(sharding: Any, body: bytes) -> None:
    """A gzip body that is malformed, empty or inflates beyond the limit raises BadBodyError."""
    shard, entry = await container(skeleton_info(sharding)).slot("7")

    with pytest.raises(BadBodyError):
        shard.encode(entry, body, coding="gzip")


def spelled(info: object) -> dict[str, bytes]:
    """Return the objects of a container without any chunk."""
    return {"info": json.dumps(info).encode()}
