"""The tissue as Neuroglancer's precomputed format: voxels, meshes, skeletons, annotations."""

import gzip
import json
import struct
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tensorstore

from shardgate.demo.meshes import BITS, Mesh, encode, surface
from shardgate.demo.tissue import NANOMETERS, STEPS, Synapses, Tissue, tissue

_CHUNK: Final = (32, 32, 32)
_MESH_STEPS: Final = ((4, 4, 2), (8, 8, 4))
"""Voxels along x, y and z from one point of a grid to the next, for each level of detail."""
_FRAGMENT_NM: Final = 2560.0
_VOXEL_NM: Final = tuple(step * NANOMETERS for step in reversed(STEPS))
_IDENTITY: Final = [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0]
_RELATIONS: Final = ("presynaptic", "postsynaptic")


def _sharding(preshift: int, minishard: int, shard: int, data: str = "raw") -> dict[str, Any]:
    """Return the member `sharding` of an `info`, for ids that are not hashed."""
    return {
        "@type": "neuroglancer_uint64_sharded_v1",
        "hash": "identity",
        "preshift_bits": preshift,
        "minishard_bits": minishard,
        "shard_bits": shard,
        "minishard_index_encoding": "gzip",
        "data_encoding": data,
    }


_CHUNKS: Final = _sharding(3, 1, 2, "gzip")
"""Eight neighbours a minishard, two minishards a shard."""
_OBJECTS: Final = _sharding(1, 2, 2)

_MESHES: Final = {
    "@type": "neuroglancer_multilod_draco",
    "vertex_quantization_bits": BITS,
    "transform": _IDENTITY,
    "lod_scale_multiplier": 1,
}
_SKELETONS: Final = {
    "@type": "neuroglancer_skeletons",
    "transform": _IDENTITY,
    "vertex_attributes": [{"id": "radius", "data_type": "float32", "num_components": 1}],
}

type Values = Mapping[int, tuple[bytes, bytes]]
"""By id, bytes that have no entry in the index of a shard, and the value, which follows them."""


def write(path: Path) -> None:
    """Write a segmentation, and in its folder the image, the meshes, and all that belongs to it."""
    block = tissue()
    labels = [block.labels, block.coarse_labels, block.coarse_labels[::2, ::2, ::2]]
    _write_volume(path, "segmentation", labels)
    _write_volume(path / "em", "image", block.greys)
    _write_meshes(path / "mesh", block)
    skeletons = {n: (b"", _skeleton(block, n)) for n in range(1, len(block.trees) + 1)}
    _write_shards(path / "skeletons", skeletons, _SKELETONS)
    _write_properties(path / "properties", block)
    _write_synapses(path / "synapses", block.synapses, block.labels.T.shape)
    parts = {name: name for name in ("mesh", "skeletons")} | {"segment_properties": "properties"}
    info = path / "info"
    info.write_text(json.dumps(json.loads(info.read_text()) | parts))


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


def _write_meshes(path: Path, block: Tissue) -> None:
    grids = [(step, block.labels.T[tuple(slice(0, None, n) for n in step)]) for step in _MESH_STEPS]
    meshes = {}
    for segment in range(1, len(block.trees) + 1):
        levels = [_mesh(labels == segment, step) for step, labels in grids]
        meshes[segment] = encode(levels, [_FRAGMENT_NM] * 3)
    _write_shards(path, meshes, _MESHES)


def _mesh(mask: npt.NDArray[np.bool_], step: Sequence[int]) -> Mesh:
    """Return the surface of *mask*, with axes x, y and z, in nanometers from the block's corner."""
    box = []
    for axis in range(mask.ndim):
        others = tuple(each for each in range(mask.ndim) if each != axis)
        (rows,) = mask.any(axis=others).nonzero()
        start = rows.min(initial=mask.shape[axis])
        box.append(slice(start, max(rows.max(initial=0) + 1, start)))
    mesh = surface(mask[tuple(box)])
    points = (mesh.points + [each.start for each in box]) * np.array(step) + 0.5
    most = np.array(mask.shape) * step
    return Mesh(points.clip(0, most) * _VOXEL_NM, mesh.triangles)


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


def _write_properties(path: Path, block: Tissue) -> None:
    """Write names, kinds and sizes of the segments, the largest ones first."""
    voxels = np.bincount(block.labels.ravel(), minlength=len(block.trees) + 1)
    order = [int(segment) for segment in np.argsort(-voxels[1:], kind="stable") + 1]
    kinds = [int(block.trees[segment - 1].is_dendrite) for segment in order]
    names = ("axon", "dendrite")
    properties: list[dict[str, Any]] = [
        {
            "id": "label",
            "type": "label",
            "values": [f"{names[kind]} {n}" for kind, n in zip(kinds, order, strict=True)],
        },
        {"id": "kind", "type": "tags", "tags": names, "values": [[kind] for kind in kinds]},
        {
            "id": "voxels",
            "type": "number",
            "data_type": "uint32",
            "values": [int(voxels[segment]) for segment in order],
        },
    ]
    inline = {"ids": [str(segment) for segment in order], "properties": properties}
    path.mkdir()
    document = {"@type": "neuroglancer_segment_properties", "inline": inline}
    (path / "info").write_text(json.dumps(document))


def _write_synapses(path: Path, synapses: Synapses, extent: Sequence[int]) -> None:
    """Write lines from axons to dendrites, by id, by segment, and in the cell of all."""
    across = np.array([4, 0, 0])
    starts, ends = synapses.before[:, ::-1] - across, synapses.after[:, ::-1] + across
    count = len(starts)
    lines = np.concatenate((starts, ends), axis=1).astype("<f4") + np.float32(0.5)
    related = synapses.segments.astype("<u8")
    one = np.uint32(1).tobytes()
    by_id = {
        number: (b"", line.tobytes() + b"".join(one + segment.tobytes() for segment in segments))
        for number, (line, segments) in enumerate(zip(lines, related, strict=True))
    }
    _write_shards(path / "by_id", by_id)
    for name, keys in zip(_RELATIONS, related.T, strict=True):
        _write_shards(path / f"by_{name}", _grouped(lines, keys))
    _write_shards(path / "spatial0", _grouped(lines, np.zeros(count)))
    info = {
        "@type": "neuroglancer_annotations_v1",
        "dimensions": {axis: [nm * 1e-9, "m"] for axis, nm in zip("xyz", _VOXEL_NM, strict=True)},
        "lower_bound": [0, 0, 0],
        "upper_bound": extent,
        "annotation_type": "line",
        "properties": [],
        "relationships": [
            {"id": name, "key": f"by_{name}", "sharding": _OBJECTS} for name in _RELATIONS
        ],
        "by_id": {"key": "by_id", "sharding": _OBJECTS},
        "spatial": [
            {
                "key": "spatial0",
                "grid_shape": [1, 1, 1],
                "chunk_size": extent,
                "limit": count,
                "sharding": _OBJECTS,
            }
        ],
    }
    (path / "info").write_text(json.dumps(info))


def _grouped(lines: npt.NDArray[np.float32], keys: npt.NDArray[Any]) -> Values:
    """Encode the lines of each key, with their numbers."""
    values = {}
    for key in np.unique(keys):
        (rows,) = np.nonzero(keys == key)
        numbers = rows.astype("<u8")
        count = np.uint64(len(rows)).tobytes()
        values[int(key)] = (b"", count + lines[rows].tobytes() + numbers.tobytes())
    return values


def _write_shards(path: Path, values: Values, info: dict[str, Any] | None = None) -> None:
    """Write *values* into the files of the shards that `_OBJECTS` describes, beside an *info*."""
    path.mkdir(parents=True)
    if info is not None:
        (path / "info").write_text(json.dumps(info | {"sharding": _OBJECTS}))
    minishards = 2 ** _OBJECTS["minishard_bits"]
    shards = 2 ** _OBJECTS["shard_bits"]

    def place(key: int) -> tuple[int, int, int]:
        """Return shard, minishard and id: the order of values in files."""
        number = key >> _OBJECTS["preshift_bits"]
        return number // minishards % shards, number % minishards, key

    for shard, keys in groupby(sorted(values, key=place), lambda key: place(key)[0]):
        data, indexes = bytearray(), {}
        for minishard, members in groupby(keys, lambda key: place(key)[1]):
            rows, last_key, end = [], 0, 0
            for key in members:
                before, value = values[key]
                data += before
                rows.append((key - last_key, len(data) - end, len(value)))
                data += value
                last_key, end = key, len(data)
            indexes[minishard] = gzip.compress(np.array(rows, "<u8").T.tobytes(), mtime=0)
        table = np.zeros((minishards, 2), "<u8")
        for minishard, index in indexes.items():
            table[minishard] = len(data), len(data) + len(index)
            data += index
        (path / f"{shard:x}.shard").write_bytes(table.tobytes() + data)
