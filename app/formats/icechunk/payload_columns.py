"""What many chunks refer to, told in columns: checked and turned into payloads column by column."""

import re
from base64 import b64decode
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import chain
from math import ceil
from types import NoneType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from app.errors import BadBodyError
from app.formats.icechunk.ids import decode_ids
from app.formats.icechunk.payloads import Distinct, Payloads, Ranges
from app.formats.icechunk.updated_chunks import Coords
from app.model import Condition, ETag, UnmodifiedSince

_MOST_DIMENSIONS: Final = 64
_U32_STOP: Final = 2**32
_STOP: Final = 2**63
_PLACES: Final = ("offsets", "lengths")
_CHECKSUMS: Final = ("etags", "last_modified")
_MAX_LOCATION_NBYTES: Final = 1024
"""The library has the same limit."""
_STRONG: Final = re.compile(r"[\x21\x23-\x7e\x80-\xff]*")


def read_coords(where: str, given: object) -> Coords:
    """Read the coordinates of chunks, a list each, no two of which are alike.

    Raises: `BadBodyError`.
    """
    what = f"{where}: coords are lists of whole numbers from 0, all of one length"
    if not isinstance(given, list) or not _are_all(list, given):
        raise BadBodyError(what)
    ndims = set(map(len, given))
    if len(ndims) > 1 or max(ndims, default=0) > _MOST_DIMENSIONS:
        raise BadBodyError(what)
    numbers = _numbers(list(chain.from_iterable(given)), _U32_STOP)
    if numbers is None:
        raise BadBodyError(what)
    coords = numbers.astype(np.uint32).reshape(len(given), max(ndims, default=0))
    order = np.lexsort(coords.T[::-1]) if coords.size else np.arange(len(coords))
    repeated = np.flatnonzero((coords[order[1:]] == coords[order[:-1]]).all(axis=1))
    if len(repeated):
        raise BadBodyError(f"{where}: chunk {coords[order[repeated[0]]].tolist()} is told twice")
    return coords


def read_payloads(where: str, columns: Mapping[str, Any], count: int) -> Payloads:
    """Read what *count* chunks refer to, all in one way.

    Raises: `BadBodyError`.
    """
    for name, column in columns.items():
        if not isinstance(column, list) or len(column) != count:
            raise BadBodyError(f"{where}: {name} is a list of {count}, as many as the coords")
    names = columns.keys()
    if names == {"inlines"}:
        return Payloads.inlaid([_read_inline(where, each) for each in columns["inlines"]])
    if {"chunk_ids", "lengths"} <= names <= {"chunk_ids", *_PLACES}:
        return Payloads.native(_read_ids(where, columns["chunk_ids"]), _ranges(where, columns))
    if {"locations", "lengths"} <= names <= {"locations", *_PLACES, *_CHECKSUMS}:
        locations = _read_locations(where, columns["locations"])
        ranges, checksums = _ranges(where, columns), _read_checksums(where, columns, count)
        return Payloads.virtual(locations, ranges, checksums)
    raise BadBodyError(
        f"{where}: of chunks are told coords and inline; or chunk_id, offset, length; or location, "
        "offset, length, and perhaps etag or last_modified"
    )


def _read_inline(where: str, text: object) -> bytes:
    try:
        data = b64decode(text, validate=True) if isinstance(text, str) else b""
    except ValueError:
        data = b""
    if not data:
        raise BadBodyError(f"{where}: an inline chunk is base64, of one byte at least")
    return data


def _read_ids(where: str, texts: Sequence[Any]) -> Distinct[bytes]:
    spelled = Distinct.of(texts) if _are_all(str, texts) else None
    ids = decode_ids(spelled.values) if spelled is not None else None
    if spelled is None or ids is None:
        raise BadBodyError(f"{where}: a chunk_id is spelled as POST /chunks answers it")
    return Distinct(ids, spelled.numbers)


def _ranges(where: str, columns: Mapping[str, Any]) -> Ranges:
    lengths = _numbers(columns["lengths"], _STOP)
    told = columns.get("offsets", [0] * len(columns["lengths"]))
    offsets = _numbers([0 if each is None else each for each in told], _STOP)
    if lengths is None or offsets is None or not lengths.all():
        raise BadBodyError(f"{where}: an offset is a whole number, and so is a length, from 1")
    stops = offsets + lengths
    if (stops < 0).any():
        raise BadBodyError(f"{where}: a chunk ends past 2^63")
    return Ranges(offsets, stops)


def _read_locations(where: str, texts: Sequence[Any]) -> Distinct[str]:
    found = Distinct.of(texts) if _are_all(str, texts) else None
    if found is None or any(len(text.encode()) > _MAX_LOCATION_NBYTES for text in found.values):
        raise BadBodyError(f"{where}: a location is a URL of up to {_MAX_LOCATION_NBYTES} bytes")
    return found


def _read_checksums(
    where: str, columns: Mapping[str, Any], count: int
) -> Distinct[Condition | None]:
    etags, moments = (_distinct(where, columns.get(name, [None] * count)) for name in _CHECKSUMS)
    known = [None if each is None else _read_etag(where, each) for each in etags.values]
    times = [None if each is None else _read_moment(where, each) for each in moments.values]
    is_tagged = np.array([each is not None for each in known], np.bool_)[etags.numbers]
    is_dated = np.array([each is not None for each in times], np.bool_)[moments.numbers]
    if (is_tagged & is_dated).any():
        raise BadBodyError(f"{where}: either etag or last_modified says what an object has to be")
    numbers = np.where(is_tagged, etags.numbers, len(known) + moments.numbers)
    return Distinct([*known, *times], numbers)


def _distinct(where: str, texts: Sequence[Any]) -> Distinct[str | None]:
    if not {str, NoneType}.issuperset(map(type, texts)):
        raise BadBodyError(f"{where}: an etag is text, and so is a last_modified")
    return Distinct.of(texts)


def _read_etag(where: str, text: str) -> ETag:
    """Read an entity tag, with its quotes or without."""
    opaque = text.removeprefix('"').removesuffix('"')
    if not opaque or not _STRONG.fullmatch(opaque):
        raise BadBodyError(f"{where}: {text[:80]!r} is no strong entity tag")
    return ETag(f'"{opaque}"')


def _read_moment(where: str, text: str) -> UnmodifiedSince:
    """Read a time of RFC 3339; its fraction of a second is rounded up."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = datetime.min  # noqa: DTZ901  refused below
    if moment.tzinfo is None or not 0 < (epoch_s := ceil(moment.timestamp())) < _U32_STOP:
        raise BadBodyError(f"{where}: {text[:80]!r} is no time such as 2026-01-31T12:00:00Z")
    return UnmodifiedSince(epoch_s)


def _numbers(values: Sequence[Any], stop: int) -> NDArray[np.int64] | None:
    """Give whole numbers from 0 to before *stop*; `None` if any is none."""
    try:
        numbers = np.array(values, np.int64) if _are_all(int, values) else None
    except OverflowError:
        return None
    if numbers is None or (len(numbers) and not 0 <= numbers.min() <= numbers.max() < stop):
        return None
    return numbers


def _are_all(kind: type, values: Iterable[Any]) -> bool:
    """Tell whether all are of this *kind*; true is no number."""
    return {kind}.issuperset(map(type, values))
