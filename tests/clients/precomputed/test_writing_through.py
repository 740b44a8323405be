"""TensorStore and cloud-volume write volumes through the service, and see no shards."""

from collections.abc import Generator
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
import tensorstore
from cloudfiles import CloudFiles, paths
from cloudfiles.interfaces import reset_connection_pools
from cloudvolume import CloudVolume

from tests.clients.filling import KEYS
from tests.clients.precomputed.cases import BY_NAME, pyramid
from tests.clients.precomputed.volumes import (
    Volume,
    by_tensorstore,
    document,
    read_tensorstore,
)
from tests.clients.taking import Taker
from tests.clients.writing import Json, same

NAMES: Final = (
    "shards/identity_index_gzip_data_gzip",
    "shards/murmurhash3_x86_128_index_raw_data_raw",
    "encoding/compressed_segmentation_uint64_1_gzip",
    "encoding/png_uint8_1_raw",
    "grid/negative_offset",
    "scales/all",
)
SECRETS: Final = {"AWS_ACCESS_KEY_ID": KEYS, "AWS_SECRET_ACCESS_KEY": KEYS}


def place_zeros(taker: Taker, volume: Volume, name: str) -> None:
    """Store *volume* with no chunk."""
    scales = [replace(scale, values=np.zeros_like(scale.values)) for scale in volume.scales]
    by_tensorstore(replace(volume, scales=scales), taker.folder / name, sharded=True)


def bucket(taker: Taker, name: str) -> Json:
    """Describe the S3 bucket that the service is to TensorStore."""
    return {
        "driver": "s3",
        "bucket": "data",
        "path": f"{name}/",
        "endpoint": taker.url,
        "aws_region": "us-east-1",
        "aws_credentials": {"type": "anonymous"},
    }


@pytest.mark.parametrize("name", NAMES)
def test_tensorstore_fills_a_volume(taker: Taker, name: str) -> None:
    """Every scale, whose shards and sharding are there afterwards for who reads directly."""
    volume = BY_NAME[name]
    place_zeros(taker, volume, name)
    for index, scale in enumerate(volume.scales):
        spec = {
            "driver": "neuroglancer_precomputed",
            "kvstore": bucket(taker, name),
            "scale_index": index,
        }
        tensorstore.open(spec).result().write(scale.values).result()

    path = taker.folder / name
    expected = [scale.sharding for scale in volume.scales]
    assert [scale.get("sharding") for scale in document(path)["scales"]] == expected
    for index, scale in enumerate(volume.scales):
        same(read_tensorstore(f"file://{path}/", index), scale.values)


def test_tensorstore_adds_a_scale(taker: Taker) -> None:
    """It writes ``info`` back, with one more scale; the others keep their sharding."""
    first, second = pyramid()[0], pyramid()[2]
    place_zeros(taker, Volume("", by_tensorstore, [first]), "grown")
    spec = {
        "driver": "neuroglancer_precomputed",
        "kvstore": bucket(taker, "grown"),
        "scale_metadata": {
            "size": second.shape,
            "chunk_size": second.chunk,
            "encoding": "raw",
            "resolution": second.resolution,
        },
        "multiscale_metadata": {"type": "image", "data_type": "uint8", "num_channels": 2},
    }
    tensorstore.open(spec, create=True).result().write(second.values).result()
    tensorstore.open(spec | {"scale_metadata": {}, "scale_index": 0}).result().write(
        first.values
    ).result()

    info = document(taker.folder / "grown")
    assert [scale.get("sharding") for scale in info["scales"]] == [first.sharding, None]
    for index, scale in enumerate((first, second)):
        same(read_tensorstore(f"file://{taker.folder}/grown/", index), scale.values)


@pytest.fixture
def files(taker: Taker) -> Generator[str]:
    """Give the URL by which cloud-files takes the service for S3; it keeps connections for ever."""
    paths.add_alias("gate", f"s3://{taker.url}/")
    yield "gate://data"
    reset_connection_pools()


@pytest.mark.parametrize("compress", [None, "gzip"])
@pytest.mark.parametrize("name", NAMES[:2])
def test_cloudvolume_fills_a_volume(taker: Taker, files: str, name: str, compress: Any) -> None:
    """Where it is given the ``info``: it cannot read that over S3, only over HTTP."""
    volume, target = BY_NAME[name], f"cloud/{compress}/{name}"
    place_zeros(taker, volume, target)
    info = CloudVolume(f"precomputed://{taker.url}/data/{target}", progress=False).info
    cloud = CloudVolume(
        f"{files}/{target}", info=info, compress=compress, progress=False, secrets=SECRETS
    )
    cloud[:] = volume.scales[0].values
    cloud.commit_info()

    path = taker.folder / target
    assert document(path)["scales"][0]["sharding"] == volume.scales[0].sharding
    same(read_tensorstore(f"file://{path}/"), volume.scales[0].values)


def test_cloudfiles_writes(taker: Taker, files: str) -> None:
    """It lists, reads ranges and deletes, too; of whole bodies it takes the ETag for an MD5."""
    bucket = CloudFiles(f"{files}/files", secrets=SECRETS)
    bucket.put("a", b"abc")

    assert list(bucket) == ["a"]
    assert bucket["a", 1:3] == b"bc"
    bucket.delete("a")
    assert not (taker.folder / "files/a").exists()
