"""Meshes, skeletons and annotations written by real libraries."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.support.clients.precomputed.volumes import (
    MURMUR,
    Scale,
    Volume,
    by_cloudvolume,
    document,
    run,
    sharding,
    write_shards,
)
from tests.support.clients.writing import Json, Values
from tests.support.deferred import Deferred
from tests.support.formats.neuroglancer_precomputed.shards import morton
from tests.support.zipped import zipped

cloudvolume: Any = Deferred("cloudvolume")
cloud_shards: Any = Deferred("cloudvolume.datasource.precomputed.sharding")
tasks: Any = Deferred("igneous.task_creation")
neuroglancer: Any = Deferred("neuroglancer")
annotations: Any = Deferred("neuroglancer.write_annotations")

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
    """Return a ball and two boxes, one of which has a mesh with a single level of detail."""
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
    meshing = {"num_lod": 2, "min_chunk_size": (4, 4, 4), "mesh_dir": "mesh", "min_shards": 2}
    run(tasks.create_sharded_multires_mesh_tasks(url, progress=False, **meshing))
    forging = {"mip": 0, "shape": (EDGE,) * 3, "sharded": True, "dust_threshold": 0}
    teasar = {"scale": 2, "const": 20}
    run(tasks.create_skeletonizing_tasks(url, teasar_params=teasar, **forging))
    merging = {"dust_threshold": 0, "tick_threshold": 0, "min_shards": 2}
    run(tasks.create_sharded_skeleton_merge_tasks(url, **merging))
    _write_properties(path)


def write_legacy(path: Path) -> None:
    """Write a segmentation that is not sharded, with meshes in the older form."""
    _write_labels(path, sharded=False)
    url = f"file://{path}"
    _forge_meshes(url, sharded=False)
    run(tasks.create_mesh_manifest_tasks(url, magnitude=1, mesh_dir="mesh"))
    _write_properties(path)


def number_fragments(path: Path, how: Json) -> dict[int, bytes]:
    """Move the fragments of older meshes into shards, under numbers that the manifests then name.

    Return the fragments by their numbers.
    """
    fragments = dict[int, bytes]()
    for manifest in sorted((path / "mesh").glob("*:0")):
        files = [manifest.with_name(name) for name in json.loads(manifest.read_text())["fragments"]]
        numbers = range(12345 + len(fragments), 12345 + len(fragments) + len(files))
        for number, file in zip(numbers, files, strict=True):
            fragments[number] = file.read_bytes()
            file.unlink()
        manifest.write_text(json.dumps({"fragments": list(map(str, numbers))}))
    write_shards(path / "mesh", how, fragments)
    info = document(path / "mesh")
    (path / "mesh/info").write_text(json.dumps(info | {"sharding": how}))
    return fragments


def _write_labels(path: Path, *, sharded: bool) -> None:
    scale = Scale(labels(), sharding((0, 1, 2), index="gzip", data="gzip"), chunk=(20, 20, 20))
    by_cloudvolume(Volume("", by_cloudvolume, [scale], "segmentation"), path, sharded)


def _forge_meshes(url: str, *, sharded: bool) -> None:
    edge = EDGE if sharded else EDGE // 2
    options = {"mesh_dir": "mesh", "compress": None, "simplification": False, "dust_threshold": 0}
    run(tasks.create_meshing_tasks(url, 0, shape=(edge,) * 3, sharded=sharded, **options))


def _write_properties(path: Path) -> None:
    """Write names of the segments, in a kind of document that is never sharded."""
    (path / "properties").mkdir()
    names = {"id": "label", "type": "label", "values": ["ball", "plate", "bar"]}
    properties = {"ids": list(map(str, IDS)), "properties": [names]}
    found = {"@type": "neuroglancer_segment_properties", "inline": properties}
    (path / "properties/info").write_text(json.dumps(found))
    info = document(path) | {"segment_properties": "properties"}
    (path / "info").write_text(json.dumps(info))


def compress_manifests(path: Path, target: Path) -> None:
    """Write the meshes of *path* again by cloud-volume, with gzip-compressed manifests.

    By the specification, the fragments before a manifest are not compressed with it.
    """
    shutil.copytree(path, target)
    meshes = {segment: mesh_parts(path, segment) for segment in IDS}
    info = document(target / "mesh")
    manifests = {segment: zipped(manifest) for segment, (manifest, _) in meshes.items()}
    shards = cloud_shards.synthesize_shard_files(
        cloud_shards.ShardingSpecification.from_dict(info["sharding"]),
        {segment: meshes[segment][1] + manifests[segment] for segment in IDS},
        {segment: len(manifests[segment]) for segment in IDS},
    )
    for name, data in shards.items():
        (target / "mesh" / name).write_bytes(data)
    info["sharding"]["data_encoding"] = "gzip"
    (target / "mesh/info").write_text(json.dumps(info))


def mesh_parts(path: Path, segment: int) -> tuple[bytes, bytes]:
    """Return a sharded mesh's manifest and the fragments before it, as cloud-volume finds them."""
    mesh = cloudvolume.CloudVolume(f"file://{path}", progress=False).mesh
    manifest = mesh.get_manifest(segment)
    size = sum(int(np.sum(sizes)) for sizes in manifest.fragment_offsets)
    shard = (path / "mesh" / Path(manifest.path).name).read_bytes()
    start = int(manifest.shard_offset)
    return mesh.reader.get_data(segment, mesh.path), shard[start - size : start]


def skeleton_bytes(path: Path, segment: int) -> bytes:
    """Return a sharded skeleton, decompressed, as cloud-volume finds it."""
    skeletons = cloudvolume.CloudVolume(f"file://{path}", progress=False).skeleton
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


type Cell = tuple[int, ...]

BOUND: Final = 60.0
"""All coordinates lie in [0, BOUND]."""
COUNT: Final = 40
LAST_ID: Final = 2**64 - 1
SEGMENTS: Final = (3, 2**40, 2**64 - 2)


@dataclass(frozen=True, slots=True)
class Collection:
    """Annotations of one type; they are the same each time."""

    kind: str
    rank: int
    relationships: Sequence[str]
    grids: Sequence[Cell]
    """The cells of each spatial level."""
    how: Callable[[str], Json | None]
    """Sharding of the folder of that name; `None` for no shards."""


def _murmur(folder: str) -> Json:
    bits = (0, 1, 1) if folder.startswith("spatial") else (0, 2, 3)
    return sharding(bits, MURMUR, index="gzip", data="gzip")


def _all_64_bits(_: str) -> Json:
    return sharding((1, 2, 61))


def _each_its_own(folder: str) -> Json | None:
    table = {
        "by_id": sharding((0, 0, 0), MURMUR, data="gzip"),
        "rel_cells": sharding((3, 1, 2), index="gzip"),
        "rel_synapses": None,
        "spatial0": None,
        "spatial1": sharding((0, 1, 3)),
    }
    return table.get(folder, sharding((1, 1, 2), data="gzip"))


COLLECTIONS: Final = {
    "points": Collection("point", 3, ["cells"], [(1, 1, 1), (2, 1, 2), (3, 2, 5)], _murmur),
    "lines": Collection("line", 2, [], [(1, 1), (4, 3)], _all_64_bits),
    "boxes": Collection(
        "axis_aligned_bounding_box",
        3,
        ["cells", "synapses"],
        [(1, 1, 1), (2, 2, 2), (5, 3, 2)],
        _each_its_own,
    ),
}


def write_annotations(collection: Collection, path: Path, twin: Path) -> None:
    """Write *collection* unsharded to *twin*, and in shards to *path*."""
    _write_unsharded(collection, twin)
    shard_annotations(twin, path, collection.how)


def shard_annotations(twin: Path, path: Path, sharding_of: Callable[[str], Json | None]) -> None:
    """Write the annotations at *twin* into shards at *path*, except folders without sharding."""
    info = document(twin)
    path.mkdir(parents=True)
    for part in (info["by_id"], *info["relationships"], *info["spatial"]):
        folder, how = part["key"], sharding_of(part["key"])
        if how is None:
            shutil.copytree(twin / folder, path / folder)
            continue
        part["sharding"] = how
        (path / folder).mkdir()
        write_shards(path / folder, how, _by_chunk_id(twin / folder, part.get("grid_shape")))
    (path / "info").write_text(json.dumps(info))


def _by_chunk_id(folder: Path, grid: Sequence[int] | None) -> Mapping[int, bytes]:
    values = {file.name: file.read_bytes() for file in folder.iterdir()}
    if grid is None:
        return {int(name): value for name, value in values.items()}
    return {
        morton(tuple(map(int, name.split("_"))), tuple(grid)): value
        for name, value in values.items()
    }


def _write_unsharded(collection: Collection, path: Path) -> None:
    everything = range(COUNT)
    _written(collection, everything, path)
    info = document(path)
    shutil.rmtree(path / "spatial0")
    info["lower_bound"] = [0.0] * collection.rank
    info["upper_bound"] = [BOUND] * collection.rank
    info["spatial"] = []
    for level, grid in enumerate(collection.grids):
        folder = f"spatial{level}"
        (path / folder).mkdir()
        size = [BOUND / cells for cells in grid]
        part = {"key": folder, "grid_shape": grid, "chunk_size": size, "limit": COUNT}
        info["spatial"].append(part)
        chosen = everything[level :: len(collection.grids)]
        for cell in product(*map(range, grid)):
            inside = [n for n in chosen if _cell_of(_start(collection, n), size) == cell]
            if inside:
                _written(collection, inside, path / "cell")
                name = "_".join(map(str, cell))
                next((path / "cell/spatial0").iterdir()).rename(path / folder / name)
                shutil.rmtree(path / "cell")
    (path / "info").write_text(json.dumps(info))


def _written(collection: Collection, numbers: Sequence[int], path: Path) -> None:
    """Write the annotations *numbers* with the package's writer."""
    names = ["x", "y", "z"][: collection.rank]
    space = neuroglancer.CoordinateSpace(
        names=names, units=["nm"] * len(names), scales=[1] * len(names)
    )
    writer = annotations.AnnotationWriter(
        space,
        collection.kind,
        relationships=collection.relationships,
        properties=[
            neuroglancer.AnnotationPropertySpec(id="size", type="float32"),
            neuroglancer.AnnotationPropertySpec(id="colour", type="rgb"),
        ],
    )
    add: Any = getattr(writer, f"add_{collection.kind}")
    for n in numbers:
        start = _start(collection, n)
        ends = [start] if collection.kind == "point" else [start, [c + 1.5 for c in start]]
        related = {name: list(SEGMENTS[: n % 4]) for name in collection.relationships}
        add(*ends, id=_id(n), size=n / 4, colour=(n, 5, 250), **related)
    writer.write(path)


def _id(number: int) -> int:
    return LAST_ID if number == 0 else number**5


def _start(collection: Collection, number: int) -> list[float]:
    random = np.random.default_rng(number)
    return [float(c) for c in random.integers(0, int(BOUND), collection.rank)]


def _cell_of(point: Sequence[float], size: Sequence[float]) -> Cell:
    return tuple(int(c // s) for c, s in zip(point, size, strict=True))
