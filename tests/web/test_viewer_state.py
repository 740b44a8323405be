"""`shardgate.web.viewer_state`: what links to Neuroglancer set up."""

from collections.abc import Sequence
from typing import Any, Final

import pytest

from shardgate.formats.surveying import Description
from shardgate.survey.arrays import ArrayView, Axis
from shardgate.survey.images import Channel
from shardgate.web.nodes import NodeView
from shardgate.web.viewer_state import (
    State,
    is_viewable,
    needs_contrast,
    state_of,
)

URL: Final = "http://host/em"
SPACE: Final = tuple(Axis(name, "space", 8, 2, "micrometer") for name in "zyx")
TIME: Final = Axis("t", "time", 5, 1, "second")
LOCAL: Final = Axis("c", "channel", 3, is_local=True)


def array(axes: Sequence[Axis], data_type: str = "uint16", **members: Any) -> ArrayView:
    """Return an array with *axes*, in chunks of one element."""
    shape = tuple(axis.size for axis in axes)
    chunk_shape = (1,) * len(shape)
    facts = {"shape": shape, "data_type": data_type, "inner_chunk_shape": chunk_shape}
    return ArrayView("", "zarr", "array", axes=axes, **(facts | members))


def state(*axes: Axis, kind: str = "image", data_type: str = "uint16", **members: Any) -> State:
    """Return the state of a node with *axes*."""
    contrast = members.pop("contrast", None)
    channels = members.pop("channels", ())
    view = array(axes, data_type, **members)
    return state_of(NodeView("", kind, {}, view, channels), URL, "em", contrast)


def test_space_is_on_screen_and_time_is_a_slider() -> None:
    """Axes of space are x, y and z on screen, at their middle; time follows, at its beginning."""
    found = state(TIME, LOCAL, *SPACE)

    assert found["dimensions"] == {**{n: [2e-6, "m"] for n in "xyz"}, "t": [1, "s"]}
    assert found["displayDimensions"] == ["x", "y", "z"]
    assert found["position"] == [4, 4, 4, 0]
    assert found["layout"] == "4panel"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("zyx", ["x", "y", "z"]),
        ("xyz", ["x", "y", "z"]),
        ("pqr", ["r", "q", "p"]),
        ("apqr", ["r", "q", "p"]),
        ("yx", ["x", "y"]),
    ],
)
def test_axes_on_screen_are_ordered_by_name_or_position(names: str, expected: list[str]) -> None:
    """Axes called x, y, z are in this order; of others the last three, the last one first."""
    found = state(*(Axis(name, "space", 8) for name in names), kind="array")

    assert found["displayDimensions"] == expected
    assert found["layout"] == ("4panel" if len(expected) == 3 else "xy")


def test_array_without_space_shows_its_axes() -> None:
    """An array whose axes are time and channel has these on screen."""
    found = state(TIME, Axis("channel", "channel", 3), kind="array")

    assert found["displayDimensions"] == ["channel", "t"]


def test_scale_fits_the_array() -> None:
    """The scale of sections grows with the longest side, counted in the smallest step."""
    wide = Axis("x", "space", 4000, 2, "micrometer")
    deep = Axis("z", "space", 400, 40, "micrometer")

    assert state(SPACE[1], wide)["crossSectionScale"] == pytest.approx(4000 / 800)
    assert state(deep, SPACE[1], wide)["crossSectionScale"] == pytest.approx(8000 / 400)


def test_level_lies_where_its_image_has_it() -> None:
    """A level is shifted by half an element: OME-Zarr has the middle of the first one at 0."""
    found = state(*SPACE, kind="array", is_level=True)
    transform = found["layers"][0]["source"]["transform"]

    assert [row[-1] for row in transform["matrix"]] == [-0.5] * 3
    assert found["position"] == state(*SPACE)["position"]


def test_each_channel_is_a_layer() -> None:
    """Each `omero` channel is a layer with its name, colour, contrast and visibility."""
    channels = (
        Channel("DAPI", "0000FF", (5, 90)),
        Channel("", "FFFFFF", None, is_active=False),
        *[Channel("no such", "00FF00", None)] * 5,
    )
    layers = state(LOCAL, *SPACE, channels=channels, contrast=(1.5, 7.5))["layers"]

    assert len(layers) == LOCAL.size
    assert [layer["name"] for layer in layers] == ["em DAPI", "em 1", "em no such"]
    assert [layer["visible"] for layer in layers] == [True, False, True]
    assert [layer["localPosition"] for layer in layers] == [[0], [1], [2]]
    assert layers[0]["localDimensions"] == {"c'": [1, ""]}
    blue = layers[0]["shaderControls"]
    assert blue == {"contrast": {"range": [5, 90], "window": [5, 90]}, "color": "#0000FF"}
    assert layers[1]["shaderControls"]["contrast"]["range"] == [1, 8]
    assert "color" not in layers[1]["shaderControls"]


@pytest.mark.parametrize(
    ("data_type", "contrast", "expected"),
    [
        ("uint16", (1.5, 7.5), [1, 8]),
        ("uint16", (3.0, 3.0), [3, 4]),
        ("uint64", (3.0, 9.0), ["3", "9"]),
        ("float32", (0.25, 0.5), [0.25, 0.5]),
        ("float32", (0.25, 0.25), [0.25, 1.25]),
    ],
)
def test_contrast_is_spelled_for_its_type(
    data_type: str, contrast: tuple[float, float], expected: list[Any]
) -> None:
    """A contrast is in integers for these types, in strings for uint64, and never empty."""
    (layer,) = state(*SPACE, data_type=data_type, contrast=contrast)["layers"]

    assert layer["shaderControls"]["contrast"]["range"] == expected


def test_labels_are_a_segmentation() -> None:
    """Labels, meshes and skeletons are layers of type segmentation; annotations their own."""
    (layer,) = state(*SPACE, is_labels=True)["layers"]
    assert (layer["type"], layer["source"]) == ("segmentation", f"{URL}/|zarr3:")
    for kind, expected in (("skeletons", "segmentation"), ("annotations", "annotation")):
        (layer,) = state(kind=kind)["layers"]
        assert (layer["type"], layer["source"]) == (expected, f"precomputed://{URL}")


def test_three_bytes_are_colours() -> None:
    """A precomputed volume of three channels of uint8 is drawn in colours."""
    (layer,) = state(*SPACE, LOCAL, kind="volume", data_type="uint8")["layers"]
    assert "getDataValue(2)" in layer["shader"]


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (NodeView("", "array", {}, array(SPACE)), True),
        (NodeView("", "array", {}, array(SPACE, "float64")), False),
        (NodeView("", "array", {}, array(())), False),
        (NodeView("", "array", {}, array(SPACE[:1])), False),
        (NodeView("", "array", {}, array(SPACE, inner_chunk_shape=None)), False),
        (NodeView("", "image", {}, array(SPACE, inner_chunk_shape=None)), False),
        (NodeView("", "group", {}), False),
        (NodeView("", "volume", {}, array(SPACE, "uint8")), True),
    ],
)
def test_viewable_nodes_have_a_drawn_type(node: NodeView, *, expected: bool) -> None:
    """An array is viewable with two axes, a known grid and a drawn type, a volume always."""
    assert is_viewable(node) is expected


@pytest.mark.parametrize(("chunk_shape", "expected"), [((2, 3), True), (None, False)])
def test_array_of_unequal_chunks_is_not_drawn(
    chunk_shape: tuple[int, ...] | None, *, expected: bool
) -> None:
    """Neuroglancer draws an array whose chunks have one shape only."""
    found = Description("", "zarr", "array", (4, 6), "uint8", inner_chunk_shape=chunk_shape)

    assert ArrayView.of(found).is_drawn is expected


def test_contrast_is_needed_without_windows() -> None:
    """The contrast of the data is needed unless all channels have a window, or for labels."""
    windows = (Channel("", "FFFFFF", (0, 1)),)
    labels = array(SPACE, "uint32", is_labels=True)
    assert needs_contrast(NodeView("", "image", {}, array(SPACE)))
    assert not needs_contrast(NodeView("", "image", {}, array(SPACE), windows))
    assert not needs_contrast(NodeView("", "image", {}, labels))
