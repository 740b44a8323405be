"""States of Neuroglancer that show a node as a person would set it up."""

import json
import math
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote

from shardgate.survey.arrays import ArrayView, Axis
from shardgate.survey.images import Channel
from shardgate.web.nodes import NodeView

type State = dict[str, Any]
type Source = str | dict[str, Any]
type Contrast = tuple[float, float]
"""Values that are drawn black, and in full brightness."""

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
_GREY_CHANNEL: Final = Channel("", "FFFFFF", None)


def is_viewable(node: NodeView) -> bool:
    """Return whether Neuroglancer draws *node*."""
    match node.kind:
        case "array" | "image":
            return node.array.is_drawn
        case "group" | "document":
            return False
        case _:
            return True


def needs_contrast(node: NodeView) -> bool:
    """Return whether the metadata of *node*, an image, have no contrast for each channel."""
    if not node.array.axes or node.array.is_labels:
        return False
    channels = _layer_channels(node)
    return not channels or any(each.window is None for each in channels)


def _layer_channels(node: NodeView) -> Sequence[Channel]:
    """Return the channels that have layers: a level has its channel axis in common with others."""
    return node.channels if node.kind == "image" else ()


def link_to(viewer: str, state: State) -> str:
    """Return the URL of *viewer* in *state*."""
    text = json.dumps(state, separators=(",", ":"), allow_nan=False)
    return f"{viewer}#!{quote(text, safe=':/,')}"


def state_of(node: NodeView, url: str, name: str, contrast: Contrast | None = None) -> State:
    """Return the state that shows *node*, which is served at *url*, as layers called *name*.

    Sections are in the middle of the array, at a scale that fits a panel. *contrast* is used where
    the metadata have none.
    """
    array = node.array
    if node.kind in ("array", "image"):
        plain = f"{url.rstrip('/')}/|{array.driver}:"
        # The viewer knows the axes of images, and not those of their levels.
        source: Source = _placed(plain, array) if array.is_level else plain
    else:
        source = f"precomputed://{url.rstrip('/')}"
    layer: State = {"name": name, "source": source}
    if node.kind == "annotations":
        return {"layers": [layer | {"type": "annotation"}], "layout": "4panel"}
    if array.is_labels or not array.axes:
        layers = [layer | {"type": "segmentation"}]
    else:
        layers = _image_layers(node, layer | {"type": "image"}, contrast)
    # The viewer has the middle of an element half a step after its index; at it in OME-Zarr.
    center = 0.0 if node.kind == "image" or array.is_level else 0.5
    return {**_position(array.axes, center), "layers": layers}


def scene_of(segmentation: State, segments: Sequence[str], around: Sequence[State]) -> State:
    """Return the state of a *segmentation* with the meshes of some of its *segments*.

    It lies over the images whose states are *around*, and below the annotations.
    """
    (layer,) = segmentation["layers"]
    view: State = {}
    if segments:
        # Sections would leave out all segments but the selected ones.
        layer |= {"segments": [*segments], "selectedAlpha": 0.4, "notSelectedAlpha": 0.15}
        view = {
            "showSlices": False,  # before the meshes
            "projectionOrientation": [0.3, 0.35, 0.1, 0.88],  # from a corner
            "projectionScale": 1.2 * segmentation["projectionScale"],  # room for the corners
        }
    others = [other for state in around for other in state["layers"]]
    below = [other for other in others if other["type"] == "image"]
    above = [other for other in others if other["type"] == "annotation"]
    return segmentation | {"layers": [*below, layer, *above]} | view


def _placed(url: str, array: ArrayView) -> Source:
    """Return the source *url* of a level, an *array* which lies where its image has it."""
    axes = array.axes
    steps = [list(axis.step_si) for axis in axes]
    own = dict(zip(array.own_names, steps, strict=True))
    dimensions = dict(zip([axis.name for axis in axes], steps, strict=True))
    # The identity, and a column of shifts: the first element begins half a step before its middle.
    matrix = [[*(int(column is axis) for column in axes), axis.start - 0.5] for axis in axes]
    transform = {"inputDimensions": own, "outputDimensions": dimensions, "matrix": matrix}
    return {"url": url, "transform": transform}


def _image_layers(node: NodeView, layer: State, contrast: Contrast | None) -> list[State]:
    """Return a *layer* for each channel of `omero` metadata; otherwise one of all channels."""
    data_type = node.array.data_type or ""
    axis = next((axis for axis in node.array.axes if axis.is_local), None)
    channels = _layer_channels(node)
    if axis is None or not channels:
        is_rgb = node.kind == "volume" and axis is not None and axis.size == _RGB_CHANNELS
        if is_rgb and data_type == "uint8":
            return [layer | {"shader": _RGB}]
        only = channels[0] if channels else _GREY_CHANNEL
        return [layer | _rendering(data_type, only, contrast)]
    shown = channels[: min(axis.size, 8)]  # the others can be added in the viewer
    return [
        layer
        | _rendering(data_type, channel, contrast)
        | {
            "name": f"{layer['name']} {channel.label or number}",
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
    first = math.floor(low)
    last = max(math.ceil(high), first + 1)
    return [str(first), str(last)] if data_type == "uint64" else [first, last]


def _position(axes: Sequence[Axis], center: float) -> State:
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
    pixels = 400 if is_4panel else 800  # along a panel
    return {
        "dimensions": {axis.name: list(axis.step_si) for axis in (*shown, *others)},
        "displayDimensions": [axis.name for axis in shown],
        "position": [axis.start + axis.middle + center for axis in (*shown, *others)],
        "crossSectionScale": max(extent / pixels, 0.05),
        "projectionScale": 1.5 * extent,
        "layout": "4panel" if is_4panel else "xy",
    }


def axes_on_screen(axes: Sequence[Axis]) -> list[Axis]:
    """Return the axes that run to the right, down, and into the screen, as far as there are any.

    These are x, y and z by name; otherwise the last axes of space, in the order of Fortran.
    """
    shown = [axis for axis in axes if axis.kind == "space"] or list(axes)
    if all(axis.name in ("x", "y", "z") for axis in shown):
        return sorted(shown, key=lambda axis: axis.name)
    return shown[: -_SPATIAL - 1 : -1]
