"""Shards of ``neuroglancer_uint64_sharded_v1``, encoded and decoded with `struct`."""

import json
import struct
import zlib
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import mmh3
from hypothesis import strategies as st

from shardgate.model import ByteRange
from tests.support.formats.case import Container
from tests.support.zipped import zipped

type Sharding = dict[str, Any]

RAW_SHARDING: Sharding = {
    "@type": "neuroglancer_uint64_sharded_v1",
    "hash": "identity",
    "preshift_bits": 1,
    "minishard_bits": 1,
    "shard_bits": 1,
    "minishard_index_encoding": "raw",
    "data_encoding": "raw",
}
SINGLE = {**RAW_SHARDING, "preshift_bits": 0, "minishard_bits": 0, "shard_bits": 0}
"""Sharding with one minishard in one shard."""


def murmur(number: int) -> int:
    """Return the low half of MurmurHash3_x86_128 of 8 bytes with seed 0."""
    return mmh3.hash64(number.to_bytes(8, "little"), 0, x64arch=False, signed=False)[0]


def morton(cell: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Return the compressed Morton code of *cell*: bits from the highest down, as text.

    A bit that no coordinate of an axis can have is left out.
    """
    text = ""
    for bit in reversed(range(64)):
        for at, size in reversed(list(zip(cell, shape, strict=True))):
            if 2**bit < size:
                text += "1" if at >> bit & 1 else "0"
    return int(text or "0", 2)


def address(chunk_id: int, sharding: Sharding) -> tuple[str, int]:
    """Return the shard and the minishard of *chunk_id*."""
    number = chunk_id // 2 ** sharding["preshift_bits"]
    number = number if sharding["hash"] == "identity" else murmur(number)
    rest, minishard = divmod(number, 2 ** sharding["minishard_bits"])
    digits = (sharding["shard_bits"] + 3) // 4
    return f"{rest % 2 ** sharding['shard_bits']:0{digits or 1}x}", minishard


def encode_minishard(chunks: list[tuple[int, int, int]]) -> bytes:
    """Encode id, offset and size of every chunk as columns of differences."""
    ids, gaps, sizes = [], [], []
    last_id = last_end = 0
    for chunk_id, offset, size in chunks:
        ids.append((chunk_id - last_id) % 2**64)
        gaps.append((offset - last_end) % 2**64)
        sizes.append(size)
        last_id, last_end = chunk_id, offset + size
    columns = ids + gaps + sizes
    return struct.pack(f"<{len(columns)}Q", *columns)


def encode_shard(
    minishards: list[dict[int, bytes]],
    sharding: Sharding = RAW_SHARDING,
    *,
    before: Mapping[int, bytes] | None = None,
) -> tuple[bytes, bytes]:
    """Write a shard index, and what follows: chunks and the minishard indexes.

    Before each chunk there is what *before* has for its id, or a gap of three bytes.
    """
    body, entries = b"", b""
    for minishard in minishards:
        places = []
        for chunk_id, chunk in minishard.items():
            body += (before or {}).get(chunk_id, b"gap")
            places.append((chunk_id, len(body), len(chunk)))
            body += chunk
        index = encode_minishard(places)
        if places and sharding["minishard_index_encoding"] == "gzip":
            index = zipped(index)
        entries += struct.pack("<2Q", len(body), len(body) + len(index))
        body += index
    return entries, body


def single_shard(
    *rows: tuple[int, int, int], body: bytes = b"chunks", entry: bytes = b"", spare: bytes = b""
) -> bytes:
    """Encode a shard whose first minishard has *rows* of id, offset and size."""
    index = encode_minishard(list(rows))
    first = entry or struct.pack("<2Q", len(body), len(body) + len(index))
    return first + spare + body + index


def build_shards(
    chunks: Mapping[int, bytes],
    sharding: Sharding,
    *,
    old: bool = False,
    before: Mapping[int, bytes] | None = None,
) -> dict[str, bytes]:
    """Return shards by name, *old* ones in two objects each."""
    shards: defaultdict[str, list[dict[int, bytes]]] = defaultdict(
        lambda: [{} for _ in range(2 ** sharding["minishard_bits"])]
    )
    for chunk_id, chunk in sorted(chunks.items()):
        name, minishard = address(chunk_id, sharding)
        stored = zipped(chunk) if sharding["data_encoding"] == "gzip" else chunk
        shards[name][minishard][chunk_id] = stored
    objects: dict[str, bytes] = {}
    for name, minishards in shards.items():
        entries, body = encode_shard(minishards, sharding, before=before)
        if old:
            objects |= {f"{name}.index": entries, f"{name}.data": body}
        else:
            objects[f"{name}.shard"] = entries + body
    return objects


def container(info: Mapping[str, Any], **objects: bytes) -> Container:
    """Store *info* and *objects*."""
    return Container({"info": json.dumps(info).encode(), **objects})


def part(start: int, length: int) -> ByteRange:
    """Return the range of *length* bytes from *start* on."""
    return ByteRange(start, start + length)


def decoded(shard: bytes, sharding: Sharding) -> list[dict[int, tuple[int, int]]]:
    """Return the places of the chunks of each minishard, by ascending ids."""
    base = 16 * 2 ** sharding["minishard_bits"]
    found = []
    for start, stop in struct.iter_unpack("<2Q", shard[:base]):
        index = shard[base + start : base + stop]
        if index and sharding["minishard_index_encoding"] == "gzip":
            index = zlib.decompress(index, 31)
        numbers = [number for (number,) in struct.iter_unpack("<Q", index)]
        count = len(numbers) // 3
        rows: dict[int, tuple[int, int]] = {}
        chunk_id, end = 0, base
        for at in range(count):
            assert numbers[at] > 0 or at == 0
            chunk_id += numbers[at]
            begin = (end + numbers[count + at]) % 2**64
            end = begin + numbers[2 * count + at]
            assert end <= len(shard)
            rows[chunk_id] = (begin, end)
        assert (start, stop) == (0, 0) or rows
        found.append(rows)
    return found


def chunks_of(shard: bytes, sharding: Sharding) -> dict[int, bytes]:
    """Return the bytes of all chunks by their ids."""
    return {
        chunk_id: shard[start:stop]
        for minishard in decoded(shard, sharding)
        for chunk_id, (start, stop) in minishard.items()
    }


_ENCODINGS = ("raw", "gzip")


@st.composite
def shardings(draw: st.DrawFn) -> Sharding:
    """Draw any sharding with few minishards."""
    return {
        **RAW_SHARDING,
        "hash": draw(st.sampled_from(["identity", "murmurhash3_x86_128"])),
        "preshift_bits": draw(st.integers(0, 3)),
        "minishard_bits": draw(st.integers(0, 6)),
        "shard_bits": draw(st.sampled_from([0, 0, 1, 5])),
        "minishard_index_encoding": draw(st.sampled_from(_ENCODINGS)),
        "data_encoding": draw(st.sampled_from(_ENCODINGS)),
    }
