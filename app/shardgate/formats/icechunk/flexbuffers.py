"""FlexBuffers read and written as JSON values; configuration and metadata are stored as such.

A value is a position, the width of the slots there, and a packed type: six bits for the kind, two
for the width of the slots that an offset leads to. Offsets lead back and may be shared. A vector
has slots of one width: the least that holds all its numbers and offsets.
"""

import struct
from base64 import b64encode
from collections.abc import Mapping, Sequence
from enum import IntEnum
from math import isfinite
from struct import Struct
from typing import Final, NamedTuple

from shardgate.formats.documents import Json
from shardgate.formats.reading import DecodeError, StepBudget

MAX_DEPTH: Final = 128
MEMORY_PER_BYTE: Final = 32
"""Limit of the memory of a decoded value, for each byte of its encoding: parts can be shared."""

VALUE_STEPS: Final = 2
_CONTAINER_NBYTES: Final = 56
_WIDTHS: Final = (1, 2, 4, 8)
_FLOATS: Final = {2: Struct("<e"), 4: Struct("<f"), 8: Struct("<d")}


class _FlexKind(IntEnum):
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
    BLOB = 25
    BOOL = 26


_K: Final = _FlexKind
_NUMBERS: Final = (_K.INT, _K.UINT, _K.FLOAT)
_ITEMS: Final[Mapping[int, tuple[int, int | None]]] = {
    36: (_K.BOOL, None),
    **{10 + item: (item, None) for item in (*_NUMBERS, _K.KEY, _K.STRING)},
    **{9 + item + 3 * count: (item, count) for item in _NUMBERS for count in (2, 3, 4)},
}
"""Kind of all items by the kind of the vector, and their number where it is not stored."""


def value_steps(nbytes: int) -> StepBudget:
    """Return the budget of values whose encodings have *nbytes* in all."""
    # Steps of about 0.5 µs, two for each value and for each key: two million of these are fewer
    # only than those of a value of megabytes.
    return StepBudget(2**22 + nbytes // 4)


def decode_flexbuffer(data: bytes, steps: StepBudget | None = None) -> Json:
    """Decode *data*; blobs become base64, and numbers that JSON lacks become null. *steps* is the
    budget of all values that are decoded together.
    """
    return _FlexReader(data, steps or value_steps(len(data))).root()


def plain_float(value: float) -> float | None:
    """Return *value*, or `None` if JSON cannot represent it."""
    return value if isfinite(value) else None


class _FlexReader:
    def __init__(self, data: bytes, steps: StepBudget) -> None:
        self._data = data
        self._steps = steps
        self._left_nbytes = len(data) * MEMORY_PER_BYTE + _CONTAINER_NBYTES

    def root(self) -> Json:
        width = self._uint(len(self._data) - 1, 1)
        packed = self._uint(len(self._data) - 2, 1)
        return self._value(len(self._data) - 2 - _check_width(width), width, packed, 0)

    def _value(self, at: int, slot_width: int, packed: int, depth: int) -> Json:
        self._spend(24)  # memory of a small Python object
        self._steps.spend(VALUE_STEPS)
        # Six bits for the kind, two for the logarithm of the width.
        kind = packed >> 2
        match kind:
            case _K.NULL:
                return None
            case _K.INT | _K.UINT | _K.FLOAT:
                return self._number(kind, at, slot_width)
            case _K.BOOL:
                return self._uint(at, slot_width) != 0
        width = 1 << (packed & 3)
        return self._distant(kind, self._follow(at, slot_width), width, depth)

    def _distant(self, kind: int, at: int, width: int, depth: int) -> Json:
        match kind:
            case _K.KEY:
                return self._key(at)
            case _K.STRING:
                return _decode_text(self._bytes(at, width))
            case _K.BLOB:
                return b64encode(self._bytes(at, width)).decode()
            case _K.INDIRECT_INT | _K.INDIRECT_UINT | _K.INDIRECT_FLOAT:
                return self._number(kind - _K.INDIRECT_INT + _K.INT, at, width)
        if depth == MAX_DEPTH:
            raise DecodeError(f"damaged FlexBuffer: it nests deeper than {MAX_DEPTH}")
        return self._container(kind, at, width, depth + 1)

    def _container(self, kind: int, at: int, width: int, depth: int) -> Json:
        self._spend(_CONTAINER_NBYTES)
        if kind in _ITEMS:
            item, fixed = _ITEMS[kind]
            count = self._count(at, width) if fixed is None else fixed
            return self._typed(item, at, width, count, depth)
        if kind not in (_K.MAP, _K.VECTOR):
            raise DecodeError(f"damaged FlexBuffer: a value of unknown kind {kind}")
        count = self._count(at, width)
        types = self._slice(at + count * width, count)
        values = [self._value(at + i * width, width, types[i], depth) for i in range(count)]
        if kind == _K.VECTOR:
            return values
        # The vector of the keys, and its width, precede the number of values.
        start = self._follow(at - 3 * width, width)
        key_width = self._uint(at - 2 * width, width)
        if self._count(start, _check_width(key_width)) != count:
            raise DecodeError("damaged FlexBuffer: a map has more keys than values, or fewer")
        slots = range(start, start + count * key_width, key_width)
        keys = [self._key(self._follow(slot, key_width)) for slot in slots]
        return dict(zip(keys, values, strict=True))

    def _typed(self, kind: int, at: int, width: int, count: int, depth: int) -> list[Json]:
        """Read *count* values of one *kind*; the length of strings takes one byte."""
        self._slice(at, count * width)
        return [self._value(at + i * width, width, kind << 2, depth) for i in range(count)]

    def _key(self, at: int) -> str:
        # A key ends at its NUL; its length is stored nowhere.
        stop = self._data.find(0, at) if at >= 0 else -1
        if stop < 0:
            raise DecodeError("damaged FlexBuffer: a key does not end")
        self._spend(48)  # memory of a `str` beside its text
        self._steps.spend(VALUE_STEPS)
        return _decode_text(self._slice(at, stop - at))

    def _bytes(self, at: int, width: int) -> bytes:
        return self._slice(at, self._count(at, width))

    def _count(self, at: int, width: int) -> int:
        count = self._uint(at - width, width)
        if count > len(self._data):
            raise DecodeError("damaged FlexBuffer: it is shorter than a length in it")
        return count

    def _number(self, kind: int, at: int, width: int) -> float | None:
        if kind != _K.FLOAT:
            return int.from_bytes(self._slice(at, width), "little", signed=kind == _K.INT)
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


def _check_width(width: int) -> int:
    if width not in _WIDTHS:
        raise DecodeError(f"damaged FlexBuffer: slots of {width} bytes")
    return width


def _decode_text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise DecodeError("damaged FlexBuffer: a string is not UTF-8") from None


class _FlexSlot(NamedTuple):
    """Content of the slot of a value: a number, or the position that an offset leads to."""

    kind: int
    number: float
    width: int
    """Least width of the number, or width of the slots of the vector that is led to."""
    is_offset: bool = False

    def width_at(self, end: int, index: int) -> int:
        """Return the least slot width of a vector written at *end* with this as item *index*."""
        if not self.is_offset:
            return self.width
        # A wider slot moves the items, and so the offset gets longer: try each width.
        for width in _WIDTHS:
            start = end + -end % width
            offset = start + index * width - self.number
            if offset < 1 << 8 * width:
                break
        return width

    def packed(self, width: int) -> int:
        own = self.width if self.is_offset else max(self.width, width)
        return self.kind << 2 | _WIDTHS.index(own)


def encode_flexbuffer(value: Json) -> bytes:
    """Encode *value*; no vector is typed. Raises: `ValueError` for values that JSON or 64 bits
    lack, NUL in a key, and deep nesting.
    """
    writer = _FlexWriter()
    root = writer.value(value, 0)
    width = root.width_at(len(writer.data), 0)
    writer.put((root,), width)
    return bytes(writer.data) + bytes((root.packed(width), width))


class _FlexWriter:
    """Writes values of variable size before the slots that lead to them."""

    def __init__(self) -> None:
        self.data = bytearray()

    def value(self, value: Json, depth: int) -> _FlexSlot:
        match value:
            case None | bool() | int() | float():
                return _number_slot(value)
            case str():
                return self._string(value.encode())
        if depth == MAX_DEPTH:
            raise ValueError(f"it nests deeper than {MAX_DEPTH}")
        if isinstance(value, Mapping):
            return self._map(value, depth + 1)
        return self._vector([self.value(item, depth + 1) for item in value])

    def put(self, slots: Sequence[_FlexSlot], width: int) -> None:
        """Write *slots* of *width* bytes, aligned to that."""
        self.data += bytes(-len(self.data) % width)
        for slot in slots:
            if slot.kind == _K.FLOAT:
                # A float always has 8 bytes, which are the widest slot.
                self.data += struct.pack("<d", slot.number)
            else:
                number = len(self.data) - slot.number if slot.is_offset else slot.number
                self.data += int(number).to_bytes(width, "little", signed=slot.kind == _K.INT)

    def _string(self, data: bytes) -> _FlexSlot:
        count = _uint_slot(len(data))
        self.put((count,), count.width)
        start = len(self.data)
        self.data += data + b"\0"
        return _FlexSlot(_K.STRING, start, count.width, is_offset=True)

    def _key(self, text: str) -> _FlexSlot:
        data = text.encode()
        start = len(self.data)
        if b"\0" in data:
            raise ValueError("a key has NUL in it")
        self.data += data + b"\0"
        return _FlexSlot(_K.KEY, start, 1, is_offset=True)

    def _map(self, members: Mapping[str, Json], depth: int) -> _FlexSlot:
        # Readers search keys by bisection, in the order of bytes.
        names = sorted(members, key=str.encode)
        pairs = [(self._key(name), self.value(members[name], depth)) for name in names]
        keys = self._vector([key for key, _ in pairs])
        items = [item for _, item in pairs]
        return self._vector(items, (keys, _uint_slot(keys.width)))._replace(kind=_K.MAP)

    def _vector(self, items: Sequence[_FlexSlot], before: Sequence[_FlexSlot] = ()) -> _FlexSlot:
        """Write *before*, the number of *items*, these, and their packed types."""
        slots = (*before, _uint_slot(len(items)), *items)
        end = len(self.data)
        width = max(slot.width_at(end, at) for at, slot in enumerate(slots))
        self.put(slots, width)
        start = len(self.data) - width * len(items)
        self.data += bytes(item.packed(width) for item in items)
        return _FlexSlot(_K.VECTOR, start, width, is_offset=True)


def _number_slot(value: float | None) -> _FlexSlot:
    match value:
        case None:
            return _FlexSlot(_K.NULL, 0, 1)
        case bool():
            return _FlexSlot(_K.BOOL, value, 1)
        case int() if not -(2**63) <= value < 2**64:
            raise ValueError("an integer has more than 64 bits")
        case int() if value >= 0:
            return _uint_slot(value)
        case int():
            return _FlexSlot(_K.INT, value, next(w for w in _WIDTHS if value >= -1 << 8 * w - 1))
    if not isfinite(value):
        raise ValueError("a number is not finite, and JSON has none such")
    return _FlexSlot(_K.FLOAT, value, 8)


def _uint_slot(value: int) -> _FlexSlot:
    return _FlexSlot(_K.UINT, value, next(w for w in _WIDTHS if value < 1 << 8 * w))
