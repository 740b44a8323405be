"""Shards that the service plans anew, put together and read step by step."""

import json
import struct
import zlib
from collections.abc import Mapping
from typing import Any

from app.formats.contract import NewShard, ShardRewriter, Slot, Target
from app.formats.neuroglancer_precomputed.layout import Precomputed
from app.formats.neuroglancer_precomputed.metadata import parse_info
from app.formats.reading import Versioned
from app.model import ByteRange, ETag, VirtualKey
from app.resolve.perform import DirectFetch
from app.storage.memory import MemoryStore
from tests.formats.neuroglancer_precomputed.shards import Sharding
from tests.formats.rendering import render
from tests.resolving import ROOT

MOST_NBYTES = 2**20


async def target(info: Mapping[str, Any], key: str, most_nbytes: int = MOST_NBYTES) -> Target:
    """Ask the layout of *info* where *key* is written."""
    data = json.dumps(info).encode()
    parsed = parse_info(info, data)
    assert parsed is not None
    options = Precomputed(2**20, most_nbytes)
    layout = options.layout(ROOT, Versioned(parsed, ETag('"1"'), len(data)))
    return await layout.target(VirtualKey(key), DirectFetch(MemoryStore()))


async def slot(info: Mapping[str, Any], key: str) -> Slot:
    """Ask the same for the key of a chunk."""
    found = await target(info, key)
    assert isinstance(found, Slot)
    return found


async def rewritten(
    shard: ShardRewriter[Any], old: bytes | None, changes: Mapping[tuple[int, ...], bytes | None]
) -> tuple[bytes | None, NewShard | None]:
    """Make *changes* of the shard whose bytes are *old*; see that it is all as it is told."""
    store = MemoryStore()
    if old is not None:
        store.place(shard.ref, old)
    opened = await shard.open(changes, DirectFetch(store))
    assert (opened is None) == (old is None)
    planned = shard.plan(opened, changes)
    if planned is None:
        return None, None
    new = render(planned.pieces, old or b"")
    for read, value in (*planned.indexes, *planned.indexes_of_version):
        assert read.ref == shard.ref
        assert isinstance(read.request, ByteRange)
        assert read.decode(new[slice(*read.request)]) == value
    return new, planned


def decoded(shard: bytes, sharding: Sharding) -> list[dict[int, tuple[int, int]]]:
    """Tell of each minishard where its chunks begin and end in the object, by rising ids."""
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
    """Give the bytes of all chunks by their ids."""
    return {
        chunk_id: shard[start:stop]
        for minishard in decoded(shard, sharding)
        for chunk_id, (start, stop) in minishard.items()
    }
