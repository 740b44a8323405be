"""Metadata of snapshots and repositories."""

import json
from contextlib import suppress
from typing import Any

import msgpack
import pytest
from flatbuffers import flexbuffers
from hypothesis import given
from hypothesis import strategies as st

from app.formats.icechunk.flatbuffers import POSITION, FlatBufferReader, TableType
from app.formats.icechunk.flexbuffers import MAX_DEPTH
from app.formats.icechunk.repo_info import Metadata, decode_messagepack, read_metadata
from app.formats.reading import DecodeError
from tests.formats.icechunk.building import payload
from tests.formats.icechunk.building_repo import Fields, item

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=40,
)


def _read(fields: Fields, version: int) -> Metadata:
    reader = FlatBufferReader(payload(fields), version=version)
    return read_metadata(reader, *reader.root(TableType(POSITION)))


@pytest.mark.parametrize(
    ("version", "encode"), [(1, msgpack.packb), (2, lambda value: bytes(flexbuffers.Dumps(value)))]
)
def test_the_version_of_the_file_tells_the_encoding(version: int, encode: Any) -> None:
    """Version 1 has MessagePack, version 2 FlexBuffers."""
    metadata = _read({0: [item("a", encode([1, "é"])), item("", encode(None))]}, version)

    assert metadata.decode() == {"a": [1, "é"], "": None}


def test_absent_metadata_is_empty() -> None:
    """Whoever has nothing to say may leave the field out."""
    assert _read({}, 2).decode() == {}


def test_the_first_of_a_name_counts() -> None:
    """Later ones are not even decoded."""
    assert _read({0: [item("a", b"\x01"), item("a", b"\xc1")]}, 1).decode() == {"a": 1}


@pytest.mark.parametrize("fields", [{0: "a"}, {1: b"\x01"}])
def test_an_item_has_name_and_value(fields: Fields) -> None:
    """Half an item is damage."""
    with pytest.raises(DecodeError, match="metadata item"):
        _read({0: [fields]}, 1)


@given(VALUES)
def test_messagepack_of_json_comes_back(value: Any) -> None:
    """All shapes of JSON, and numbers up to 2^64."""
    assert decode_messagepack(msgpack.packb(value)) == value


@pytest.mark.parametrize(
    ("value", "decoded"),
    [(b"\x00\xff", "AP8="), (float("nan"), None), ([float("-inf")], [None])],
)
def test_what_json_cannot_say_is_replaced(value: Any, decoded: Any) -> None:
    """Binary becomes base64, and numbers that JSON has not become null."""
    assert decode_messagepack(msgpack.packb(value)) == decoded


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", b"\x01\x02", b"\xa1\xff", b"\xdd\xff\xff\xff\xff", b"\x81\x01\x02",
     b"\x81\xc4\x01a\x02", b"\xd6\xff\0\0\0\0", b"\xc7\x00\xff", b"\xc7\x00\x05",
     b"\x91" * 5000 + b"\x01", b"\xdd\x00\x00\xff\xff" * 500],
)  # fmt: skip
def test_damaged_messagepack_is_an_error(data: bytes) -> None:
    """Timestamps and other extensions, keys that are no text, and lists that only claim to be."""
    with pytest.raises(DecodeError, match="MessagePack"):
        decode_messagepack(data)


def test_messagepack_nests_to_a_limit() -> None:
    """The same limit as for FlexBuffers."""
    assert decode_messagepack(b"\x91" * MAX_DEPTH + b"\x01")

    with pytest.raises(DecodeError, match="nests deeper"):
        decode_messagepack(b"\x91" * (MAX_DEPTH + 1) + b"\x01")


@given(st.binary(max_size=64))
def test_noise_is_json_or_an_error(data: bytes) -> None:
    """No noise raises anything else, and what it means can be said in JSON."""
    with suppress(DecodeError):
        json.dumps(decode_messagepack(data), allow_nan=False).encode()
