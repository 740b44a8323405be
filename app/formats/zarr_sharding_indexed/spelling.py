"""Metadata that mean the same, however their writers spell them: with defaults or without."""

import math
from typing import Any, Final

import numpy as np

from app.formats.zarr_sharding_indexed.chunk import item_nbytes
from app.formats.zarr_sharding_indexed.unshard import codec_name, configuration

type Json = Any

_MAY_BE_UNSAID: Final = {
    "gzip": {"level"},
    "zstd": {"level", "checksum"},
    "blosc": {"cname", "clevel", "shuffle", "typesize", "blocksize"},
}
"""What no reader of a codec needs to know."""
_FLOATS: Final = {"float16": 2, "float32": 4, "float64": 8}
_COMPLEX: Final = {"complex64": "float32", "complex128": "float64"}
_LARGEST: Final = float(np.finfo("f8").max)
_SPELLED: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def are_codecs_alike(one: Json, other: Json, ndim: int, data_type: Json) -> bool:
    """Compare two codec chains of arrays of *ndim* dimensions.

    Raises: `DecodeError` for what is no codec.
    """
    if not isinstance(one, list) or not isinstance(other, list) or len(one) != len(other):
        return False
    return all(_are_alike(a, b, ndim, data_type) for a, b in zip(one, other, strict=True))


def are_extensions_alike(one: Json, other: Json) -> bool:
    """Compare two data types, or whatever else has a name and perhaps a configuration.

    Raises: `DecodeError` for what has no name.
    """
    return (codec_name(one), configuration(one)) == (codec_name(other), configuration(other))


def are_fill_values_alike(one: Json, other: Json, data_type: Json) -> bool:
    """Compare two fill values of *data_type*."""
    name = data_type.get("name") if isinstance(data_type, dict) else data_type
    return bool(_element(one, name) == _element(other, name))


def _are_alike(one: Json, other: Json, ndim: int, data_type: Json) -> bool:
    name, members = _plain(one, ndim, data_type)
    other_name, other_members = _plain(other, ndim, data_type)
    if name != other_name:
        return False
    if name == "sharding_indexed":
        for chain in ("codecs", "index_codecs"):
            pair = members.pop(chain, []), other_members.pop(chain, [])
            if not are_codecs_alike(*pair, ndim, data_type if chain == "codecs" else "uint64"):
                return False
    may_be_unsaid = _MAY_BE_UNSAID.get(name, set())
    said = {member for member in may_be_unsaid if member in members and member in other_members}
    unsaid = may_be_unsaid - said
    return {k: v for k, v in members.items() if k not in unsaid} == {
        k: v for k, v in other_members.items() if k not in unsaid
    }


def _plain(codec: Json, ndim: int, data_type: Json) -> tuple[str, dict[str, Json]]:
    """Give the name of a codec, and its configuration in one spelling."""
    name, members = codec_name(codec), dict(configuration(codec))
    match name:
        case "bytes" | "endian":
            name = "bytes"
            if item_nbytes(data_type) == 1:
                members.pop("endian", None)
        case "transpose" if members.get("order") in ("C", "F"):
            axes = list(range(ndim))
            members["order"] = axes if members["order"] == "C" else axes[::-1]
        case "sharding_indexed":
            members.setdefault("index_location", "end")
    return name, members


def _element(value: Json, data_type: Json) -> Json:
    """Give the bytes of a floating point number, and all else as it is."""
    if data_type in _COMPLEX and isinstance(value, list):
        return [_element(part, _COMPLEX[data_type]) for part in value]
    if data_type not in _FLOATS or isinstance(value, bool):
        return value
    number = _SPELLED.get(value, value) if isinstance(value, str) else value
    if isinstance(number, str):
        return _bits(number, _FLOATS[data_type])
    if not isinstance(number, int | float):
        return value
    if isinstance(number, int) and abs(number) > _LARGEST:
        return value
    with np.errstate(over="ignore"):
        return (
            np.asarray(float(number)).astype(data_type).astype(f">f{_FLOATS[data_type]}").tobytes()
        )


def _bits(spelled: str, nbytes: int) -> Json:
    """Read the bits of a number in ``0x…``, which is as it is where that is no such."""
    digits = spelled.removeprefix("0x")
    try:
        return bytes.fromhex(digits) if len(digits) == 2 * nbytes else spelled
    except ValueError:
        return spelled
