"""Reports of `verify` and `inspect` on shards built by `struct` in memory."""

import json
import struct
from typing import Any

import pytest

from shardgate.errors import BadKeyError, DamagedError, StorageUnusableError
from shardgate.formats.surveying import Description
from shardgate.model import ObjectRef, VirtualKey
from shardgate.storage.contract import Found
from shardgate.storage.memory import MemoryStore
from shardgate.survey.inspect import DamageReport, inspect_key, inspect_root, inspect_shard
from shardgate.survey.verify import verify
from tests.support.formats.neuroglancer_precomputed.case import volume_info
from tests.support.formats.neuroglancer_precomputed.shards import RAW_SHARDING, encode_minishard
from tests.support.formats.zarr.building import (
    ANY_LENGTH,
    CRC,
    EMPTY,
    LITTLE,
    array_metadata,
    checksum,
    consolidated,
    encode_index,
    sharding,
)
from tests.support.read.stores import Unlisted, WatchedStore
from tests.support.survey.verifying import BUCKET, report_of, root_of


def array(codecs: list[Any], shape: int = 8, shard: int = 4) -> bytes:
    """Return the metadata of an array of one dimension, whose chunks may be of any length."""
    return json.dumps(array_metadata([shape], [shard], codecs, **ANY_LENGTH)).encode()


def group(**nodes: bytes) -> bytes:
    """Return the metadata of a group with consolidated *nodes*."""
    return json.dumps(consolidated({n: json.loads(node) for n, node in nodes.items()})).encode()


def checked(data: bytes) -> bytes:
    """Append the checksum of *data*."""
    return data + checksum(data)


def shard(*entries: tuple[int, int], body: bytes = b"") -> bytes:
    """Build a shard of *body* and an index of *entries* at its end."""
    return body + encode_index(list(entries))


PLAIN = array([sharding([1])])
"""Metadata of shards of four chunks, without checksums."""


SOUND = shard((0, 2), (2, 2), EMPTY, (5, 3), body=b"aabb.ccc")
"""Four inner chunks, one of them empty, and a gap of one byte."""


async def test_a_sound_shard_is_counted() -> None:
    """The report counts shards, inner chunks and their bytes, and calls back for each shard."""
    seen: list[int] = []
    root = root_of({"a/zarr.json": PLAIN, "a/c/0": SOUND, "a/c/1": SOUND})

    report = await verify(root, chunks=True, on_shard=lambda r: seen.append(r.shards))

    assert (report.arrays, report.shards, report.chunks, report.nbytes) == (1, 2, 6, 14)
    assert report.damages == []
    assert seen == [1, 2]


@pytest.mark.parametrize(
    ("data", "key", "reason"),
    [
        (SOUND[:-1] + b"?", "a/c/4", "the checksum of the shard index does not match"),
        (SOUND[:9], "a/c/4", "9 bytes are too few for a shard"),
        (b"", "a/c/4", "0 bytes"),
        (shard((0, 1), (0, 99), EMPTY, EMPTY, body=b"a"), "a/c/5", "ends past"),
        (shard((0, 1), (1, 1), EMPTY, EMPTY, body=b"a"), "a/c/5", "overlaps the shard index"),
        (shard(EMPTY, EMPTY, EMPTY, (2**64 - 1, 0)), "a/c/7", "is half an empty marker"),
        (shard((0, 3), (2, 2), EMPTY, EMPTY, body=b"aaaa"), "a/c/5", "overlaps inner chunk 0"),
        (shard((0, 2), (0, 0), (2, 3), EMPTY, body=b"aaaa"), "a/c/6", "overlaps the shard index"),
    ],
)
async def test_damaged_index_is_reported_with_object_and_key(
    data: bytes, key: str, reason: str
) -> None:
    """A damaged shard index is reported with its object, its first chunk's key and the reason."""
    report = await report_of({"a/zarr.json": PLAIN, "a/c/0": SOUND, "a/c/1": data})

    assert [(d.object, d.key) for d in report.damages] == [(f"{BUCKET}/a/c/1", key)]
    assert reason in report.damages[0].reason


@pytest.mark.parametrize(
    ("codecs", "data", "keys", "reason"),
    [
        (
            [sharding([1], [LITTLE, CRC])],
            shard(
                *((0, 7), (7, 7), (14, 2), EMPTY),
                body=checked(b"one") + checked(b"two")[:-1] + b"?" + b"xx",
            ),
            ["c/5", "c/6"],
            "the checksum of the inner chunk does not match",
        ),
        (
            [sharding([1]), CRC],
            checked(SOUND)[:4] + b"!" + checked(SOUND)[5:],
            ["c/4"],
            "the checksum behind the shard does not match",
        ),
    ],
)
async def test_chunks_are_checked_by_their_own_checksum(
    codecs: list[Any], data: bytes, keys: list[str], reason: str
) -> None:
    """Checksums of inner chunks and of whole shards are checked with `chunks`, and not without."""
    objects = {"zarr.json": array(codecs), "c/1": data}
    if CRC in codecs:
        objects["c/0"] = checked(SOUND)

    assert (await report_of(objects)).damages == []
    damages = (await report_of(objects, chunks=True)).damages
    assert [damage.key for damage in damages] == keys
    assert {damage.reason for damage in damages} == {reason}


async def test_shards_inside_of_shards_are_checked() -> None:
    """A damaged index of an inner shard is reported by its first chunk's key.

    `inspect` describes the outer shard.
    """
    inner = shard((0, 1), (1, 1), body=b"ab")
    broken = inner[:-1] + b"?"
    outer = shard((0, len(inner)), (len(inner), len(broken)), body=inner + broken)
    codecs = [sharding([2], [sharding([1])])]

    report = await report_of({"zarr.json": array(codecs), "c/1": outer})
    assert report.chunks == 2
    assert [damage.key for damage in report.damages] == ["c/6"]

    outer = shard((0, len(inner)), EMPTY, body=inner)
    root = root_of({"zarr.json": array(codecs), "c/1": outer})
    found = (await inspect_key(root, VirtualKey("c/4"))).shard
    assert found is not None
    assert (found.entries, found.empty, found.used_nbytes) == (2, 1, len(inner))


async def test_arrays_of_an_unlisted_store_are_found_by_metadata() -> None:
    """In a store without listings, arrays of consolidated metadata are checked by their grid.

    Without such metadata StorageUnusableError is raised.
    """
    node = array([sharding([1])], shape=16)
    root = root_of(
        {"zarr.json": group(a=node), "a/zarr.json": node, "a/c/0": SOUND, "a/c/3": SOUND[:-1]},
        Unlisted(),
    )

    report = await verify(root, chunks=False)

    assert (report.arrays, report.shards, len(report.damages)) == (1, 2, 1)
    assert report.damages[0].key == "a/c/12"
    bare = b'{"zarr_format": 3, "node_type": "group"}'
    with pytest.raises(StorageUnusableError):
        await verify(root_of({"zarr.json": bare}, Unlisted()), chunks=False)


async def test_arrays_below_metadata_too_long_to_be_read_are_found_by_listing_only() -> None:
    """Arrays below a group whose metadata are too long are found where the store lists, and
    elsewhere nothing is reported as checked.
    """
    long = group()[:-1] + b', "attributes": {"x": "' + b"x" * 2**20 + b'"}}'
    objects = {"zarr.json": long, "a/zarr.json": PLAIN, "a/c/0": SOUND}

    report = await report_of(objects)
    assert (report.arrays, report.shards, report.damages) == (1, 1, [])
    with pytest.raises(StorageUnusableError, match="cannot be listed"):
        await verify(root_of(objects, Unlisted()), chunks=False)
    with pytest.raises(StorageUnusableError, match="cannot be listed"):
        await inspect_root(root_of(objects, Unlisted()))


async def test_only_nodes_below_the_root_are_reported() -> None:
    """Names of consolidated metadata that lead elsewhere or are no node are ignored.

    Arrays in directories of chunks are ignored too.
    """
    node = array([LITTLE])
    names = ["a", "gone", ".", "..", "../data", "a//b"]
    objects = {"zarr.json": group(**dict.fromkeys(names, node)), "a/zarr.json": node}

    reports = await inspect_root(root_of(objects | {"a//b/zarr.json": node}, Unlisted()))
    assert [report.path for report in reports] == ["a"]
    reports = await inspect_root(root_of({"a/zarr.json": PLAIN, "a/c/zarr.json": PLAIN}))
    assert [report.path for report in reports] == ["a"]


async def test_uncountable_shards_are_reported() -> None:
    """Shards that can neither be listed nor tried are reported as unread, and not as sound."""
    info = json.dumps(volume_info({**RAW_SHARDING, "shard_bits": 40})).encode()

    report = await verify(root_of({"info": info}, Unlisted()), chunks=False)

    assert (report.arrays, report.shards) == (1, 0)
    assert [(d.object, d.key) for d in report.damages] == [(f"{BUCKET}/s0/", "s0")]
    assert "too many" in report.damages[0].reason


async def test_unchecked_arrays_are_reported_with_the_reason() -> None:
    """Arrays that cannot be checked, or are not sharded, are reported with the reason."""
    gzip = {"name": "gzip", "configuration": {"level": 1}}
    report = await report_of(
        {
            "hidden/zarr.json": array([sharding([1]), gzip]),
            "plain/zarr.json": array([LITTLE]),
            "broken/zarr.json": b"{",
        }
    )

    assert sorted(report.not_checked) == ["hidden", "plain"]
    assert "gzip after sharding_indexed" in report.not_checked["hidden"]
    assert [damage.key for damage in report.damages] == ["broken/zarr.json"]


async def test_overlapping_chunks_are_found_in_any_order() -> None:
    """A chunk that overlaps others, or the shard index, is found in any order."""
    data = shard((5, 1), (0, 9), (7, 1), EMPTY, body=b"a" * 9)
    report = await report_of({"zarr.json": PLAIN, "c/0": data})
    assert [damage.key for damage in report.damages] == ["c/0", "c/2"]

    codec = sharding([1], index_location="start")
    data = shard((0, 2), (67, 2), (68, 2), EMPTY) + b"aabb"
    report = await report_of({"zarr.json": array([codec]), "c/0": data})
    assert [damage.key for damage in report.damages] == ["c/0", "c/1"]
    assert all("overlaps the shard index" in damage.reason for damage in report.damages)


async def test_chunk_that_begins_before_a_minishard_index_and_reaches_into_it_is_named() -> None:
    """A chunk that begins before the index of another minishard and overlaps it is reported."""
    sharding = RAW_SHARDING | {"preshift_bits": 0, "minishard_bits": 1, "shard_bits": 0}
    first, second = encode_minishard([(0, 4, 8)]), encode_minishard([(1, 0, 4)])
    entries = struct.pack("<4Q", 32, 56, 8, 32)
    info = json.dumps(volume_info(sharding)).encode()
    data = entries + bytes(8) + second + first

    report = await report_of({"info": info, "s0/0.shard": data})

    (damage,) = report.damages
    assert damage.key == "s0/-1-2_5-8_0-1"
    assert damage.reason == "inner chunk 0 at [36, 44) overlaps the shard index"


@pytest.mark.parametrize(("swaps", "expected"), [(1, []), (99, ["a/c/0"])])
async def test_shard_replaced_during_its_check_is_checked_again(
    swaps: int, expected: list[str]
) -> None:
    """A shard that is replaced during its check is checked again, and reported if that persists."""
    codecs = [sharding([1], [LITTLE, CRC])]
    entries, chunks = ((1, 5), (6, 5), EMPTY, EMPTY), checked(b"1") + checked(b"2")
    store, left = WatchedStore(), swaps

    def replace(found: Found) -> Found:
        nonlocal left
        call = store.calls[-1]
        if call.ref.key == "a/c/0" and call.if_match is None and left:
            left -= 1
            store.place(call.ref, shard(*entries, body=bytes([left]) + chunks))
        return found

    store.spoil = replace
    data = {"a/zarr.json": array(codecs), "a/c/0": shard(*entries, body=b"." + chunks)}
    root = root_of(data, store)
    report = await verify(root, chunks=True)

    assert [damage.key for damage in report.damages] == expected
    assert report.chunks == 2


@pytest.mark.parametrize("checksums", [0, 2])
async def test_inspect_counts_empty_entries_and_gaps(checksums: int) -> None:
    """`inspect` of a shard counts empty entries, used bytes and gaps.

    Checksums behind the shard are no gap. `verify` uses no cached index.
    """
    data = checked(checked(SOUND)) if checksums else SOUND
    codecs = [sharding([1])] + [CRC] * checksums
    root = root_of({"zarr.json": array(codecs), "c/0": data})
    found = await inspect_shard(root, VirtualKey("c/0"))

    assert found == (await inspect_key(root, VirtualKey("c/2"))).shard
    assert (found.entries, found.empty, found.used_nbytes) == (4, 1, 7)
    assert (found.gaps, found.gap_nbytes) == (1, 1)
    assert isinstance(root.store, MemoryStore)
    root.store.place(ObjectRef(BUCKET, "c/0"), data[:-1] + b"?")
    assert len((await verify(root, chunks=True)).damages) == 1  # no cached index is used


async def test_inspect_shard_needs_a_shard_key() -> None:
    """`inspect` of a shard raises BadKeyError for another key or an absent shard.

    For a damaged shard it raises DamagedError.
    """
    damaged = shard((0, 99), EMPTY, EMPTY, EMPTY)
    root = root_of({"zarr.json": PLAIN, "c/0": damaged})

    for key, reason in (("c/0/0", "is no key of a shard"), ("c/1", "there is no such shard")):
        with pytest.raises(BadKeyError, match=reason):
            await inspect_shard(root, VirtualKey(key))
    with pytest.raises(DamagedError, match="ends past"):
        await inspect_shard(root, VirtualKey("c/0"))


@pytest.mark.parametrize("damaged", [b"[]", array([LITTLE]).replace(b"[8]", b"8")])
async def test_inspect_reports_damaged_metadata_beside_sound_arrays(damaged: bytes) -> None:
    """A node with damaged metadata is reported as damage, beside the sound arrays."""
    reports = await inspect_root(root_of({"a/zarr.json": damaged, "b/zarr.json": array([LITTLE])}))

    assert [(type(report), report.path) for report in reports] == [
        (DamageReport, "a"),
        (Description, "b"),
    ]


async def test_a_large_shard_is_checked_to_its_last_chunk() -> None:
    """A shard of 10,000 chunks is checked up to the last, for overlaps and checksums."""
    count = 10_000
    chunks = [checked(struct.pack("<I", n)) for n in range(count)]
    chunks[-1] = chunks[-1][:-1] + b"?"
    entries = [(8 * n, 8) for n in range(count)]
    entries[5] = entries[4]
    data = shard(*entries, body=b"".join(chunks))
    objects = {"zarr.json": array([sharding([1], [LITTLE, CRC])], count, count), "c/0": data}

    report = await report_of(objects, chunks=True)

    assert (report.chunks, report.nbytes) == (count, 8 * count)
    assert [(d.key, d.reason) for d in report.damages] == [
        ("c/5", "inner chunk 5 at [32, 40) overlaps inner chunk 4 at [32, 40)"),
        (f"c/{count - 1}", "the checksum of the inner chunk does not match"),
    ]
