"""Shards of ``neuroglancer_uint64_sharded_v1``, written with `struct` after the documents."""

import struct
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from tests.zipped import zipped

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


def murmur(number: int) -> int:
    """Hash 8 bytes by MurmurHash3_x86_128 with seed 0; the low half of the result.

    Such a short input is all tail: its halves enter two of the four states.
    """
    c1, c2, c3 = 0x239B961B, 0xAB0E9789, 0x38B34AE5
    h1 = _times(_left(_times(number, c1), 15), c2) ^ 8
    h2 = _times(_left(_times(number >> 32, c2), 16), c3) ^ 8
    states = _spread([h1, h2, 8, 8])
    low, second, *_ = _spread([_finish(state) for state in states])
    return second << 32 | low


def _spread(states: list[int]) -> list[int]:
    first = sum(states) % 2**32
    return [first, *((state + first) % 2**32 for state in states[1:])]


def _finish(state: int) -> int:
    state = _times(state ^ state >> 16, 0x85EBCA6B)
    state = _times(state ^ state >> 13, 0xC2B2AE35)
    return state ^ state >> 16


def _left(number: int, bits: int) -> int:
    return (number << bits | number >> 32 - bits) % 2**32


def _times(number: int, factor: int) -> int:
    return number % 2**32 * factor % 2**32


def morton(cell: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Give the compressed Morton code of *cell*: bits from the highest down, as text.

    A bit that no coordinate of an axis can have is left out.
    """
    text = ""
    for bit in reversed(range(64)):
        for at, size in reversed(list(zip(cell, shape, strict=True))):
            if 2**bit < size:
                text += "1" if at >> bit & 1 else "0"
    return int(text or "0", 2)


def address(chunk_id: int, sharding: Sharding) -> tuple[str, int]:
    """Tell in which shard *chunk_id* is, and in which minishard of it."""
    number = chunk_id // 2 ** sharding["preshift_bits"]
    number = number if sharding["hash"] == "identity" else murmur(number)
    rest, minishard = divmod(number, 2 ** sharding["minishard_bits"])
    digits = (sharding["shard_bits"] + 3) // 4
    return f"{rest % 2 ** sharding['shard_bits']:0{digits or 1}x}", minishard


def encode_minishard(chunks: list[tuple[int, int, int]]) -> bytes:
    """Encode id, offset and size of every chunk, each column less what came before."""
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


def build_shards(
    chunks: Mapping[int, bytes],
    sharding: Sharding,
    *,
    old: bool = False,
    before: Mapping[int, bytes] | None = None,
) -> dict[str, bytes]:
    """Write shards by name, *old* ones in two objects each."""
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
