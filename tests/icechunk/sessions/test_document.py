"""Sessions: their stored document."""

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from shardgate.formats.reading import DecodeError
from shardgate.icechunk.sessions.document import (
    ChangedNode,
    Committed,
    Discarded,
    Open,
    Sealed,
    SessionDocument,
    decode_session,
    encode_session,
)

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
