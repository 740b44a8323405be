"""Images: OME-Zarr multiscales and precomputed volumes, as far as their metadata are shown."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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

from shardgate.formats.documents import Json
from shardgate.survey.arrays import MOST_LETTERS, ArrayView, Axis, kind_of, unique_names

_MOST_SIZE: Final = 2**63
_LEAST_STEP: Final = 1e-60


@dataclass(frozen=True, slots=True)
class Channel:
    """A channel, as the ``omero`` metadata of OME-Zarr render it."""

    label: str
    color: str
    """Six hexadecimal digits: red, green, blue."""
    window: tuple[float, float] | None
    """Values that are drawn black, and in full colour."""
    is_active: bool = True


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
_SOUND: Final = AfterValidator(lambda items: tuple(each for each in items if each is not None))
type _Sound[T] = Annotated[tuple[Annotated[T, _or(None)], ...], _FEW, _SOUND, Field(min_length=1)]
"""Items without those that are invalid."""
type _Value = Annotated[float, Field(strict=True, gt=-1e300, lt=1e300)]
type _Shift = Annotated[float, Field(strict=True, gt=-1e30, lt=1e30), _or(0.0)]
type _Step = Annotated[float, Field(strict=True, gt=1e-30, lt=1e30), _or(nan)]
"""Not a number where it is invalid: the step of that axis is unknown then."""
type _Size = Annotated[int, Field(strict=True, ge=0, lt=_MOST_SIZE)]
type _Offset = Annotated[int, Field(strict=True, gt=-_MOST_SIZE, lt=_MOST_SIZE)]
type _Name = Annotated[str, _at_most(MOST_LETTERS)]


class _Transformation(_Lenient):
    scale: Annotated[tuple[_Step, ...], _FEW] = ()
    translation: Annotated[tuple[_Shift, ...], _FEW] = ()


type _Transformations = Annotated[tuple[_Transformation, ...], _at_most(4)]


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

    def axes_of(self, level: _OmeLevel, shape: Sequence[int]) -> tuple[Axis, ...]:
        """Return the axes of a *level* of this *shape*, without step and unit where a step is
        invalid or out of all bounds; none if their number differs from that of the image.
        """
        if len(shape) != len(self.axes):
            return ()
        steps = [1.0] * len(shape)
        starts = [0.0] * len(shape)
        for each in (*level.transformations, *self.transformations):
            if len(each.scale) == len(shape):
                steps = [a * b for a, b in zip(steps, each.scale, strict=True)]
                starts = [a * b for a, b in zip(starts, each.scale, strict=True)]
            if len(each.translation) == len(shape):
                starts = [a + b for a, b in zip(starts, each.translation, strict=True)]
        names = unique_names([axis.name for axis in self.axes])
        axes = []
        for name, axis, size, step, at in zip(names, self.axes, shape, steps, starts, strict=True):
            kind = axis.type or kind_of(axis.name)
            shown = Axis(name, kind, size, is_local=axis.type == "channel")
            if _LEAST_STEP < step < 1 / _LEAST_STEP:
                shown = replace(shown, step=step, unit=axis.unit, start=at / step)
            axes.append(shown)
        return tuple(axes)


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


class OmeImage(_Lenient):
    """The member ``ome`` of OME-Zarr 0.5, or the attributes of 0.4, as far as they are shown."""

    multiscales: _Sound[_Multiscale]
    omero: _Omero = _Omero()
    image_label: Any = Field(None, alias="image-label")

    @property
    def levels(self) -> Sequence[str]:
        """Paths of the arrays of the first multiscale, finest first."""
        return [level.path for level in self.multiscales[0].datasets]

    @property
    def channels(self) -> tuple[Channel, ...]:
        return tuple(map(_channel, self.omero.channels))

    def place(self, array: ArrayView, path: str) -> ArrayView | None:
        """Return *array* as the level at *path*, with axes and labels of the image; `None` if it is
        no level, or differs in the number of dimensions.
        """
        for multiscale in self.multiscales:
            for level in multiscale.datasets:
                is_wanted = level.path.strip("/") == path.strip("/")
                if is_wanted and (axes := multiscale.axes_of(level, array.shape or ())):
                    return replace(array, axes=axes, is_labels=self._has_labels(array))
        return None

    def _has_labels(self, array: ArrayView) -> bool:
        is_unlike_image = array.is_labels and not self.omero.channels
        return self.image_label is not None or is_unlike_image


def read_ome(document: dict[str, Json]) -> OmeImage | None:
    """Return the image that the group of *document* is, in OME-Zarr 0.5 or later, or in 0.4 where
    it is that of Zarr v2; `None` for other groups.
    """
    match document:
        case {
            "zarr_format": 2,
            "attributes": {"multiscales": [{"version": "0.4"}, *_]} as attributes,
        }:
            return _validated(OmeImage, attributes)
        case {"attributes": {"ome": dict() as ome}}:
            return _validated(OmeImage, ome)
        case _:
            return None


def _validated[M: BaseModel](model: type[M], value: object) -> M | None:
    try:
        return model.model_validate(value)
    except ValidationError:
        return None


def _channel(omero: _OmeroChannel) -> Channel:
    window = None
    if omero.window is not None and omero.window.start < omero.window.end:
        window = omero.window.start, omero.window.end
    return Channel(omero.label, omero.color, window, omero.active)


class _VolumeScale(_Lenient):
    size: tuple[_Size, _Size, _Size]
    chunk_sizes: _Sound[tuple[_Size, _Size, _Size]] | None = None
    resolution: tuple[_Step, _Step, _Step] = (nan, nan, nan)
    voxel_offset: tuple[_Offset, _Offset, _Offset] = (0, 0, 0)


class _Volume(_Lenient):
    """The ``info`` of a precomputed volume, as far as it is shown."""

    type: str = ""
    data_type: str = ""
    num_channels: _Size = 1
    scales: _Sound[_VolumeScale]


def view_volume(info: dict[str, Json]) -> ArrayView | None:
    """Return the finest scale of the precomputed volume of *info*; `None` if it is none."""
    if (volume := _validated(_Volume, info)) is None:
        return None
    finest = volume.scales[0]
    sizes = zip("xyz", finest.size, finest.resolution, finest.voxel_offset, strict=True)
    axes = [
        Axis(name, "space", size, start=at)
        if isnan(step)
        else Axis(name, "space", size, step, "nanometer", at)
        for name, size, step, at in sizes
    ]
    channels: tuple[int, ...] = ()
    if volume.num_channels > 1:
        channels = (volume.num_channels,)
        axes.append(Axis("channel", "channel", volume.num_channels, is_local=True))
    return ArrayView(
        path="",
        format="precomputed",
        kind="array",
        shape=finest.size + channels,
        data_type=volume.data_type,
        inner_chunk_shape=finest.chunk_sizes[0] + channels if finest.chunk_sizes else None,
        axes=tuple(axes),
        is_labels=volume.type == "segmentation",
    )
