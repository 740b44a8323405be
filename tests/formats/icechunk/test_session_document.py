"""The document of a session is read as it was written."""

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from app.formats.icechunk.session_document import (
    ChangedNode,
    Committed,
    Discarded,
    Open,
    Sealed,
    SessionDocument,
    decode_session,
    encode_session,
)
from app.formats.reading import DecodeError

_LIMIT = 2**20
states = st.one_of(
    st.just(Open()),
    st.just(Discarded()),
    st.builds(Sealed, st.floats(0, 1e10), st.text()),
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


@pytest.mark.parametrize("data", [b"", b"{}", zstandard.compress(b"{}"), zstandard.compress(b"[")])
def test_what_is_no_session_is_refused(data: bytes) -> None:
    """Whether it is compressed or not."""
    with pytest.raises(DecodeError):
        decode_session(data, _LIMIT)


def test_a_session_is_not_inflated_beyond_measure() -> None:
    """What it would take is known before."""
    with pytest.raises(DecodeError):
        decode_session(zstandard.compress(bytes(2 * _LIMIT)), _LIMIT)
