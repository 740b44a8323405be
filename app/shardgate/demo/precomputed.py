"""The tissue as Neuroglancer's precomputed format: voxels, meshes, skeletons, annotations."""

import json
import shutil
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tensorstore
from neuroglancer import CoordinateSpace
from neuroglancer.write_annotations import AnnotationWriter

from shardgate.demo.meshes import BITS, Mesh, encode, surface
from shardgate.demo.tissue import NANOMETERS, STEPS, Tissue, tissue

_CHUNK: Final = (32, 32, 32)
# Voxels along x, y and z from one point of the finest level of a mesh to the next.
_MESH_STEP: Final = (4, 4, 2)
_VOXEL_NM: Final = tuple(step * NANOMETERS for step in reversed(STEPS))
_IDENTITY: Final = [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0]
_KINDS: Final = ("axon", "dendrite")
_ONE_SHARD: Final = {
    "@type": "neuroglancer_uint64_sharded_v1",
    "hash": "identity",
    "preshift_bits": 0,
    "minishard_bits": 0,
    "shard_bits": 0,
    "minishard_index_encoding": "raw",
    "data_encoding": "raw",
}
_CHUNKS: Final = _ONE_SHARD | {
    "preshift_bits": 3,  # eight neighbours a minishard
    "minishard_bits": 1,
    "shard_bits": 2,
    "minishard_index_encoding": "gzip",
    "data_encoding": "gzip",
}
_MESHES: Final = {
    "@type": "neuroglancer_multilod_draco",
    "vertex_quantization_bits": BITS,
    "transform": _IDENTITY,
    "lod_scale_multiplier": 1,
    "sharding": _ONE_SHARD,
}
_SKELETONS: Final = {
    "@type": "neuroglancer_skeletons",
    "transform": _IDENTITY,
    "vertex_attributes": [{"id": "radius", "data_type": "float32", "num_components": 1}],
    "sharding": _ONE_SHARD,
}

type Values = Mapping[int, tuple[bytes, bytes]]
"""By id, bytes that have no entry in the index of a shard, and the value, which follows them."""


def write(path: Path) -> None:
    """Write a segmentation, and in its folder the image, the meshes, and all that belongs to it."""
    block = tissue()
    labels = [block.labels[::step, ::step, ::step] for step in (1, 2, 4)]
    _write_volume(path, "segmentation", labels)
    _write_volume(path / "em", "image", block.greys)
    numbers = range(1, len(block.trees) + 1)
    _write_shard(path / "mesh", {each: _mesh(block, each) for each in numbers}, _MESHES)
    skeletons = {each: (b"", _skeleton(block, each)) for each in numbers}
    _write_shard(path / "skeletons", skeletons, _SKELETONS)
    (path / "properties").mkdir()
    _write_json(path / "properties/info", _properties(block))
    _write_synapses(path / "synapses", block)
    info = json.loads((path / "info").read_text())
    parts = {"mesh": "mesh", "skeletons": "skeletons", "segment_properties": "properties"}
    _write_json(path / "info", info | parts)


def _write_volume(path: Path, kind: str, levels: Sequence[npt.NDArray[Any]]) -> None:
    """Write *levels*, whose axes are z, y and x, finest first, by TensorStore."""
    data_type = "uint8"
    encoding: dict[str, Any] = {"encoding": "jpeg", "jpeg_quality": 80}
    if kind == "segmentation":
        data_type = "uint64"
        encoding = {
            "encoding": "compressed_segmentation",
            "compressed_segmentation_block_size": [8, 8, 8],
        }
    for level, values in enumerate(levels):
        spec = {
            "driver": "neuroglancer_precomputed",
            "kvstore": {"driver": "file", "path": f"{path.absolute()}/"},
            "multiscale_metadata": {"type": kind, "data_type": data_type, "num_channels": 1},
            "scale_metadata": {
                "size": values.T.shape,
                "resolution": [nm * 2**level for nm in _VOXEL_NM],
                "chunk_size": _CHUNK,
                "sharding": _CHUNKS,
                **encoding,
            },
        }
        with tensorstore.Transaction() as transaction:  # writes each shard once
            volume = tensorstore.open(spec, open=True, create=True, transaction=transaction)
            volume.result()[..., 0] = values.T.astype(data_type)


def _mesh(block: Tissue, segment: int) -> tuple[bytes, bytes]:
    """Encode the surface of a segment, in nanometers from the block's corner."""
    grid = block.labels.T[tuple(slice(0, None, step) for step in _MESH_STEP)]
    rows = np.argwhere(grid == segment)
    start = rows.min(axis=0)
    mask = grid[tuple(map(slice, start, rows.max(axis=0) + 1))] == segment
    extent = np.array(block.labels.T.shape)
    levels = []
    for every in (1, 2):  # the levels
        mesh = surface(mask[::every, ::every, ::every])
        voxels = (mesh.points * every + start) * _MESH_STEP + 0.5
        levels.append(Mesh(voxels.clip(0, extent) * _VOXEL_NM, mesh.triangles))
    return encode(levels, extent * _VOXEL_NM)


def _skeleton(block: Tissue, segment: int) -> bytes:
    """Encode points of a tree that lie in its segment, edges, and radii, in nanometers."""
    tree = block.trees[segment - 1]
    voxels = (tree.points / STEPS).astype(int).clip(max=np.array(block.labels.shape) - 1)
    is_inside = block.labels[tuple(voxels.T)] == segment
    steps = np.stack((tree.parents, np.arange(len(tree.points))), axis=1)[1:]
    numbers = np.cumsum(is_inside) - 1
    edges = numbers[steps[is_inside[steps].all(axis=1)]].astype("<u4")
    points = (tree.points[is_inside, ::-1] * NANOMETERS).astype("<f4")
    radii = (tree.radii[is_inside] * NANOMETERS).astype("<f4")
    counts = struct.pack("<II", len(points), len(edges))
    return b"".join((counts, points.tobytes(), edges.tobytes(), radii.tobytes()))


def _properties(block: Tissue) -> dict[str, Any]:
    """Return names and kinds of the segments, the largest ones first."""
    voxels = np.bincount(block.labels.ravel(), minlength=len(block.trees) + 1)
    order = [int(segment) for segment in np.argsort(-voxels[1:], kind="stable") + 1]
    kinds = [int(block.trees[segment - 1].is_dendrite) for segment in order]
    names = [f"{_KINDS[kind]} {number}" for kind, number in zip(kinds, order, strict=True)]
    properties: list[dict[str, Any]] = [
        {"id": "label", "type": "label", "values": names},
        {"id": "kind", "type": "tags", "tags": _KINDS, "values": [[kind] for kind in kinds]},
    ]
    inline = {"ids": [str(segment) for segment in order], "properties": properties}
    return {"@type": "neuroglancer_segment_properties", "inline": inline}


def _write_synapses(path: Path, block: Tissue) -> None:
    """Write lines from axons to dendrites, by id, by segment, and in the cell of all."""
    space = CoordinateSpace(names=("x", "y", "z"), units="nm", scales=_VOXEL_NM)
    writer = AnnotationWriter(space, "line", ("presynaptic", "postsynaptic"))
    for ends in block.synapses:
        axon, dendrite = block.labels[tuple(ends.T)].tolist()
        start, stop = ends[:, ::-1] + np.array([[-3.5, 0.5, 0.5], [4.5, 0.5, 0.5]])
        writer.add_line(start, stop, presynaptic=axon, postsynaptic=dendrite)
    writer.write(path)
    # The library writes one file for each value, which belong into shards.
    info = json.loads((path / "info").read_text())
    for index in (info["by_id"], *info["relationships"], *info["spatial"]):
        folder = path / index["key"]
        # The cell 0_0_0 has the number 0.
        files = {int(file.name.partition("_")[0]): file for file in folder.iterdir()}
        values = {number: (b"", file.read_bytes()) for number, file in files.items()}
        shutil.rmtree(folder)
        _write_shard(folder, values)
        index["sharding"] = _ONE_SHARD
    _write_json(path / "info", info)


def _write_shard(path: Path, values: Values, info: Mapping[str, Any] | None = None) -> None:
    """Write *values* into one shard of one minishard, beside an *info*."""
    rows = []
    data = bytearray()
    last_number = 0
    for number, (before, value) in sorted(values.items()):
        rows.append((number - last_number, len(before), len(value)))
        data += before + value
        last_number = number
    index = np.array(rows, "<u8").T.tobytes()
    path.mkdir(parents=True)
    table = struct.pack("<QQ", len(data), len(data) + len(index))
    (path / "0.shard").write_bytes(table + data + index)
    if info is not None:
        _write_json(path / "info", info)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value))
