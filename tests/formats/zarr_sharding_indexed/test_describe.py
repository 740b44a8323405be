"""What the metadata of a node tells."""

import json
from typing import Any

import pytest

from app.formats.reading import DecodeError
from app.formats.surveying import Description
from app.formats.zarr_sharding_indexed.describe import array_names, describe
from app.formats.zarr_sharding_indexed.metadata import Node, parse_node
from tests.formats.zarr_sharding_indexed.case import CRC, LITTLE, array_metadata, sharding

_GZIP = {"name": "gzip", "configuration": {"level": 1}}


def _node(document: dict[str, Any]) -> Node:
    return parse_node(document, json.dumps(document).encode())


def _described(document: dict[str, Any]) -> Description:
    return describe(_node(document))


def test_a_sharded_array_tells_its_shards() -> None:
    """Shapes are in array elements, codecs those of an inner chunk."""
    inner = sharding([1, 2], [LITTLE, CRC], index_location="start")
    document = array_metadata([8, 8], [4, 8], [sharding([2, 4], [inner])])

    assert _described(document | {"dimension_names": ["y", None]}) == Description(
        path="",
        format="zarr",
        kind="array",
        shape=(8, 8),
        data_type="uint8",
        dimension_names=("y", None),
        inner_chunk_shape=(1, 2),
        codecs=("bytes", "crc32c"),
        shard_shape=(4, 8),
        chunks_per_shard=(4, 4),
        index_location=("end", "start"),
    )


def test_an_array_without_shards_tells_its_chunks() -> None:
    """What has to do with shards is not there."""
    assert _described(array_metadata([8], [4], [LITTLE])) == Description(
        path="",
        format="zarr",
        kind="array",
        shape=(8,),
        data_type="uint8",
        inner_chunk_shape=(4,),
        codecs=("bytes",),
    )


def test_an_array_that_stays_sharded_tells_why() -> None:
    """Its chunks are its shards."""
    described = _described(array_metadata([8], [4], [sharding([2]), _GZIP]))

    assert described.shard_shape is None
    assert described.inner_chunk_shape == (4,)
    assert "gzip after sharding_indexed" in described.why_sharded


@pytest.mark.parametrize(
    ("members", "data_type", "chunk_shape"),
    [
        (
            {"data_type": {"name": "numpy.datetime64", "configuration": {}}},
            "numpy.datetime64",
            (4,),
        ),
        ({"chunk_grid": {"name": "rectilinear", "configuration": {"x": 1}}}, "uint8", ()),
        ({"chunk_grid": "rectilinear"}, "uint8", ()),
    ],
)
def test_extensions_are_told_by_their_names(
    members: dict[str, Any], data_type: str, chunk_shape: tuple[int, ...]
) -> None:
    """An array that is served as it is need not be understood."""
    described = _described(array_metadata([8], [4], [LITTLE]) | members)

    assert (described.data_type, described.inner_chunk_shape) == (data_type, chunk_shape)


@pytest.mark.parametrize(
    "members",
    [
        {"shape": 8},
        {"shape": None},
        {"codecs": None},
        {"codecs": [7]},
        {"data_type": None},
        {"chunk_grid": None},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": "x"}}},
        {"chunk_grid": {"name": "regular", "configuration": 4}},
        {"dimension_names": "x"},
        {"dimension_names": [1]},
    ],
)
def test_what_contradicts_the_specification_is_told(members: dict[str, Any]) -> None:
    """Metadata that is only passed on may be anything."""
    with pytest.raises(DecodeError):
        _described(array_metadata([8], [4], [LITTLE]) | members)


def test_consolidated_metadata_names_the_arrays() -> None:
    """Groups in it are passed over: their arrays are in it too."""
    nodes = {
        "g/b": {"node_type": "array"},
        "g": {"node_type": "group"},
        "a": {"node_type": "array"},
        "x": 1,
    }
    group: dict[str, Any] = {"zarr_format": 3, "node_type": "group"}

    assert array_names(_node(group)) is None
    assert array_names(_node(group | {"consolidated_metadata": None})) is None
    assert array_names(_node(group | {"consolidated_metadata": {"metadata": nodes}})) == [
        "a",
        "g/b",
    ]
