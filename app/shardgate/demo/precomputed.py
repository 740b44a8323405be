"""The tissue as Neuroglancer's precomputed format: voxels, meshes, skeletons, annotations."""

import gzip
import json
import struct
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorstore

from shardgate.demo.grids import halved
from shardgate.demo.meshes import BITS, Mesh, encode, surface
from shardgate.demo.tissue import NANOMETERS, STEPS, Synapses, Tissue, Tree, tissue

_CHUNK: Final = (32, 32, 32)
_LEVELS: Final = 3
_MESH_STEPS: Final = ((4, 4, 2), (8, 8, 4))
"""Voxels along x, y and z from one point of a grid to the next, for each level of detail."""
_FRAGMENT_NM: Final = 2560.0
_VOXEL_NM: Final = tuple(step * NANOMETERS for step in reversed(STEPS))
_IDENTITY: Final = [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0]
_RELATIONS: Final = ("presynaptic", "postsynaptic")
_NOWHERE: Final = -1
_QUALITIES: Final = {"jpeg_quality": 80}


class _Sharding(NamedTuple):
    """Bits of an id: the lowest ones are ignored, the next ones are the minishard, then the
    shard.
    """

    preshift: int
    minishard: int
    shard: int
    is_compressed: bool = False

    @property
    def document(self) -> dict[str, Any]:
        """The member `sharding` of an `info`."""
        return {
            "@type": "neuroglancer_uint64_sharded_v1",
            "hash": "identity",
            "preshift_bits": self.preshift,
            "minishard_bits": self.minishard,
            "shard_bits": self.shard,
            "minishard_index_encoding": "gzip",
            "data_encoding": "gzip" if self.is_compressed else "raw",
        }


_VOXELS: Final = _Sharding(3, 1, 2, is_compressed=True)
"""Eight neighbours a minishard, two minishards a shard."""
_OBJECTS: Final = _Sharding(1, 2, 2)
_CELLS: Final = _Sharding(0, 1, 1)


class Value(NamedTuple):
    """A value in a shard, and bytes before it that have no entry of their own."""

    data: bytes
    before: bytes = b""


def write(path: Path) -> None:
    """Write a segmentation, and in its folder the image, the meshes, and all that belongs to it."""
    block = tissue()
    segments = [*range(1, len(block.trees) + 1)]
    _write_volume(path, "segmentation", _label_levels(block))
    _write_volume(path / "em", "image", _image_levels(block))
    _write_meshes(path / "mesh", block, segments)
    skeletons = {n: Value(_skeleton(tree)) for n, tree in enumerate(block.trees, 1)}
    _write_objects(path / "skeletons", _SKELETONS, skeletons)
    _write_properties(path / "properties", block)
    _write_synapses(path / "synapses", block.synapses)
    parts = {name: name for name in ("mesh", "skeletons")} | {"segment_properties": "properties"}
    info = path / "info"
    info.write_text(json.dumps(json.loads(info.read_text()) | parts))


def _label_levels(block: Tissue) -> list[npt.NDArray[Any]]:
    """Return the segments on every voxel, every second and every fourth one."""
    return [block.labels, block.coarse_labels, block.coarse_labels[::2, ::2, ::2]]


def _image_levels(block: Tissue) -> list[npt.NDArray[Any]]:
    levels: list[npt.NDArray[Any]] = [block.grey]
    while len(levels) < _LEVELS:
        levels.append(halved(levels[-1], range(3)))
    return levels


def _write_volume(path: Path, kind: str, levels: Sequence[npt.NDArray[Any]]) -> None:
    """Write *levels*, whose axes are z, y and x, finest first, by TensorStore."""
    encoding = (
        {"encoding": "jpeg", **_QUALITIES}
        if kind == "image"
        else {
            "encoding": "compressed_segmentation",
            "compressed_segmentation_block_size": [8, 8, 8],
        }
    )
    data_type = "uint8" if kind == "image" else "uint64"
    for level, values in enumerate(levels):
        spec = {
            "driver": "neuroglancer_precomputed",
            "kvstore": {"driver": "file", "path": f"{path.absolute()}/"},
            "multiscale_metadata": {"type": kind, "data_type": data_type, "num_channels": 1},
            "scale_metadata": {
                "size": values.T.shape,
                "resolution": [nm * 2**level for nm in _VOXEL_NM],
                "chunk_size": _CHUNK,
                "sharding": _VOXELS.document,
                **encoding,
            },
        }
        with tensorstore.Transaction() as transaction:  # writes each shard once
            volume = tensorstore.open(spec, open=True, create=True, transaction=transaction)
            volume.result()[..., 0] = values.T.astype(data_type)


def _write_meshes(path: Path, block: Tissue, segments: Sequence[int]) -> None:
    info = {
        "@type": "neuroglancer_multilod_draco",
        "vertex_quantization_bits": BITS,
        "transform": _IDENTITY,
        "lod_scale_multiplier": 1,
    }
    grids = [(step, block.labels.T[tuple(slice(0, None, n) for n in step)]) for step in _MESH_STEPS]
    meshes = {}
    for segment in segments:
        levels = [_mesh(labels == segment, step) for step, labels in grids]
        meshes[segment] = Value(*encode(levels, [_FRAGMENT_NM] * 3))
    _write_objects(path, info, meshes)


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


_SKELETONS: Final = {
    "@type": "neuroglancer_skeletons",
    "transform": _IDENTITY,
    "vertex_attributes": [{"id": "radius", "data_type": "float32", "num_components": 1}],
}


def _skeleton(tree: Tree) -> bytes:
    """Encode the points of a tree, its edges, and the radius at each point, in nanometers."""
    children = np.arange(1, len(tree.points), dtype="<u4")
    edges = np.stack((tree.parents[1:].astype("<u4"), children), axis=1)
    points = (tree.points[:, ::-1] * NANOMETERS).astype("<f4")
    radii = (tree.radii * NANOMETERS).astype("<f4")
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


def _write_synapses(path: Path, synapses: Synapses) -> None:
    """Write lines from axons to dendrites, by id, by segment, and in cells of two levels."""
    starts, ends = (
        rows[:, ::-1] + np.float32(0.5) + offset
        for rows, offset in ((synapses.before, (-4, 0, 0)), (synapses.after, (4, 0, 0)))
    )
    size = np.linspace(20, 90, len(starts)).astype("<f4")
    lines = np.concatenate((starts, ends, size[:, np.newaxis]), axis=1).astype("<f4")
    count = len(lines)
    related = synapses.segments.astype("<u8")
    one = np.uint32(1).tobytes()
    by_id = {
        n: Value(lines[n].tobytes() + b"".join(one + segment.tobytes() for segment in related[n]))
        for n in range(count)
    }
    by_segment = {
        f"by_{name}": (_grouped(lines, column), _OBJECTS)
        for name, column in zip(_RELATIONS, related.T, strict=True)
    }
    extent = np.array(tissue().grey.T.shape)
    half = (starts >= extent / 2) @ (1, 2, 4)
    is_first = np.arange(count) % 4 == 0  # shown from afar
    by_cell = {
        "spatial0": (_grouped(lines, np.where(is_first, 0, _NOWHERE)), _CELLS),
        "spatial1": (_grouped(lines, np.where(is_first, _NOWHERE, half)), _CELLS),
    }
    tables = {"by_id": (by_id, _OBJECTS)} | by_segment | by_cell
    for name, (values, sharding) in tables.items():
        _write_shards(path / name, sharding, values)
    info = {
        "@type": "neuroglancer_annotations_v1",
        "dimensions": {axis: [nm * 1e-9, "m"] for axis, nm in zip("xyz", _VOXEL_NM, strict=True)},
        "lower_bound": [0, 0, 0],
        "upper_bound": extent.tolist(),
        "annotation_type": "line",
        "properties": [{"id": "size", "type": "float32", "description": "nanometers"}],
        "relationships": [
            {"id": name, "key": f"by_{name}", "sharding": _OBJECTS.document} for name in _RELATIONS
        ],
        "by_id": {"key": "by_id", "sharding": _OBJECTS.document},
        "spatial": [
            {
                "key": f"spatial{level}",
                "grid_shape": [2**level] * 3,
                "chunk_size": (extent / 2**level).tolist(),
                "limit": count,
                "sharding": _CELLS.document,
            }
            for level in range(2)
        ],
    }
    (path / "info").write_text(json.dumps(info))


def _grouped(lines: npt.NDArray[np.float32], keys: npt.NDArray[Any]) -> dict[int, Value]:
    """Encode the lines of each key, but of `_NOWHERE`, with their numbers."""
    values = {}
    for key in {*keys.tolist()} - {_NOWHERE}:
        (rows,) = np.nonzero(keys == key)
        count = np.uint64(len(rows)).tobytes()
        values[int(key)] = Value(count + lines[rows].tobytes() + rows.astype("<u8").tobytes())
    return values


def _write_objects(path: Path, info: dict[str, Any], values: Mapping[int, Value]) -> None:
    _write_shards(path, _OBJECTS, values)
    (path / "info").write_text(json.dumps(info | {"sharding": _OBJECTS.document}))


def _write_shards(path: Path, sharding: _Sharding, values: Mapping[int, Value]) -> None:
    """Write *values* by their ids into the files of the shards."""
    path.mkdir(parents=True, exist_ok=True)
    places = {}
    for key in values:
        minishard = key >> sharding.preshift
        shard = minishard >> sharding.minishard
        places[key] = (shard % 2**sharding.shard, minishard % 2**sharding.minishard, key)
    ordered = sorted(values, key=places.__getitem__)
    for shard, keys in groupby(ordered, lambda key: places[key][0]):
        data, indexes = bytearray(), {}
        for minishard, members in groupby(keys, lambda key: places[key][1]):
            rows, known = [], (0, 0)
            for key in members:
                data += values[key].before
                value = values[key].data
                rows.append((key - known[0], len(data) - known[1], len(value)))
                data += value
                known = (key, len(data))
            indexes[minishard] = gzip.compress(np.array(rows, "<u8").T.tobytes(), mtime=0)
        table = np.zeros((2**sharding.minishard, 2), "<u8")
        for minishard, index in indexes.items():
            table[minishard] = len(data), len(data) + len(index)
            data += index
        digits = -(-sharding.shard // 4)
        (path / f"{shard:0{digits}x}.shard").write_bytes(table.tobytes() + data)
