"""Metadata of Zarr v2: the documents that real writers and others write."""

import json
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.core.buffer import cpu
from zarr.storage import MemoryStore

from shardgate.formats.reading import DecodeError
from shardgate.formats.surveying import Description
from shardgate.formats.zarr.survey import describe_served
from shardgate.formats.zarr.v2 import array_document, decoders_of, plain_document
from tests.support.formats.mutating import members, mutations

PLAIN: dict[str, Any] = {
    "zarr_format": 2,
    "shape": [4, 6],
    "chunks": [2, 3],
    "dtype": "<f4",
    "fill_value": None,
    "order": "C",
    "filters": None,
    "compressor": None,
}


def described(attributes: Any = None, **changed: Any) -> Description:
    """Describe an array with some members *changed*."""
    return describe_served(array_document(PLAIN | changed, attributes))


@given(
    shape=st.lists(st.integers(0, 9), max_size=4),
    dtype=st.sampled_from(["|b1", "|i1", "<u2", ">u4", "<i8", ">f2", "<f4", "<f8", "<c8", ">c16"]),
    order=st.sampled_from("CF"),
    separator=st.sampled_from("./"),
    codec=st.sampled_from([None, numcodecs.Blosc(), numcodecs.Zlib(), numcodecs.LZMA()]),
)
def test_written_metadata_have_the_facts_of_their_writer(
    shape: list[int], dtype: str, order: Any, separator: Any, codec: Any
) -> None:
    """The metadata that zarr-python writes have the shape, chunks and type that it wrote."""
    store: dict[str, Any] = {}
    chunks = tuple(max(1, size // 2) for size in shape)
    array = zarr.create_array(
        MemoryStore(store),
        shape=tuple(shape),
        dtype=dtype,
        chunks=chunks,
        order=order,
        compressors=codec,
        zarr_format=2,
        chunk_key_encoding={"name": "v2", "separator": separator},
    )
    document = array_document(json.loads(store[".zarray"].to_bytes()))
    found = describe_served(document)

    assert (found.shape, found.inner_chunk_shape) == (array.shape, chunks)
    assert found.data_type == np.dtype(dtype).name
    assert found.format == "zarr2"
    assert decoders_of(document) == ([] if codec is None else [codec.get_config()])
    assert ("transpose" in found.codecs) == (order == "F" and len(shape) > 1)
    plain = cpu.Buffer.from_bytes(json.dumps(plain_document(document)).encode())
    assert zarr.open_array({"zarr.json": plain}, mode="r").dtype.name == found.data_type


def test_filters_stand_before_the_bytes() -> None:
    """Filters stand before `bytes`, the compressor behind it, and all keep their members."""
    filters = [{"id": "delta", "dtype": "<f4"}, {"id": "shuffle", "elementsize": 4}]
    document = array_document(PLAIN | {"filters": filters, "compressor": {"id": "bz2", "level": 1}})

    assert [each["name"] for each in document["codecs"]] == ["delta", "shuffle", "bytes", "bz2"]
    assert decoders_of(document) == [*filters, {"id": "bz2", "level": 1}]


@pytest.mark.parametrize(
    ("dtype", "filters", "data_type"),
    [
        ("|S7", None, "S7"),
        ("<U5", None, "U5"),
        ("|V3", None, "V3"),
        ("<M8[ns]", None, "datetime64[ns]"),
        (">m8[D]", None, "timedelta64[D]"),
        ("|O", None, "object"),
        ("|O", [{"id": "vlen-utf8"}], "string"),
        ([["a", "<i4"], ["b", "|O", [2]]], None, "struct of a, b"),
    ],
)
def test_types_without_numbers_are_named(dtype: Any, filters: Any, data_type: str) -> None:
    """Texts, times, objects and structured types have names."""
    assert described(dtype=dtype, filters=filters).data_type == data_type


@pytest.mark.parametrize(
    ("attributes", "names"),
    [
        ({"_ARRAY_DIMENSIONS": ["lat", "lon"]}, ("lat", "lon")),
        ({"_ARRAY_DIMENSIONS": ["lat"]}, None),
        ({"_ARRAY_DIMENSIONS": ["lat", 7]}, None),
        ({"_ARRAY_DIMENSIONS": "ab"}, None),
        ([], None),
    ],
)
def test_dimensions_have_the_names_of_xarray(attributes: Any, names: Any) -> None:
    """Names in the attributes are taken if there is one for each dimension."""
    assert described(attributes).dimension_names == names


@pytest.mark.parametrize(
    ("dtype", "literal", "fill_value"),
    [
        ("<f4", "NaN", "NaN"),
        (">f8", "Infinity", "Infinity"),
        ("<f2", "-Infinity", "-Infinity"),
        ("<c8", "[NaN, 1.5]", ["NaN", 1.5]),
        ("<f4", '"NaN"', "NaN"),
    ],
)
def test_fill_value_that_is_not_finite_is_text(dtype: str, literal: str, fill_value: Any) -> None:
    """Bare words of Python's writers are spelled as Zarr v3 spells them."""
    stored = PLAIN | {"dtype": dtype, "fill_value": json.loads(literal)}

    assert array_document(stored)["fill_value"] == fill_value


def test_separator_of_keys_is_a_dot_where_it_is_null() -> None:
    """A `dimension_separator` that is null means what its absence means."""
    document = array_document(PLAIN | {"dimension_separator": None})

    assert document["chunk_key_encoding"]["configuration"] == {"separator": "."}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"zarr_format": 1}, "zarr_format is not 2"),
        ({"shape": [-1, 2]}, "shape is no list of sizes"),
        ({"chunks": [True, 2]}, "chunk_shape is no list of sizes"),
        ({"chunks": None}, "chunk_shape is no list of sizes"),
        ({"dtype": "float32"}, "dtype: expected a type of numpy: float32"),
        ({"dtype": None}, "dtype: expected a type of numpy"),
        ({"order": "A"}, "order is neither C nor F: A"),
        ({"filters": [7]}, "a codec without an id of Zarr v2: 7"),
        ({"filters": [{"id": "transpose"}]}, "a codec without an id of Zarr v2"),
        ({"compressor": {"id": "bytes"}}, "a codec without an id of Zarr v2"),
        ({"filters": {"id": "delta"}}, "filters is no list"),
        ({"filters": [{"id": "delta"}] * 99}, "filters is no list of at most 16"),
        ({"compressor": {"level": 1}}, "a codec without an id"),
    ],
)
def test_invalid_metadata_have_a_reason(changed: dict[str, Any], reason: str) -> None:
    """Invalid metadata raise an error that names the member."""
    with pytest.raises(DecodeError, match=reason):
        described(**changed)


@given(
    stored=mutations(PLAIN, PLAIN | {"filters": [{"id": "delta"}], "dtype": [["a", "<i4"]]}),
    attributes=members,
)
def test_hostile_metadata_raise_one_error(stored: Any, attributes: Any) -> None:
    """Metadata with wrong values at any position are a description or a `DecodeError`."""
    try:
        found = describe_served(array_document(stored, attributes))
    except DecodeError:
        return
    assert found.shape is not None
