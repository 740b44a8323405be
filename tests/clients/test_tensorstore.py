"""TensorStore's `zarr3` driver reads the service over its `http` driver."""

from typing import Any, Final

import pytest
import tensorstore

from tests.clients.arrays import BY_NAME, VALUES
from tests.clients.conftest import from_each_store
from tests.clients.writing import same

_AFTER: Final = "allows no bytes-to-bytes codec after sharding, and the array is served sharded"
_TYPE: Final = "knows no such data type"
BEYOND: Final = {
    "after/gzip": _AFTER,
    "after/zstd": _AFTER,
    "after/crc_then_zstd": _AFTER,
    "after/gzip_after_nested": _AFTER,
    "dtype/string": _TYPE,
    "dtype/fixed_text": _TYPE,
    "dtype/fixed_bytes": _TYPE,
    "dtype/time": _TYPE,
    "plain/v2": "has a driver of its own for format 2",
}
"""What TensorStore cannot decode from any server, and why."""


def open_array(url: str, driver: str = "zarr3") -> Any:
    """Open the array below *url*."""
    return tensorstore.open({"driver": driver, "kvstore": f"{url}/"}, open=True).result()


@from_each_store
@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in BEYOND])
def test_reads_values_in_inner_chunks(service: str, name: str) -> None:
    """Each array that TensorStore can decode reads as written; its chunks are inner chunks."""
    array = open_array(f"{service}/bucket/{name}")
    layout = array.chunk_layout
    shapes = [tuple(chunk.shape or ()) for chunk in (layout.read_chunk, layout.write_chunk)]

    same(array.read().result(), BY_NAME[name].values)
    assert shapes == [BY_NAME[name].served] * 2


@pytest.mark.parametrize("name", list(BEYOND))
def test_cannot_decode_the_others(local: str, name: str) -> None:
    """What is left out of the table is refused by TensorStore itself."""
    with pytest.raises(ValueError, match=r"zarr3|FAILED_PRECONDITION|NOT_FOUND"):
        open_array(f"{local}/bucket/{name}")


def test_v2_passes_through(service: str) -> None:
    """An array of format 2 reads with its own driver."""
    same(open_array(f"{service}/bucket/plain/v2", "zarr").read().result(), VALUES)


def test_finds_the_format_by_itself(service: str) -> None:
    """Without a driver, the probes for other formats find nothing and ``zarr.json`` wins."""
    array = tensorstore.open(f"{service}/bucket/index/zarr_end_little_crc/").result()

    same(array.read().result(), VALUES)


def test_reads_again_after_revalidation(service: str) -> None:
    """A second read through TensorStore's cache, which sends If-None-Match, is equal."""
    spec = {
        "driver": "zarr3",
        "kvstore": f"{service}/bucket/inside/zstd_zarr/",
        "context": {"cache_pool": {"total_bytes_limit": 10_000_000}},
        "recheck_cached_data": True,
    }
    array = tensorstore.open(spec, open=True).result()

    for _ in range(2):
        same(array.read().result(), VALUES)
