"""FlatBuffers read in place, every offset checked before it is followed.

A table is a position; its vtable has the offset of each field, by *slot*. All numbers are little
endian.
"""

from collections.abc import Iterator
from struct import Struct
from typing import Final, Self

from app.formats.icechunk.ids import OBJECT_ID_NBYTES, encode_id
from app.formats.reading import DecodeError

U8: Final = Struct("<B")
U16: Final = Struct("<H")
U32: Final = Struct("<I")
I32: Final = Struct("<i")
U64: Final = Struct("<Q")

_MEMORY_PER_BYTE: Final = 32
"""Memory per byte of payload; dense JSON takes 27 times its length, and small tables less."""
_MEMORY_PER_LIMIT: Final = 4
_LEAST_MEMORY_NBYTES: Final = 256 * 1024
_LEAST_LIMIT_NBYTES: Final = 1024**2
"""Smaller limits bound the size of files, but not the memory to decode them."""
_DEFAULT_LIMIT_NBYTES: Final = 2**29
_TABLE_NBYTES: Final = 256
"""Memory of the Python objects for a table, without its vectors."""
_ITEM_NBYTES: Final = 128
"""Memory of the Python object for a string, or for a struct in a vector."""
_STRING_PER_BYTE: Final = 4


def decoded_nbytes(payload_nbytes: int, limit_nbytes: int) -> int:
    """Return the limit of the memory of objects decoded from a payload, in bytes."""
    return min(
        payload_nbytes * _MEMORY_PER_BYTE + _LEAST_MEMORY_NBYTES,
        max(limit_nbytes, _LEAST_LIMIT_NBYTES) * _MEMORY_PER_LIMIT,
    )


class Buffer:
    """Bytes of a FlatBuffer, with a memory limit for the objects decoded from it. Tables and
    strings may be shared, so that a small buffer can describe endlessly many.
    """

    __slots__ = ("_left_nbytes", "data")

    def __init__(self, data: bytes, limit_nbytes: int = _DEFAULT_LIMIT_NBYTES) -> None:
        self.data = data
        self._left_nbytes = decoded_nbytes(len(data), limit_nbytes)

    @property
    def root(self) -> "Table":
        """The root table."""
        return Table(self, self.number(U32, 0))

    def spend(self, nbytes: int) -> None:
        """Count *nbytes* of memory. Raises: `DecodeError` past the limit of `decoded_nbytes`."""
        self.check(nbytes)
        self._left_nbytes -= nbytes

    def check(self, nbytes: int) -> None:
        """Check that *nbytes* of memory are left, for temporary use. Raises: `DecodeError`."""
        if nbytes > self._left_nbytes:
            raise DecodeError("damaged FlatBuffer: too many tables and vectors for its size")

    def number(self, kind: Struct, at: int) -> int:
        """Read the number at *at*."""
        if not 0 <= at <= len(self.data) - kind.size:
            raise DecodeError("damaged FlatBuffer: an offset leads out of it")
        value: int = kind.unpack_from(self.data, at)[0]
        return value

    def follow(self, at: int) -> int:
        """Return the target of the offset at *at*."""
        return at + self.number(U32, at)

    def vector(self, at: int, item_nbytes: int) -> tuple[int, int]:
        """Return the position of the first item of the vector at *at*, and the number of items."""
        count, start = self.number(U32, at), at + 4
        if start + count * item_nbytes > len(self.data):
            raise DecodeError("damaged FlatBuffer: a vector reaches out of it")
        self.spend(count * item_nbytes)
        return start, count

    def text(self, at: int) -> str:
        """Read the string at *at*."""
        start, count = self.vector(at, 1)
        self.spend(_ITEM_NBYTES + count * (_STRING_PER_BYTE - 1))
        try:
            return self.data[start : start + count].decode()
        except UnicodeDecodeError:
            raise DecodeError("damaged FlatBuffer: a string is not UTF-8") from None


class Table:
    """The table at *position*; absent fields are `None` or their default."""

    __slots__ = ("_vtable", "_vtable_nbytes", "buffer", "position")

    def __init__(self, buffer: Buffer, position: int) -> None:
        self.buffer = buffer
        self.position = position
        self._vtable = position - buffer.number(I32, position)
        self._vtable_nbytes = buffer.number(U16, self._vtable)
        buffer.spend(_TABLE_NBYTES)

    def at(self, slot: int) -> int | None:
        """Return the position of the field *slot*; `None` if it is absent."""
        offset = 4 + 2 * slot
        if offset + 2 > self._vtable_nbytes:
            return None
        field = self.buffer.number(U16, self._vtable + offset)
        return self.position + field if field else None

    def number(self, slot: int, kind: Struct, default: int = 0) -> int:
        """Read a number."""
        at = self.at(slot)
        return default if at is None else self.buffer.number(kind, at)

    def struct(self, slot: int, nbytes: int) -> bytes | None:
        """Copy a struct of *nbytes*."""
        if (at := self.at(slot)) is None:
            return None
        if at + nbytes > len(self.buffer.data):
            raise DecodeError("damaged FlatBuffer: a struct reaches out of it")
        return self.buffer.data[at : at + nbytes]

    def vector(self, slot: int, item_nbytes: int) -> tuple[int, int] | None:
        """Return the position of the first item of a vector, and the number of items."""
        at = self.at(slot)
        return None if at is None else self.buffer.vector(self.buffer.follow(at), item_nbytes)

    def structs(self, slot: int, nbytes: int) -> list[bytes] | None:
        """Copy a vector of structs of *nbytes*."""
        if (found := self.vector(slot, nbytes)) is None:
            return None
        start, count = found
        self.buffer.spend(count * _ITEM_NBYTES)
        stops = range(start + nbytes, start + nbytes * count + 1, nbytes)
        return [self.buffer.data[stop - nbytes : stop] for stop in stops]

    def data(self, slot: int) -> bytes | None:
        """Copy a vector of bytes."""
        if (found := self.vector(slot, 1)) is None:
            return None
        start, count = found
        return self.buffer.data[start : start + count]

    def text(self, slot: int) -> str | None:
        """Read a string."""
        at = self.at(slot)
        return None if at is None else self.buffer.text(self.buffer.follow(at))

    def table(self, slot: int) -> Self | None:
        """Read a table."""
        at = self.at(slot)
        return None if at is None else type(self)(self.buffer, self.buffer.follow(at))

    def tables(self, slot: int) -> Iterator[Self]:
        """Read a vector of tables; an absent one is empty."""
        start, count = self.vector(slot, 4) or (0, 0)
        for at in range(start, start + 4 * count, 4):
            yield type(self)(self.buffer, self.buffer.follow(at))


def required[T](value: T | None, name: str) -> T:
    """Return *value*, the field *name*. Raises: `DecodeError` where it is absent."""
    if value is None:
        raise DecodeError(f"it has no {name}")
    return value


def check_object_id(root: Table, kind: str, object_id: str) -> None:
    """Check that the file says that it is the *kind* of thing called *object_id*."""
    if (found := encode_id(required(root.struct(0, OBJECT_ID_NBYTES), "id"))) != object_id:
        raise DecodeError(f"it is the {kind} {found}, not {object_id}")
