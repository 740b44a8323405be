"""Sessions: their stored document and the entries of their journal."""

import pytest
import zstandard
from hypothesis import given, settings
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


@settings(max_examples=40)
@given(session=documents)
def test_encoded_session_is_decoded(session: SessionDocument) -> None:
    """A session in any state is decoded from its encoding."""
    assert decode_session(encode_session(session), _LIMIT) == session


@pytest.mark.parametrize("text", [b"NaN", b"Infinity", b"1e300", b"-1.0"])
def test_session_with_an_invalid_expiry_is_refused(text: bytes) -> None:
    """A session whose `expires_at_s` is not a time raises DecodeError."""
    data = zstandard.decompress(encode_session(SessionDocument("main", "P", 512, 1.0, 2.0)))
    assert b'"expires_at_s":2.0' in data
    with pytest.raises(DecodeError, match="expires_at_s"):
        decode_session(zstandard.compress(data.replace(b"2.0", text)), _LIMIT)


@pytest.mark.parametrize("data", [b"", b"{}", zstandard.compress(b"{}"), zstandard.compress(b"[")])
def test_invalid_session_is_refused(data: bytes) -> None:
    """Data that are no session, compressed or not, raise DecodeError."""
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
def test_encoded_entry_is_decoded(entry: JournalEntry) -> None:
    """An entry is decoded from its encoding; the one of a deleted chunk has `GONE_NBYTES`."""
    data = encode_entry(entry)

    assert decode_entry(data) == entry
    assert (len(data) == GONE_NBYTES) == (entry is None)


@pytest.mark.parametrize(
    "data", [b"", b"x", b"n", b"n" + bytes(27), b"n" + b"\xff" * 20 + bytes(8)]
)
def test_invalid_entry_is_refused(data: bytes) -> None:
    """Data that are no entry raise DecodeError."""
    with pytest.raises(DecodeError):
        decode_entry(data)


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
