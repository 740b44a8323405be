"""What the metadata of an array tell."""

import json
from typing import Any

import pytest

from app.formats.reading import DecodeError
from app.formats.surveying import Description
from app.formats.zarr_storage_transformer.describe import array_paths, describe
from app.formats.zarr_storage_transformer.keys import MetadataKeys
from app.formats.zarr_storage_transformer.metadata import (
    Document,
    parse_array_document,
    parse_consolidated,
)
from tests.formats.zarr_storage_transformer.case import BY_ZARR_PYTHON, array_metadata, sharding


def _document(members: dict[str, Any]) -> Document:
    return parse_array_document(members, json.dumps(members).encode())


def test_a_sharded_array_tells_its_shards() -> None:
    """Shapes are in array elements, as zarr-python wrote them too."""
    assert describe("foo/bar", _document(BY_ZARR_PYTHON)) == Description(
        path="foo/bar",
        format="zarr",
        kind="array",
        shape=(5, 7),
        data_type="<i4",
        inner_chunk_shape=(2, 2),
        codecs=("blosc/1.0",),
        shard_shape=(4, 6),
        chunks_per_shard=(2, 3),
        index_location=("end",),
    )


def test_an_array_without_transformers_tells_its_chunks() -> None:
    """What has to do with shards is not there."""
    assert describe("", _document(array_metadata([5], [2]))) == Description(
        path="",
        format="zarr",
        kind="array",
        shape=(5,),
        data_type="u1",
        inner_chunk_shape=(2,),
    )


def test_an_array_that_stays_sharded_tells_why() -> None:
    """Its transformer is unknown."""
    transformer = {"type": "indexed", "extension": "https://example.org/moon"}

    described = describe("", _document(array_metadata([5], [2], [transformer])))

    assert described.chunks_per_shard is None
    assert described.index_location == ()
    assert "https://example.org/moon" in described.why_sharded


@pytest.mark.parametrize(
    ("members", "data_type", "chunk_shape", "codecs"),
    [
        ({"data_type": {"extension": "x", "type": "<M8[s]"}}, "<M8[s]", (2,), ()),
        ({"data_type": 7}, None, (2,), ()),
        ({"chunk_grid": {"type": "rectilinear"}}, "u1", (), ()),
        ({"compressor": {"codec": "lz4"}}, "u1", (2,), ("lz4",)),
        (
            {"compressor": {"codec": "https://purl.org/zarr/spec/codecs/gzip"}},
            "u1",
            (2,),
            ("gzip",),
        ),
        ({"compressor": None}, "u1", (2,), ()),
    ],
)
def test_extensions_are_told_by_their_names(
    members: dict[str, Any],
    data_type: str | None,
    chunk_shape: tuple[int, ...],
    codecs: tuple[str, ...],
) -> None:
    """An array that is served as it is need not be understood."""
    described = describe("", _document(array_metadata([5], [2]) | members))

    assert described.data_type == data_type
    assert (described.inner_chunk_shape, described.codecs) == (chunk_shape, codecs)


def test_what_contradicts_the_draft_is_told() -> None:
    """Metadata that are only passed on may be anything."""
    for members in ({"shape": 8}, {"chunk_grid": {"type": "regular", "chunk_shape": "x"}}):
        with pytest.raises(DecodeError):
            describe("", _document(array_metadata([5], [2]) | members))


def test_gathered_metadata_name_the_arrays() -> None:
    """And groups, and much else."""
    array = array_metadata([5], [2], [sharding([2])])
    nodes = {
        "meta/root/b/c.array.json": array,
        "meta/root/b.group.json": {},
        "meta/root/a.array.json": {},
        "meta/root.array.json": array,
        "zarr.json": {},
    }
    for document, paths in (
        ({"metadata": nodes}, ["", "a", "b/c"]),
        ({"metadata": 7}, []),
        ([], []),
    ):
        consolidated = parse_consolidated(document, json.dumps(document).encode())
        assert array_paths(consolidated, MetadataKeys(".json")) == paths
