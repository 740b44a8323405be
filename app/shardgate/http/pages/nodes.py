"""Nodes as people and viewers see them: axes, data type, levels and channels, from documents."""

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from shardgate.concurrency import is_large, run_in_thread
from shardgate.errors import BadKeyError, DamagedError
from shardgate.formats.documents import Json, parse_json
from shardgate.http.conditions import whole_of
from shardgate.http.request import check_key
from shardgate.model import ByteRange, ETag, VirtualKey, join_path
from shardgate.read.bodies import Entity, Selection
from shardgate.read.containers import Dataset
from shardgate.read.resolver import Resolver
from shardgate.survey.inspect import summarize

MOST_NBYTES: Final = 2 * 1024**2
"""Largest document that is shown."""
_MOST_AXES: Final = 32
_MOST_LETTERS: Final = 256
_MOST_SIZE: Final = 2**63
_LEAST_STEP: Final = 1e-60
_LABEL_TYPES: Final = ("uint32", "uint64")
"""Integers of these types are labels, where metadata do not say what they are."""
_PREFIXES: Final = {
    "": 1.0, "yotta": 1e24, "zetta": 1e21, "exa": 1e18, "peta": 1e15, "tera": 1e12, "giga": 1e9,
    "mega": 1e6, "kilo": 1e3, "hecto": 1e2, "deca": 1e1, "deci": 1e-1, "centi": 1e-2,
    "milli": 1e-3, "micro": 1e-6, "nano": 1e-9, "pico": 1e-12, "femto": 1e-15, "atto": 1e-18,
    "zepto": 1e-21, "yocto": 1e-24,
}  # fmt: skip
_UNITS: Final[dict[str, tuple[float, str]]] = {
    f"{prefix}{unit}": (factor, unit[0])
    for prefix, factor in _PREFIXES.items()
    for unit in ("meter", "second")
} | {
    "angstrom": (1e-10, "m"),
    "inch": (0.0254, "m"),
    "foot": (0.3048, "m"),
    "yard": (0.9144, "m"),
    "mile": (1609.34, "m"),
    "minute": (60, "s"),
    "hour": (3600, "s"),
    "day": (86400, "s"),
}
"""Units of UDUNITS-2, as OME-Zarr spells them, in meters or seconds."""
_TIME: Final = re.compile("t|time.*|date|step|frame", re.IGNORECASE)
_CHANNEL: Final = re.compile("c|channels?|bands?|variable|sample", re.IGNORECASE)
_SPACE: Final = "space"
_COLOURS: Final = 3
"""Bytes along the last axis that are a colour, where dimensions have no names."""


@dataclass(frozen=True, slots=True)
class ViewAxis:
    """A dimension of a node, at its finest level."""

    name: str
    kind: str
    """``space``, ``time`` or ``channel``."""
    size: int
    step: float = 1.0
    """Size of an element, in *unit*."""
    unit: str = ""
    """As it is spelled in the metadata."""
    start: float = 0.0
    """Coordinate of the first element, in elements."""
    is_local: bool = False
    """True for a dimension of its layer alone in Neuroglancer."""

    @property
    def middle(self) -> int:
        """The element that is shown first: in space the middle, otherwise 0."""
        return self.size // 2 if self.kind == _SPACE else 0

    @property
    def step_si(self) -> tuple[float, str]:
        """Size of an element in meters or seconds; without a unit where that is unknown."""
        factor, unit = _UNITS.get(self.unit, (1.0, ""))
        return self.step * factor, unit


@dataclass(frozen=True, slots=True)
class Channel:
    """A channel, as the ``omero`` metadata of OME-Zarr render it."""

    label: str
    color: str
    """Six hexadecimal digits: red, green, blue."""
    window: tuple[float, float] | None
    """Values that are drawn black, and in full colour."""
    is_active: bool = True


@dataclass(frozen=True, slots=True)
class NodeView:
    """A group, array, or precomputed collection."""

    path: str
    """Key of its folder, without a slash at its end."""
    kind: str
    """``group``, ``image`` (a group with OME-Zarr multiscales), ``array``, ``volume``, or the kind
    of another precomputed collection: ``meshes``, ``skeletons``, ``annotations``; ``document`` for
    one that is neither.
    """
    document: dict[str, Json]
    axes: Sequence[ViewAxis] = ()
    data_type: str = ""
    is_labels: bool = False
    channels: Sequence[Channel] = ()
    levels: Sequence[str] = ()
    """Paths of the arrays of an image, below it, finest first."""
    document_name: str = "zarr.json"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the finest level, in the order of *axes*."""
        return tuple(axis.size for axis in self.axes)


async def read_node(resolver: Resolver, dataset: Dataset, path: str) -> NodeView | None:
    """Read the node at *path*; `None` if there is none. Raises: `ShardgateError`."""
    document = await read_document(resolver, dataset, join_path(path, "zarr.json"))
    if document is None:
        info = await read_document(resolver, dataset, join_path(path, "info"))
        return None if info is None else _precomputed_node(path, info)
    if document.get("node_type") == "array":
        return _array_node(path, document)
    if document.get("node_type") != "group":
        return NodeView(path, "document", document)
    if (image := _read_ome(document)) is None:
        return NodeView(path, "group", document)
    finest = join_path(path, image.multiscales[0].datasets[0].path)
    with suppress(BadKeyError):  # of a level with an invalid path
        array = await read_document(resolver, dataset, join_path(finest, "zarr.json"))
        if array is not None:
            return _image_node(path, document, image, array)
    return NodeView(path, "group", document)


async def read_document(resolver: Resolver, dataset: Dataset, key: str) -> dict[str, Json] | None:
    """Read the JSON object at *key*; `None` if there is none. Raises: `BadKeyError`,
    `DamagedError`.
    """
    if (found := await read_body(resolver, dataset, check_key(key), MOST_NBYTES)) is None:
        return None
    try:
        document = await run_in_thread(parse_json, found[1], is_long=is_large(len(found[1])))
    except (ValueError, RecursionError) as error:
        raise DamagedError(dataset.root.join(key), f"is no JSON: {error}") from error
    return document if isinstance(document, dict) else None


async def read_body(
    resolver: Resolver, dataset: Dataset, key: VirtualKey, most_nbytes: int
) -> tuple[ETag, bytes] | None:
    """Read *key* without its content coding; `None` if there is no such key. Raises:
    `DamagedError` for more than *most_nbytes*.
    """

    def choose(entity: Entity) -> Selection | None:
        if entity.length > most_nbytes:
            ref = dataset.root.join(key)
            raise DamagedError(ref, f"has {entity.length} bytes, more than {most_nbytes}")
        return None if entity.coding else whole_of(entity.length)

    reading = ByteRange(0, most_nbytes)
    async with resolver.open(dataset, key, choose, reading) as opened:
        if opened is None:
            return None
        etag, body = opened.entity.etag, opened.body
        if not isinstance(body, bytes):
            body = b"".join([bytes(piece) async for piece in body])
        return etag, body


async def find_images(resolver: Resolver, dataset: Dataset, path: str) -> AsyncGenerator[str]:
    """Yield *path*, then those of the first images, arrays and containers of volumes below it."""
    yield path
    folder = VirtualKey(f"{path}/" if path else "")
    overview = await summarize(resolver, dataset, folder)
    known = {path}
    for each in overview.collections:
        found = each.container if each.node is None else each.node
        found = found if each.image is None else each.image
        if each.found.format and found not in known:
            known.add(found)
            yield found


def _at_most(count: int) -> BeforeValidator:
    """Cut a list; long ones would hold up the event loop while they are validated."""
    return BeforeValidator(lambda value: value[:count] if isinstance(value, list) else value)


_FEW: Final = _at_most(64)
_FOUR: Final = _at_most(4)
_ONE: Final = _at_most(1)
type _Value = Annotated[float, Field(strict=True, gt=-1e300, lt=1e300)]
type _Shift = Annotated[float, Field(strict=True, gt=-1e30, lt=1e30)]
type _Step = Annotated[float, Field(strict=True, gt=1e-30, lt=1e30)]
type _Size = Annotated[int, Field(strict=True, ge=0, lt=_MOST_SIZE)]
type _Offset = Annotated[int, Field(strict=True, gt=-_MOST_SIZE, lt=_MOST_SIZE)]
type _Name = Annotated[str, Field(max_length=_MOST_LETTERS)]


class _Transformation(BaseModel):
    scale: Annotated[tuple[_Step, ...], _FEW] = ()
    translation: Annotated[tuple[_Shift, ...], _FEW] = ()


class _OmeLevel(BaseModel):
    path: str
    transformations: Annotated[tuple[_Transformation, ...], _FOUR] = Field(
        (), alias="coordinateTransformations"
    )


class _OmeAxis(BaseModel):
    name: _Name
    type: _Name = ""
    unit: _Name = ""


class _Multiscale(BaseModel):
    axes: Annotated[tuple[_OmeAxis, ...], _FEW]
    datasets: Annotated[tuple[_OmeLevel, ...], _FEW, Field(min_length=1)]
    transformations: Annotated[tuple[_Transformation, ...], _FOUR] = Field(
        (), alias="coordinateTransformations"
    )


class _OmeroWindow(BaseModel):
    start: _Value
    end: _Value


class _OmeroChannel(BaseModel):
    label: _Name = ""
    color: Annotated[str, Field(pattern="^[0-9A-Fa-f]{6}$")] = "FFFFFF"
    window: _OmeroWindow | None = None
    active: bool = True


class _Omero(BaseModel):
    channels: Annotated[tuple[_OmeroChannel, ...], _FEW]


class _Ome(BaseModel):
    """The member ``ome`` of OME-Zarr 0.5, as far as it is shown."""

    multiscales: Annotated[tuple[_Multiscale, ...], _ONE, Field(min_length=1)]
    omero: Any = None
    image_label: Any = Field(None, alias="image-label")


def _read_ome(document: dict[str, Json]) -> _Ome | None:
    match document:
        case {"attributes": {"ome": dict() as ome}}:
            return _validated(_Ome, ome)
        case _:
            return None


def _validated[M: BaseModel](model: type[M], value: object) -> M | None:
    try:
        return model.model_validate(value)
    except ValidationError:
        return None


def _array_node(path: str, document: dict[str, Json]) -> NodeView:
    shape, data_type = _shape_of(document), _data_type_of(document)
    named = document.get("dimension_names")
    names = [""] * len(shape)
    if isinstance(named, list) and len(named) == len(shape):
        names = [str(name or "") for name in named]
    kinds = [_kind_of(name) for name in names]
    if not any(names) and data_type == "uint8" and shape[2:] and shape[-1] == _COLOURS:
        kinds[-1] = "channel"
    axes = tuple(map(ViewAxis, _unique_names(names), kinds, shape))
    return NodeView(
        path, "array", document, axes=axes, data_type=data_type, is_labels=data_type in _LABEL_TYPES
    )


def _image_node(
    path: str, document: dict[str, Json], ome: _Ome, array: dict[str, Json]
) -> NodeView:
    """Return the node of an OME-Zarr image whose finest level is *array*; a group if they differ
    in the number of dimensions, or steps are out of all bounds.
    """
    multiscale, shape = ome.multiscales[0], _shape_of(array)
    if len(shape) != len(multiscale.axes):
        return NodeView(path, "group", document)
    steps, starts = [1.0] * len(shape), [0.0] * len(shape)
    for each in (*multiscale.datasets[0].transformations, *multiscale.transformations):
        if len(each.scale) == len(shape):
            steps = [a * b for a, b in zip(steps, each.scale, strict=True)]
            starts = [a * b for a, b in zip(starts, each.scale, strict=True)]
        if len(each.translation) == len(shape):
            starts = [a + b for a, b in zip(starts, each.translation, strict=True)]
    if not all(_LEAST_STEP < step < 1 / _LEAST_STEP for step in steps):
        return NodeView(path, "group", document)
    axes = tuple(
        ViewAxis(
            name=axis.name,
            kind=axis.type or _kind_of(axis.name),
            size=size,
            step=step,
            unit=axis.unit,
            start=start / step,
            is_local=axis.type == "channel",
        )
        for axis, size, step, start in zip(multiscale.axes, shape, steps, starts, strict=True)
    )
    data_type = _data_type_of(array)
    omero = _validated(_Omero, ome.omero)
    channels = () if omero is None else tuple(map(_channel, omero.channels))
    is_labels = ome.image_label is not None or (data_type in _LABEL_TYPES and not channels)
    levels = [level.path for level in multiscale.datasets]
    return NodeView(path, "image", document, axes, data_type, is_labels, channels, levels)


def _channel(omero: _OmeroChannel) -> Channel:
    window = None if omero.window is None else (omero.window.start, omero.window.end)
    return Channel(omero.label, omero.color, window, omero.active)


class _VolumeScale(BaseModel):
    size: tuple[_Size, _Size, _Size]
    resolution: tuple[_Step, _Step, _Step]
    voxel_offset: tuple[_Offset, _Offset, _Offset] = (0, 0, 0)


class _Volume(BaseModel):
    """The ``info`` of a precomputed volume, as far as it is shown."""

    type: str
    data_type: str
    num_channels: _Size
    scales: Annotated[tuple[_VolumeScale, ...], _ONE, Field(min_length=1)]


_PRECOMPUTED: Final = {
    "neuroglancer_annotations_v1": "annotations",
    "neuroglancer_skeletons": "skeletons",
    "neuroglancer_legacy_mesh": "meshes",
    "neuroglancer_multilod_draco": "meshes",
}


def _precomputed_node(path: str, info: dict[str, Json]) -> NodeView | None:
    if (kind := _PRECOMPUTED.get(str(info.get("@type")))) is not None:
        return NodeView(path, kind, info, document_name="info")
    if (volume := _validated(_Volume, info)) is None:
        return None
    finest = volume.scales[0]
    sizes = zip("xyz", finest.size, finest.resolution, finest.voxel_offset, strict=True)
    axes = [ViewAxis(name, _SPACE, size, step, "nanometer", at) for name, size, step, at in sizes]
    if volume.num_channels > 1:
        axes.append(ViewAxis("channel", "channel", volume.num_channels, is_local=True))
    is_labels = volume.type == "segmentation"
    return NodeView(
        path, "volume", info, tuple(axes), volume.data_type, is_labels, document_name="info"
    )


def _shape_of(document: dict[str, Json]) -> tuple[int, ...]:
    match document.get("shape"):
        case list() as sizes if len(sizes) <= _MOST_AXES:
            known = [size for size in sizes if type(size) is int and 0 <= size < _MOST_SIZE]
            return tuple(known) if len(known) == len(sizes) else ()
        case _:
            return ()


def _data_type_of(document: dict[str, Json]) -> str:
    match document.get("data_type"):
        case str() as name:
            return name
        case {"name": str() as name}:
            return name
        case _:
            return ""


def _unique_names(names: Sequence[str]) -> list[str]:
    """Name dimensions as Neuroglancer does, which needs unique names."""
    unique: list[str] = []
    for number, name in enumerate(names):
        wanted = candidate = name if 0 < len(name) <= _MOST_LETTERS else f"dim_{number}"
        count = 0
        while candidate in unique:
            candidate, count = f"{wanted}{count}", count + 1
        unique.append(candidate)
    return unique


def _kind_of(name: str) -> str:
    if _TIME.fullmatch(name):
        return "time"
    return "channel" if _CHANNEL.fullmatch(name) else _SPACE
