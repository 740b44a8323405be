"""Real clients raise an error at a 424; only cloud-volume repeats the request."""

import re
from collections.abc import Callable, Generator
from typing import Any, Final

import boto3
import httpx
import numpy as np
import pytest
import s3fs
import tensorstore
import zarr

from shardgate.settings import DatasetSettings, Settings
from tests.support.clients.filling import KEYS, over_obstore, s3fs_options
from tests.support.clients.precomputed.volumes import Scale, sharding, write_scale
from tests.support.clients.reading import over_fsspec, run_node
from tests.support.clients.reading import over_obstore as over_obstore_http
from tests.support.deferred import Deferred
from tests.support.serving import serving

cloudfiles: Any = Deferred("cloudfiles")
cloudvolume: Any = Deferred("cloudvolume")

_LONGEST_S: Final = 120
"""TensorStore would repeat 500, 502, 503 and 504 without end."""
_FAILED: Final = re.compile(
    r'^shardgate_requests_total\{.*outcome="failed".*\} ([0-9.]+)$', re.MULTILINE
)
_REASON: Final = "7 bytes"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """Serve an array and two volumes of one chunk, with a truncated shard or info."""
    folder = tmp_path_factory.mktemp("damaged")
    zarr.create_array(folder / "array", shape=2, chunks=2, shards=2, dtype="u1")[:] = 1
    ones = np.ones((2, 2, 2, 1), "u1")
    scale = Scale(ones, sharding((0, 0, 0)), chunk=(2, 2, 2), resolution=(1, 1, 1))
    for name in ("volume", "info"):
        write_scale(scale, folder / name)
    for damaged in (folder / "array/c/0", folder / "volume/1_1_1/0.shard", folder / "info/info"):
        damaged.write_bytes(damaged.read_bytes()[:7])
    datasets = {each.name: DatasetSettings(url=str(each)) for each in folder.iterdir()}
    with serving(Settings(datasets=datasets)) as served:
        yield served


def by_tensorstore(url: str, driver: str) -> Any:
    """Read all with TensorStore."""
    opened = tensorstore.open({"driver": driver, "kvstore": f"{url}/"}).result(timeout=_LONGEST_S)
    return opened.read().result(timeout=_LONGEST_S)


def by_boto3(url: str) -> Any:
    """Read the chunk with boto3, which tries five times by default."""
    keys = {"aws_access_key_id": KEYS, "aws_secret_access_key": KEYS}
    s3 = boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys)
    return s3.get_object(Bucket="array", Key="c/0")


def by_zarrita(url: str) -> Any:
    """Read an array with zarrita.js, and raise its error."""
    (answer,) = run_node([f"{url}/array"]).values()
    raise OSError(answer["error"])


def by_cloudvolume(url: str) -> Any:
    """Read all with cloud-volume, without its pauses between seven tries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cloudfiles.interfaces.HttpInterface.get_file.retry, "sleep", lambda _: None)
        return cloudvolume.CloudVolume(f"precomputed://{url}", progress=False)[:]


READERS: Final[dict[str, tuple[Callable[[str], Any], int, str]]] = {
    "tensorstore": (lambda url: by_tensorstore(f"{url}/array", "zarr3"), 1, _REASON),
    "tensorstore volume": (
        lambda url: by_tensorstore(f"{url}/volume", "neuroglancer_precomputed"), 1, _REASON,
    ),
    "tensorstore info": (
        lambda url: by_tensorstore(f"{url}/info", "neuroglancer_precomputed"), 1, "424",
    ),
    "zarr fsspec": (lambda url: over_fsspec(f"{url}/array")[...], 1, "424"),
    "zarr obstore": (lambda url: over_obstore_http(f"{url}/array")[...], 1, _REASON),
    "zarr obstore s3": (
        lambda url: zarr.open_array(over_obstore(url, "", "array"), mode="r")[...], 1, _REASON,
    ),
    "s3fs": (
        lambda url: s3fs.S3FileSystem(**s3fs_options(url)).cat_file("array/c/0"), 1, "424",
    ),
    "boto3": (by_boto3, 1, f"FailedDependency.*{_REASON}"),
    "zarrita": (by_zarrita, 1, "424"),
    "cloud-volume": (lambda url: by_cloudvolume(f"{url}/volume"), 7, "424"),
}  # fmt: skip
"""Reads of one damaged object, the requests that they take, and a part of the error."""


@pytest.mark.parametrize("reader", READERS)
def test_client_raises_an_error_for_damage(url: str, reader: str) -> None:
    """Each client raises an error for 424 after its expected number of requests."""
    read, requests, said = READERS[reader]
    before = _failed(url)

    with pytest.raises(Exception, match=said) as raised:
        read(url)

    assert not isinstance(raised.value, TimeoutError)
    assert _failed(url) - before == requests


def _failed(url: str) -> float:
    """Return the number of failed requests so far."""
    return sum(float(count) for count in _FAILED.findall(httpx.get(f"{url}/metrics").text))
