"""The two levels of index."""

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.formats.neuroglancer_precomputed.index import (
    MinishardIndex,
    MinishardIndexDecoder,
    ShardIndexDecoder,
    Sharding,
)
from app.formats.reading import DecodeError
from app.model import ByteRange
from tests.formats.neuroglancer_precomputed import shards
from tests.formats.neuroglancer_precomputed.shards import RAW_SHARDING, encode_minishard
from tests.zipped import zipped

_MOST_NBYTES = 2**16
_ids = st.integers(0, 2**64 - 1)
_chunks = st.lists(
    st.tuples(_ids, st.integers(0, 2**63 - 1), st.integers(0, 2**62)),
    unique_by=lambda chunk: chunk[0],
    max_size=40,
)
"""Id, offset and size, in any order and anywhere."""


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


def _sharding(document: shards.Sharding) -> Sharding:
    return Sharding(
        preshift_bits=document["preshift_bits"],
        is_hashed=document["hash"] != "identity",
        minishard_bits=document["minishard_bits"],
        shard_bits=document["shard_bits"],
        is_minishard_index_gzip=False,
        is_data_gzip=False,
    )


def _decode(data: bytes, *, is_gzip: bool = False) -> MinishardIndex:
    return MinishardIndexDecoder(is_gzip, _MOST_NBYTES)(data)


@given(_shardings(), _ids)
def test_an_id_is_in_the_shard_that_the_documents_say(
    document: shards.Sharding, chunk_id: int
) -> None:
    """However many bits of which hash: name of the shard and number of the minishard."""
    sharding = _sharding(document)
    shard, minishard = sharding.address(chunk_id)

    assert (sharding.shard_name(shard), minishard) == shards.address(chunk_id, document)


@given(st.lists(st.tuples(_ids, _ids).map(sorted), min_size=1, max_size=40), st.integers(0, 2**63))
def test_minishards_are_where_they_were_written(places: list[list[int]], first: int) -> None:
    """Every entry is found, in a part of an index as well; an empty one is none."""
    data = b"".join(struct.pack("<2Q", *place) for place in places)
    index = ShardIndexDecoder(len(data), first)(data)

    assert index.nbytes == len(data)
    assert [index.lookup(first + at) for at in range(len(places))] == [
        ByteRange(start, stop) if start < stop else None for start, stop in places
    ]


@given(_chunks, st.booleans())
def test_chunks_are_where_they_were_written(
    chunks: list[tuple[int, int, int]],
    is_gzip: bool,  # noqa: FBT001 - drawn
) -> None:
    """Ids that fall, and chunks that lie before the one listed before, make deltas wrap."""
    data = encode_minishard(chunks)
    index = _decode(zipped(data) if is_gzip else data, is_gzip=is_gzip)

    assert {chunk[0]: index.lookup(chunk[0]) for chunk in chunks} == {
        chunk_id: ByteRange(start, start + size) for chunk_id, start, size in chunks
    }


@given(_chunks, _ids)
def test_an_id_that_was_not_written_is_not_found(
    chunks: list[tuple[int, int, int]], chunk_id: int
) -> None:
    """Between, before and after the ids that are there."""
    expected = {each: ByteRange(start, start + size) for each, start, size in chunks}
    index = _decode(encode_minishard(chunks))

    for near in {chunk_id, *(each + step for each in expected for step in (-1, 1))}:
        assert index.lookup(near) == expected.get(near)


@given(_chunks)
def test_chunks_are_held_by_rising_id(chunks: list[tuple[int, int, int]]) -> None:
    """In whichever order they are listed; Neuroglancer and TensorStore read any order too."""
    index = _decode(encode_minishard(chunks))

    assert list(index.ids) == sorted(chunk_id for chunk_id, *_ in chunks)
    assert list(map(ByteRange, index.starts, index.stops)) == [
        ByteRange(start, start + size) for _, start, size in sorted(chunks)
    ]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 3, 0, 2), (3, 2, 1, 0)])
def test_an_id_that_is_there_twice_is_an_error_of_its_own(order: tuple[int, ...]) -> None:
    """Nobody can tell which of two is meant; the others are found."""
    chunks = [(3, 0, 2), (3, 2, 2), (4, 4, 2), (1, 6, 2)]
    index = _decode(encode_minishard([chunks[at] for at in order]))

    assert (index.lookup(1), index.lookup(4)) == (ByteRange(6, 8), ByteRange(4, 6))
    with pytest.raises(DecodeError, match="chunk 3 is twice in its minishard index"):
        index.lookup(3)


@pytest.mark.parametrize("step", [1, -1])
def test_an_entry_weighs_24_bytes(step: int) -> None:
    """A hundred thousand chunks take 2.4 MB, and the columns hold on to nothing else."""
    chunks = [(each, each, 1) for each in range(100_000)][::step]
    index = MinishardIndexDecoder(is_gzip=False, most_nbytes=2**30)(encode_minishard(chunks))

    assert index.nbytes == 2_400_000
    owners = {}
    for column in (index.ids, index.starts, index.stops):
        array: Any = column.obj
        while isinstance(array, np.ndarray) and array.base is not None:
            array = array.base
        owners[id(array)] = array.nbytes
    assert sum(owners.values()) == 2_400_000


@given(_shardings(), st.lists(_ids, max_size=20))
def test_many_ids_have_the_addresses_of_each(document: shards.Sharding, ids: list[int]) -> None:
    """Whichever way they are hashed, and however many bits they take."""
    sharding = _sharding(document)
    found = sharding.addresses(np.array(ids, np.uint64))

    assert list(zip(*map(np.ndarray.tolist, found), strict=True)) == list(
        map(sharding.address, ids)
    )
