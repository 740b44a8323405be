"""Precomputed volumes written by real libraries."""

import json
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import tensorstore

from tests.support.clients.writing import Json, Values, same
from tests.support.deferred import Deferred

cloudvolume: Any = Deferred("cloudvolume")
igneous_tasks: Any = Deferred("igneous.task_creation")

type Point = tuple[int, int, int]
type Bits = tuple[int, int, int]
"""Preshift, minishard and shard bits."""

IDENTITY: Final = "identity"
MURMUR: Final = "murmurhash3_x86_128"
LOSSY: Final = ("jpeg",)


def sharding(
    bits: Bits, hash_name: str = IDENTITY, *, index: str = "raw", data: str = "raw"
) -> Json:
    """Return a sharding specification; *index* and *data* are raw or gzip."""
    return {
        "@type": "neuroglancer_uint64_sharded_v1",
        "preshift_bits": bits[0],
        "hash": hash_name,
        "minishard_bits": bits[1],
        "shard_bits": bits[2],
        "minishard_index_encoding": index,
        "data_encoding": data,
    }


@dataclass(frozen=True, slots=True, eq=False)
class Scale:
    """One scale with known *values*, whose axes are x, y, z and channel."""

    values: Values
    sharding: Json | None
    chunk: Point = (4, 4, 4)
    encoding: str = "raw"
    offset: Point = (0, 0, 0)
    resolution: Point = (8, 8, 8)
    key: str | None = None
    """Folder of the scale; `None` for the default of writers, ``8_8_8``."""
    options: Json = field(default_factory=dict)
    """Members of the scale that belong to its encoding."""

    @property
    def path(self) -> str:
        """The folder of the chunks, relative to the volume."""
        return self.key or "_".join(map(str, self.resolution))

    @property
    def members(self) -> Json:
        """The members of the scale in ``info``, without its chunks and sharding."""
        shape = {"size": self.shape, "voxel_offset": self.offset, "resolution": self.resolution}
        return {"key": self.path, "encoding": self.encoding, **shape, **self.options}

    @property
    def shape(self) -> Point:
        """Voxels along x, y and z."""
        x, y, z, _ = self.values.shape
        return x, y, z

    def chunks(self) -> Iterator[tuple[str, tuple[slice, ...]]]:
        """Yield the name of each chunk in the grid, and its slices of *values*."""
        starts = [range(0, n, c) for n, c in zip(self.shape, self.chunk, strict=True)]
        for corner in product(*starts):
            stop = [min(a + c, n) for a, c, n in zip(corner, self.chunk, self.shape, strict=True)]
            ranges = [f"{a + o}-{b + o}" for a, b, o in zip(corner, stop, self.offset, strict=True)]
            yield "_".join(ranges), tuple(map(slice, corner, stop))


@dataclass(frozen=True, slots=True, eq=False)
class Volume:
    """A volume, its writer, and its path in the bucket: ``bits/identity_1_2_3``."""

    name: str
    write: "Writer"
    scales: Sequence[Scale]
    kind: str = "image"


type Writer = Callable[[Volume, Path, bool], None]


def write(volume: Volume, path: Path, twin: Path) -> None:
    """Write *volume* to *path*, and unsharded to *twin*; assert that both have its values."""
    for folder, sharded in ((path, True), (twin, False)):
        volume.write(volume, folder, sharded)
        for index, scale in enumerate(volume.scales):
            if scale.encoding not in LOSSY:
                same(read_tensorstore(f"file://{folder}/", index), scale.values)
    if volume.write is by_tensorstore:
        expected = [scale.sharding for scale in volume.scales]
        assert [scale.get("sharding") for scale in document(path)["scales"]] == expected


def by_tensorstore(volume: Volume, path: Path, sharded: bool) -> None:  # noqa: FBT001  # a Writer
    """Write with TensorStore, which skips chunks that are all zero."""
    for scale in volume.scales:
        metadata = scale.members | {"chunk_size": scale.chunk}
        if sharded and scale.sharding:
            metadata["sharding"] = scale.sharding
        spec = {
            "driver": "neuroglancer_precomputed",
            "kvstore": {"driver": "file", "path": f"{path}/", "file_io_sync": False},
            "multiscale_metadata": {
                "type": volume.kind,
                "data_type": scale.values.dtype.name,
                "num_channels": scale.values.shape[3],
            },
            "scale_metadata": metadata,
        }
        tensorstore.open(spec, open=True, create=True).result().write(scale.values).result()


def write_scale(scale: Scale, path: Path) -> None:
    """Write a volume of one scale with TensorStore."""
    by_tensorstore(Volume("", by_tensorstore, [scale]), path, sharded=True)


def read_tensorstore(url: str, scale: int = 0) -> Values:
    """Read all of a scale with TensorStore; *url* ends with a slash."""
    spec = {"driver": "neuroglancer_precomputed", "kvstore": url, "scale_index": scale}
    return np.asarray(tensorstore.open(spec).result().read().result())


def read_cloudvolume(url: str, scale: int = 0) -> Values:
    """Read all of a scale with cloud-volume, with zeros for absent chunks."""
    cloud = cloudvolume.CloudVolume(url, mip=scale, fill_missing=True, progress=False)
    return np.asarray(cloud[:])


def write_shards(path: Path, how: Json, values: Mapping[int, bytes]) -> None:
    """Write *values* by their ids into shards in the folder *path*, with TensorStore."""
    spec = {"driver": "neuroglancer_uint64_sharded", "base": f"file://{path}/", "metadata": how}
    transaction = tensorstore.Transaction()
    store = tensorstore.KvStore.open(spec).result().with_transaction(transaction)
    for key, value in values.items():
        store[struct.pack(">Q", key)] = value
    transaction.commit_sync()


def document(path: Path) -> Json:
    """Read the ``info`` of *path*."""
    found: Json = json.loads((path / "info").read_text())
    return found


MEMORY_TARGET: Final = 2000
"""Bytes of a shard that igneous plans for; with 300, two of its tasks write the same shard."""


def by_cloudvolume(volume: Volume, path: Path, sharded: bool) -> None:  # noqa: FBT001  # a Writer
    """Write with cloud-volume, a shard at a time, without chunks that are all zero."""
    first = volume.scales[0]
    info = cloudvolume.CloudVolume.create_new_info(
        num_channels=first.values.shape[3],
        layer_type=volume.kind,
        data_type=first.values.dtype.name,
        encoding=first.encoding,
        resolution=first.resolution,
        voxel_offset=first.offset,
        chunk_size=first.chunk,
        volume_size=first.shape,
    )
    info["scales"] += [each.members | {"chunk_sizes": [each.chunk]} for each in volume.scales[1:]]
    for scale, document in zip(volume.scales, info["scales"], strict=True):
        document.update(scale.options)
        if sharded and scale.sharding:
            document["sharding"] = scale.sharding
    cloud = cloudvolume.CloudVolume(
        f"file://{path}", info=info, compress=False, progress=False, delete_black_uploads=True
    )
    cloud.commit_info()
    for mip, scale in enumerate(volume.scales):
        cloud.mip = mip
        how = scale.sharding if sharded else None
        many = how is not None and how["shard_bits"] > 0
        step = cloud.image.shard_shape(mip) if many else scale.shape
        _write_in_steps(cloud, scale, [int(n) for n in step])


def _write_in_steps(cloud: Any, scale: Scale, step: Sequence[int]) -> None:
    starts = [range(0, n, s) for n, s in zip(scale.shape, step, strict=True)]
    offset = np.array(scale.offset)
    for corner in product(*starts):
        start = np.array(corner)
        stop = np.minimum(start + step, scale.shape)
        part = scale.values[tuple(map(slice, start, stop))]
        cloud[cloudvolume.Bbox(start + offset, stop + offset)] = part


def by_igneous(volume: Volume, path: Path, sharded: bool) -> None:  # noqa: FBT001  # a Writer
    """Write unsharded with cloud-volume, and reshard that with igneous."""
    if not sharded:
        by_cloudvolume(volume, path, sharded)
        return
    source = path.with_name(f"{path.name}_source")
    by_cloudvolume(volume, source, sharded=False)
    run(
        igneous_tasks.create_image_shard_transfer_tasks(
            f"file://{source}", f"file://{path}", memory_target=MEMORY_TARGET
        )
    )
    shutil.rmtree(source)


def run(tasks: Iterable[Any]) -> None:
    """Run the tasks of igneous one after the other."""
    for task in tasks:
        task.execute() if hasattr(task, "execute") else task()


@dataclass(frozen=True, slots=True)
class Written:
    """Folders of the served data and of the same data without shards."""

    bucket: Path
    twins: Path
