"""Descriptions of arrays, and surveys of their shards."""

import json
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardgate.errors import DamagedError
from shardgate.formats.reading import DecodeError
from shardgate.formats.surveying import Description, Fault, IndexEntry, Survey
from shardgate.formats.zarr.metadata import Node, parse_array, parse_node
from shardgate.formats.zarr.survey import ZarrShards, array_names, describe
from shardgate.model import ByteRange, VirtualKey
from shardgate.read.metadata_cache import ReadCache, uncached_reads
from tests.support.formats.case import chunks_of, filled
from tests.support.formats.zarr.building import (
    CRC,
    LITTLE,
    array_metadata,
    build,
    rectilinear,
    sharding,
)
from tests.support.formats.zarr.nesting import Nesting, nestings
from tests.support.resolving import ROOT

_GRID = ZarrShards(ROOT, parse_array(array_metadata([5, 7], [4, 4], [sharding([2, 2])])))


def _shards(objects: dict[str, bytes]) -> tuple[ZarrShards, ReadCache]:
    array = parse_array(json.loads(objects["zarr.json"]))
    return ZarrShards(ROOT, array), uncached_reads(filled(objects))


async def _survey(objects: dict[str, bytes], key: str) -> Survey:
    shards, fetch = _shards(objects)
    shard = shards.named(key)
    assert shard is not None
    survey = await shard.survey(fetch)
    assert survey is not None
    return survey


def test_key_off_the_grid_is_no_shard() -> None:
    """Keys off the grid or of other objects name no shard and are held by none."""
    for key in ("c/2/0", "c/0/2", "c/00/0", "c/0", "zarr.json", "c/0/0/0", ""):
        assert _GRID.named(key) is None
    for key in ("c/3/0", "c/0/4", "zarr.json", "c/01/0"):
        assert _GRID.holding(VirtualKey(key)) is None


def test_countless_shards_are_enumerated_one_by_one() -> None:
    """Shards beyond counting are enumerated without a list of them."""
    array = parse_array(array_metadata([2, 2**62], [1, 1], [sharding([1, 1])]))
    found = islice(ZarrShards(ROOT, array).every(), 2)

    assert [shard.ref for shard in found] == [ROOT.join("c/0/0"), ROOT.join("c/0/1")]


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(nestings(), st.data())
async def test_surveys_of_any_nesting_name_the_written_chunks(
    nesting: Nesting, data: st.DataObject
) -> None:
    """Surveys of all shards of a random nesting name exactly the written chunks."""
    coords = list(nesting.coords())
    written = data.draw(st.sets(st.sampled_from(coords))) if coords else set()
    objects = nesting.build({at: f"{at}".encode() for at in written})
    shards, fetch = _shards(objects)

    named: dict[str, bytes] = {}
    for shard in shards.every():
        async for key, place in chunks_of(shard, fetch):
            shard_bytes = objects[place.ref.key.removeprefix(ROOT.prefix.key)]
            named[key] = shard_bytes[slice(*place.byte_range)]

    assert named == {"/".join(map(str, ("c", *at))): f"{at}".encode() for at in written}


async def test_survey_lists_entries_by_place() -> None:
    """A survey lists entries by their places in the shard, and the number of empty ones."""
    survey = await _survey(build({"c/0/0": b"first", "c/1/1": b"fourth"}), "c/0/0")

    table = survey.table()

    assert list(table) == [IndexEntry(0, ByteRange(0, 5)), IndexEntry(3, ByteRange(8, 14))]
    assert (table.empty, list(table.faults)) == (2, [])
    assert np.transpose(survey.indexes).tolist() == [[17, 17 + 68]]
    assert survey.index_location == "end"


async def test_damaged_entry_or_index_is_a_fault() -> None:
    """A damaged entry is a fault of its chunk, a damaged inner index of its first chunk.

    Other entries are listed; a shard too short for its index raises DamagedError.
    """
    objects = build({"c/0/0": b"first", "c/1/1": b"last"}, crc=False)
    data = objects["c/0/0"]
    objects["c/0/0"] = data[:-16] + bytes(8) + (99).to_bytes(8, "little")
    flipped = build({"c/0/3": b"chunk"})
    flipped["c/0/1"] = flipped["c/0/1"][:-1] + b"?"

    table = (await _survey(objects, "c/0/0")).table()
    unread = (await _survey(flipped, "c/0/1")).table()

    reason = "inner chunk 3 at [0, 99) ends past 79 bytes"
    assert [entry.number for entry in table] == [0]
    assert list(table.faults) == [Fault(VirtualKey("c/1/1"), reason)]
    assert (list(unread), unread.empty) == ([], 0)
    reason = "the checksum of the shard index does not match"
    assert unread.faults == [Fault(VirtualKey("c/0/2"), reason)]
    with pytest.raises(DamagedError, match="3 bytes are too few for a shard"):
        await _survey(build({}) | {"c/0/0": b"abc"}, "c/0/0")


_GZIP = {"name": "gzip", "configuration": {"level": 1}}


def _node(document: dict[str, Any]) -> Node:
    return parse_node(document, json.dumps(document).encode())


def _described(document: dict[str, Any]) -> Description:
    return describe(_node(document))


def test_sharded_array_is_described_with_its_shards() -> None:
    """A sharded array is described with shapes in elements and codecs of the inner chunks."""
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


def test_array_with_shards_of_several_sizes_is_described_by_the_largest() -> None:
    """An array with shards of several sizes has no shard shape; its largest shard is named."""
    grid = rectilinear([4, [2, 2]], [6, 8])
    described = _described(array_metadata([8, 8], [], [sharding([2, 2])], chunk_grid=grid))

    assert (described.shard_shape, described.chunks_per_shard) == (None, None)
    assert described.sharding == "rectilinear, at most 4×8"
    assert (described.inner_chunk_shape, described.why_sharded) == ((2, 2), "")


async def test_shards_beyond_the_array_are_none_of_it() -> None:
    """Shards that only elements beyond the shape would fill are neither named nor enumerated."""
    document = array_metadata([5], [], [sharding([1])], chunk_grid=rectilinear([2, [4, 3]]))
    shards = ZarrShards(ROOT, parse_array(document))

    assert [shard.ref.key for shard in shards.every()] == [ROOT.join(f"c/{n}").key for n in (0, 1)]
    assert shards.named("c/1") is not None
    assert shards.named("c/2") is None
    assert shards.holding(VirtualKey("c/5")) is None


@pytest.mark.parametrize(
    ("members", "data_type", "chunk_shape"),
    [
        ({"data_type": {"name": "numpy.datetime64"}}, "numpy.datetime64", (4,)),
        ({"chunk_grid": {"name": "rectilinear", "configuration": {"x": 1}}}, "uint8", None),
        ({"chunk_grid": "rectilinear"}, "uint8", None),
        ({"codecs": [sharding([2]), _GZIP]}, "uint8", (4,)),
    ],
)  # fmt: skip
def test_array_with_extensions_is_described(
    members: dict[str, Any], data_type: str, chunk_shape: tuple[int, ...] | None
) -> None:
    """An array with extensions is described by their names, with a reason if it stays sharded."""
    described = _described(array_metadata([8], [4], [LITTLE]) | members)

    assert (described.data_type, described.inner_chunk_shape) == (data_type, chunk_shape)
    assert described.shard_shape is None
    assert ("gzip after sharding_indexed" in described.why_sharded) is ("codecs" in members)


def test_array_with_unknown_metadata_is_described_by_the_reason() -> None:
    """A sharded array with contradictory metadata is described with the reason."""
    described = _described(array_metadata([8], [4], [sharding([2])]) | {"shape": "eight"})

    assert (described.kind, described.shape) == ("array", None)
    assert described.why_sharded == "shape is no list of sizes: eight"


@pytest.mark.parametrize(
    "members",
    [{"shape": 8}, {"shape": None}, {"codecs": None}, {"codecs": [7]}, {"data_type": None},
     {"chunk_grid": None},
     {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": "x"}}},
     {"chunk_grid": {"name": "regular", "configuration": 4}}, {"dimension_names": "x"},
     {"dimension_names": [1]}],
)  # fmt: skip
def test_invalid_metadata_has_no_description(members: dict[str, Any]) -> None:
    """Metadata that violate the specification raise DecodeError when they are described."""
    with pytest.raises(DecodeError):
        _described(array_metadata([8], [4], [LITTLE]) | members)


def test_consolidated_metadata_names_the_arrays() -> None:
    """Names of arrays that keys can have come from consolidated metadata; None without it."""
    nodes = {
        "g/b": {"node_type": "array"},
        "g": {"node_type": "group"},
        "a": {"node_type": "array"},
        "../b": {"node_type": "array"},
        "\ud800": {"node_type": "array"},
        "x": 1,
    }
    group: dict[str, Any] = {"zarr_format": 3, "node_type": "group"}

    assert array_names(_node(group)) is None
    assert array_names(_node(group | {"consolidated_metadata": None})) is None
    assert array_names(_node(group | {"consolidated_metadata": {"metadata": nodes}})) == [
        "a",
        "g/b",
    ]
