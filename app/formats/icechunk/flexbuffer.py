"""FlexBuffers, which spell configuration and metadata, as JSON values.

A value is a place, the width of the slots there, and a packed type: six bits of kind, two of the
width of what an offset leads to. Offsets lead back, and may lead to what others lead to as well.
"""

from base64 import b64encode
from enum import IntEnum
from math import isfinite
from struct import Struct
from typing import Final

from app.formats.documents import Json
from app.formats.reading import DecodeError

MAX_DEPTH: Final = 128
"""How deep lists and objects may nest."""

MEMORY_PER_BYTE: Final = 32
"""So much a value may take for each byte that spells it: its parts can be shared."""
_VALUE_NBYTES: Final = 24
_CONTAINER_NBYTES: Final = 56
_KEY_NBYTES: Final = 48
_WIDTHS: Final = (1, 2, 4, 8)
_FLOATS: Final = {2: Struct("<e"), 4: Struct("<f"), 8: Struct("<d")}


class _Kind(IntEnum):
    NULL = 0
    INT = 1
    UINT = 2
    FLOAT = 3
    KEY = 4
    STRING = 5
    INDIRECT_INT = 6
    INDIRECT_UINT = 7
    INDIRECT_FLOAT = 8
    MAP = 9
    VECTOR = 10
    VECTOR_INT = 11
    VECTOR_STRING = 15
    VECTOR_INT2 = 16
    VECTOR_FLOAT4 = 24
    BLOB = 25
    BOOL = 26
    VECTOR_BOOL = 36


def decode_flexbuffer(data: bytes) -> Json:
    """Decode the value that *data* spells.

    Blobs become base64, and numbers that JSON has not become null.

    Raises: `DecodeError`.
    """
    return _Reader(data).root()


def plain_float(value: float) -> float | None:
    """Give *value*, or `None` if JSON cannot say it."""
    return value if isfinite(value) else None


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._left_nbytes = len(data) * MEMORY_PER_BYTE + _CONTAINER_NBYTES

    def root(self) -> Json:
        """Read the value that the last bytes describe."""
        width, packed = self._uint(len(self._data) - 1, 1), self._uint(len(self._data) - 2, 1)
        return self._value(len(self._data) - 2 - _checked(width), width, packed, 0)

    def _value(self, at: int, slot_width: int, packed: int, depth: int) -> Json:
        """Read the value whose slot is at *at*."""
        self._spend(_VALUE_NBYTES)
        kind, width = packed >> 2, 1 << (packed & 3)
        match kind:
            case _Kind.NULL:
                return None
            case _Kind.INT | _Kind.UINT | _Kind.FLOAT:
                return self._number(kind, at, slot_width)
            case _Kind.BOOL:
                return self._uint(at, slot_width) != 0
        return self._distant(kind, self._follow(at, slot_width), width, depth)

    def _distant(self, kind: int, at: int, width: int, depth: int) -> Json:
        """Read the value at *at* that a slot only leads to."""
        match kind:
            case _Kind.KEY:
                return self._key(at)
            case _Kind.STRING:
                return _text(self._bytes(at, width))
            case _Kind.BLOB:
                return b64encode(self._bytes(at, width)).decode()
            case _Kind.INDIRECT_INT | _Kind.INDIRECT_UINT | _Kind.INDIRECT_FLOAT:
                return self._number(kind - _Kind.INDIRECT_INT + _Kind.INT, at, width)
        if depth == MAX_DEPTH:
            raise DecodeError(f"damaged FlexBuffer: it nests deeper than {MAX_DEPTH}")
        return self._container(kind, at, width, depth + 1)

    def _container(self, kind: int, at: int, width: int, depth: int) -> Json:
        self._spend(_CONTAINER_NBYTES)
        if kind == _Kind.MAP:
            keys, values = self._keys(at, width), self._vector(at, width, depth)
            if len(keys) != len(values):
                raise DecodeError("damaged FlexBuffer: as many keys as values it has not")
            return dict(zip(keys, values, strict=True))
        if kind == _Kind.VECTOR:
            return self._vector(at, width, depth)
        if _Kind.VECTOR_INT <= kind <= _Kind.VECTOR_STRING:
            item = kind - _Kind.VECTOR_INT + _Kind.INT
            return self._typed(item, at, width, self._count(at, width), depth)
        if _Kind.VECTOR_INT2 <= kind <= _Kind.VECTOR_FLOAT4:
            more, item = divmod(kind - _Kind.VECTOR_INT2, 3)
            return self._typed(item + _Kind.INT, at, width, more + 2, depth)
        if kind == _Kind.VECTOR_BOOL:
            return self._typed(_Kind.BOOL, at, width, self._count(at, width), depth)
        raise DecodeError(f"damaged FlexBuffer: a value of unknown kind {kind}")

    def _vector(self, at: int, width: int, depth: int) -> list[Json]:
        """Read a vector, whose types stand behind its slots."""
        count = self._count(at, width)
        types = self._slice(at + count * width, count)
        return [self._value(at + i * width, width, types[i], depth) for i in range(count)]

    def _typed(self, kind: int, at: int, width: int, count: int, depth: int) -> list[Json]:
        """Read *count* values of one *kind*; the length of strings takes one byte."""
        self._slice(at, count * width)
        return [self._value(at + i * width, width, kind << 2, depth) for i in range(count)]

    def _keys(self, at: int, width: int) -> list[str]:
        """Read the keys of the map at *at*; that vector and its width stand before its length."""
        keys = self._follow(at - 3 * width, width)
        key_width = _checked(self._uint(at - 2 * width, width))
        count = self._count(keys, key_width)
        stop = keys + count * key_width
        return [self._key(self._follow(key, key_width)) for key in range(keys, stop, key_width)]

    def _key(self, at: int) -> str:
        stop = self._data.find(0, at) if at >= 0 else -1
        if stop < 0:
            raise DecodeError("damaged FlexBuffer: a key does not end")
        self._spend(_KEY_NBYTES)
        return _text(self._slice(at, stop - at))

    def _bytes(self, at: int, width: int) -> bytes:
        return self._slice(at, self._count(at, width))

    def _count(self, at: int, width: int) -> int:
        """Read the length that stands before what is at *at*, all of which takes slots."""
        count = self._uint(at - width, width)
        if count > len(self._data):
            raise DecodeError("damaged FlexBuffer: it is shorter than a length in it")
        return count

    def _number(self, kind: int, at: int, width: int) -> float | None:
        if kind != _Kind.FLOAT:
            return int.from_bytes(self._slice(at, width), "little", signed=kind == _Kind.INT)
        if width not in _FLOATS:
            raise DecodeError("damaged FlexBuffer: a float of one byte")
        value: float = _FLOATS[width].unpack(self._slice(at, width))[0]
        return plain_float(value)

    def _follow(self, at: int, width: int) -> int:
        return at - self._uint(at, width)

    def _uint(self, at: int, width: int) -> int:
        return int.from_bytes(self._slice(at, width), "little")

    def _slice(self, at: int, nbytes: int) -> bytes:
        if not 0 <= at <= len(self._data) - nbytes:
            raise DecodeError("damaged FlexBuffer: an offset leads out of it")
        self._spend(nbytes)
        return self._data[at : at + nbytes]

    def _spend(self, nbytes: int) -> None:
        self._left_nbytes -= nbytes
        if self._left_nbytes < 0:
            raise DecodeError("damaged FlexBuffer: too many values for its size")


def _checked(width: int) -> int:
    if width not in _WIDTHS:
        raise DecodeError("damaged FlexBuffer: no width of slots")
    return width


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise DecodeError("damaged FlexBuffer: a string is no UTF-8") from None
