"""States of Neuroglancer that show a node as a person would set it up."""

import json
import math
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote

from shardgate.formats.surveying import Description
from shardgate.web.nodes import Channel, NodeView, ViewAxis

type State = dict[str, Any]
type Source = str | dict[str, Any]
type Contrast = tuple[float, float]
"""Values that are drawn black, and in full brightness."""

_DRAWN: Final = frozenset(
    {"uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "float32"}
)
"""Data types that Neuroglancer draws."""
_MOST_CHANNELS: Final = 8
"""Layers of channels in one state; the others can be added in the viewer."""
_PANEL_PIXELS: Final = 400
"""Pixels along one of four panels; one alone has twice as many."""
_GREY: Final = "#uicontrol invlerp contrast\nvoid main() { emitGrayscale(contrast()); }"
_COLORED: Final = """#uicontrol invlerp contrast
#uicontrol vec3 color color
void main() { emitRGB(color * contrast()); }"""
_RGB: Final = """void main() {
  emitRGB(vec3(toNormalized(getDataValue(0)), toNormalized(getDataValue(1)),
               toNormalized(getDataValue(2))));
}"""
_RGB_CHANNELS: Final = 3
_SPATIAL: Final = 3
_NAMES: Final = ("x", "y", "z")
_LEAST_SCALE: Final = 0.05
_HALF: Final = 0.5
"""Middle of an element from its index; in images of OME-Zarr an index is the middle itself."""
_GREY_CHANNEL: Final = Channel("", "FFFFFF", None)
_SELECTION: Final[State] = {"selectedAlpha": 0.4, "notSelectedAlpha": 0.15}
"""Opacity of segments in sections; others than the selected ones would be left out."""
_ASLANT: Final[State] = {"showSlices": False, "projectionOrientation": [0.3, 0.35, 0.1, 0.88]}
"""Meshes without the sections before them, seen from a corner."""
_CORNERS: Final = 1.2
"""Room for the corners of a box that is seen so."""


def is_viewable(node: NodeView) -> bool:
    """Return whether Neuroglancer draws *node*."""
    match node.kind:
        case "array" | "image":
            return node.data_type in _DRAWN and bool(node.axes) and not _has_unequal_chunks(node)
        case "group" | "document":
            return False
        case _:
            return True


def is_drawn(array: Description) -> bool:
    """Return whether Neuroglancer draws *array*."""
    is_regular = array.inner_chunk_shape is not None
    return is_regular and array.data_type in _DRAWN and bool(array.shape)


def _has_unequal_chunks(node: NodeView) -> bool:
    grid = node.document.get("chunk_grid")
    return isinstance(grid, dict) and grid.get("name") == "rectilinear"


def needs_contrast(node: NodeView) -> bool:
    """Return whether the metadata of *node*, an image, have no contrast for each channel."""
    if not node.axes or node.is_labels:
        return False
    return not node.channels or any(each.window is None for each in node.channels)


def link_to(viewer: str, state: State) -> str:
    """Return the URL of *viewer* in *state*."""
    text = json.dumps(state, separators=(",", ":"), allow_nan=False)
    return f"{viewer}#!{quote(text, safe=':/,')}"


def state_of(node: NodeView, url: str, name: str, contrast: Contrast | None = None) -> State:
    """Return the state that shows *node*, which is served at *url*, as layers called *name*.

    Sections are in the middle of the array, at a scale that fits a panel. *contrast* is used where
    the metadata have none.
    """
    if node.kind in ("array", "image"):
        source: Source = _placed(f"{url.rstrip('/')}/|zarr3:", node.level_axes)
    else:
        source = f"precomputed://{url.rstrip('/')}"
    if node.kind == "annotations":
        return {"layers": [_layer("annotation", name, source)], "layout": "4panel"}
    axes = node.shown_axes
    if node.is_labels or not axes:
        layers = [_layer("segmentation", name, source)]
    else:
        layers = _image_layers(node, name, source, contrast)
    center = 0.0 if node.kind == "image" else _HALF
    return {**_position(axes, center), "layers": layers}


def scene_of(segmentation: State, segments: Sequence[str], around: Sequence[State]) -> State:
    """Return the state of a *segmentation* with the meshes of some of its *segments*.

    It lies over the images whose states are *around*, and below the annotations.
    """
    (layer,) = segmentation["layers"]
    view: State = {}
    if segments:
        layer |= _SELECTION | {"segments": [*segments]}
        view = _ASLANT | {"projectionScale": _CORNERS * segmentation["projectionScale"]}
    others = [layer for state in around for layer in state["layers"]]
    below = [layer for layer in others if layer["type"] == "image"]
    above = [layer for layer in others if layer["type"] == "annotation"]
    return segmentation | {"layers": [*below, layer, *above]} | view


def _placed(url: str, axes: Sequence[ViewAxis]) -> Source:
    """Return the source *url* of a level with *axes*: the viewer knows those of images only."""
    if not axes:
        return url
    dimensions = {axis.name: list(axis.step_si) for axis in axes}
    # The identity, and a column of shifts.
    matrix = [[*(int(column is axis) for column in axes), axis.start] for axis in axes]
    transform = {"inputDimensions": dimensions, "outputDimensions": dimensions, "matrix": matrix}
    return {"url": url, "transform": transform}


def _layer(kind: str, name: str, source: Source) -> State:
    return {"type": kind, "name": name, "source": source}


def _image_layers(
    node: NodeView, name: str, source: Source, contrast: Contrast | None
) -> list[State]:
    """Return a layer for each channel of `omero` metadata; otherwise one of all channels."""
    layer = _layer("image", name, source)
    axis = next((axis for axis in node.shown_axes if axis.is_local), None)
    if axis is None or not node.channels:
        is_rgb = node.kind == "volume" and axis is not None and axis.size == _RGB_CHANNELS
        if is_rgb and node.data_type == "uint8":
            return [layer | {"shader": _RGB}]
        only = node.channels[0] if node.channels else _GREY_CHANNEL
        return [layer | _rendering(node.data_type, only, contrast)]
    shown = node.channels[: min(axis.size, _MOST_CHANNELS)]
    return [
        layer
        | _rendering(node.data_type, channel, contrast)
        | {
            "name": f"{name} {channel.label or number}",
            "localDimensions": {f"{axis.name}'": [1, ""]},
            "localPosition": [number],
            "blend": "additive",
            "opacity": 1,
            "visible": channel.is_active,
        }
        for number, channel in enumerate(shown)
    ]


def _rendering(data_type: str, channel: Channel, contrast: Contrast | None) -> State:
    """Return the shader of *channel*, and its controls."""
    controls: State = {}
    if (window := channel.window or contrast) is not None:
        spelled = _spell_range(data_type, window)
        controls["contrast"] = {"range": spelled, "window": spelled}
    if channel.color == _GREY_CHANNEL.color:
        return {"shader": _GREY, "shaderControls": controls}
    controls["color"] = f"#{channel.color}"
    return {"shader": _COLORED, "shaderControls": controls}


def _spell_range(data_type: str, window: Contrast) -> list[float | int | str]:
    """Return *window* as the control reads it: uint64 in strings, no empty range."""
    low, high = window
    if data_type.startswith("float"):
        return [low, high if high > low else low + 1]
    first, last = math.floor(low), max(math.ceil(high), math.floor(low) + 1)
    return [str(first), str(last)] if data_type == "uint64" else [first, last]


def _position(axes: Sequence[ViewAxis], center: float) -> State:
    """Return dimensions, those on screen first, the middle of the array, and the scales.

    *center* is where the viewer has the middle of an element, counted from its index.
    """
    if not axes:
        return {"layout": "4panel"}
    shown = axes_on_screen(axes)
    others = [axis for axis in axes if axis not in shown and not axis.is_local]
    steps = [axis.step_si[0] for axis in shown]
    extent = max(axis.size * step / min(steps) for axis, step in zip(shown, steps, strict=True))
    is_4panel = len(shown) == _SPATIAL
    pixels = _PANEL_PIXELS if is_4panel else 2 * _PANEL_PIXELS
    return {
        "dimensions": {axis.name: list(axis.step_si) for axis in (*shown, *others)},
        "displayDimensions": [axis.name for axis in shown],
        "position": [axis.start + axis.middle + center for axis in (*shown, *others)],
        "crossSectionScale": max(extent / pixels, _LEAST_SCALE),
        "projectionScale": 1.5 * extent,
        "layout": "4panel" if is_4panel else "xy",
    }


def axes_on_screen(axes: Sequence[ViewAxis]) -> list[ViewAxis]:
    """Return the axes that run to the right, down, and into the screen, as far as there are any.

    These are x, y and z by name; otherwise the last axes of space, in the order of Fortran.
    """
    shown = [axis for axis in axes if axis.kind == "space"] or list(axes)
    if all(axis.name in _NAMES for axis in shown):
        return sorted(shown, key=lambda axis: axis.name)
    return shown[: -_SPATIAL - 1 : -1]
