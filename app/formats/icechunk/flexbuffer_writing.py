"""FlexBuffers of JSON values, of the kinds that the library chooses.

Everything that has no fixed size is written before what leads to it. A vector has slots of one
width: the least that holds all its numbers, and the ways back to what its items lead to.
"""

import struct
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Final, NamedTuple

from app.formats.documents import Json
from app.formats.icechunk.flexbuffer import MAX_DEPTH

_NULL, _INT, _UINT, _FLOAT, _KEY, _STRING, _MAP, _VECTOR, _BOOL = 0, 1, 2, 3, 4, 5, 9, 10, 26
_TYPED: Final = {_INT: 11, _UINT: 12, _FLOAT: 13, _BOOL: 36}
_FIXED: Final = {_INT: 16, _UINT: 17, _FLOAT: 18}
_FIXED_COUNTS: Final = range(2, 5)
_WIDTHS: Final = (1, 2, 4, 8)
_UINT_STOP: Final = 2**64
_INT_START: Final = -(2**63)


class _Slot(NamedTuple):
    """A value as its slot tells it: a number, or where to go back to."""

    kind: int
    number: float
    width: int
    """The least that holds a number, or the slots of a vector that is led to."""
    is_offset: bool = False

    def width_at(self, end: int, index: int) -> int:
        """Tell how wide the slots of a vector are, the one *index* of which holds this."""
        if not self.is_offset:
            return self.width
        return next(width for width in _WIDTHS if self._way(end, index, width) < 1 << 8 * width)

    def _way(self, end: int, index: int, width: int) -> int:
        return int(end + -end % width + index * width - self.number)

    def packed(self, width: int) -> int:
        """Give the byte that tells the kind, in a vector of slots of *width*."""
        own = self.width if self.is_offset else max(self.width, width)
        return self.kind << 2 | _WIDTHS.index(own)


def encode_flexbuffer(value: Json) -> bytes:
    """Spell *value*.

    Raises: `ValueError` for what JSON has not, integers of more than 64 bits, NUL in a key, and
    what nests too deep to be read again.
    """
    writer = _Writer()
    root = writer.value(value, 0)
    width = root.width_at(len(writer.data), 0)
    writer.pad(width)
    writer.put(root, width)
    return bytes(writer.data) + bytes((root.packed(width), width))


class _Writer:
    def __init__(self) -> None:
        self.data = bytearray()
        self._keys: dict[bytes, _Slot] = {}

    def value(self, value: Json, depth: int) -> _Slot:
        """Write all that *value* leads to."""
        match value:
            case None | bool() | int() | float():
                return _number(value)
            case str():
                return self._string(value.encode())
        if depth == MAX_DEPTH:
            raise ValueError(f"it nests deeper than {MAX_DEPTH}")
        if isinstance(value, Mapping):
            return self._map(value, depth + 1)
        return self._list([self.value(item, depth + 1) for item in value])

    def pad(self, width: int) -> None:
        """Go on at a multiple of *width*."""
        self.data += bytes(-len(self.data) % width)

    def put(self, slot: _Slot, width: int) -> None:
        """Write *slot*."""
        if slot.is_offset:
            self.data += (len(self.data) - int(slot.number)).to_bytes(width, "little")
        elif slot.kind == _FLOAT:
            self.data += struct.pack("<f" if width == _WIDTHS[2] else "<d", slot.number)
        else:
            self.data += int(slot.number).to_bytes(width, "little", signed=slot.kind == _INT)

    def _string(self, data: bytes) -> _Slot:
        width = _uint_width(len(data))
        self.pad(width)
        self.data += len(data).to_bytes(width, "little")
        start = len(self.data)
        self.data += data + b"\0"
        return _Slot(_STRING, start, width, is_offset=True)

    def _key(self, text: str) -> _Slot:
        data = text.encode()
        if b"\0" in data:
            raise ValueError("a key has NUL in it")
        if data not in self._keys:
            self._keys[data] = _Slot(_KEY, len(self.data), 1, is_offset=True)
            self.data += data + b"\0"
        return self._keys[data]

    def _map(self, members: Mapping[str, Json], depth: int) -> _Slot:
        names = sorted(members, key=str.encode)
        pairs = [(self._key(name), self.value(members[name], depth)) for name in names]
        keys = self._vector([key for key, _ in pairs])
        width = _Slot(_UINT, keys.width, 1)
        return self._vector([item for _, item in pairs], (keys, width))._replace(kind=_MAP)

    def _list(self, items: Sequence[_Slot]) -> _Slot:
        kinds = {item.kind for item in items}
        kind = kinds.pop() if len(kinds) == 1 else _NULL
        if kind not in _TYPED:
            return self._vector(items)
        if kind in _FIXED and len(items) in _FIXED_COUNTS:
            fixed = _FIXED[kind] + 3 * (len(items) - _FIXED_COUNTS.start)
            return self._vector(items, has_count=False)._replace(kind=fixed)
        return self._vector(items)._replace(kind=_TYPED[kind])

    def _vector(
        self, items: Sequence[_Slot], before: Sequence[_Slot] = (), *, has_count: bool = True
    ) -> _Slot:
        """Write a vector with what stands before its count; kinds only where they may differ."""
        count = (_Slot(_UINT, len(items), _uint_width(len(items))),) if has_count else ()
        slots = (*before, *count, *items)
        end = len(self.data)
        width = max((slot.width_at(end, at) for at, slot in enumerate(slots)), default=1)
        self.pad(width)
        start = len(self.data) + width * (len(slots) - len(items))
        for slot in slots:
            self.put(slot, width)
        kinds = {item.kind for item in items}
        if not (len(kinds) == 1 and kinds <= {*_TYPED, _KEY} and not before):
            self.data += bytes(item.packed(width) for item in items)
        return _Slot(_VECTOR, start, width, is_offset=True)


def _number(value: float | None) -> _Slot:
    match value:
        case None:
            return _Slot(_NULL, 0, 1)
        case bool():
            return _Slot(_BOOL, value, 1)
        case int():
            return _integer(value)
    if not isfinite(value):
        raise ValueError("a number is not finite, and JSON has none such")
    return _Slot(_FLOAT, value, 4 if _is_short(value) else 8)


def _integer(value: int) -> _Slot:
    if not _INT_START <= value < _UINT_STOP:
        raise ValueError("an integer has more than 64 bits")
    if value >= 0:
        return _Slot(_UINT, value, _uint_width(value))
    return _Slot(_INT, value, next(w for w in _WIDTHS if value >= -1 << 8 * w - 1))


def _uint_width(value: int) -> int:
    return next(width for width in _WIDTHS if value < 1 << 8 * width)


def _is_short(value: float) -> bool:
    try:
        return bool(struct.unpack("<f", struct.pack("<f", value))[0] == value)
    except OverflowError:
        return False
