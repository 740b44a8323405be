"""`shardgate.formats.neuroglancer_precomputed.index`: shard index and minishard index."""

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgate.formats.neuroglancer_precomputed.index import (
    MinishardIndex,
    Sharding,
    decode_minishard,
    decode_shard_index,
)
from shardgate.formats.reading import DecodeError
from shardgate.model import ByteRange
from tests.support.formats.neuroglancer_precomputed import shards
from tests.support.formats.neuroglancer_precomputed.shards import RAW_SHARDING, encode_minishard
from tests.support.zipped import zipped

_MOST_NBYTES = 2**16
_ids = st.integers(0, 2**64 - 1)
_chunks = st.lists(
    st.tuples(_ids, st.integers(0, 2**63 - 1), st.integers(0, 2**62)),
    unique_by=lambda chunk: chunk[0],
    max_size=40,
)
"""Chunks as id, offset and size, in any order and anywhere."""


@st.composite
def _shardings(draw: st.DrawFn) -> shards.Sharding:
    minishard_bits = draw(st.integers(0, 64))
    return {
        **RAW_SHARDING,
        "hash": draw(st.sampled_from(["identity", "murmurhash3_x86_128"])),
        "preshift_bits": draw(st.integers(0, 64)),
        "minishard_bits": minishard_bits,
        "shard_bits": draw(st.integers(0, 64 - minishard_bits)),
    }


def _decode(data: bytes, *, is_gzip: bool = False) -> MinishardIndex:
    return decode_minishard(data, "gzip" if is_gzip else "raw", _MOST_NBYTES)


@given(_shardings(), st.lists(_ids, max_size=20))
def test_shard_and_minishard_of_an_id_follow_the_specification(
    document: shards.Sharding, ids: list[int]
) -> None:
    """Shard and minishard of any ids, singly and in arrays, are those of the specification."""
    members = ("preshift_bits", "minishard_bits", "shard_bits", "hash")
    sharding = Sharding(**{name: document[name] for name in members})
    found = [sharding.address(each) for each in ids]
    at_once = sharding.addresses(np.array(ids, np.uint64))

    assert [(sharding.shard_name(shard), minishard) for shard, minishard in found] == [
        shards.address(each, document) for each in ids
    ]
    assert list(zip(*map(np.ndarray.tolist, at_once), strict=True)) == found


@given(st.lists(st.tuples(_ids, _ids).map(sorted), min_size=1, max_size=40), st.integers(0, 2**63))
def test_shard_index_returns_the_written_places(places: list[list[int]], first: int) -> None:
    """A whole or partial shard index returns each written place, and None for an empty one."""
    data = b"".join(struct.pack("<2Q", *place) for place in places)
    index = decode_shard_index(data, len(data), first, None)

    assert index.nbytes == len(data)
    assert [index.lookup(first + at) for at in range(len(places))] == [
        ByteRange(start, stop) if start < stop else None for start, stop in places
    ]


@given(_chunks, _ids, st.booleans())
def test_minishard_index_returns_the_written_places(
    chunks: list[tuple[int, int, int]],
    chunk_id: int,
    is_gzip: bool,  # noqa: FBT001 - drawn
) -> None:
    """A minishard index returns the place of each written id, in any order, and None for others."""
    expected = {each: ByteRange(start, start + size) for each, start, size in chunks}
    data = encode_minishard(chunks)
    index = _decode(zipped(data) if is_gzip else data, is_gzip=is_gzip)

    for near in {chunk_id, *(each + step for each in expected for step in (-1, 0, 1))}:
        assert index.lookup(near) == expected.get(near)
    assert list(index.ids) == sorted(expected)
    assert list(map(ByteRange, index.starts, index.stops)) == [
        expected[each] for each in sorted(expected)
    ]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 3, 0, 2), (3, 2, 1, 0)])
def test_lookup_of_a_duplicate_id_raises_decode_error(order: tuple[int, ...]) -> None:
    """Lookup of an id that is listed twice raises DecodeError; other ids are found."""
    chunks = [(3, 0, 2), (3, 2, 2), (4, 4, 2), (1, 6, 2)]
    index = _decode(encode_minishard([chunks[at] for at in order]))

    assert (index.lookup(1), index.lookup(4)) == (ByteRange(6, 8), ByteRange(4, 6))
    with pytest.raises(DecodeError, match="chunk 3 is twice in its minishard index"):
        index.lookup(3)


@pytest.mark.parametrize("step", [1, -1])
def test_entry_of_a_minishard_index_takes_24_bytes(step: int) -> None:
    """A minishard index of 100,000 chunks keeps 2.4 MB and no other buffer."""
    chunks = [(each, each, 1) for each in range(100_000)][::step]
    index = decode_minishard(encode_minishard(chunks), "raw", 2**30)

    assert index.nbytes == 2_400_000
    owners = {}
    for column in (index.ids, index.starts, index.stops):
        array: Any = column.obj
        while isinstance(array, np.ndarray) and array.base is not None:
            array = array.base
        owners[id(array)] = array.nbytes
    assert sum(owners.values()) == 2_400_000
