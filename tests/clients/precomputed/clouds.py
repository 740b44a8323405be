"""Volumes written by cloud-volume and by igneous."""

import shutil
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
from cloudvolume import Bbox, CloudVolume
from igneous.task_creation import create_image_shard_transfer_tasks

from tests.clients.precomputed.volumes import Scale, Volume

MEMORY_TARGET: Final = 2000
"""Bytes of a shard that igneous plans with; with 300 two of its tasks write the same shard."""


def by_cloudvolume(volume: Volume, path: Path, sharded: bool) -> None:  # noqa: FBT001  # a Writer
    """Write with cloud-volume, a shard at a time, and no chunk that is all zero."""
    first = volume.scales[0]
    info = CloudVolume.create_new_info(
        num_channels=first.values.shape[3],
        layer_type=volume.kind,
        data_type=first.values.dtype.name,
        encoding=first.encoding,
        resolution=first.resolution,
        voxel_offset=first.offset,
        chunk_size=first.chunk,
        volume_size=first.shape,
    )
    for scale in volume.scales[1:]:
        added = {
            "key": scale.path,
            "resolution": scale.resolution,
            "voxel_offset": scale.offset,
            "chunk_sizes": [scale.chunk],
            "size": scale.shape,
            "encoding": scale.encoding,
        }
        info["scales"].append(added)
    for scale, document in zip(volume.scales, info["scales"], strict=True):
        document.update(scale.options)
        if sharded and scale.sharding:
            document["sharding"] = scale.sharding
    cloud = CloudVolume(
        f"file://{path}",
        info=info,
        compress=False,
        progress=False,
        delete_black_uploads=True,
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
        cloud[Bbox(start + offset, stop + offset)] = part


def by_igneous(volume: Volume, path: Path, sharded: bool) -> None:  # noqa: FBT001  # a Writer
    """Write with cloud-volume unsharded; from there igneous shards it as it sees fit."""
    if not sharded:
        by_cloudvolume(volume, path, sharded)
        return
    source = path.with_name(f"{path.name}_source")
    by_cloudvolume(volume, source, sharded=False)
    run(
        create_image_shard_transfer_tasks(
            f"file://{source}", f"file://{path}", memory_target=MEMORY_TARGET
        )
    )
    shutil.rmtree(source)


def run(tasks: Iterable[Any]) -> None:
    """Do the tasks that igneous would give to its workers, one after the other."""
    for task in tasks:
        task.execute() if hasattr(task, "execute") else task()
