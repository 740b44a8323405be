"""What is taken for an inner chunk."""

from typing import Any

import pytest

from app.formats.zarr_sharding_indexed.chunk import ChunkForm, chunk_form
from tests.formats.zarr_sharding_indexed.case import BIG, CRC, LITTLE, checksum

GZIP = {"name": "gzip"}
TRANSPOSE = {"name": "transpose", "configuration": {"order": [1, 0]}}


def of_length(name: str, length: object) -> dict[str, Any]:
    """Write a data type with ``length_bytes``."""
    return {"name": name, "configuration": {"length_bytes": length}}


def record(name: str, *fields: Any) -> dict[str, Any]:
    """Write a data type of fields."""
    return {"name": name, "configuration": {"fields": list(fields)}}


@pytest.mark.parametrize(
    ("data_type", "nbytes"),
    [
        ("bool", 1),
        ("int8", 1),
        ("uint16", 2),
        ("int32", 4),
        ("uint64", 8),
        ("float16", 2),
        ("bfloat16", 2),
        ("float32", 4),
        ("float64", 8),
        ("complex64", 8),
        ("complex128", 16),
        ("r8", 1),
        ("r24", 3),
        ({"name": "int32"}, 4),
        ({"name": "numpy.datetime64", "configuration": {"unit": "s", "scale_factor": 1}}, 8),
        ({"name": "numpy.timedelta64", "configuration": {"unit": "s", "scale_factor": 1}}, 8),
        (of_length("fixed_length_utf32", 12), 12),
        (of_length("null_terminated_bytes", 3), 3),
        (of_length("raw_bytes", 5), 5),
        (record("structured", ["a", "int16"], ["b", of_length("raw_bytes", 3)]), 5),
        (record("struct", {"name": "a", "data_type": "int16"}), 2),
    ],
)
def test_chunks_of_fixed_size_types_have_one_length(data_type: object, nbytes: int) -> None:
    """As many elements as the chunk shape says, each of so many bytes."""
    assert chunk_form([LITTLE], (2, 3), data_type) == ChunkForm(6 * nbytes)
    assert chunk_form([LITTLE], (), data_type) == ChunkForm(nbytes)


@pytest.mark.parametrize(
    "data_type",
    [
        "string",
        "variable_length_bytes",
        "r7",
        "r",
        "int",
        "int3",
        "uint128x",
        "",
        7,
        None,
        {"name": 7},
        of_length("raw_bytes", -1),
        of_length("raw_bytes", None),
        {"name": "raw_bytes"},
        record("struct"),
        record("struct", ["a"]),
        record("struct", ["a", "string"]),
        {"name": "struct", "configuration": {"fields": 7}},
    ],
)
def test_chunks_of_other_types_are_of_any_length(data_type: object) -> None:
    """What is not known is not refused."""
    assert chunk_form([LITTLE], (2, 3), data_type) == ChunkForm()


@pytest.mark.parametrize(
    ("codecs", "expected"),
    [
        ([LITTLE], ChunkForm(12)),
        (["bytes"], ChunkForm(12)),
        ([TRANSPOSE, BIG], ChunkForm(12)),
        ([LITTLE, CRC], ChunkForm(16, has_checksum=True)),
        ([LITTLE, "crc32c", CRC], ChunkForm(20, has_checksum=True)),
        ([LITTLE, GZIP], ChunkForm()),
        ([LITTLE, GZIP, CRC], ChunkForm(has_checksum=True)),
        ([LITTLE, CRC, GZIP], ChunkForm()),
        ([{"name": "packbits"}], ChunkForm()),
    ],
)
def test_codecs_tell_the_length_and_the_checksum(codecs: list[Any], expected: ChunkForm) -> None:
    """Of what they make of six elements of two bytes."""
    assert chunk_form(codecs, (3, 2), "int16") == expected


def test_data_must_have_the_form() -> None:
    """The first thing that is wrong is told."""
    form = ChunkForm(8, has_checksum=True)

    assert form.fault(b"") == "the inner chunk is empty"
    assert form.fault(b"1234567") == "the inner chunk has 7 bytes instead of 8"
    assert form.fault(b"12345678") == "the checksum of the inner chunk does not match"
    assert form.fault(b"1234" + checksum(b"1234")) is None
    assert ChunkForm().fault(b"any") is None
