"""Sessions: their stored document and the entries of their journal."""

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from shardgate.formats.icechunk.manifest import InlineChunk, Native
from shardgate.formats.reading import DecodeError
from shardgate.icechunk.sessions.document import (
    GONE_NBYTES,
    ChangedNode,
    Committed,
    Discarded,
    JournalEntry,
    Open,
    Sealed,
    SessionDocument,
    decode_entry,
    decode_session,
    encode_entry,
    encode_session,
    parse_coords,
    spell_coords,
)
from shardgate.model import ByteRange

_LIMIT = 2**20
states = st.one_of(
    st.just(Open()),
    st.just(Discarded()),
    st.builds(Sealed, st.none() | st.text()),
    st.builds(Committed, st.text(), st.none() | st.text(), st.none() | st.text()),
)
nodes = st.none() | st.builds(
    ChangedNode, st.binary(min_size=8, max_size=8), st.text().map(str.encode)
)
times = st.floats(0, 1e10)
documents = st.builds(
    SessionDocument,
    st.text(),
    st.text(),
    st.integers(0, 2**30),
    times,
    times,
    states,
    st.integers(0, 9),
    st.dictionaries(st.text(), nodes, max_size=4),
)


@given(session=documents)
def test_a_session_is_read_as_it_was_written(session: SessionDocument) -> None:
    """In every state."""
    assert decode_session(encode_session(session), _LIMIT) == session


@pytest.mark.parametrize("text", [b"NaN", b"Infinity", b"1e300", b"-1.0"])
def test_a_session_that_ends_at_no_time_is_refused(text: bytes) -> None:
    """What is no time could not be shown as one."""
    data = zstandard.decompress(encode_session(SessionDocument("main", "P", 512, 1.0, 2.0)))
    assert b'"expires_at_s":2.0' in data
    with pytest.raises(DecodeError, match="expires_at_s"):
        decode_session(zstandard.compress(data.replace(b"2.0", text)), _LIMIT)


@pytest.mark.parametrize("data", [b"", b"{}", zstandard.compress(b"{}"), zstandard.compress(b"[")])
def test_what_is_no_session_is_refused(data: bytes) -> None:
    """Compressed or not."""
    with pytest.raises(DecodeError):
        decode_session(data, _LIMIT)


entries = st.one_of(
    st.none(),
    st.builds(InlineChunk, st.binary(min_size=1)),
    st.builds(
        lambda chunk_id, start, nbytes: Native(chunk_id, ByteRange(start, start + nbytes)),
        st.binary(min_size=12, max_size=12),
        st.integers(0, 2**62),
        st.integers(0, 2**62),
    ),
)


@given(entry=entries)
def test_an_entry_is_read_as_it_was_written(entry: JournalEntry) -> None:
    """Only that of a chunk that is gone is as short as a listing shows."""
    data = encode_entry(entry)

    assert decode_entry(data) == entry
    assert (len(data) == GONE_NBYTES) == (entry is None)


@pytest.mark.parametrize(
    "data", [b"", b"x", b"n", b"n" + bytes(27), b"n" + b"\xff" * 20 + bytes(8)]
)
def test_what_is_no_entry_is_refused(data: bytes) -> None:
    """Nothing is guessed."""
    with pytest.raises(DecodeError):
        decode_entry(data)


@given(coords=st.lists(st.integers(0, 2**32 - 1), max_size=5))
def test_coords_are_read_as_they_were_written(coords: list[int]) -> None:
    """Also those of the only chunk of an array without dimensions."""
    assert parse_coords(spell_coords(tuple(coords))) == tuple(coords)


@pytest.mark.parametrize(
    "name", ["", ".", "01", "1.", "-1", "1/2", "٣", "Scalar", "4294967296", "9" * 20]
)
def test_other_names_are_of_no_chunk(name: str) -> None:
    """One spelling is read."""
    assert parse_coords(name) is None
