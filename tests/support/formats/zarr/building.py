"""Sharded Zarr arrays, encoded and decoded with `struct` from the specification."""

import itertools
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import google_crc32c
import numpy as np

from shardgate.formats.contract import NewShard, Slot
from shardgate.formats.zarr.index import ShardIndex
from shardgate.formats.zarr.metadata import parse_array
from shardgate.formats.zarr.rewrite import OpenZarrShard
from shardgate.model import ByteRange, ETag, Stored
from tests.support.formats.case import Container, write_chunks
from tests.support.resolving import ROOT

EMPTY = (2**64 - 1, 2**64 - 1)
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
BIG = {"name": "bytes", "configuration": {"endian": "big"}}
CRC = {"name": "crc32c"}
ANY_LENGTH = {"data_type": "string"}
"""Members with which chunks of any length are valid."""


def checksum(data: bytes) -> bytes:
    """Return the CRC-32C of *data*, little-endian."""
    return struct.pack("<I", google_crc32c.value(data))


def encode_index(entries: list[tuple[int, int]], *, endian: str = "<", crc: bool = True) -> bytes:
    """Encode offset and nbytes of every inner chunk."""
    data = b"".join(struct.pack(f"{endian}QQ", *entry) for entry in entries)
    return data + checksum(data) if crc else data


def encode_index_by(
    codecs: list[Any], entries: list[tuple[int, int]], counts: tuple[int, ...]
) -> bytes:
    """Apply *codecs*, transposes, bytes and checksums, to the index of a shard of *counts*."""
    numbers = np.array(entries, np.uint64).reshape(*counts, 2)
    data = b""
    for codec in codecs:
        if codec["name"] == "transpose":
            numbers = numbers.transpose(codec["configuration"]["order"])
        elif codec["name"] == "bytes":
            data = numbers.astype(">u8" if codec == BIG else "<u8").tobytes()
        else:
            data += checksum(data)
    return data


def encode_shard(
    chunks: list[bytes | None],
    *,
    location: str = "end",
    endian: str = "<",
    crc: bool = True,
    gap: bytes = b"gap",
    encode: Callable[[list[tuple[int, int]]], bytes] | None = None,
) -> bytes:
    """Encode inner chunks one after the other, each followed by *gap*, and their index."""
    encode = encode or partial(encode_index, endian=endian, crc=crc)
    size = len(encode([EMPTY] * len(chunks)))
    at = size if location == "start" else 0
    entries, body = [], b""
    for chunk in chunks:
        if chunk is None:
            entries.append(EMPTY)
            continue
        entries.append((at + len(body), len(chunk)))
        body += chunk + gap
    index = encode(entries)
    return index + body if location == "start" else body + index


def array_metadata(
    shape: list[int], shard_shape: list[int], codecs: list[Any], **members: Any
) -> dict[str, Any]:
    """Return the metadata of a uint8 array."""
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": "uint8",
        "chunk_grid": regular(*shard_shape),
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": codecs,
        "attributes": {},
        **members,
    }


def sharding(chunk_shape: list[int], codecs: list[Any] | None = None, **members: Any) -> Any:
    """Return a sharding codec."""
    return {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": chunk_shape,
            "codecs": codecs or [LITTLE],
            "index_codecs": [LITTLE, CRC],
            "index_location": "end",
            **members,
        },
    }


def consolidated(nodes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a group with those of *nodes*."""
    inline = {"kind": "inline", "must_understand": False, "metadata": nodes}
    group = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    return {**group, "consolidated_metadata": inline}


def regular(*sizes: Any) -> dict[str, Any]:
    """Return the grid of chunks of one shape."""
    return {"name": "regular", "configuration": {"chunk_shape": list(sizes)}}


def rectilinear(*sizes: Any) -> dict[str, Any]:
    """Return the grid whose chunks have the edge lengths *sizes* along each dimension."""
    configuration = {"kind": "inline", "chunk_shapes": list(sizes)}
    return {"name": "rectilinear", "configuration": configuration}


def build(
    chunks: Mapping[str, bytes],
    *,
    location: str = "end",
    endian: str = "<",
    crc: bool = True,
    trailer: bool = False,
    is_declared: bool = True,
) -> dict[str, bytes]:
    """Return a 2-d array of 5 x 7 elements, inner chunks of 2 x 2 and shards of 4 x 4.

    Without *is_declared*, its metadata have no index_codecs.
    """
    codec = sharding(
        [2, 2],
        index_codecs=[BIG if endian == ">" else LITTLE, *([CRC] if crc else [])],
        index_location=location,
    )
    if not is_declared:
        del codec["configuration"]["index_codecs"]
    metadata = array_metadata([5, 7], [4, 4], [codec, *([CRC] if trailer else [])], **ANY_LENGTH)
    objects = {"zarr.json": json.dumps(metadata).encode()}
    for shard in itertools.product(range(2), range(2)):
        inner = [
            chunks.get(f"c/{shard[0] * 2 + i}/{shard[1] * 2 + j}")
            for i, j in itertools.product(range(2), range(2))
        ]
        if any(chunk is not None for chunk in inner):
            data = encode_shard(inner, location=location, endian=endian, crc=crc)
            objects["c/{}/{}".format(*shard)] = data + (checksum(data) if trailer else b"")
    return objects


def build_rectilinear(chunks: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return a 2-d array of 9 x 7 elements in inner chunks of 2 x 2, whose shards have 2, 6 and 4
    rows, and 6 and 4 columns.
    """
    rows, columns = [(0, 1), (1, 4), (4, 6)], [(0, 3), (3, 5)]
    metadata = array_metadata([9, 7], [], [sharding([2, 2])], **ANY_LENGTH)
    metadata["chunk_grid"] = rectilinear([2, 6, 4], [6, 4])
    objects = {"zarr.json": json.dumps(metadata).encode()}
    for (i, height), (j, width) in itertools.product(enumerate(rows), enumerate(columns)):
        cells = itertools.product(range(*height), range(*width))
        inner = [chunks.get(f"c/{row}/{column}") for row, column in cells]
        if any(chunk is not None for chunk in inner):
            objects[f"c/{i}/{j}"] = encode_shard(inner)
    return objects


def build_nested(chunks: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return a 1-d array of 8 inner chunks in shards of 2 shards of 2, the inner index first."""
    inner_codec = sharding([1], index_location="start", index_codecs=[BIG])
    metadata = array_metadata([8], [4], [sharding([2], [inner_codec])], **ANY_LENGTH)
    objects = {"zarr.json": json.dumps(metadata).encode()}
    for shard in range(2):
        halves: list[bytes | None] = []
        for half in range(2):
            inner = [chunks.get(f"c/{shard * 4 + half * 2 + i}") for i in range(2)]
            is_empty = all(chunk is None for chunk in inner)
            written = encode_shard(inner, location="start", endian=">", crc=False)
            halves.append(None if is_empty else written)
        if any(half is not None for half in halves):
            objects[f"c/{shard}"] = encode_shard(halves)
    return objects


def chunk_bytes(number: int) -> bytes:
    """Return bytes that no other chunk has."""
    return bytes((number * 7 + i) % 251 for i in range(5 + number % 3))


type Coords = tuple[int, ...]


@dataclass
class WrittenArray:
    """An array in memory whose shards are rewritten by plans."""

    document: dict[str, Any]
    objects: dict[str, bytes] = field(default_factory=dict)
    """The shards."""

    @property
    def stored(self) -> dict[str, bytes]:
        """All objects."""
        return {**self.objects, "zarr.json": json.dumps(self.document).encode()}

    async def slot(self, key: str) -> Slot:
        """Return the slot of a chunk."""
        return await Container(self.stored).slot(key)

    async def open(self, key: str, *entries: Coords) -> OpenZarrShard:
        """Open the shard of a chunk to change *entries*."""
        container = Container(self.stored)
        opened = await (await container.slot(key)).shard.open(entries, container.fetch)
        assert isinstance(opened, OpenZarrShard)
        return opened

    async def write(self, chunks: Mapping[Coords, bytes | None]) -> dict[str, NewShard | None]:
        """Write chunks; return the plans by the keys of their shards."""
        objects = self.stored
        keys = {"/".join(["c", *map(str, coords)]): body for coords, body in chunks.items()}
        plans = await write_chunks(objects, keys)
        self.objects = {key: data for key, data in objects.items() if key != "zarr.json"}
        return plans


def one_dimension(count: int, **members: Any) -> WrittenArray:
    """Return an array of one dimension with *count* chunks per shard."""
    document = array_metadata([count], [count], [sharding([1], **members)], data_type="string")
    return WrittenArray(document)


def two_levels(count: int, inner: int) -> WrittenArray:
    """Return an array of *count* chunks per shard, with inner shards of *inner* chunks."""
    codec = sharding([inner], [sharding([1])])
    return WrittenArray(array_metadata([count], [count], [codec], data_type="string"))


GIB = 2**30


def opened(array: WrittenArray, entries: list[tuple[int, int]], size: int) -> OpenZarrShard:
    """Return an opened shard of *size* bytes without its data, since a plan reads no chunks."""
    codec = parse_array(array.document).indexes[0]
    index = ShardIndex(encode_index(entries, crc=False), big_endian=False)
    shard = Stored(ROOT.join("c/0"), ByteRange(0, size), ETag('"1"'))
    return OpenZarrShard(shard, ETag('"1"'), codec, index, {})
