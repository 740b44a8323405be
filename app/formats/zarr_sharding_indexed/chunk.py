"""What the bytes of an encoded inner chunk must be like, as far as that can be told unread."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import crc32c

from app.formats.zarr_sharding_indexed.index import CHECKSUM_NBYTES

type Json = Any

_ITEM_NBYTES: Final = {
    "bool": 1,
    "bfloat16": 2,
    "complex64": 8,
    "complex128": 16,
    "numpy.datetime64": 8,
    "numpy.timedelta64": 8,
}
_BY_BITS: Final = re.compile("(?:u?int|float|r)(8|[1-9][0-9]{1,5})")
"""Of ``r*`` any number of whole bytes is a data type."""
_BY_LENGTH: Final = {"null_terminated_bytes", "raw_bytes", "fixed_length_utf32"}
"""Data types that tell their ``length_bytes``."""
_RECORDS: Final = {"struct", "structured"}


@dataclass(frozen=True, slots=True)
class ChunkForm:
    """What can be told of all inner chunks of an array."""

    nbytes: int | None = None
    """Of each, where no codec makes that depend on what is in it."""
    has_checksum: bool = False
    """Whether the last codec puts a CRC-32C behind it."""

    def fault(self, data: bytes) -> str | None:
        """Tell why *data* cannot be an inner chunk."""
        if not data:
            return "the inner chunk is empty"
        if self.nbytes is not None and len(data) != self.nbytes:
            return f"the inner chunk has {len(data)} bytes instead of {self.nbytes}"
        if self.has_checksum and not has_intact_checksum(data):
            return "the checksum of the inner chunk does not match"
        return None


def chunk_form(codecs: Sequence[Json], chunk_shape: Sequence[int], data_type: Json) -> ChunkForm:
    """Tell how *codecs* encode chunks of *chunk_shape*."""
    names = [codec.get("name") if isinstance(codec, dict) else codec for codec in codecs]
    element = item_nbytes(data_type)
    nbytes = None
    if element is not None and set(names) <= {"transpose", "bytes", "crc32c"}:
        checksums_nbytes = CHECKSUM_NBYTES * names.count("crc32c")
        nbytes = math.prod(chunk_shape) * element + checksums_nbytes
    return ChunkForm(nbytes, has_checksum=names[-1:] == ["crc32c"])


def has_intact_checksum(data: bytes) -> bool:
    """Tell whether *data* ends in the CRC-32C of all before it, 4 bytes, little endian."""
    body, checksum = data[:-CHECKSUM_NBYTES], data[-CHECKSUM_NBYTES:]
    expected = int.from_bytes(checksum, "little")
    return len(checksum) == CHECKSUM_NBYTES and crc32c.crc32c(body) == expected


def item_nbytes(data_type: Json) -> int | None:
    """Tell how many bytes the codec ``bytes`` makes of an element; `None` if that is not known."""
    name = data_type.get("name") if isinstance(data_type, dict) else data_type
    if not isinstance(name, str):
        return None
    if (bits := _BY_BITS.fullmatch(name)) is not None:
        nbytes, rest = divmod(int(bits[1]), 8)
        return None if rest else nbytes
    configuration = data_type.get("configuration") if isinstance(data_type, dict) else None
    if isinstance(configuration, dict) and name in _BY_LENGTH:
        length = configuration.get("length_bytes")
        return length if type(length) is int and length > 0 else None
    if isinstance(configuration, dict) and name in _RECORDS:
        return _record_nbytes(configuration.get("fields"))
    return _ITEM_NBYTES.get(name)


def _record_nbytes(fields: Json) -> int | None:
    """Add up fields, which are pairs of a name and a data type, or objects with these members."""
    total = 0
    for field in fields if isinstance(fields, list) and fields else [None]:
        match field:
            case [_, data_type] | {"data_type": data_type}:
                nbytes = item_nbytes(data_type)
            case _:
                nbytes = None
        if nbytes is None:
            return None
        total += nbytes
    return total
