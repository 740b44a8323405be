"""Ids as file names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.formats.icechunk.ids import NODE_ID_NBYTES, OBJECT_ID_NBYTES, decode_id, encode_id

_FIRST_SNAPSHOT = "1CECHNKREP0F1RSTCMT0"
"""Of every repository."""


@given(st.binary(max_size=40))
def test_an_id_is_read_as_it_is_spelled(data: bytes) -> None:
    """Of any length: five bits a letter, the last ones padded."""
    assert decode_id(encode_id(data), len(data)) == data


def test_the_first_snapshot_has_its_name() -> None:
    """The alphabet is that of the specification."""
    digits = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
    bits = "".join(f"{digits.index(letter):05b}" for letter in _FIRST_SNAPSHOT)
    data = int(bits[:96], 2).to_bytes(12)

    assert decode_id(_FIRST_SNAPSHOT) == data
    assert encode_id(data) == _FIRST_SNAPSHOT


@given(st.text("0123456789ABCDEFGHJKMNPQRSTVWXYZabcoilOIL-\u0663 ", max_size=21))
def test_an_id_has_one_spelling(text: str) -> None:
    """Neither small letters nor letters alike nor set bits at the end are read."""
    for nbytes in (NODE_ID_NBYTES, OBJECT_ID_NBYTES):
        data = decode_id(text, nbytes)
        assert data is None or encode_id(data) == text


@pytest.mark.parametrize(
    "text",
    ["", _FIRST_SNAPSHOT.lower(), _FIRST_SNAPSHOT[:-1], _FIRST_SNAPSHOT + "0",
     _FIRST_SNAPSHOT[:-1] + "1", _FIRST_SNAPSHOT.replace("0", "O"),
     _FIRST_SNAPSHOT.replace("1", "\u0661")],
)  # fmt: skip
def test_what_is_no_id_is_none(text: str) -> None:
    """A wrong length, case, letter, digit, or padding."""
    assert decode_id(text) is None
