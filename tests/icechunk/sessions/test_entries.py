"""Entries of a session's journal, and shards in fragments."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgate.formats.icechunk.manifest import InlineChunk, Native
from shardgate.formats.reading import DecodeError
from shardgate.icechunk.sessions.entries import (
    GONE_NBYTES,
    MAX_FRAGMENTS,
    Fragment,
    Fragmented,
    JournalEntry,
    cut,
    decode_entry,
    encode_entry,
    parse_coords,
    rearrange,
    spell_coords,
)
from shardgate.model import ByteRange, Piece

ids = st.binary(min_size=12, max_size=12)
ranges = st.builds(
    lambda start, nbytes: ByteRange(start, start + nbytes),
    st.integers(0, 2**62),
    st.integers(1, 2**62),
)
fragments = st.builds(Fragment, ids, ranges, st.booleans())
entries = st.one_of(
    st.none(),
    st.builds(InlineChunk, st.binary(min_size=1)),
    st.builds(Native, ids, ranges),
    st.builds(Fragmented, ids, st.lists(fragments, min_size=1, max_size=9).map(tuple)),
)


@given(entry=entries)
def test_encoded_entry_is_decoded(entry: JournalEntry) -> None:
    """An entry is decoded from its encoding; the one of a deleted chunk has `GONE_NBYTES`."""
    data = encode_entry(entry)

    assert decode_entry(data) == entry
    assert (len(data) == GONE_NBYTES) == (entry is None)


FRAGMENT = bytes(12) + (0).to_bytes(8, "little") + (9).to_bytes(8, "little") + b"\1"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x",
        b"n",
        b"n" + bytes(27),
        b"n" + b"\xff" * 20 + bytes(8),
        b"f" + bytes(12),
        b"f" + bytes(12) + FRAGMENT + b"x",
        b"f" + bytes(12) + bytes(29),
        b"f" + bytes(12) + FRAGMENT * (MAX_FRAGMENTS + 1),
    ],
)
def test_invalid_entry_is_refused(data: bytes) -> None:
    """Data that are no entry, and shards of no, empty or too many fragments raise DecodeError."""
    with pytest.raises(DecodeError):
        decode_entry(data)


FILES = {bytes([number] * 12): bytes(range(20 * number, 20 * number + 20)) for number in range(4)}
NEW_ID = bytes([9] * 12)


def contents(fragments: Iterable[Fragment], new: bytes = b"") -> bytes:
    """Return the bytes of *fragments*; the file `NEW_ID` has *new*."""
    files = {**FILES, NEW_ID: new}
    return b"".join(files[file_id][start:stop] for file_id, (start, stop), _ in fragments)


@given(data=st.data())
def test_rearranged_fragments_have_the_bytes_of_the_pieces(data: st.DataObject) -> None:
    """Fragments that are rearranged have the kept bytes and the new ones, in the given order."""
    within = st.tuples(st.integers(0, 19), st.integers(1, 20)).filter(
        lambda pair: pair[0] < pair[1]
    )
    parts = st.builds(
        Fragment,
        st.sampled_from(list(FILES)),
        within.map(lambda at: ByteRange(*at)),
        st.booleans(),
    )
    old = data.draw(st.lists(parts, min_size=1, max_size=5))
    shard = contents(old)
    bounds = st.tuples(*[st.integers(0, len(shard))] * 2).map(lambda pair: ByteRange(*sorted(pair)))
    pieces: list[Piece] = data.draw(st.lists(bounds | st.binary(max_size=4), max_size=6))
    new = b"".join(piece for piece in pieces if isinstance(piece, bytes))

    arranged = rearrange(old, pieces, NEW_ID)

    wanted = b"".join(p if isinstance(p, bytes) else shard[p.start : p.stop] for p in pieces)
    assert contents(arranged, new) == wanted
    assert all(fragment.byte_range.length for fragment in arranged)


def test_range_is_cut_from_the_fragments_that_have_it() -> None:
    """A range of a shard is read from no other fragments than those that have bytes of it."""
    old = [Fragment(file_id, ByteRange(5, 10), is_chunk_file=True) for file_id in FILES]

    (found,) = cut(old, ByteRange(7, 12))

    assert [tuple(fragment.byte_range) for fragment in found] == [(7, 10), (5, 7)]
    assert [fragment.file_id for fragment in found] == [old[1].file_id, old[2].file_id]


@given(coords=st.lists(st.integers(0, 2**32 - 1), max_size=5))
def test_spelled_coords_are_parsed(coords: list[int]) -> None:
    """Coordinates are parsed from their spelling, for arrays without dimensions too."""
    assert parse_coords(spell_coords(tuple(coords))) == tuple(coords)


@pytest.mark.parametrize(
    "name", ["", ".", "01", "1.", "-1", "1/2", "٣", "Scalar", "4294967296", "9" * 20]
)
def test_other_spelling_of_coords_is_no_chunk(name: str) -> None:
    """A name that is not the one spelling of coordinates is no chunk."""
    assert parse_coords(name) is None
