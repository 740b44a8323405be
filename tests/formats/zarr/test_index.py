"""`shardgate.formats.zarr.index`: the shard index."""

import struct

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardgate.formats.reading import DecodeError
from shardgate.formats.zarr.index import IndexCodec, ShardIndex
from shardgate.model import ByteRange, SuffixRange
from tests.support.formats.zarr.building import EMPTY, encode_index

_codecs = st.builds(
    IndexCodec,
    shape=st.tuples(st.integers(1, 40)),
    location=st.sampled_from(["start", "end"]),
    big_endian=st.booleans(),
    checksum_count=st.integers(0, 1),
    trailer_nbytes=st.sampled_from([0, 4, 8]),
)
_places = st.integers(0, 2**63 - 1)
_entries = st.just(EMPTY) | st.tuples(_places, _places)


def _endian(codec: IndexCodec) -> str:
    return ">" if codec.big_endian else "<"


def _drawn(data: st.DataObject, codec: IndexCodec) -> tuple[list[tuple[int, int]], bytes]:
    entries = data.draw(st.lists(_entries, min_size=codec.entry_count, max_size=codec.entry_count))
    return entries, encode_index(entries, endian=_endian(codec), crc=bool(codec.checksum_count))


@given(_codecs, st.data())
def test_lookup_returns_the_written_entries(codec: IndexCodec, data: st.DataObject) -> None:
    """Lookup returns every entry of an encoded index as written, and None for empty ones."""
    entries, encoded = _drawn(data, codec)
    index = codec(encoded)

    assert index.nbytes == 16 * codec.entry_count
    assert [index.lookup(i) for i in range(codec.entry_count)] == [
        None if entry == EMPTY else ByteRange(entry[0], sum(entry)) for entry in entries
    ]


@given(_codecs, st.data())
def test_index_of_a_wrong_size_is_refused(codec: IndexCodec, data: st.DataObject) -> None:
    """An index of a wrong size raises DecodeError."""
    nbytes = data.draw(st.integers(0, codec.nbytes + 20))
    assume(nbytes not in {codec.nbytes, codec.nbytes + codec.trailer_nbytes})
    with pytest.raises(DecodeError, match=f"has {nbytes} bytes instead of {codec.nbytes}"):
        codec(bytes(nbytes))


@given(_codecs, st.data())
def test_flipped_bit_fails_the_checksum(codec: IndexCodec, data: st.DataObject) -> None:
    """An index with a checksum and any flipped bit raises DecodeError."""
    assume(codec.checksum_count)
    _, encoded = _drawn(data, codec)
    damaged = bytearray(encoded)
    bit = data.draw(st.integers(0, 8 * len(damaged) - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DecodeError, match="checksum"):
        codec(bytes(damaged))


@given(_codecs, st.binary(max_size=60), st.data())
def test_place_and_request_of_an_index_hold_it(
    codec: IndexCodec, body: bytes, data: st.DataObject
) -> None:
    """The place and the request of an index contain it, in a shard of any size."""
    _, encoded = _drawn(data, codec)
    trailer = data.draw(st.binary(min_size=codec.trailer_nbytes, max_size=codec.trailer_nbytes))
    parts = (encoded, body) if codec.location == "start" else (body, encoded)
    shard = b"".join((*parts, trailer))
    place = codec.place(len(shard))
    assert shard[place.start : place.stop] == encoded

    match codec.request:
        case SuffixRange(length):
            asked = shard[-length:]
        case ByteRange(start, stop):
            asked = shard[start:stop]
    assert codec(asked) == codec(encoded)


@given(_codecs, st.data())
def test_shard_too_short_for_its_index_is_refused(codec: IndexCodec, data: st.DataObject) -> None:
    """A shard shorter than its index and trailer raises DecodeError."""
    nbytes = data.draw(st.integers(0, codec.nbytes + codec.trailer_nbytes - 1))
    with pytest.raises(DecodeError, match="truncated"):
        codec.place(nbytes)


@given(_codecs, st.integers(0, 100), st.integers(0, 1000), st.integers(0, 1000))
def test_chunk_outside_of_its_shard_or_over_its_index_is_refused(
    codec: IndexCodec, spare: int, offset: int, nbytes: int
) -> None:
    """An entry that overlaps the index or trailer, or ends past the shard, raises DecodeError."""
    size = codec.nbytes + codec.trailer_nbytes + spare
    entries = struct.pack(f"{_endian(codec)}QQ", offset, nbytes) * codec.entry_count
    index = ShardIndex(entries, codec.big_endian)
    taken = set(range(*codec.place(size))) | set(range(size - codec.trailer_nbytes, size + 2000))
    is_right = taken.isdisjoint(range(offset, offset + nbytes)) and (
        offset + nbytes <= size - codec.trailer_nbytes
    )
    try:
        found = codec.find(index, 0, size)
    except DecodeError:
        assert not is_right
    else:
        assert found == ByteRange(offset, offset + nbytes)
        assert is_right


_edges = st.sampled_from([0, 1, 9, 10, 11, 61, 62, 63, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1])


@given(_codecs, st.integers(0, 100), st.data())
def test_columns_of_an_index_agree_with_single_entries(
    codec: IndexCodec, spare: int, data: st.DataObject
) -> None:
    """The columns of an index have the places, empty marks and faults of its single entries."""
    size, count = codec.nbytes + codec.trailer_nbytes + spare, codec.entry_count
    near = _edges | st.integers(0, size + 2)
    pairs = data.draw(st.lists(st.tuples(near, near), min_size=count, max_size=count))
    encoded = encode_index(pairs, endian=_endian(codec), crc=False)
    index = ShardIndex(encoded, codec.big_endian)
    columns = codec.columns(index, size)
    for entry, found in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        offset, nbytes, is_empty, is_damaged = found
        try:
            expected = codec.find(index, entry, size)
        except DecodeError:
            assert is_damaged
        else:
            assert not is_damaged
            place = None if is_empty else ByteRange(offset, offset + nbytes)
            assert place == expected
