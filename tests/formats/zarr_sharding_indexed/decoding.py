"""What is in a shard of nested shards, told by `struct` after the specification."""

import math
import struct
from typing import Any, NamedTuple

from tests.formats.zarr_sharding_indexed.case import BIG, CRC, EMPTY, checksum

type Path = tuple[int, ...]


class Decoded(NamedTuple):
    """The inner chunks of a shard."""

    chunks: dict[Path, bytes]
    """By their entries in the nested indexes."""
    places: dict[Path, tuple[int, int]]
    """Where in the object each begins and ends."""
    has_holes: bool
    """Whether any byte belongs to no chunk, index or checksum, or to two."""


def decode(data: bytes, shape: tuple[int, ...], codecs: list[Any], start: int = 0) -> Decoded:
    """Decode a shard of *shape*, which *codecs* encoded, that lies at *start* in its object."""
    whole = len(data)
    names = [codec["name"] for codec in codecs]
    at = names.index("sharding_indexed")
    for _ in names[at + 1 :]:
        assert data[-4:] == checksum(data[:-4])
        data = data[:-4]
    configuration = codecs[at]["configuration"]
    for codec in codecs[:at]:
        shape = _transposed(shape, codec["configuration"]["order"])
    inner_shape = tuple(configuration["chunk_shape"])
    entries = _entries(data, math.prod(shape) // math.prod(inner_shape), configuration)
    chunks: dict[Path, bytes] = {}
    places: dict[Path, tuple[int, int]] = {}
    has_holes = False
    for number, (offset, nbytes) in enumerate(entries):
        if (offset, nbytes) == EMPTY:
            continue
        chunk = data[offset : offset + nbytes]
        assert len(chunk) == nbytes
        if any(codec["name"] == "sharding_indexed" for codec in configuration["codecs"]):
            inner = decode(chunk, inner_shape, configuration["codecs"], start + offset)
            chunks |= {(number, *path): found for path, found in inner.chunks.items()}
            places |= {(number, *path): place for path, place in inner.places.items()}
            has_holes |= inner.has_holes
        else:
            chunks[(number,)] = chunk
            places[(number,)] = (start + offset, start + offset + nbytes)
    return Decoded(chunks, places, has_holes or not _fills(entries, data, configuration, whole))


def _entries(data: bytes, count: int, configuration: dict[str, Any]) -> list[tuple[int, int]]:
    big, *checks = configuration["index_codecs"]
    size = 16 * count + 4 * (CRC in checks)
    index = data[:size] if configuration["index_location"] == "start" else data[-size:]
    assert CRC not in checks or checksum(index[:-4]) == index[-4:]
    numbers = struct.unpack(f"{'>' if big == BIG else '<'}{2 * count}Q", index[: 16 * count])
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _fills(
    entries: list[tuple[int, int]], data: bytes, configuration: dict[str, Any], whole: int
) -> bool:
    """Tell whether chunks and index lie one behind the other."""
    size = 16 * len(entries) + 4 * (CRC in configuration["index_codecs"])
    at = size if configuration["index_location"] == "start" else 0
    for offset, nbytes in sorted(entry for entry in entries if entry != EMPTY):
        if offset != at:
            return False
        at += nbytes
    return at == (len(data) if configuration["index_location"] == "start" else len(data) - size)


def _transposed(shape: tuple[int, ...], order: Any) -> tuple[int, ...]:
    axes = {"C": range(len(shape)), "F": range(len(shape))[::-1]}.get(str(order), order)
    return tuple(shape[axis] for axis in axes)
