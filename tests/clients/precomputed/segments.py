"""A segmentation with meshes and skeletons, made by cloud-volume and igneous."""

import json
import shutil
from pathlib import Path
from typing import Final

import igneous.task_creation as tasks
import numpy as np
from cloudvolume import CloudVolume
from cloudvolume.datasource.precomputed.sharding import (
    ShardingSpecification,
    synthesize_shard_files,
)

from tests.clients.precomputed.clouds import by_cloudvolume, run
from tests.clients.precomputed.volumes import (
    MURMUR,
    Scale,
    Volume,
    document,
    sharding,
    write_shards,
)
from tests.clients.writing import Json, Values
from tests.zipped import zipped

EDGE: Final = 40
IDS: Final = (7, 1234567, 2**40 + 1)
ABSENT: Final = (8, 2**63)
LARGE_IDS: Final = (0, 1, 255, 2**32, 2**63, 2**64 - 1)
"""Ids that skeletons are given a second time, to reach the last bits of shards."""

RESHARDED: Final = {
    "identity_64": sharding((2, 3, 59), index="gzip"),
    "murmur_64": sharding((0, 1, 63), MURMUR, data="gzip"),
    "one_shard": sharding((0, 0, 0), MURMUR),
}
"""Ways to shard the skeletons once more, by their folders."""


def labels() -> Values:
    """Make a ball and two boxes, in one of which a mesh has one level of detail only."""
    x, y, z = np.mgrid[:EDGE, :EDGE, :EDGE]
    values = np.zeros((EDGE, EDGE, EDGE, 1), "u8")
    values[(x - 10) ** 2 + (y - 10) ** 2 + (z - 20) ** 2 < 64] = IDS[0]
    values[(abs(x - 12) < 5) & (abs(y - 30) < 6) & (abs(z - 12) < 10)] = IDS[1]
    values[(abs(x - 28) < 6) & (abs(y - 20) < 4) & (abs(z - 20) < 16)] = IDS[2]
    return values


def write_segments(path: Path) -> None:
    """Write a sharded segmentation, with multi-resolution meshes and skeletons in shards."""
    _write_labels(path, sharded=True)
    url = f"file://{path}"
    _forge_meshes(url, sharded=True)
    run(
        tasks.create_sharded_multires_mesh_tasks(
            url, num_lod=2, min_chunk_size=(4, 4, 4), mesh_dir="mesh", min_shards=2, progress=False
        )
    )
    run(
        tasks.create_skeletonizing_tasks(
            url,
            mip=0,
            shape=(EDGE, EDGE, EDGE),
            sharded=True,
            dust_threshold=0,
            teasar_params={"scale": 2, "const": 20},
        )
    )
    run(
        tasks.create_sharded_skeleton_merge_tasks(
            url, dust_threshold=0, tick_threshold=0, min_shards=2
        )
    )
    _write_properties(path)


def write_legacy(path: Path) -> None:
    """Write a segmentation that is not sharded, with meshes in the older form."""
    _write_labels(path, sharded=False)
    url = f"file://{path}"
    _forge_meshes(url, sharded=False)
    run(tasks.create_mesh_manifest_tasks(url, magnitude=1, mesh_dir="mesh"))
    _write_properties(path)


def _write_labels(path: Path, *, sharded: bool) -> None:
    scale = Scale(labels(), sharding((0, 1, 2), index="gzip", data="gzip"), chunk=(20, 20, 20))
    by_cloudvolume(Volume("", by_cloudvolume, [scale], "segmentation"), path, sharded)


def _forge_meshes(url: str, *, sharded: bool) -> None:
    edge = EDGE if sharded else EDGE // 2
    run(
        tasks.create_meshing_tasks(
            url,
            0,
            shape=(edge, edge, edge),
            mesh_dir="mesh",
            sharded=sharded,
            compress=None,
            simplification=False,
            dust_threshold=0,
        )
    )


def _write_properties(path: Path) -> None:
    """Name the segments, in a document of the kind that is never sharded."""
    (path / "properties").mkdir()
    names = {"id": "label", "type": "label", "values": ["ball", "plate", "bar"]}
    properties = {"ids": list(map(str, IDS)), "properties": [names]}
    found = {"@type": "neuroglancer_segment_properties", "inline": properties}
    (path / "properties/info").write_text(json.dumps(found))
    info = document(path) | {"segment_properties": "properties"}
    (path / "info").write_text(json.dumps(info))


def compress_manifests(path: Path, target: Path) -> None:
    """Write the meshes of *path* again, by cloud-volume, with their manifests in gzip.

    As the mesh documents say, the fragments before a manifest are not compressed with it.
    """
    shutil.copytree(path, target)
    meshes = {segment: mesh_parts(path, segment) for segment in IDS}
    info = document(target / "mesh")
    manifests = {segment: zipped(manifest) for segment, (manifest, _) in meshes.items()}
    shards = synthesize_shard_files(
        ShardingSpecification.from_dict(info["sharding"]),
        {segment: meshes[segment][1] + manifests[segment] for segment in IDS},
        {segment: len(manifests[segment]) for segment in IDS},
    )
    for name, data in shards.items():
        (target / "mesh" / name).write_bytes(data)
    info["sharding"]["data_encoding"] = "gzip"
    (target / "mesh/info").write_text(json.dumps(info))


def mesh_parts(path: Path, segment: int) -> tuple[bytes, bytes]:
    """Give a sharded mesh's manifest and the fragments before it, as cloud-volume finds them."""
    mesh = CloudVolume(f"file://{path}", progress=False).mesh
    manifest = mesh.get_manifest(segment)
    size = sum(int(np.sum(sizes)) for sizes in manifest.fragment_offsets)
    shard = (path / "mesh" / Path(manifest.path).name).read_bytes()
    start = int(manifest.shard_offset)
    return mesh.reader.get_data(segment, mesh.path), shard[start - size : start]


def skeleton_bytes(path: Path, segment: int) -> bytes:
    """Give a sharded skeleton, decompressed, as cloud-volume finds it."""
    skeletons = CloudVolume(f"file://{path}", progress=False).skeleton
    found: bytes = skeletons.reader.get_data(segment, skeletons.path)
    return found


def reshard_skeletons(path: Path, target: Path, how: Json) -> None:
    """Write the skeletons of *path* again, under large ids, with TensorStore."""
    skeletons = document(path)["skeletons"]
    (target / skeletons).mkdir(parents=True)
    shutil.copy(path / "info", target)
    info = document(path / skeletons) | {"sharding": how}
    (target / skeletons / "info").write_text(json.dumps(info))
    values = [skeleton_bytes(path, segment) for segment in IDS]
    write_shards(target / skeletons, how, dict(zip(LARGE_IDS, values * 2, strict=True)))
