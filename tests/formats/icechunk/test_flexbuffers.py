"""FlexBuffers and metadata, compared with flatbuffers, msgpack and the library."""

from math import inf, nan
from pathlib import Path
from typing import Any

import icechunk
import msgpack
import pytest
from flatbuffers import flexbuffers
from hypothesis import given, settings
from hypothesis import strategies as st

from shardgate.formats.icechunk.flatbuffers import POSITION, FlatBufferReader, TableType
from shardgate.formats.icechunk.flexbuffers import MAX_DEPTH, decode_flexbuffer, encode_flexbuffer
from shardgate.formats.icechunk.metadata_items import (
    Metadata,
    decode_messagepack,
    encode_metadata,
    read_metadata,
)
from shardgate.formats.reading import DecodeError
from tests.support.formats.icechunk.building import payload
from tests.support.formats.icechunk.building_repo import Fields, Repo, item


def _built(method: str, value: object) -> bytes:
    """Let the package `flatbuffers` encode *value*."""
    builder = flexbuffers.Builder()
    getattr(builder, method)(value)
    return bytes(builder.Finish())


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (_built("Key", "a key"), "a key"),
        (_built("Blob", b"\x00\xff"), "AP8="),
        (_built("IndirectInt", -(2**40)), -(2**40)),
        (_built("IndirectUInt", 2**40), 2**40),
        (_built("IndirectFloat", 0.1), 0.1),
        (_built("UInt", 2**63 - 1), 2**63 - 1),
        (_built("Float", inf), None),
        (_built("Float", nan), None),
        *((_built("TypedVectorFromElements", value), value)
          for value in ([-1, 300], [1.5], [True, False])),
        *((_built("FixedTypedVectorFromElements", value), value)
          for value in ([1, -2], [1, 2, 3], [0.5, 0.25, 0.1, 4.0])),
        # kinds that the package lacks: unsigned, of two bytes, vectors of keys, strings and others
        (b"\xff" * 8 + b"\x0b\x08", 2**64 - 1),
        (b"\x00\x3c\x0d\x02", 1.0),
        (b"a\0b\0\x02\x05\x04\x02\x38\x01", ["a", "b"]),
        (b"\x01a\0\x01\x03\x01\x3c\x01", ["a"]),
        (b"\x03\x01\x02\x03\x03\x30\x01", [1, 2, 3]),
        (b"\x01\xfe\x02\x40\x01", [1, -2]),
        (b"\x01\xfe\x02\x44\x01", [1, 254]),
        (b"\x01\x02\xff\x03\x4c\x01", [1, 2, -1]),
        (b"\x01\x02\x03\x04\x04\x5c\x01", [1, 2, 3, 4]),
        (b"\x02\x01\x00\x02\x90\x01", [True, False]),
    ],
)  # fmt: skip
def test_each_kind_of_flexbuffer_is_decoded_to_json(data: bytes, value: Any) -> None:
    """Keys, blobs, numbers and vectors of each kind are decoded to JSON values."""
    assert decode_flexbuffer(data) == value


def _shared() -> bytes:
    """Return two hundred bytes that decode to 2^30 values."""
    data = bytes([1, 0, 4])
    at = 1
    for _ in range(30):
        start = len(data) + 1
        data += bytes([2, start - at, start + 1 - at, 0x28, 0x28])
        at = start
    return data + bytes([len(data) - at, 0x28, 1])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        *((data, "FlexBuffer") for data in (
            b"", b"\x00", b"\x04\x01", b"\x00\x04\x03", b"\x00\x04\x00", b"\x05\x14\x01",
            b"\x00\x0c\x01", b"\x00\x6c\x01", b"\x02\xff\xff\x02\x14\x01",
            b"\xff\xfe\x01\x10\x01")),
        (b"\x01\x00\x28\x02\x28\x01", "damaged FlexBuffer"),
        (_shared(), "for its size"),
    ],
)  # fmt: skip
def test_damaged_flexbuffer_is_refused(data: bytes, reason: str) -> None:
    """A damaged, circular or excessively shared FlexBuffer raises DecodeError."""
    with pytest.raises(DecodeError, match=reason):
        decode_flexbuffer(data)


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value, "x"]
    return value


def test_nesting_is_limited() -> None:
    """Values nested up to the limit are read and written; deeper ones raise an error."""
    value, beyond = _nested(MAX_DEPTH), bytes(flexbuffers.Dumps(_nested(MAX_DEPTH + 1)))

    for data in (bytes(flexbuffers.Dumps(value)), encode_flexbuffer(value)):
        assert decode_flexbuffer(data) == value
    assert decode_messagepack(b"\x91" * MAX_DEPTH + b"\x01")
    with pytest.raises(DecodeError, match="nests deeper"):
        decode_flexbuffer(beyond)
    with pytest.raises(DecodeError, match="nests deeper"):
        decode_messagepack(b"\x91" * (MAX_DEPTH + 1) + b"\x01")
    with pytest.raises(ValueError, match="deeper than 128"):
        encode_flexbuffer([value])


TEXT = st.text(st.characters(codec="utf-8"), max_size=300)
KEYS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.integers(-300, 300)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.floats(width=32, allow_nan=False, allow_infinity=False)
    | TEXT
)
VALUES = st.recursive(
    SCALARS | st.lists(st.integers(-9, 9), max_size=7) | st.lists(st.floats(0, 1), max_size=7),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(KEYS, inner, max_size=7),
    max_leaves=40,
)


def test_library_reads_encoded_metadata(tmp_path: Path) -> None:
    """The library reads random values of metadata as encoded, and so does the decoder."""
    values: list[Any] = []

    @settings(max_examples=20)
    @given(st.lists(VALUES, min_size=5, max_size=5))
    def collect(some: list[Any]) -> None:
        assert decode_flexbuffer(encode_flexbuffer(some)) == some
        values.extend(some)

    collect()
    metadata = {f"{number:04d}": value for number, value in enumerate(values)}
    storage = icechunk.local_filesystem_storage(str(tmp_path))
    icechunk.Repository.create(storage)
    items = [item(*each) for each in encode_metadata(metadata).items]
    (tmp_path / "repo").write_bytes(Repo(more={6: items}).file())

    assert icechunk.Repository.open(storage).metadata == metadata


@pytest.mark.parametrize(
    "value", [2**64, -(2**63) - 1, inf, [nan], {"a\0": 1}, "\ud800", [[[]] * 2, {"\ud800": 1}]]
)
def test_value_without_an_encoding_is_refused(value: Any) -> None:
    """A value that FlexBuffers cannot represent raises ValueError."""
    with pytest.raises(ValueError, match=r".+"):
        encode_flexbuffer(value)


def test_metadata_item_above_8_mib_is_refused() -> None:
    """A metadata item above 8 MiB encoded raises ValueError; one below it is decoded."""
    assert encode_metadata({"a": "x" * (2**23 - 64)}).decode()
    with pytest.raises(ValueError, match=r"^a takes 83886\d\d bytes, over 8388608$"):
        encode_metadata({"a": "x" * 2**23})


def _read(fields: Fields, version: int) -> Metadata:
    reader = FlatBufferReader(payload(fields), version=version)
    return read_metadata(reader, *reader.root(TableType(POSITION)))


@pytest.mark.parametrize(
    ("version", "encode"), [(1, msgpack.packb), (2, lambda value: bytes(flexbuffers.Dumps(value)))]
)
def test_encoding_of_metadata_depends_on_the_version(version: int, encode: Any) -> None:
    """Metadata items are MessagePack in version 1 and FlexBuffers in version 2.

    The first item of a name counts; an item without name or value raises DecodeError.
    """
    items = [item("a", encode([1, "é"])), item("", encode(None)), item("a", b"\xc1")]

    assert _read({0: items}, version).decode() == {"a": [1, "é"], "": None}
    assert _read({}, version).decode() == {}
    for fields in ({0: "a"}, {1: b"\x01"}):
        with pytest.raises(DecodeError, match="metadata item"):
            _read({0: [fields]}, version)


@settings(max_examples=40)
@given(VALUES)
def test_messagepack_of_json_is_decoded(value: Any) -> None:
    """JSON values encoded as MessagePack are decoded to the same values."""
    assert decode_messagepack(msgpack.packb(value)) == value


@pytest.mark.parametrize(
    ("value", "decoded"), [(b"\x00\xff", "AP8="), (float("nan"), None), ([float("-inf")], [None])]
)
def test_messagepack_values_outside_of_json_are_replaced(value: Any, decoded: Any) -> None:
    """Binary values of MessagePack become base64, and NaN and infinities null."""
    assert decode_messagepack(msgpack.packb(value)) == decoded


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", b"\x01\x02", b"\xa1\xff", b"\xdd\xff\xff\xff\xff", b"\x81\x01\x02",
     b"\x81\xc4\x01a\x02", b"\xd6\xff\0\0\0\0", b"\xc7\x00\xff", b"\xc7\x00\x05",
     b"\x91" * 5000 + b"\x01", b"\xdd\x00\x00\xff\xff" * 500],
)  # fmt: skip
def test_damaged_messagepack_is_refused(data: bytes) -> None:
    """MessagePack that is damaged, or has extensions or keys other than text, is refused."""
    with pytest.raises(DecodeError, match="MessagePack"):
        decode_messagepack(data)
