"""Clients of Zarr that open arrays by URL, and the arrays that they cannot decode."""

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import obstore.store
import tensorstore
import zarr
import zarr.storage

from tests.support.clients.writing import Json
from tests.support.lacking import lack, need

JS: Final = Path(__file__).parents[2] / "clients/js"
_TIMEOUT_S: Final = 90
_BEYOND_BOTH: Final = {
    "after/gzip", "after/crc_then_zstd", "after/gzip_after_nested",
    "dtype/fixed_text", "dtype/fixed_bytes", "dtype/time",
}  # fmt: skip
BEYOND: Final = {
    "tensorstore": {*_BEYOND_BOTH, "dtype/string", "plain/v2"},
    "zarrita": {
        *_BEYOND_BOTH, "dtype/float16", "fill/complex", "fill/beyond_2_53", "shape/zero_length",
    },
}  # fmt: skip
"""Arrays that a client cannot decode from any server: it knows no codec after sharding, or not the
data type; zarrita fails for empty arrays, and reads fill values as doubles.
"""


def over_fsspec(url: str) -> Any:
    """Open *url* with zarr-python over fsspec, its default."""
    return zarr.open(url, mode="r")


def over_obstore(url: str) -> Any:
    """Open *url* with zarr-python over obstore."""
    store = obstore.store.HTTPStore.from_url(url, client_options={"allow_http": True})
    return zarr.open(zarr.storage.ObjectStore(store, read_only=True), mode="r")


OPENERS: Final = {"fsspec": over_fsspec, "obstore": over_obstore}


def open_tensorstore(url: str, driver: str = "zarr3") -> Any:
    """Open the array below *url* with TensorStore."""
    return tensorstore.open({"driver": driver, "kvstore": f"{url}/"}, open=True).result()


def run_node(urls: Iterable[str]) -> dict[str, Json]:
    """Run one node process that reads the arrays at *urls*; return its results by URL."""
    node = need("node")
    if not (JS / "node_modules/zarrita").is_dir():
        lack("zarrita is not installed: npm install --prefix tests/clients/js")
    process = subprocess.run(
        [node, str(JS / "read.mjs")],
        input=json.dumps(list(urls)),
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )
    assert process.returncode == 0, process.stderr
    answers = [json.loads(line) for line in process.stdout.splitlines()]
    return {answer["url"]: answer for answer in answers}
