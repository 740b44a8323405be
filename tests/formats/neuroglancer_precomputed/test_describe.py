"""What an ``info`` tells."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from app.formats.neuroglancer_precomputed.describe import Described, describe
from app.formats.neuroglancer_precomputed.metadata import Info, parse_info
from app.formats.reading import DecodeError
from app.formats.surveying import Description
from tests.formats.neuroglancer_precomputed.case import (
    GZIP_DATA,
    MURMUR,
    annotation_info,
    mesh_info,
    skeleton_info,
    volume_info,
)
from tests.formats.neuroglancer_precomputed.shards import RAW_SHARDING

_RAW = "identity, preshift 1, minishard 1, shard 1 bits, index raw, data raw"


def _info(document: dict[str, Any]) -> Info:
    info = parse_info(document, json.dumps(document).encode())
    assert info is not None
    return info


def _described(document: dict[str, Any]) -> Iterator[Description]:
    for each in describe(_info(document)):
        assert isinstance(each, Described)
        yield each.description


def test_a_scale_is_an_array_by_the_order_of_its_axes() -> None:
    """Shapes are in voxels, x first, and the sharding is spelled out."""
    assert list(_described(volume_info(RAW_SHARDING))) == [
        Description(
            path="s0",
            format="precomputed",
            kind="array",
            shape=(7, 5, 1),
            data_type="uint8",
            dimension_names=("x", "y", "z"),
            inner_chunk_shape=(3, 3, 1),
            codecs=("raw",),
            sharding=_RAW,
        )
    ]


def test_channels_are_a_dimension() -> None:
    """All of them are in each chunk; a single one is no dimension."""
    (array,) = _described(volume_info(None) | {"num_channels": 3})

    assert array.shape == (7, 5, 1, 3)
    assert array.inner_chunk_shape == (3, 3, 1, 3)
    assert array.dimension_names == ("x", "y", "z", "channel")


def test_each_chunk_size_is_an_array_of_its_own() -> None:
    """Paths are unlike each other, whatever else is called so."""
    document = volume_info(None, chunk_sizes=[[3, 3, 1], [7, 5, 1]])
    document["scales"] += [{**document["scales"][0], "key": key} for key in ("s0#2", "s0")]

    assert [(array.path, array.inner_chunk_shape) for array in _described(document)] == [
        ("s0", (3, 3, 1)),
        ("s0#2", (7, 5, 1)),
        ("s0#2#2", (3, 3, 1)),
        ("s0#2#3", (7, 5, 1)),
        ("s0#3", (3, 3, 1)),
        ("s0#4", (7, 5, 1)),
    ]


@pytest.mark.parametrize(
    ("document", "kind", "sharding"),
    [
        (mesh_info(RAW_SHARDING), "meshes", _RAW),
        (mesh_info(None), "meshes", None),
        (
            skeleton_info({**MURMUR, "minishard_index_encoding": "gzip"}),
            "skeletons",
            "murmurhash3_x86_128, preshift 0, minishard 1, shard 1 bits, index gzip, data raw",
        ),
    ],
)
def test_meshes_and_skeletons_are_one_collection(
    document: dict[str, Any], kind: str, sharding: str | None
) -> None:
    """They lie in the directory itself; manifests and fragments share their shards."""
    assert list(_described(document)) == [Description("", "precomputed", kind, sharding=sharding)]


def test_annotations_are_a_collection_by_each_index() -> None:
    """By id, by each relationship, by each spatial level."""
    found = list(_described(annotation_info(GZIP_DATA)))

    assert [each.path for each in found] == ["by_id", "by_segment", "spatial0", "spatial1"]
    assert {each.kind for each in found} == {"annotations"}


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ({"sharding": {"@type": "by_moon"}}, "the sharding is by_moon"),
        ({"sharding": "dense"}, "the sharding is dense"),
        ({"sharding": RAW_SHARDING, "key": "../s0"}, "its key leads out of the directory"),
        ({"sharding": None}, ""),
        ({}, ""),
    ],
)
def test_what_is_served_as_it_is_tells_why(members: dict[str, Any], why: str) -> None:
    """Only where it says that it is sharded."""
    document = volume_info(None)
    document["scales"][0] |= members

    (found,) = describe(_info(document))

    assert isinstance(found, Described)
    assert found.parts == ()
    assert found.description.sharding is None
    assert found.description.why_sharded.startswith(why)
    assert bool(found.description.why_sharded) == bool(why)


@pytest.mark.parametrize("members", [{"size": [7, 5]}, {"chunk_sizes": None}, {"size": "x"}])
def test_damage_of_one_scale_hides_no_other(members: dict[str, Any]) -> None:
    """What is only passed on may be anything."""
    document = volume_info(None, **members)
    document["scales"] += volume_info(RAW_SHARDING, key="s1")["scales"]

    damaged, sound = describe(_info(document))

    assert isinstance(damaged, DecodeError)
    assert isinstance(sound, Described)
    assert sound.description.path == "s1"


def test_what_nothing_depends_on_may_be_missing() -> None:
    """Shards are found without type and encoding."""
    document = volume_info(RAW_SHARDING, encoding=7) | {"data_type": None, "num_channels": "x"}

    (array,) = _described(document)

    assert (array.data_type, array.codecs, array.shape) == (None, (), (7, 5, 1))


def test_a_volume_names_the_containers_below() -> None:
    """Directories that may have an ``info`` of their own."""
    document = volume_info(None) | {"mesh": "m/", "skeletons": "./s", "segment_properties": 7}

    assert _info(document).below == ("m", "s")
