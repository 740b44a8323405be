"""`ArrayView`: an array as pages, code, links and pictures show it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Final, Self

from shardgate.formats.documents import Json
from shardgate.formats.surveying import Description
from shardgate.formats.zarr.survey import describe_served

MOST_LETTERS: Final = 256  # letters of a name that is shown, or used in code
_MOST_AXES: Final = 32
_DRAWN: Final = frozenset(
    {"uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "float32"}
)
"""Data types that Neuroglancer draws."""
_PICTURED: Final = _DRAWN | {"bool", "int64", "float16", "float64", "complex64", "complex128"}
"""Data types of Zarr v2 that previews are made of; those of v3 are left to TensorStore."""
_NUMBER: Final = re.compile("(bool|u?int|b?float|complex)[0-9a-z_]*")
"""Data types of Zarr v3 that are numbers: ``bfloat16``, ``int4``, ``float8_e4m3fn`` too."""
_PLAIN: Final = frozenset({"bytes", "transpose", "blosc", "gzip", "zlib", "zstd"})
"""Codecs of arrays of Zarr v2 that Neuroglancer and TensorStore read; they read no filters."""
_DECODED: Final = _PLAIN | {
    "adler32", "astype", "bitround", "bz2", "crc32", "delta", "fixedscaleoffset", "fletcher32",
    "lz4", "lzma", "quantize", "shuffle",
}  # fmt: skip
"""Codecs of numcodecs that previews decode: none of them makes objects of Python."""
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
_RGB: Final = 3


@dataclass(frozen=True, slots=True)
class Axis:
    """A dimension of an array."""

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
        return self.size // 2 if self.kind == "space" else 0

    @property
    def step_si(self) -> tuple[float, str]:
        """Size of an element in meters or seconds; without a unit where that is unknown."""
        factor, unit = _UNITS.get(self.unit, (1.0, ""))
        return self.step * factor, unit


@dataclass(frozen=True, slots=True)
class ArrayView(Description):
    """An array, or another collection, with what clients are told beside its description."""

    axes: Sequence[Axis] = ()
    """As its metadata name them, or those of the image that it is a level of; none of an array of
    very many dimensions.
    """
    is_labels: bool = False
    is_level: bool = False
    """Whether the axes are those of an image: a viewer that opens the array does not know them."""

    @classmethod
    def of(cls, found: Description) -> Self:
        """Return the view of a collection that a format has described."""
        facts = {field.name: getattr(found, field.name) for field in fields(Description)}
        # Integers of these types are labels, where metadata do not say what they are.
        is_labels = found.data_type in ("uint32", "uint64")
        view = cls(**facts, is_labels=is_labels)
        return replace(view, axes=_axes_of(view))

    @classmethod
    def of_zarr(cls, document: dict[str, Json]) -> Self:
        """Return the view of the array of a served ``zarr.json``. Raises: `DecodeError`."""
        names = document.get("dimension_names")
        # An invalid name costs no other one, and viewers need none.
        listed = names if isinstance(names, list) else []
        sound = [name if isinstance(name, str) else None for name in listed]
        return cls.of(describe_served(document | {"dimension_names": sound}))

    @property
    def driver(self) -> str:
        """TensorStore's name of the format in which it is served."""
        named = {"precomputed": "neuroglancer_precomputed", "zarr2": "zarr2"}
        return named.get(self.format, "zarr3")

    @property
    def own_names(self) -> list[str]:
        """Names of its dimensions in Neuroglancer, which knows no image that it is a level of."""
        prefix = "d" if self.format == "zarr2" else "dim_"
        return unique_names(_names_of(self), prefix)

    @property
    def has_unequal_chunks(self) -> bool:
        """Return whether it is an array without one shape of its chunks."""
        return self.shape is not None and self.inner_chunk_shape is None

    @property
    def is_drawn(self) -> bool:
        """Return whether Neuroglancer draws it; a line, such as a coordinate, is not worth it."""
        is_read = self.is_plain and not self.has_unequal_chunks
        return len(self.axes) > 1 and is_read and self.data_type in _DRAWN

    @property
    def is_plain(self) -> bool:
        """Return whether Neuroglancer and TensorStore know its codecs, as far as v2 has others."""
        if self.format != "zarr2":
            return True
        filters = set(self.codecs[: self.codecs.index("bytes")]) - {"transpose"}
        return not filters and _PLAIN.issuperset(self.codecs)

    @property
    def why_not_pictured(self) -> str:
        """Return why there is no preview, where its types of values and codecs tell."""
        is_v2 = self.format == "zarr2"
        data_type = self.data_type or ""
        if not (data_type in _PICTURED if is_v2 else _NUMBER.fullmatch(data_type)):
            return f"{self.data_type} is no type of numbers that is drawn"
        unknown = [name for name in self.codecs if name not in _DECODED]
        return f"{unknown[0]} is not decoded" if is_v2 and unknown else ""


NO_ARRAY: Final = ArrayView("", "", "")  # stands for the array of a node that is none


def unique_names(names: Sequence[str | None], prefix: str = "dim_") -> list[str]:
    """Name dimensions as Neuroglancer does, which needs unique names."""
    unique: list[str] = []
    for number, name in enumerate(names):
        wanted = name if name and len(name) <= MOST_LETTERS else f"{prefix}{number}"
        candidate = wanted
        count = 0
        while candidate in unique:
            candidate = f"{wanted}{count}"
            count += 1
        unique.append(candidate)
    return unique


def kind_of(name: str) -> str:
    """Return the kind of the axis *name*."""
    if _TIME.fullmatch(name):
        return "time"
    return "channel" if _CHANNEL.fullmatch(name) else "space"


def _names_of(found: Description) -> Sequence[str | None]:
    count = len(found.shape or ())
    names = found.dimension_names or ()
    return names if len(names) == count else [None] * count


def _axes_of(view: ArrayView) -> tuple[Axis, ...]:
    shape = view.shape or ()
    if len(shape) > _MOST_AXES:
        return ()
    names = _names_of(view)
    kinds = [kind_of(name or "") for name in names]
    # Bytes of three along the last axis of an array without names are a colour.
    if not any(names) and view.data_type == "uint8" and shape[2:] and shape[-1] == _RGB:
        kinds[-1] = "channel"
    return tuple(map(Axis, view.own_names, kinds, shape))
