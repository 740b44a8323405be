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
    MinishardPlaces,
    ShardIndexDecoder,
    Sharding,
    murmurhash3_x86_128,
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


@given(_ids)
def test_the_hash_is_that_of_the_definition(number: int) -> None:
    """Another way to write MurmurHash3 down gives the same low 8 bytes."""
    assert murmurhash3_x86_128(number) == shards.murmur(number)


@given(_shardings(), _ids)
def test_an_id_is_in_the_shard_that_the_documents_say(
    document: shards.Sharding, chunk_id: int
) -> None:
    """However many bits of which hash: name of the shard and number of the minishard."""
    sharding = _sharding(document)
    shard, minishard = sharding.address(chunk_id)

    assert (sharding.shard_name(shard), minishard) == shards.address(chunk_id, document)


@pytest.mark.parametrize(
    ("shard_bits", "shard", "name"),
    [(0, 0, "0"), (1, 1, "1"), (4, 15, "f"), (5, 1, "01"), (8, 255, "ff"), (9, 255, "0ff"),
     (12, 0, "000"), (64, 10, "000000000000000a")],
)  # fmt: skip
def test_names_of_shards_are_padded(shard_bits: int, shard: int, name: str) -> None:
    """A digit for every four bits, lower case; TensorStore calls a single shard ``0``."""
    sharding = _sharding({**RAW_SHARDING, "shard_bits": shard_bits})

    assert sharding.shard_name(shard) == name


@given(_shardings())
def test_a_shard_index_has_16_bytes_for_each_minishard(document: shards.Sharding) -> None:
    """Its size is known from the number of bits."""
    assert _sharding(document).index_nbytes == 16 * 2 ** document["minishard_bits"]


@given(st.lists(st.tuples(_ids, _ids).map(sorted), min_size=1, max_size=40), st.integers(0, 2**63))
def test_minishards_are_where_they_were_written(places: list[list[int]], first: int) -> None:
    """Every entry is found, in a part of an index as well; an empty one is none."""
    data = b"".join(struct.pack("<2Q", *place) for place in places)
    index = ShardIndexDecoder(len(data), first)(data)

    assert index.nbytes == len(data)
    assert [index.lookup(first + at) for at in range(len(places))] == [
        ByteRange(start, stop) if start < stop else None for start, stop in places
    ]


@pytest.mark.parametrize("nbytes", [0, 15, 17, 31, 33])
def test_a_shard_index_of_another_size_is_truncated(nbytes: int) -> None:
    """Neither fewer nor more bytes are an index."""
    with pytest.raises(DecodeError, match=f"{nbytes} bytes of shard index instead of 32"):
        ShardIndexDecoder(32)(bytes(nbytes))


@pytest.mark.parametrize("entry", [(1, 0), (2**64 - 1, 0), (2**64 - 1, 2**64 - 2)])
def test_a_minishard_index_must_not_end_before_it_begins(entry: tuple[int, int]) -> None:
    """Such an entry is neither empty nor a range."""
    with pytest.raises(DecodeError, match=f"minishard index 0 ends at {entry[1]}, before"):
        MinishardPlaces(struct.pack("<2Q", *entry)).lookup(0)


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


@pytest.mark.parametrize(("start", "size"), [(2**64 - 1, 1), (2**63, 2**63), (1, 2**64 - 1)])
def test_a_chunk_must_not_end_past_64_bits(start: int, size: int) -> None:
    """Offset and size must not overflow together: what follows counts from there."""
    with pytest.raises(DecodeError, match=r"chunk 7 ends past 2\^64"):
        _decode(encode_minishard([(7, start, size), (8, 0, 2)]))


@pytest.mark.parametrize("nbytes", [1, 8, 23, 25, 47, 50])
def test_a_minishard_index_of_another_size_is_refused(nbytes: int) -> None:
    """It takes 24 bytes a chunk."""
    with pytest.raises(DecodeError, match=f"{nbytes} bytes, no multiple of 24"):
        _decode(bytes(nbytes))
    with pytest.raises(DecodeError, match=f"{nbytes} bytes, no multiple of 24"):
        _decode(zipped(bytes(nbytes)), is_gzip=True)


@pytest.mark.parametrize("is_gzip", [False, True])
def test_an_empty_minishard_index_holds_nothing(*, is_gzip: bool) -> None:
    """No chunk is in it, and that is no error."""
    index = _decode(zipped(b"") if is_gzip else b"", is_gzip=is_gzip)

    assert (len(index), index.nbytes, index.lookup(0)) == (0, 0, None)


@given(_chunks)
def test_a_truncated_gzip_is_refused(chunks: list[tuple[int, int, int]]) -> None:
    """At whatever byte it ends, it is not taken for fewer chunks."""
    data = zipped(encode_minishard(chunks))
    for length in range(len(data)):
        with pytest.raises(DecodeError, match="ends early"):
            _decode(data[:length], is_gzip=True)


def test_an_index_that_inflates_beyond_the_limit_is_refused() -> None:
    """A bomb is not inflated further than the limit."""
    bomb = zipped(bytes(100 * _MOST_NBYTES))
    with pytest.raises(DecodeError, match="more than 65536 bytes once inflated"):
        _decode(bomb, is_gzip=True)


def test_an_index_that_inflates_to_the_limit_is_decoded() -> None:
    """The limit itself is allowed."""
    data = encode_minishard([(each, each, 1) for each in range(1000)])

    assert len(MinishardIndexDecoder(is_gzip=True, most_nbytes=24_000)(zipped(data))) == 1000


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
