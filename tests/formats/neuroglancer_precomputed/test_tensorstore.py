"""What TensorStore writes is where the documents were understood to put it."""

import itertools
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts

from app.formats.neuroglancer_precomputed.keys import MortonGrid
from tests.formats.neuroglancer_precomputed.shards import (
    RAW_SHARDING,
    Sharding,
    address,
    encode_minishard,
)

_SINGLE = {**RAW_SHARDING, "preshift_bits": 0, "minishard_bits": 0, "shard_bits": 0}


def _opened(document: Sharding, base: Any, context: Any) -> Any:
    return ts.KvStore.open(
        {"driver": "neuroglancer_uint64_sharded", "base": base, "metadata": document},
        context=context,
    ).result()


def _minishards(shard: bytes, minishard_bits: int = 0) -> Iterator[list[tuple[int, bytes]]]:
    """Decode ids and chunks of every minishard, step by step."""
    base = 16 << minishard_bits
    for start, stop in struct.iter_unpack("<2Q", shard[:base]):
        columns = np.frombuffer(shard[base + start : base + stop], "<u8").reshape(3, -1)
        found, chunk_id, at = [], 0, base
        for step, gap, size in columns.T.tolist():
            chunk_id, at = (chunk_id + step) % 2**64, (at + gap) % 2**64
            found.append((chunk_id, shard[at : at + size]))
            at += size
        yield found


@pytest.mark.parametrize("hash_name", ["identity", "murmurhash3_x86_128"])
@pytest.mark.parametrize(
    ("preshift_bits", "minishard_bits", "shard_bits"),
    [(0, 0, 0), (3, 2, 1), (0, 1, 4), (60, 2, 2), (1, 3, 5), (64, 2, 3), (0, 0, 64), (5, 6, 58)],
)
def test_ids_are_in_the_shards_that_the_builder_says(
    hash_name: str, preshift_bits: int, minishard_bits: int, shard_bits: int
) -> None:
    """Random ids, by either hash and with shards of every padding."""
    document = {
        **RAW_SHARDING,
        "hash": hash_name,
        "preshift_bits": preshift_bits,
        "minishard_bits": minishard_bits,
        "shard_bits": shard_bits,
    }
    numbers = random.Random(minishard_bits)
    ids = {0, 1, 2**64 - 1, *(numbers.getrandbits(numbers.randint(1, 64)) for _ in range(20))}
    base = ts.KvStore.open("memory://", context=(context := ts.Context())).result()
    with ts.Transaction() as transaction:
        kvstore = _opened(document, "memory://", context).with_transaction(transaction)
        for chunk_id in ids:
            kvstore[chunk_id.to_bytes(8, "big")] = b"%d" % chunk_id

    found = {}
    for key in base.list().result():
        for minishard, chunks in enumerate(_minishards(base[key], minishard_bits)):
            for chunk_id, chunk in chunks:
                assert chunk == b"%d" % chunk_id
                found[chunk_id] = (key.decode().removesuffix(".shard"), minishard)
    assert found == {chunk_id: address(chunk_id, document) for chunk_id in ids}


@pytest.mark.parametrize("grid", [(3, 2, 1), (2, 5, 3), (1, 1, 6), (4, 4, 4)])
def test_chunks_of_a_volume_are_under_the_codes_of_their_cells(
    tmp_path: Path, grid: tuple[int, ...]
) -> None:
    """The compressed Morton code of grids with few and many bits an axis."""
    volume = ts.open(
        {
            "driver": "neuroglancer_precomputed",
            "kvstore": tmp_path.as_uri(),
            "multiscale_metadata": {"type": "image", "data_type": "uint16", "num_channels": 1},
            "scale_metadata": {
                "key": "s0",
                "size": list(grid),
                "chunk_size": [1, 1, 1],
                "resolution": [1, 1, 1],
                "encoding": "raw",
                "sharding": _SINGLE,
            },
            "create": True,
        }
    ).result()
    cells = list(itertools.product(*map(range, grid)))
    values = np.arange(1, len(cells) + 1, dtype="<u2").reshape(*grid, 1)
    volume.write(values).result()
    (chunks,) = _minishards((tmp_path / "s0" / "0.shard").read_bytes())

    assert dict(chunks) == {MortonGrid(grid).encode(cell): values[cell].tobytes() for cell in cells}


def test_ids_that_do_not_rise_are_read() -> None:
    """Chunks are found in whichever order a minishard index lists them."""
    body = b"aabbcc"
    index = encode_minishard([(5, 0, 2), (3, 2, 2), (9, 4, 2)])
    base = ts.KvStore.open("memory://", context=(context := ts.Context())).result()
    base["0.shard"] = struct.pack("<2Q", len(body), len(body) + len(index)) + body + index
    kvstore = _opened(_SINGLE, "memory://", context)

    assert [kvstore[each.to_bytes(8, "big")] for each in (3, 5, 9)] == [b"bb", b"aa", b"cc"]
