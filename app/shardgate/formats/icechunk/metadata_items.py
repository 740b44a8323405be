"""Metadata of snapshots and repositories: named values, as FlexBuffers or MessagePack."""

from base64 import b64encode
from collections.abc import Mapping
from typing import Final, NamedTuple, Never

import msgpack

from shardgate.formats.documents import Json
from shardgate.formats.icechunk.flatbuffers import DATA, TEXT, Field, FlatBufferReader, TableType
from shardgate.formats.icechunk.flexbuffers import (
    MAX_DEPTH,
    MEMORY_PER_BYTE,
    VALUE_STEPS,
    decode_flexbuffer,
    encode_flexbuffer,
    plain_float,
    value_steps,
)
from shardgate.formats.reading import DecodeError, StepBudget

VERSION: Final = 2
"""Version of the specification that spells values as FlexBuffers; version 1 has MessagePack."""
_MAX_VALUE_NBYTES: Final = 8 * 1024**2
"""MessagePack can take 180 times its length in memory."""


class Metadata(NamedTuple):
    """Items as they are stored; a value is decoded when it is asked for."""

    version: int
    items: tuple[tuple[str, bytes], ...]

    def decode(self) -> dict[str, Json]:
        """Decode all values; of items with one name the first counts. Raises: `DecodeError`."""
        decode = decode_flexbuffer if self.version >= VERSION else decode_messagepack
        steps = value_steps(sum(len(value) for _, value in self.items))
        found: dict[str, Json] = {}
        for name, value in self.items:
            if name not in found:
                found[name] = decode(value, steps)
        return found


def encode_metadata(values: Mapping[str, Json]) -> Metadata:
    """Encode *values*, sorted by name. Raises: `ValueError` for values that cannot be encoded."""
    names = sorted(values, key=str.encode)
    items = tuple((name, encode_flexbuffer(values[name])) for name in names)
    for name, value in items:
        if len(value) > _MAX_VALUE_NBYTES:
            raise ValueError(f"{name} takes {len(value)} bytes, over {_MAX_VALUE_NBYTES}")
    return Metadata(VERSION, items)


def read_metadata(reader: FlatBufferReader, at: int | None) -> Metadata:
    """Copy the vector of items at *at*; an absent one is empty. Raises: `DecodeError`."""
    items: list[tuple[str, bytes]] = []
    for name, value in [] if at is None else reader.tables(ITEM, at):
        items.append((name, value))
        if len(value) > _MAX_VALUE_NBYTES:
            raise DecodeError(f"a metadata item has more than {_MAX_VALUE_NBYTES} bytes")
        reader.spend(len(value) * (MEMORY_PER_BYTE - 1))
    return Metadata(reader.version, tuple(items))


ITEM: Final = TableType(
    TEXT.required("name of a metadata item"), DATA.required("value of a metadata item")
)
METADATA: Final = Field(
    "I", read_metadata, lambda writer, metadata: writer.tables(ITEM, metadata.items)
)


def decode_messagepack(data: bytes, steps: StepBudget | None = None) -> Json:
    """Decode the value that *data* spells: binary as base64, numbers that JSON lacks as null."""
    try:
        unpacker = msgpack.Unpacker(max_buffer_size=len(data) + 1)
        unpacker.feed(data)
        unpacker.skip()  # before memory is reserved for what a list only claims to hold
        value = msgpack.unpackb(data, max_ext_len=0, ext_hook=_refuse)
        return _plain(value, 0, steps or value_steps(len(data)))
    except DecodeError:
        raise
    except (ValueError, msgpack.UnpackException) as error:
        raise DecodeError(f"damaged MessagePack: {error or type(error).__name__}") from None


def _refuse(code: int, _: bytes) -> Never:
    raise DecodeError(f"damaged MessagePack: extension type {code}")


def _plain(value: Json, depth: int, steps: StepBudget) -> Json:
    steps.spend(VALUE_STEPS)
    match value:
        case dict() | list() if depth == MAX_DEPTH:
            raise DecodeError(f"damaged MessagePack: it nests deeper than {MAX_DEPTH}")
        case dict():
            if not all(isinstance(key, str) for key in value):
                raise DecodeError("damaged MessagePack: a key is no text")
            return {key: _plain(item, depth + 1, steps) for key, item in value.items()}
        case list():
            return [_plain(item, depth + 1, steps) for item in value]
        case bytes():
            return b64encode(value).decode()
        case float():
            return plain_float(value)
    return value
