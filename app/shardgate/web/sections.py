"""Plan a picture: the level of a multiscale, the section of the array, and the chunks in it."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import isqrt, prod
from typing import Final, NamedTuple

from shardgate.errors import BadParameterError
from shardgate.formats.contract import Layout
from shardgate.formats.documents import Json, write_json
from shardgate.formats.neuroglancer_precomputed.layout import PrecomputedLayout
from shardgate.formats.neuroglancer_precomputed.metadata import Info, Member, voxel_bounds
from shardgate.formats.reading import DecodeError, Versioned
from shardgate.formats.zarr.codecs import item_nbytes
from shardgate.formats.zarr.metadata import chunk_keys
from shardgate.formats.zarr.v2 import decoders_of, plain_document
from shardgate.model import ETag, join_path
from shardgate.survey.arrays import ArrayView, Axis
from shardgate.survey.images import Channel
from shardgate.web.nodes import NodeView, ServedDocument
from shardgate.web.rendering import visible

ENOUGH: Final = 256  # pixels that a level should have along its longer side
MOST_VALUES: Final = 4_000_000
_MOST_CHUNK_NBYTES: Final = 64 * 1024**2  # of a decoded chunk
_COLOURS: Final = 3
_OF_VOLUMES: Final = ("space", "space", "depth", "channel")

type Indices = Mapping[str, int]
"""Positions along axes, by their names, that a client has chosen."""


class UndrawableError(DecodeError):
    """There is no picture of the array; the message says why."""


class Choice(NamedTuple):
    """The position along an axis that a picture does not show as a whole."""

    axis: int
    name: str
    size: int
    at: int | None
    """`None` for all channels at once, each in its colour."""

    def index_in(self, size: int) -> int:
        """Return the position in another level, which has *size* elements."""
        return (2 * (self.at or 0) + 1) * size // (2 * self.size)  # where its middle is


class ArraySection(NamedTuple):
    """Part of an array: two axes, at one position of all others but a channel axis of colours."""

    ranges: tuple[range, ...]
    """Elements along each axis, counted from the first."""
    order: tuple[int, ...]
    """The axes: rows, columns, then all others."""
    is_rgb: bool


class Drawing(NamedTuple):
    """An array, and the section of it that is drawn."""

    driver: str
    """TensorStore's name of the format."""
    document: tuple[str, bytes]
    """Metadata for TensorStore, by their name."""
    version: ETag
    """Of the metadata."""
    chunk_shape: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the whole array."""
    section: ArraySection
    name: Callable[[tuple[int, ...]], str]
    """Returns the name of the chunk at a position in the grid."""
    is_labels: bool
    directory: str
    """Directory of the chunks in the dataset."""
    origin: tuple[int, ...]
    """Coordinates of the first element."""
    inside: str = ""
    """Prefix of the names of chunks for TensorStore."""
    decoders: tuple[Json, ...] = ()
    """Codecs of numcodecs that are undone before that, in the order of encoding."""
    item_nbytes: int = 16
    """Of an element; the largest one where the type is unknown."""
    channels: Sequence[Channel | None] = ()
    """Along the channel axis of the section; `None` for one that is not drawn."""
    why_not_pictured: str = ""
    """Why values cannot be drawn, though chunks can be located."""

    @property
    def extent(self) -> int:
        """Elements along the longer side of the whole array."""
        return max(self.shape[axis] for axis in self.section.order[:2])

    def check(self) -> None:
        """Raise `UndrawableError` if there is no picture of the values, which a grid needs not."""
        if self.why_not_pictured:
            raise UndrawableError(self.why_not_pictured)
        nbytes = prod(self.chunk_shape) * self.item_nbytes
        if nbytes > _MOST_CHUNK_NBYTES:
            raise UndrawableError(f"chunks of {nbytes} bytes are too large")

    @property
    def cells(self) -> Sequence[range]:
        """Positions along each axis of the grid, of the chunks that the section needs."""
        sizes = zip(self.section.ranges, self.chunk_shape, strict=True)
        return [range(part.start // size, (part.stop - 1) // size + 1) for part, size in sizes]

    @property
    def chunks(self) -> list[str]:
        """Names of these chunks."""
        return [self.name(cell) for cell in product(*self.cells)]

    @property
    def request(self) -> dict[str, Json]:
        """Request to the worker, without the list of objects."""
        ranges = zip(self.section.ranges, self.origin, strict=True)
        return {
            "driver": self.driver,
            "ranges": [(part.start + first, part.stop + first) for part, first in ranges],
            "order": self.section.order,
            "is_rgb": self.section.is_rgb,
            "is_labels": self.is_labels,
            "decoders": self.decoders,
            "channels": [each and [each.color, each.window] for each in self.channels],
        }


def choices_of(node: NodeView, at: Indices) -> Sequence[Choice]:
    """Return the positions along all axes of *node* but those of its plane: by default the first
    time and channel, or all channels that have colours, and the middle of other axes.

    Raises: `UndrawableError`, `BadParameterError` for one *at* an axis that is unknown or shorter.
    """
    plane = plane_of(node)
    axes = node.array.axes
    others = {axis.name: number for number, axis in enumerate(axes) if number not in plane}
    for name in at:
        if name not in others:
            known = ", ".join(f"at.{visible(each, 40)}" for each in others) or "none"
            raise BadParameterError(f"at.{visible(name, 40)}: the picture has {known}")
    choices = []
    channel_axes = [number for number in others.values() if axes[number].kind == "channel"]
    has_colours = bool(node.channels) and not node.array.is_labels
    for name, number in others.items():
        axis = axes[number]
        chosen = at.get(name)
        if chosen is not None and chosen >= axis.size:
            raise BadParameterError(f"at.{visible(name, 40)}: {chosen} is not below {axis.size}")
        if chosen is None and not (has_colours and channel_axes == [number]):
            chosen = 0 if axis.kind in ("time", "channel") else axis.size // 2
        choices.append(Choice(number, name, axis.size, chosen))
    return choices


def draw_zarr(document: ServedDocument, directory: str, node: NodeView, at: Indices) -> Drawing:
    """Plan the picture of the Zarr array in *directory*: that of *node*, or a level of it.

    Raises: `DecodeError`, `BadParameterError`.
    """
    array = ArrayView.of_zarr(document.members)
    shape = array.shape or ()
    chunk_shape = array.inner_chunk_shape
    if chunk_shape is None or len(chunk_shape) != len(shape):
        raise UndrawableError("the chunk grid is not regular")
    if len(node.array.axes) != len(shape):
        raise UndrawableError(f"a level has {len(shape)} dimensions, not {len(node.array.axes)}")
    choices = choices_of(node, at)
    channels = _drawn_channels(node, choices)
    section = plan_section(shape, chunk_shape, plane_of(node), choices, len(channels))
    is_v2 = array.format == "zarr2"
    plain = plain_document(document.members) if is_v2 else document.members
    # TensorStore refuses NaN, which attributes may have, and a name of two dimensions.
    plain = {name: plain[name] for name in plain if name != "dimension_names"} | {"attributes": {}}
    return Drawing(
        driver="zarr3",
        document=("zarr.json", write_json(plain)),
        version=document.etag,
        chunk_shape=chunk_shape,
        shape=shape,
        section=section,
        name=chunk_keys(document.members.get("chunk_key_encoding"), len(shape)).format,
        is_labels=node.array.is_labels,
        directory=directory,
        origin=(0,) * len(shape),
        decoders=tuple(decoders_of(document.members)) if is_v2 else (),
        item_nbytes=item_nbytes(array.data_type) or 16,
        channels=channels,
        why_not_pictured=array.why_not_pictured,
    )


def draw_volume(layout: Layout, container: str, path: str, at: Indices) -> Drawing | None:
    """Plan the picture of the coarsest scale of a precomputed volume with enough pixels, or of the
    one at *path*; `None` for other layouts. Raises: `DecodeError`, `BadParameterError`.
    """
    if not isinstance(layout, PrecomputedLayout):
        return None
    info = layout.info.value
    sound = [each for each in info.members if each.name == "scales" and not each.fault]
    scales = [each for each in sound if each.path == path or (not path and each.path is not None)]
    if not scales:
        raise UndrawableError("there is no scale")
    finest = scales[0]
    shown = finest
    for scale in scales[1:64]:
        if max(voxel_bounds(scale.value)[0].size[:2]) >= ENOUGH:
            shown = scale
    count = info.document.get("num_channels")
    if type(count) is not int or count < 1:
        raise UndrawableError("num_channels is no positive number")
    sizes = (*voxel_bounds(finest.value)[0].size, count)
    array = ArrayView(
        "",
        "precomputed",
        "array",
        shape=sizes,
        data_type=str(info.document.get("data_type")),
        axes=tuple(map(Axis, ("x", "y", "z", "channel"), _OF_VOLUMES, sizes)),
        is_labels=info.document.get("type") == "segmentation",
    )
    return _draw_scale(container, layout.info, shown, NodeView("", "volume", {}, array), at)


def _draw_scale(
    container: str, info: Versioned[Info], scale: Member, node: NodeView, at: Indices
) -> Drawing:
    """Plan the picture of the first chunk size of a *scale* in *container*, as a level of *node*.

    Raises: `DecodeError`, `BadParameterError`.
    """
    bounds = voxel_bounds(scale.value)[0]
    document = info.value.document
    shape = (*bounds.size, node.array.axes[-1].size)
    chunk_shape = (*bounds.chunk_size, shape[-1])
    section = plan_section(shape, chunk_shape, plane_of(node), choices_of(node, at))
    columns, rows, *others = section.order
    chunk_sizes = [list(bounds.chunk_size)]
    read = ("@type", "type", "data_type", "num_channels")  # by TensorStore, beside the scales
    members = {name: document[name] for name in read if name in document}
    alone = {**scale.value, "key": "scale", "chunk_sizes": chunk_sizes, "sharding": None}
    return Drawing(
        driver="neuroglancer_precomputed",
        document=("info", write_json(members | {"scales": [alone]})),
        version=info.etag,
        chunk_shape=chunk_shape,
        shape=shape,
        section=section._replace(order=(rows, columns, *others)),
        name=lambda cell: bounds.beginning(cell[:3]),
        is_labels=node.array.is_labels,
        directory=join_path(container.rstrip("/"), scale.path or ""),
        origin=(*bounds.voxel_offset, 0),
        inside="scale/",
        item_nbytes=item_nbytes(document.get("data_type")) or 16,
    )


class Plane(NamedTuple):
    """The axes that a picture shows as a whole."""

    rows: int
    columns: int
    colours: int | None
    """A channel axis of three bytes: red, green and blue."""


def plane_of(node: NodeView) -> Plane:
    """Return the last two axes of space, or else of all; of a volume x and y.

    Raises: `UndrawableError`.
    """
    shape = node.array.shape or ()
    if len(shape) < 2 or not prod(shape):  # noqa: PLR2004
        raise UndrawableError(f"an array of shape {list(shape)} has no picture")
    kinds = [axis.kind for axis in node.array.axes]
    if node.kind == "volume":
        kinds = list(_OF_VOLUMES[: len(shape)])
    spatial = [axis for axis, kind in enumerate(kinds) if kind == "space"]
    rows, columns = (spatial if len(spatial) > 1 else range(len(shape)))[-2:]
    colours = [
        axis
        for axis, kind in enumerate(kinds)
        if kind == "channel" and shape[axis] == _COLOURS and axis not in (rows, columns)
    ]
    # Channels of an image have colours of their own, and three bytes of a label are none.
    has_none = node.channels or (node.kind == "volume" and node.array.is_labels)
    is_rgb = node.array.data_type == "uint8" and len(colours) == 1 and not has_none
    return Plane(rows, columns, colours[0] if is_rgb else None)


def _drawn_channels(node: NodeView, choices: Sequence[Choice]) -> Sequence[Channel | None]:
    """Return the channels of *node* that are drawn in their colours, in the order in which they are
    read; none if it has no colours.
    """
    for choice in choices:
        if node.array.axes[choice.axis].kind != "channel" or node.array.is_labels:
            continue
        if choice.at is not None:
            return node.channels[choice.at : choice.at + 1]
        first = node.channels[: min(choice.size, 8)]  # in one picture
        active = [each if each.is_active else None for each in first]
        return active if any(active) else first
    return ()


def plan_section(
    shape: Sequence[int],
    chunk_shape: Sequence[int],
    plane: Plane,
    choices: Sequence[Choice],
    channels: int = 0,
) -> ArraySection:
    """Return the middle of *plane* at the position of *choices*, with the first *channels* where
    these are drawn at once. Raises: `UndrawableError`.
    """
    rows, columns, colours = plane
    if not prod(shape) or not prod(chunk_shape):
        raise UndrawableError(f"an array of shape {list(shape)} has no picture")
    ranges = [range(size) for size in shape]
    for choice in choices:
        first = choice.index_in(shape[choice.axis])
        ranges[choice.axis] = range(first, first + 1)
        if choice.at is None:
            ranges[choice.axis] = range(min(channels, shape[choice.axis]))
    others = [axis for axis in range(len(shape)) if axis not in (rows, columns)]
    depth = prod(len(ranges[axis]) for axis in others)
    if colours is not None and depth != _COLOURS:
        raise UndrawableError(f"a level has {depth} colours")
    # So many chunks may be read, and then so many values.
    down = -(-shape[rows] // chunk_shape[rows])
    across = -(-shape[columns] // chunk_shape[columns])
    down, across = _fit(down, across, 1024 // depth)
    height = min(shape[rows], down * chunk_shape[rows])
    width = min(shape[columns], across * chunk_shape[columns])
    height, width = _fit(height, width, MOST_VALUES // depth)
    ranges[rows] = _middle(shape[rows], height)
    ranges[columns] = _middle(shape[columns], width)
    return ArraySection(tuple(ranges), (rows, columns, *others), colours is not None)


def _middle(length: int, size: int) -> range:
    start = (length - size) // 2
    return range(start, start + size)


def _fit(height: int, width: int, most: int) -> tuple[int, int]:
    """Reduce the longer side, or both, so that their product is at most *most*."""
    height = min(height, max(isqrt(most), most // width))
    return height, min(width, most // height)
