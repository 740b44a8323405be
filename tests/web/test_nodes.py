"""`shardgate.web.nodes`: axes, channels and levels, from documents of real and odd files."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardgate.errors import DamagedError
from shardgate.storage.memory import MemoryStore
from shardgate.survey.arrays import Axis
from shardgate.survey.images import Channel
from shardgate.web.nodes import MOST_NBYTES, NodeView, find_images, read_node
from tests.support.formats.neuroglancer_precomputed.case import volume_info
from tests.support.formats.zarr.building import LITTLE, array_metadata
from tests.support.resolving import ROOT, Reading, reading
from tests.support.web.images import ARRAY, AXES, image

DAPI: Final = {"label": "DAPI", "color": "0000FF", "window": {"start": 5, "end": 90}}
CHANNEL: Final = Channel("DAPI", "0000FF", (5, 90))
"""What `DAPI` describes."""


def opened(documents: Mapping[str, Any]) -> Reading:
    """Open a store of documents by their keys."""
    store = MemoryStore()
    for key, document in documents.items():
        store.place(ROOT.join(key), json.dumps(document).encode())
    return reading(store)


async def find(documents: Mapping[str, Any], path: str) -> NodeView | None:
    """Read the node at *path* of a store of documents by their keys, if there is one."""
    found = opened(documents)
    return await read_node(found.resolver, found.dataset, path)


async def read(path: str = "", **documents: Any) -> NodeView:
    """Read the node at *path* of a store of documents by their keys, ``__`` for a slash."""
    named = {
        name.replace("__", "/").replace("_json", ".json"): document
        for name, document in documents.items()
    }
    node = await find(named, path)
    assert node is not None
    return node


async def test_image_has_axes_levels_and_channels() -> None:
    """An OME-Zarr image has the axes of its finest level, all levels and the `omero` channels."""
    document = image(omero={"channels": [DAPI | {"active": False}, {"color": "ffffff"}]})
    node = await read("", zarr_json=document, s0__zarr_json=ARRAY)

    assert (node.kind, node.levels, node.array.is_labels) == ("image", ["s0", "s1"], False)
    assert node.array.axes[0] == Axis("t", "time", 2, 1, "second")
    assert node.array.axes[1] == Axis("c", "channel", 3, is_local=True)
    assert node.array.axes[3] == Axis("y", "space", 96, 1, "micrometer", start=10)
    assert node.array.axes[2].step_si == (2e-6, "m")
    assert node.channels == (replace(CHANNEL, is_active=False), Channel("", "ffffff", None))


@pytest.mark.parametrize(
    "ome",
    [
        {"multiscales": []},
        {"multiscales": [{"axes": AXES[:2], "datasets": [{"path": "s0"}]}]},
        {"multiscales": [{"axes": AXES, "datasets": []}]},
        {"multiscales": [{"axes": AXES, "datasets": [{"path": "absent"}]}]},
        {"multiscales": {"axes": 7}},
    ],
)
async def test_invalid_image_is_a_group(ome: dict[str, Any]) -> None:
    """A group whose `multiscales` are invalid, or fit no array, is a group."""
    node = await read("", zarr_json=image(**ome), s0__zarr_json=ARRAY)

    assert node.kind == "group"


ODD_CHANNELS: Final[list[Any]] = [
    7,
    {"color": "no"},
    {"label": 7},
    {"window": {"start": "a"}},
    {"window": {"start": 5, "end": 5}},
    {"window": {"start": 9, "end": 5}},
    {"active": []},
]


@pytest.mark.parametrize("omero", [[], {"channels": 7}, *ODD_CHANNELS], ids=str)
async def test_odd_omero_leaves_the_image(omero: Any) -> None:
    """An invalid `omero` member is no channels; an odd channel keeps its place."""
    is_channel = omero in ODD_CHANNELS
    member = {"channels": [omero, DAPI]} if is_channel else omero
    node = await read("", zarr_json=image(omero=member), s0__zarr_json=ARRAY)

    assert node.kind == "image"
    assert node.channels == ((Channel("", "FFFFFF", None), CHANNEL) if is_channel else ())


@pytest.mark.parametrize("prefix", ["", "a/0/", "labels/cells/"])
@pytest.mark.parametrize("level", ["s0", "scale0/image"])
async def test_level_has_axes_of_its_image(prefix: str, level: str) -> None:
    """An array that is a level of an image has its names, units and steps, wherever that lies."""
    step = {"type": "scale", "scale": [1, 1, 3, 5, 7]}
    twice = {"type": "scale", "scale": [1, 1, 1, 2, 2]}
    multiscale = {
        "axes": AXES,
        "datasets": [{"path": "other"}, {"path": level, "coordinateTransformations": [step]}],
        "coordinateTransformations": [twice],
    }
    documents = {
        f"{prefix}zarr.json": image(multiscales=[multiscale]),
        f"{prefix}{level}/zarr.json": ARRAY,
    }
    node = await read(f"{prefix}{level}", **documents)

    assert node.kind == "array"
    shown = [(axis.name, axis.step, axis.unit) for axis in node.array.axes]
    assert [each for each in shown if each[2]] == [
        ("t", 1, "second"),
        ("z", 3, "micrometer"),
        ("y", 10, "micrometer"),
        ("x", 14, "micrometer"),
    ]
    assert node.array.is_level
    assert not any(axis.is_local for axis in node.array.axes)


async def test_odd_step_costs_one_axis() -> None:
    """An odd step leaves its axis without step and unit, and all others with theirs."""
    for odd in (0, "7", None, float("nan"), 10**400):
        scale = {"type": "scale", "scale": [1, 1, 3, odd, 7]}
        level = {"path": "s0", "coordinateTransformations": [7, scale]}
        multiscale = {"axes": AXES, "datasets": ["odd", level]}
        node = await read("", zarr_json=image(multiscales=[multiscale]), s0__zarr_json=ARRAY)

        units = [(axis.step, axis.unit) for axis in node.array.axes[2:]]
        assert units == [(3, "micrometer"), (1, ""), (7, "micrometer")]


JSON: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=6,
)


@given(JSON, st.sampled_from(["axes", "datasets", "coordinateTransformations"]), JSON, JSON)
@settings(max_examples=40, deadline=None)
def test_any_attributes_make_a_node(odd: Any, member: str, omero: Any, names: Any) -> None:
    """Whatever the members of its attributes are, an image or a level of it is a node."""
    document = image(omero=omero, multiscales=[{"axes": AXES, "datasets": [{"path": "s0"}]}])
    document["attributes"]["ome"]["multiscales"][0][member] = odd
    array = ARRAY | {"dimension_names": names}
    for path in ("", "s0"):
        node = asyncio.run(read(path, zarr_json=document, s0__zarr_json=array))
        assert node.kind in ("group", "image", "array")


@pytest.mark.parametrize(
    ("changed", "ome", "expected"),
    [
        ({"data_type": "uint16"}, {}, False),
        ({"data_type": "uint64"}, {}, True),
        ({"data_type": "uint64"}, {"omero": {"channels": [{}]}}, False),
        ({"data_type": "uint8"}, {"image-label": {}}, True),
    ],
)
async def test_labels_are_told_by_metadata_or_type(
    changed: dict[str, Any], ome: dict[str, Any], *, expected: bool
) -> None:
    """An image has labels by `image-label`, or by its type unless it has channels."""
    node = await read("", zarr_json=image(**ome), s0__zarr_json=ARRAY | changed)

    assert node.array.is_labels is expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["time", "lat", "lon"], [("time", "time"), ("lat", "space"), ("lon", "space")]),
        (["c", "y", "x"], [("c", "channel"), ("y", "space"), ("x", "space")]),
        (None, [("dim_0", "space"), ("dim_1", "space"), ("dim_2", "space")]),
        (["x", None, "x"], [("x", "space"), ("dim_1", "space"), ("x0", "space")]),
        (["a"], [("dim_0", "space"), ("dim_1", "space"), ("dim_2", "space")]),
    ],
)
async def test_array_axes_have_unique_names(
    names: list[str | None] | None, expected: list[tuple[str, str]]
) -> None:
    """Axes of an array have its dimension names, made unique, and kinds by these names."""
    array = array_metadata([4, 6, 8], [2, 3, 4], [LITTLE]) | {"dimension_names": names}
    if names is None:
        del array["dimension_names"]
    node = await read("a", a__zarr_json=array)

    assert [(axis.name, axis.kind) for axis in node.array.axes] == expected


@pytest.mark.parametrize(
    ("members", "shape", "data_type"),
    [
        ({"data_type": {"name": "numpy.datetime64"}}, (4,), "numpy.datetime64"),
        ({"data_type": 5}, None, None),
        ({"shape": 4}, None, None),
    ],
)
async def test_array_has_the_name_of_its_data_type_and_a_shape(
    members: dict[str, Any], shape: tuple[int, ...] | None, data_type: str | None
) -> None:
    """An array has the name of its data type, and its shape; neither where one is invalid."""
    node = await read("a", a__zarr_json=array_metadata([4], [2], [LITTLE]) | members)

    assert (node.array.shape, node.array.data_type) == (shape, data_type)


async def test_precomputed_node_has_scale_and_offset() -> None:
    """A precomputed volume has axes in nanometers from its offset, and one of channels."""
    info = volume_info(None) | {"num_channels": 3}
    finest = info["scales"][0]
    node = await read("v", v__info=info)

    assert node.kind == "volume"
    assert node.array.shape == (*finest["size"], 3)
    assert [axis.unit for axis in node.array.axes[:3]] == ["nanometer"] * 3
    offset = list(finest.get("voxel_offset", (0, 0, 0)))
    assert [axis.start for axis in node.array.axes[:3]] == offset
    assert node.array.axes[3:] == (Axis("channel", "channel", 3, is_local=True),)
    annotations = await read("n", n__info={"@type": "neuroglancer_annotations_v1"})
    assert annotations.kind == "annotations"


async def test_long_lists_are_cut_before_they_are_read() -> None:
    """Long lists are read up to a bound: invalid items behind that do no harm."""
    odd: list[Any] = [7] * 1000
    level = {"path": "s0", "coordinateTransformations": [{"scale": [2.0] * 5}] * 4 + odd}
    multiscale = {"axes": AXES, "datasets": [level] * 64 + odd}
    document = image(multiscales=[multiscale, *odd], omero={"channels": [{}] * 64 + odd})
    node = await read("", zarr_json=document, s0__zarr_json=ARRAY)
    info = volume_info(None)
    volume = await read("v", v__info=info | {"scales": [*info["scales"][:1], *odd]})

    assert (node.kind, len(node.levels), len(node.channels)) == ("image", 64, 64)
    assert [axis.step for axis in node.array.axes] == [2.0**4] * 5
    assert volume.kind == "volume"


async def test_odd_attributes_cost_no_node_of_zarr_v2() -> None:
    """An array and a group of Zarr v2 whose `.zattrs` is no JSON have a node without attributes."""
    array = {"zarr_format": 2, "shape": [8, 8], "chunks": [4, 4], "dtype": "<f4", "order": "C"}
    store = MemoryStore()
    for key, data in {
        "a/.zarray": json.dumps(array).encode(),
        "a/.zattrs": b"{",
        "g/.zgroup": b'{"zarr_format": 2}',
        "g/.zattrs": b"{",
    }.items():
        store.place(ROOT.join(key), data)
    found = reading(store)
    nodes = [await read_node(found.resolver, found.dataset, path) for path in "ag"]

    assert [node and node.kind for node in nodes] == ["array", "group"]


async def test_nothing_is_no_node() -> None:
    """A folder without a document, or with one of another program, has no node."""
    assert await find({}, "nothing") is None
    assert await find({"other/info": {"version": 7}}, "other") is None
    assert await find({"list/info": []}, "list") is None


async def test_long_document_is_refused() -> None:
    """A document longer than the limit raises and names the limit."""
    array = ARRAY | {"attributes": {"x": "y" * MOST_NBYTES}}
    with pytest.raises(DamagedError, match=str(MOST_NBYTES)):
        await read("a", a__zarr_json=array)


async def test_images_are_found_before_their_levels() -> None:
    """An image is found at its group, an array at itself, a volume at its container."""
    documents = {
        "a/zarr.json": ARRAY,
        "i/zarr.json": image(),
        "i/s0/zarr.json": ARRAY,
        "v/info": volume_info(None),
    }
    store = opened(documents)
    found = [each async for each in find_images(store.resolver, store.dataset, "")]

    assert found == ["", "a", "i", "v"]
