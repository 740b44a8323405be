"""Nodes as people and viewers see them: axes, data type, levels and channels, from documents."""

import re
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from math import isnan, nan
from typing import Annotated, Any, Final

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    field_validator,
    model_validator,
)

from shardgate.concurrency import is_large, run_in_thread
from shardgate.errors import BadKeyError, DamagedError, ShardgateError
from shardgate.formats.documents import Json, parse_json
from shardgate.model import ByteRange, ETag, VirtualKey, join_path
from shardgate.read.bodies import Entity, Selection
from shardgate.read.containers import Dataset
from shardgate.read.resolver import Resolver
from shardgate.server.conditions import whole_of
from shardgate.server.request import check_key
from shardgate.survey.inspect import MAX_COLLECTIONS, summarize

MOST_NBYTES: Final = 2 * 1024**2
"""Largest document that is shown."""
_MOST_AXES: Final = 32
_MOST_LEVELS: Final = 8
"""Levels that are read to find one that exists."""
_MOST_PARENTS: Final = 3
"""Groups above an array that are read to find the image that it is a level of."""
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
    """As viewers see them: those of an array have no steps."""
    data_type: str = ""
    is_labels: bool = False
    channels: Sequence[Channel] = ()
    levels: Sequence[str] = ()
    """Paths of the arrays of an image, below it, finest first."""
    document_name: str = "zarr.json"
    level_axes: Sequence[ViewAxis] = ()
    """Of an array that is a level of an image: axes with its names, units and steps there."""

    @property
    def shown_axes(self) -> Sequence[ViewAxis]:
        """Axes for people."""
        return self.level_axes or self.axes

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
        return await _find_level(resolver, dataset, _array_node(path, document))
    if document.get("node_type") != "group":
        return NodeView(path, "document", document)
    group = NodeView(path, "group", document)
    image = _read_ome(document)
    return group if image is None else await _read_image(resolver, dataset, group, image)


async def _read_image(
    resolver: Resolver, dataset: Dataset, group: NodeView, image: "_Ome"
) -> NodeView:
    """Return the node of an *image*, whose finest level may be absent; *group* without any."""
    for level in image.multiscales[0].datasets[:_MOST_LEVELS]:
        with suppress(BadKeyError, DamagedError):  # of one level: the next may be sound
            finest = join_path(group.path, level.path)
            array = await read_document(resolver, dataset, join_path(finest, "zarr.json"))
            if array is not None:
                return _image_node(group, image, level, array)
    return group


async def _find_level(resolver: Resolver, dataset: Dataset, array: NodeView) -> NodeView:
    """Return *array* with the axes of the nearest image above it that it is a level of, if any."""
    for parent in islice(_parents(array.path), _MOST_PARENTS):
        document = None
        with suppress(ShardgateError):  # of the group: the array is sound
            document = await read_document(resolver, dataset, join_path(parent, "zarr.json"))
        if document is None or (image := _read_ome(document)) is None:
            continue
        for multiscale, level in image.levels:
            if join_path(parent, level.path) == array.path:
                axes = [
                    replace(axis, is_local=False)
                    for axis in _axes_of(multiscale, level, array.shape)
                ]
                is_labels = _has_labels(image, array.data_type)
                return replace(array, level_axes=axes, is_labels=is_labels)
    return array


def _parents(path: str) -> Iterator[str]:
    """Yield the folders above *path*, the nearest first, up to the ref where it names one."""
    while path and not path.rpartition("/")[2].startswith("@"):
        path = path.rpartition("/")[0]
        yield path


async def read_document(resolver: Resolver, dataset: Dataset, key: str) -> dict[str, Json] | None:
    """Read the JSON object at *key*; `None` if there is none. Raises: `BadKeyError`,
    `DamagedError`.
    """
    if (found := await read_body(resolver, dataset, check_key(key), MOST_NBYTES)) is None:
        return None
    try:
        document = await run_in_thread(parse_json, found[1], is_long=is_large(len(found[1])))
    except ValueError as error:
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


async def find_images(
    resolver: Resolver, dataset: Dataset, path: str, most: int = MAX_COLLECTIONS
) -> AsyncGenerator[str]:
    """Yield *path*, then those of images, arrays and containers of volumes among the first *most*
    collections below it.
    """
    yield path
    folder = VirtualKey(f"{path}/" if path else "")
    overview = await summarize(resolver, dataset, folder, most=most)
    known = {path}
    for each in overview.collections:
        found = each.container if each.node is None else each.node
        found = found if each.image is None else each.image
        if each.found.format and found not in known:
            known.add(found)
            yield found


def _at_most(count: int) -> BeforeValidator:
    """Cut a list or text; long ones would hold up the event loop while they are validated."""
    return BeforeValidator(lambda value: value[:count] if isinstance(value, list | str) else value)


class _Lenient(BaseModel):
    """Metadata of others: an invalid member has its default, so that it costs no other one."""

    @model_validator(mode="before")
    @classmethod
    def _demand_object(cls, value: object) -> object:
        return value if isinstance(value, dict) else {}

    @field_validator("*", mode="wrap")
    @classmethod
    def _replace_invalid(
        cls, value: object, validate: Callable[[object], Any], info: ValidationInfo
    ) -> Any:
        try:
            return validate(value)
        except ValidationError:
            field = cls.model_fields[info.field_name or ""]
            if field.is_required():
                raise
            return field.default


def _or(default: float | None) -> WrapValidator:
    """Replace an invalid item of a list by *default*."""

    def validate(value: object, validate_inner: Callable[[object], Any]) -> Any:
        try:
            return validate_inner(value)
        except ValidationError:
            return default

    return WrapValidator(validate)


_FEW: Final = _at_most(64)
_FOUR: Final = _at_most(4)
_SOUND: Final = AfterValidator(lambda items: tuple(each for each in items if each is not None))
type _Sound[T] = Annotated[tuple[Annotated[T, _or(None)], ...], _FEW, _SOUND, Field(min_length=1)]
"""Items without those that are invalid."""
type _Value = Annotated[float, Field(strict=True, gt=-1e300, lt=1e300)]
type _Shift = Annotated[float, Field(strict=True, gt=-1e30, lt=1e30), _or(0.0)]
type _Step = Annotated[float, Field(strict=True, gt=1e-30, lt=1e30), _or(nan)]
"""Not a number where it is invalid: the step of that axis is unknown then."""
type _Size = Annotated[int, Field(strict=True, ge=0, lt=_MOST_SIZE)]
type _Offset = Annotated[int, Field(strict=True, gt=-_MOST_SIZE, lt=_MOST_SIZE)]
type _Name = Annotated[str, _at_most(_MOST_LETTERS)]


class _Transformation(_Lenient):
    scale: Annotated[tuple[_Step, ...], _FEW] = ()
    translation: Annotated[tuple[_Shift, ...], _FEW] = ()


type _Transformations = Annotated[tuple[_Transformation, ...], _FOUR]


class _OmeLevel(_Lenient):
    path: str
    transformations: _Transformations = Field((), alias="coordinateTransformations")


class _OmeAxis(_Lenient):
    name: _Name = ""
    type: _Name = ""
    unit: _Name = ""


class _Multiscale(_Lenient):
    axes: Annotated[tuple[_OmeAxis, ...], _FEW]
    datasets: _Sound[_OmeLevel]
    transformations: _Transformations = Field((), alias="coordinateTransformations")


class _OmeroWindow(BaseModel):
    start: _Value
    end: _Value


class _OmeroChannel(_Lenient):
    label: _Name = ""
    color: Annotated[str, Field(pattern="^[0-9A-Fa-f]{6}$")] = "FFFFFF"
    window: _OmeroWindow | None = None
    active: bool = True


class _Omero(_Lenient):
    channels: Annotated[tuple[_OmeroChannel, ...], _FEW] = ()


class _Ome(_Lenient):
    """The member ``ome`` of OME-Zarr 0.5, as far as it is shown."""

    multiscales: _Sound[_Multiscale]
    omero: _Omero = _Omero()
    image_label: Any = Field(None, alias="image-label")

    @property
    def levels(self) -> Iterator[tuple[_Multiscale, _OmeLevel]]:
        """All levels, with their multiscales."""
        return ((each, level) for each in self.multiscales for level in each.datasets)


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
        names = [name if isinstance(name, str) else "" for name in named]
    kinds = [_kind_of(name) for name in names]
    if not any(names) and data_type == "uint8" and shape[2:] and shape[-1] == _COLOURS:
        kinds[-1] = "channel"
    axes = tuple(map(ViewAxis, _unique_names(names), kinds, shape))
    return NodeView(
        path, "array", document, axes=axes, data_type=data_type, is_labels=data_type in _LABEL_TYPES
    )


def _image_node(group: NodeView, ome: _Ome, finest: _OmeLevel, array: dict[str, Json]) -> NodeView:
    """Return the node of an OME-Zarr image whose level *finest* is *array*; *group* if they differ
    in the number of dimensions.
    """
    multiscale = ome.multiscales[0]
    if not (axes := _axes_of(multiscale, finest, _shape_of(array))):
        return group
    data_type = _data_type_of(array)
    return replace(
        group,
        kind="image",
        axes=axes,
        data_type=data_type,
        is_labels=_has_labels(ome, data_type),
        channels=_channels(ome),
        levels=[level.path for level in multiscale.datasets],
    )


def _axes_of(
    multiscale: _Multiscale, level: _OmeLevel, shape: Sequence[int]
) -> tuple[ViewAxis, ...]:
    """Return the axes of a *level* of this *shape*, without step and unit where a step is invalid
    or out of all bounds; none if their number differs from that of the image.
    """
    if len(shape) != len(multiscale.axes):
        return ()
    steps, starts = [1.0] * len(shape), [0.0] * len(shape)
    for each in (*level.transformations, *multiscale.transformations):
        if len(each.scale) == len(shape):
            steps = [a * b for a, b in zip(steps, each.scale, strict=True)]
            starts = [a * b for a, b in zip(starts, each.scale, strict=True)]
        if len(each.translation) == len(shape):
            starts = [a + b for a, b in zip(starts, each.translation, strict=True)]
    names = _unique_names([axis.name for axis in multiscale.axes])
    axes = []
    for name, axis, size, step, start in zip(
        names, multiscale.axes, shape, steps, starts, strict=True
    ):
        kind = axis.type or _kind_of(axis.name)
        shown = ViewAxis(name, kind, size, is_local=axis.type == "channel")
        if _LEAST_STEP < step < 1 / _LEAST_STEP:
            shown = replace(shown, step=step, unit=axis.unit, start=start / step)
        axes.append(shown)
    return tuple(axes)


def _has_labels(ome: _Ome, data_type: str) -> bool:
    is_unlike_image = data_type in _LABEL_TYPES and not ome.omero.channels
    return ome.image_label is not None or is_unlike_image


def _channels(ome: _Ome) -> tuple[Channel, ...]:
    return tuple(map(_channel, ome.omero.channels))


def _channel(omero: _OmeroChannel) -> Channel:
    window = None if omero.window is None else (omero.window.start, omero.window.end)
    return Channel(omero.label, omero.color, window, omero.active)


class _VolumeScale(_Lenient):
    size: tuple[_Size, _Size, _Size]
    resolution: tuple[_Step, _Step, _Step] = (nan, nan, nan)
    voxel_offset: tuple[_Offset, _Offset, _Offset] = (0, 0, 0)


class _Volume(_Lenient):
    """The ``info`` of a precomputed volume, as far as it is shown."""

    type: str = ""
    data_type: str = ""
    num_channels: _Size = 1
    scales: _Sound[_VolumeScale]


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
    axes = [
        ViewAxis(name, _SPACE, size, start=at)
        if isnan(step)
        else ViewAxis(name, _SPACE, size, step, "nanometer", at)
        for name, size, step, at in sizes
    ]
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
