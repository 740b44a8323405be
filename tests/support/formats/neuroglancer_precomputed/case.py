"""Sharded precomputed containers, encoded from the specification."""

import json
import re
import struct
from collections.abc import Iterator, Mapping
from functools import partial
from math import prod
from typing import Any

from tests.support.formats.case import Case
from tests.support.formats.neuroglancer_precomputed.shards import (
    RAW_SHARDING,
    Sharding,
    build_shards,
)
from tests.support.formats.zarr.building import chunk_bytes

_HASHED = {"hash": "murmurhash3_x86_128", "preshift_bits": 0}
MURMUR = {**RAW_SHARDING, **_HASHED}
GZIP_DATA = {**RAW_SHARDING, "data_encoding": "gzip"}
IDS = {
    "s0/-1-2_5-8_0-1": 0,
    "s0/2-5_5-8_0-1": 1,
    "s0/-1-2_8-10_0-1": 2,
    "s0/2-5_8-10_0-1": 3,
    "s0/5-6_5-8_0-1": 4,
}
"""Chunks of a grid of 3 x 2 x 1: one bit of y between two of x, none of z."""
SEGMENTS = (1, 2, 7, 1000, 2**64 - 1)


def volume_info(sharding: Sharding | None, **members: Any) -> dict[str, Any]:
    """Write the ``info`` of a volume of 7 x 5 x 1 voxels in chunks of 3 x 3 x 1."""
    scale = {
        "key": "s0",
        "size": [7, 5, 1],
        "voxel_offset": [-1, 5, 0],
        "chunk_sizes": [[3, 3, 1]],
        "resolution": [8, 8, 8],
        "encoding": "raw",
        **({} if sharding is None else {"sharding": sharding}),
        **members,
    }
    return {
        "@type": "neuroglancer_multiscale_volume",
        "type": "image",
        "data_type": "uint8",
        "num_channels": 1,
        "scales": [scale],
    }


def mesh_info(sharding: Sharding | None) -> dict[str, Any]:
    """Write the ``info`` of multi-resolution meshes."""
    return {
        "@type": "neuroglancer_multilod_draco",
        "vertex_quantization_bits": 16,
        "transform": [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0],
        "lod_scale_multiplier": 1,
        **({} if sharding is None else {"sharding": sharding}),
    }


def skeleton_info(sharding: Sharding) -> dict[str, Any]:
    """Write the ``info`` of skeletons."""
    return {"@type": "neuroglancer_skeletons", "vertex_attributes": [], "sharding": sharding}


def annotation_info(sharding: Sharding) -> dict[str, Any]:
    """Write the ``info`` of annotations with one relationship and two spatial levels."""
    levels = enumerate([[1, 1, 1], [2, 1, 3]])
    return {
        "@type": "neuroglancer_annotations_v1",
        "dimensions": {"x": [1, "m"], "y": [1, "m"], "z": [1, "m"]},
        "annotation_type": "point",
        "by_id": {"key": "by_id", "sharding": sharding},
        "relationships": [{"id": "segment", "key": "by_segment", "sharding": sharding}],
        "spatial": [
            {"key": f"spatial{at}", "grid_shape": shape, "limit": 9, "sharding": sharding}
            for at, shape in levels
        ],
    }


def encode_manifest(lods: list[list[int]]) -> bytes:
    """Encode a mesh manifest with the sizes of the fragments of each level of detail."""
    head = struct.pack("<6fI", 64, 64, 64, 0, 0, 0, len(lods))
    head += struct.pack(f"<{4 * len(lods)}f", *([1.0] * (4 * len(lods))))
    head += struct.pack(f"<{len(lods)}I", *map(len, lods))
    for sizes in lods:
        head += struct.pack(f"<{4 * len(sizes)}I", *([3] * (3 * len(sizes))), *sizes)
    return head


def voxels(key: str, number: int) -> bytes:
    """Return the bytes of a raw chunk, which no other chunk has."""
    bounds = (map(int, each) for each in re.findall(r"(-?\d+)-(-?\d+)", key.rpartition("/")[2]))
    return bytes(number * 7 + i for i in range(prod(end - begin for begin, end in bounds)))


def build(
    chunks: Mapping[str, bytes], *, sharding: Sharding = RAW_SHARDING, old: bool = False
) -> dict[str, bytes]:
    """Return the objects of a volume; *chunks* are some of `IDS`."""
    objects = {"info": json.dumps(volume_info(sharding)).encode()}
    return objects | _below("s0", {IDS[key]: data for key, data in chunks.items()}, sharding, old)


def build_skeletons(chunks: Mapping[str, bytes], *, sharding: Sharding) -> dict[str, bytes]:
    """Return the objects of skeletons, *chunks* by segment."""
    ids = {int(key): data for key, data in chunks.items()}
    return {"info": json.dumps(skeleton_info(sharding)).encode()} | build_shards(ids, sharding)


def build_meshes(chunks: Mapping[str, bytes], *, sharding: Sharding) -> dict[str, bytes]:
    """Return the objects of meshes; *chunks* are their fragments, two for each mesh."""
    before = {int(key): data for key, data in chunks.items()}
    manifests = {each: encode_manifest([[2], [len(data) - 2]]) for each, data in before.items()}
    shards = build_shards(manifests, sharding, before=before)
    return {"info": json.dumps(mesh_info(sharding)).encode()} | shards


def build_annotations(chunks: Mapping[str, bytes], *, sharding: Sharding) -> dict[str, bytes]:
    """Return the objects of annotations, *chunks* by id, segment and cell."""
    objects = {"info": json.dumps(annotation_info(sharding)).encode()}
    for path in ("by_id", "by_segment", "spatial0", "spatial1"):
        names = {key.rpartition("/")[2]: data for key, data in chunks.items() if path in key}
        objects |= _below(
            path, {_CELLS[n] if n in _CELLS else int(n): d for n, d in names.items()}, sharding
        )
    return objects


_CELLS = {"0_0_0": 0, "1_0_0": 1, "0_0_1": 2, "1_0_2": 5}
"""Cells of a grid of 2 x 1 x 3: one bit of x, two of z."""


def _below(
    path: str,
    chunks: Mapping[int, bytes],
    sharding: Sharding,
    old: bool = False,  # noqa: FBT001, FBT002
) -> dict[str, bytes]:
    shards = build_shards(chunks, sharding, old=old)
    return {f"{path}/{name}": data for name, data in shards.items()}


def _volumes() -> Iterator[Case]:
    variants: dict[str, dict[str, Any]] = {
        "raw": {},
        "murmur": {"sharding": MURMUR},
        "gzip-index": {"sharding": {**RAW_SHARDING, "minishard_index_encoding": "gzip"}},
        "gzip-data": {"sharding": GZIP_DATA},
        "index-and-data": {"old": True},
    }
    for name, options in variants.items():
        yield Case(
            name,
            partial(build, **options),
            {key: voxels(key, number) for key, number in IDS.items() if number != 3},
            absent=(
                "s0/2-5_8-10_0-1",
                "s0/5-6_8-10_0-1",
                "s0/5-8_5-8_0-1",
                "s0/-1-02_5-8_0-1",
                "s0/-4--1_5-8_0-1",
                "s0/0-3_5-8_0-1",
                "s0/-1-2_5-8",
                "s0",
            ),
            checksummed=False,
            is_spelling=name in ("murmur", "gzip-index"),
        )


def _segments(name: str, build: Any, sharding: Sharding, *absent: str) -> Case:
    return Case(
        name,
        partial(build, sharding=sharding),
        {str(segment): chunk_bytes(segment % 100) for segment in SEGMENTS},
        absent=("0", "3", "07", "+7", "\u0667", "7.0", str(2**64), *absent),
        checksummed=False,
        entry_suffix=".index" if build is build_meshes else "",
    )


CASES = (
    *_volumes(),
    _segments("skeletons", build_skeletons, {**GZIP_DATA, "shard_bits": 5}),
    _segments("meshes", build_meshes, RAW_SHARDING, "3.index", "07.index", ".index"),
    _segments("gzip-meshes", build_meshes, {**GZIP_DATA, **_HASHED, "shard_bits": 0}, "3.index"),
    Case(
        "annotations",
        partial(build_annotations, sharding=MURMUR),
        {
            key: chunk_bytes(number)
            for number, key in enumerate(
                ["by_id/0", "by_id/3", "by_segment/3", "spatial0/0_0_0"]
                + [f"spatial1/{cell}" for cell in ("0_0_0", "1_0_0", "1_0_2")]
            )
        },
        absent=("by_id/1", "by_segment/0", "spatial0/1_0_0", "spatial1/0_0_1", "spatial1/0_1_0"),
        checksummed=False,
    ),
)
