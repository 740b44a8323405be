"""Plan a picture: the level of a multiscale, the section of the array, and the chunks in it."""

from collections.abc import Callable, Sequence
from itertools import product
from math import isqrt, prod
from typing import Final, NamedTuple

from shardgate.formats.contract import Layout
from shardgate.formats.documents import Json, write_json
from shardgate.formats.neuroglancer_precomputed.layout import PrecomputedLayout
from shardgate.formats.neuroglancer_precomputed.metadata import Info, Member, voxel_bounds
from shardgate.formats.reading import DecodeError
from shardgate.formats.zarr.codecs import item_nbytes
from shardgate.formats.zarr.metadata import chunk_keys
from shardgate.formats.zarr.v2 import decoders_of, plain_document
from shardgate.model import ETag, join_path
from shardgate.survey.arrays import ArrayView
from shardgate.web.nodes import NodeView, ServedDocument

ENOUGH: Final = 256  # pixels that a level should have along its longer side
MOST_VALUES: Final = 4_000_000
_MOST_CHUNKS: Final = 1024
_MOST_CHUNK_NBYTES: Final = 64 * 1024**2  # of a decoded chunk
_COLOURS: Final = 3
_MOST_SCALES: Final = 64

type Kinds = Sequence[str]
"""Kind of each axis: ``space``, ``time``, ``channel``, or another one."""


class UndrawableError(DecodeError):
    """There is no picture of the array; the message says why."""


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
    section: ArraySection
    extent: int
    """Elements along the longer side of the whole array."""
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

    @property
    def chunks(self) -> list[str]:
        """Names of the chunks that the section needs."""
        sizes = zip(self.section.ranges, self.chunk_shape, strict=True)
        cells = [range(part.start // size, (part.stop - 1) // size + 1) for part, size in sizes]
        return [self.name(cell) for cell in product(*cells)]

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
        }


def draw_zarr(document: ServedDocument, directory: str, node: NodeView) -> Drawing:
    """Plan the picture of the Zarr array in *directory*: that of *node*, or a level of it.

    Raises: `DecodeError`.
    """
    array = ArrayView.of_zarr(document.members)
    shape = array.shape or ()
    chunk_shape = array.inner_chunk_shape
    if chunk_shape is None or len(chunk_shape) != len(shape):
        raise UndrawableError("the chunk grid is not regular")
    kinds = [axis.kind for axis in node.array.axes]
    if len(kinds) != len(shape):
        raise UndrawableError(f"a level has {len(shape)} dimensions, not {len(kinds)}")
    section = plan_section(shape, chunk_shape, kinds, is_bytes=array.data_type == "uint8")
    _check_chunk(chunk_shape, item_nbytes(array.data_type))
    if array.why_not_pictured:
        raise UndrawableError(array.why_not_pictured)
    is_v2 = array.format == "zarr2"
    # TensorStore refuses NaN, which attributes may have
    plain = plain_document(document.members) if is_v2 else document.members | {"attributes": {}}
    return Drawing(
        driver="zarr3",
        document=("zarr.json", write_json(plain)),
        version=document.etag,
        chunk_shape=chunk_shape,
        section=section,
        extent=max(shape[axis] for axis in section.order[:2]),
        name=chunk_keys(document.members.get("chunk_key_encoding"), len(shape)).format,
        is_labels=node.array.is_labels,
        directory=directory,
        origin=(0,) * len(shape),
        decoders=tuple(decoders_of(document.members)) if is_v2 else (),
    )


def draw_volume(layout: Layout, container: str, path: str) -> Drawing | None:
    """Plan the picture of the coarsest scale of a precomputed volume with enough pixels, or of the
    one at *path*; `None` for other layouts. Raises: `DecodeError`.
    """
    if not isinstance(layout, PrecomputedLayout):
        return None
    info = layout.info.value
    sound = [each for each in info.members if each.name == "scales" and not each.fault]
    scales = [each for each in sound if each.path == path or (not path and each.path is not None)]
    if not scales:
        raise UndrawableError("there is no scale")
    shown = scales[0]
    for scale in scales[1:_MOST_SCALES]:
        if max(voxel_bounds(scale.value)[0].size[:2]) >= ENOUGH:
            shown = scale
    return _draw_scale(container, layout.info.etag, info, shown)


def _draw_scale(container: str, version: ETag, info: Info, scale: Member) -> Drawing:
    """Plan the picture of the first chunk size of a *scale* in *container*. Raises:
    `DecodeError`.
    """
    bounds = voxel_bounds(scale.value)[0]
    document = info.document
    count = document.get("num_channels")
    if type(count) is not int or count < 1:
        raise UndrawableError("num_channels is no positive number")
    chunk_shape = (*bounds.chunk_size, count)
    is_labels = document.get("type") == "segmentation"
    is_bytes = document.get("data_type") == "uint8" and not is_labels
    kinds = ("space", "space", "depth", "channel")
    section = plan_section((*bounds.size, count), chunk_shape, kinds, is_bytes=is_bytes)
    columns, rows, *others = section.order
    _check_chunk(chunk_shape, item_nbytes(document.get("data_type")))
    chunk_sizes = [list(bounds.chunk_size)]
    read = ("@type", "type", "data_type", "num_channels")  # by TensorStore, beside the scales
    members = {name: document[name] for name in read if name in document}
    alone = {**scale.value, "key": "scale", "chunk_sizes": chunk_sizes, "sharding": None}
    return Drawing(
        driver="neuroglancer_precomputed",
        document=("info", write_json(members | {"scales": [alone]})),
        version=version,
        chunk_shape=chunk_shape,
        section=section._replace(order=(rows, columns, *others)),
        extent=max(bounds.size[:2]),
        name=lambda cell: bounds.beginning(cell[:3]),
        is_labels=is_labels,
        directory=join_path(container.rstrip("/"), scale.path or ""),
        origin=(*bounds.voxel_offset, 0),
        inside="scale/",
    )


def plan_section(
    shape: Sequence[int], chunk_shape: Sequence[int], kinds: Kinds, *, is_bytes: bool
) -> ArraySection:
    """Return the middle of the last two axes of space, at the middle of all others, and at the
    first time and channel. A channel axis of three bytes has colours. Raises: `UndrawableError`.
    """
    if len(shape) < 2 or not prod(shape) or not prod(chunk_shape):  # noqa: PLR2004
        raise UndrawableError(f"an array of shape {list(shape)} has no picture")
    spatial = [axis for axis, kind in enumerate(kinds) if kind == "space"]
    rows, columns = (spatial if len(spatial) > 1 else range(len(shape)))[-2:]
    others = [axis for axis in range(len(shape)) if axis not in (rows, columns)]
    ranges = [_middle(size, 1) for size in shape]
    for axis in others:
        if kinds[axis] in ("time", "channel"):
            ranges[axis] = range(1)
    colours = [axis for axis in others if kinds[axis] == "channel" and shape[axis] == _COLOURS]
    is_rgb = is_bytes and len(colours) == 1
    if is_rgb:
        ranges[colours[0]] = range(_COLOURS)
    height, width = _cut(
        (shape[rows], shape[columns]),
        (chunk_shape[rows], chunk_shape[columns]),
        depth=_COLOURS if is_rgb else 1,
    )
    ranges[rows] = _middle(shape[rows], height)
    ranges[columns] = _middle(shape[columns], width)
    return ArraySection(tuple(ranges), (rows, columns, *others), is_rgb)


def _cut(shape: tuple[int, int], chunk_shape: tuple[int, int], depth: int) -> tuple[int, int]:
    """Return the part of *shape* that may be read, *depth* times: by its chunks and its values."""
    height, width = shape
    rows, columns = chunk_shape
    down, across = _fit(-(-height // rows), -(-width // columns), _MOST_CHUNKS // depth)
    return _fit(min(height, down * rows), min(width, across * columns), MOST_VALUES // depth)


def _middle(length: int, size: int) -> range:
    start = (length - size) // 2 if size > 1 else length // 2
    return range(start, start + size)


def _fit(height: int, width: int, most: int) -> tuple[int, int]:
    """Reduce the longer side, or both, so that their product is at most *most*."""
    height = min(height, max(isqrt(most), most // width))
    return height, min(width, most // height)


def _check_chunk(chunk_shape: Sequence[int], nbytes: int | None) -> None:
    found = prod(chunk_shape) * (nbytes or 16)  # the largest item, where the type is unknown
    if found > _MOST_CHUNK_NBYTES:
        raise UndrawableError(f"chunks of {found} bytes are too large")
