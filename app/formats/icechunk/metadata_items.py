"""What people say of a snapshot or a repository: names, and values of any shape."""

from base64 import b64encode
from dataclasses import dataclass
from typing import Final, Never

import msgpack

from app.formats.documents import Json
from app.formats.icechunk.flatbuffer import Table, required
from app.formats.icechunk.flexbuffer import (
    MAX_DEPTH,
    MEMORY_PER_BYTE,
    decode_flexbuffer,
    plain_float,
)
from app.formats.reading import DecodeError

_NAME: Final = 0
_VALUE: Final = 1
_FIRST_WITH_FLEXBUFFERS: Final = 2
_MAX_VALUE_NBYTES: Final = 8 * 1024**2
"""MessagePack can take 180 times its length in memory."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """The items as they are stored; only who asks for them pays for decoding them."""

    version: int
    """Of the specification that the file follows: version 1 has MessagePack."""
    items: tuple[tuple[str, bytes], ...]

    def decode(self) -> dict[str, Json]:
        """Decode all values; of items with one name the first counts.

        Raises: `DecodeError`.
        """
        is_flex = self.version >= _FIRST_WITH_FLEXBUFFERS
        decode = decode_flexbuffer if is_flex else decode_messagepack
        found: dict[str, Json] = {}
        for name, value in self.items:
            if name not in found:
                found[name] = decode(value)
        return found


def read_metadata(table: Table, slot: int, version: int) -> Metadata:
    """Copy the vector of items in *slot*; an absent one is empty.

    Raises: `DecodeError`.
    """
    items: list[tuple[str, bytes]] = []
    for item in table.tables(slot):
        name = required(item.text(_NAME), "name of a metadata item")
        value = required(item.data(_VALUE), "value of a metadata item")
        if len(value) > _MAX_VALUE_NBYTES:
            raise DecodeError(f"a metadata item has more than {_MAX_VALUE_NBYTES} bytes")
        table.buffer.spend(len(value) * (MEMORY_PER_BYTE - 1))
        items.append((name, value))
    return Metadata(version, tuple(items))


def decode_messagepack(data: bytes) -> Json:
    """Decode the value that *data* spells.

    Binary becomes base64, and numbers that JSON has not become null. Keys are text, and there are
    no extension types.

    Raises: `DecodeError`.
    """
    try:
        _check_counts(data)
        return _plain(msgpack.unpackb(data, max_ext_len=0, ext_hook=_refuse), 0)
    except DecodeError:
        raise
    except (ValueError, msgpack.UnpackException) as error:
        raise DecodeError(f"damaged MessagePack: {error or type(error).__name__}") from None


def _check_counts(data: bytes) -> None:
    """Skip over the value: reserving memory for what a list only claims to hold costs too much."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(data) + 1)
    unpacker.feed(data)
    unpacker.skip()


def _refuse(code: int, _: bytes) -> Never:
    raise DecodeError(f"damaged MessagePack: extension type {code}")


def _plain(value: Json, depth: int) -> Json:
    match value:
        case dict() | list() if depth == MAX_DEPTH:
            raise DecodeError(f"damaged MessagePack: it nests deeper than {MAX_DEPTH}")
        case dict():
            if not all(isinstance(key, str) for key in value):
                raise DecodeError("damaged MessagePack: a key is no text")
            return {key: _plain(item, depth + 1) for key, item in value.items()}
        case list():
            return [_plain(item, depth + 1) for item in value]
        case bytes():
            return b64encode(value).decode()
        case float():
            return plain_float(value)
    return value
