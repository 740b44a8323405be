"""`verify --chunks`: frames of chunks that zarr-python and TensorStore write."""

import json
import struct
from collections.abc import Sequence
from itertools import batched
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import tensorstore
import zarr
from zarr.abc.codec import BytesBytesCodec
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, ShardingCodec, ZstdCodec
from zarr.core.buffer import Buffer

from tests.support.files import read_files
from tests.support.formats.neuroglancer_precomputed.case import volume_info
from tests.support.formats.neuroglancer_precomputed.shards import RAW_SHARDING
from tests.support.formats.zarr.building import checksum
from tests.support.survey.verifying import report_of

_ENTRIES: Final = 8
"""Number of inner chunks of a shard."""
_MINISHARDS: Final = 1 << RAW_SHARDING["minishard_bits"]
CHAINS: Final[list[Sequence[BytesBytesCodec]]] = [
    [],
    [Crc32cCodec()],
    [GzipCodec()],
    [ZstdCodec(checksum=False)],
    [ZstdCodec(level=19, checksum=True)],
    [ZstdCodec(), Crc32cCodec()],
    [GzipCodec(), ZstdCodec()],
    *(
        [BloscCodec(cname=name, shuffle=shuffle)]
        for name in ("blosclz", "lz4", "lz4hc", "zlib", "zstd")
        for shuffle in ("noshuffle", "shuffle", "bitshuffle")
    ),
    [BloscCodec(cname="lz4"), Crc32cCodec()],
]
"""Codecs whose frames are known."""


def name_of(chain: Sequence[BytesBytesCodec]) -> str:
    """Return a name of the codecs that is the same in every process."""
    return json.dumps([codec.to_dict() for codec in chain])


def written(
    chain: Sequence[BytesBytesCodec], dtype: str = "uint16", *, is_nested: bool = False
) -> dict[str, bytes]:
    """Write two shards with zarr-python: chunks of noise, and chunks of one value."""
    store: dict[str, Buffer] = {}
    inner = ShardingCodec(chunk_shape=(2, 40), codecs=[BytesCodec(), *chain])
    array = zarr.create(
        store=zarr.storage.MemoryStore(store),
        shape=(8, 160),
        chunks=(8, 80),
        dtype=dtype,
        codecs=[ShardingCodec(chunk_shape=(4, 80), codecs=[inner])] if is_nested else [inner],
        zarr_format=3,
    )
    noise = np.random.default_rng(5).integers(1, 256, (8, 160))
    noise[4:] = 7
    array[...] = noise.astype(dtype)
    return {key: value.to_bytes() for key, value in store.items()}


@pytest.mark.parametrize("chain", CHAINS, ids=name_of)
@pytest.mark.parametrize(
    ("dtype", "is_nested"),
    [
        ("float64", False),
        ("uint8", True),
        pytest.param("uint8", False, marks=pytest.mark.soak),
        pytest.param("float64", True, marks=pytest.mark.soak),
    ],
)
async def test_chunks_of_zarr_python_are_sound(
    chain: Sequence[BytesBytesCodec], dtype: str, *, is_nested: bool
) -> None:
    """Chunks that zarr-python wrote with any codec have no damage."""
    report = await report_of(written(chain, dtype, is_nested=is_nested), chunks=True)

    assert (report.damages, report.not_checked, report.chunks) == ([], {}, 2 * _ENTRIES)


def shortened(shard: bytes) -> bytes:
    """Remove the last byte of the first chunk, and correct the index."""
    index = bytearray(shard[-16 * _ENTRIES - 4 : -4])
    (nbytes,) = struct.unpack_from("<Q", index, 8)
    struct.pack_into("<Q", index, 8, nbytes - 1)
    return shard[: -len(index) - 4] + index + checksum(bytes(index))


def zeroed(shard: bytes) -> bytes:
    """Set the first chunk to zeroes."""
    start, nbytes = struct.unpack_from("<QQ", shard, len(shard) - 16 * _ENTRIES - 4)
    return shard[:start] + bytes(nbytes) + shard[start + nbytes :]


@pytest.mark.parametrize("at", [0, 4, 7, 12, 15])
async def test_damaged_blosc_header_is_reported(at: int) -> None:
    """A Blosc chunk with another version or size in its header is damage."""
    objects = written([BloscCodec()])
    shard = bytearray(objects["c/0/1"])
    start, _ = struct.unpack_from("<QQ", shard, len(shard) - 16 * _ENTRIES - 4)
    shard[start + at] ^= 0xFF
    objects["c/0/1"] = bytes(shard)

    report = await report_of(objects, chunks=True)

    assert [each.key for each in report.damages] == ["c/0/2"]


@pytest.mark.parametrize("chain", CHAINS, ids=name_of)
@pytest.mark.parametrize("damage", [shortened, zeroed])
async def test_truncated_or_zeroed_chunk_is_damage(
    chain: Sequence[BytesBytesCodec], damage: Any
) -> None:
    """A short chunk is damage, and so is one of zeroes unless its codecs do not compress."""
    objects = written(chain)
    objects["c/0/1"] = damage(objects["c/0/1"])

    report = await report_of(objects, chunks=True)

    is_hidden = not chain and damage is zeroed
    assert [each.key for each in report.damages] == ([] if is_hidden else ["c/0/2"])


async def test_frame_of_another_length_is_damage() -> None:
    """A sound frame that holds other than the bytes of a whole chunk is damage."""
    objects = written([ZstdCodec()])
    document = json.loads(objects["zarr.json"])
    document["data_type"], document["fill_value"] = "uint32", 0
    objects["zarr.json"] = json.dumps(document).encode()

    report = await report_of(objects, chunks=True)

    assert {each.reason for each in report.damages} == {"zstd holds 160 bytes instead of 320"}
    assert len(report.damages) == 2 * _ENTRIES


async def test_chunks_of_unknown_codecs_are_reported_as_unchecked() -> None:
    """The report lists chunks of an unknown codec as not checked, with the codec."""
    objects = written([])
    document = json.loads(objects["zarr.json"])
    document["codecs"][0]["configuration"]["codecs"].append({"name": "numcodecs.lz4"})
    objects["zarr.json"] = json.dumps(document).encode()

    report = await report_of(objects, chunks=True)

    assert report.damages == []
    assert report.not_checked == {
        "": "the bytes of its chunks: no check is known for numcodecs.lz4"
    }


def without_chunks(shard: bytes) -> bytes:
    """Set the chunks between the shard index and the first minishard index to zeroes."""
    first, entries = 16 * _MINISHARDS, struct.unpack_from(f"<{2 * _MINISHARDS}Q", shard)
    last = first + min(start for start, stop in batched(entries, 2) if stop > start)
    return shard[:first] + bytes(last - first) + shard[last:]


@pytest.mark.parametrize("gzip", ["raw", "gzip"])
@pytest.mark.parametrize("encoding", ["raw", "jpeg", "png", "compressed_segmentation"])
async def test_zeroed_voxels_are_damage(tmp_path: Path, encoding: str, gzip: str) -> None:
    """Chunks that TensorStore wrote are sound in each encoding, and damaged once zeroed."""
    is_labels = encoding == "compressed_segmentation"
    block = {"compressed_segmentation_block_size": [8, 8, 8]} if is_labels else {}
    info = volume_info(
        {**RAW_SHARDING, "data_encoding": gzip, "hash": "identity"},
        size=[40, 24, 16],
        voxel_offset=[0, 0, 0],
        chunk_sizes=[[16, 16, 16]],
        encoding=encoding,
        **block,
    )
    info["data_type"] = "uint32" if is_labels else "uint8"
    (tmp_path / "info").write_text(json.dumps(info))
    spec = {"driver": "neuroglancer_precomputed", "kvstore": tmp_path.as_uri() + "/"}
    volume = tensorstore.open(spec).result()
    volume.write(
        np.random.default_rng(5).integers(0, 9, volume.shape, volume.dtype.numpy_dtype)
    ).result()
    objects = read_files(tmp_path)

    report = await report_of(objects, chunks=True)
    assert (report.damages, report.not_checked, report.chunks) == ([], {}, 6)

    for key in [key for key in objects if key.endswith(".shard")]:
        objects[key] = without_chunks(objects[key])
    report = await report_of(objects, chunks=True)
    is_hidden = (encoding, gzip) == ("raw", "raw")
    assert bool(report.damages) is not is_hidden
