"""zarrita.js under node reads the service, even what it cannot read from the shards itself."""

import base64
import json
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from tests.clients.arrays import BY_NAME
from tests.clients.conftest import from_each_store
from tests.clients.writing import Json, Values, same
from tests.lacking import lack

FOLDER: Final = Path(__file__).parent / "js"
_TIMEOUT_S: Final = 90

_AFTER: Final = "knows no codec after sharding, and the array is served sharded"
_TYPE: Final = "knows no such data type under node 20"
_NOTHING: Final = "fails on any array without elements"
_NUMBER: Final = "takes the fill value from JSON as a double"
BEYOND: Final = {
    "after/gzip": _AFTER,
    "after/zstd": _AFTER,
    "after/crc_then_zstd": _AFTER,
    "after/gzip_after_nested": _AFTER,
    "dtype/float16": _TYPE,
    "dtype/complex64": _TYPE,
    "dtype/complex128": _TYPE,
    "fill/complex_zarr": _TYPE,
    "fill/complex_tensorstore": _TYPE,
    "dtype/fixed_text": _TYPE,
    "dtype/fixed_bytes": _TYPE,
    "dtype/time": _TYPE,
    "shape/zero_length_zarr": _NOTHING,
    "shape/zero_length_tensorstore": _NOTHING,
    "fill/beyond_2_53_zarr": _NUMBER,
    "fill/beyond_2_53_tensorstore": _NUMBER,
}
"""What zarrita cannot decode from any server, and why."""

READABLE_ONLY_HERE: Final = (
    "index/zarr_start_little_crc",
    "nested/two_zarr",
    "transpose/outer_201",
    "after/crc",
)
"""What zarrita cannot read from the shards."""


def read(urls: Iterable[str]) -> dict[str, Json]:
    """Run one node that reads the arrays at *urls*; answers by URL."""
    node = shutil.which("node")
    if node is None:
        lack("node is not installed")
    if not (FOLDER / "node_modules/zarrita").is_dir():
        lack("zarrita is not installed: npm install --prefix tests/clients/js")
    process = subprocess.run(
        [str(node), str(FOLDER / "read.mjs")],
        input=json.dumps(list(urls)),
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )
    assert process.returncode == 0, process.stderr
    answers = [json.loads(line) for line in process.stdout.splitlines()]
    return {answer["url"]: answer for answer in answers}


def values(answer: Json) -> Any:
    """Rebuild the numpy array of an *answer*, whose strides are those of zarrita."""
    if "error" in answer:
        pytest.fail(answer["error"])
    if "strings" in answer:
        return np.array(answer["strings"], dtype=np.dtypes.StringDType())
    flat = np.frombuffer(base64.b64decode(answer["base64"]), answer["dtype"])
    strides = [step * flat.itemsize for step in answer["stride"]]
    return np.lib.stride_tricks.as_strided(flat, answer["shape"], strides)


def is_right(answer: Json, expected: Values) -> bool:
    """Tell whether zarrita read at all, and read the *expected* values."""
    return "error" not in answer and np.array_equal(values(answer), expected)


@pytest.fixture(scope="module")
def answers(service: str) -> dict[str, Json]:
    """Read every case with one node."""
    found = read(f"{service}/bucket/{name}" for name in BY_NAME)
    return {url.removeprefix(f"{service}/bucket/"): answer for url, answer in found.items()}


@from_each_store
@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in BEYOND])
def test_reads_values_in_inner_chunks(answers: dict[str, Json], name: str) -> None:
    """Each array that zarrita can decode reads as written, in chunks of the inner shape."""
    same(values(answers[name]), BY_NAME[name].values)
    assert tuple(answers[name]["chunks"]) == BY_NAME[name].served


@from_each_store
@pytest.mark.parametrize("name", list(BEYOND))
def test_cannot_decode_the_others(answers: dict[str, Json], name: str) -> None:
    """What is left out of the table is refused by zarrita itself, or misread."""
    assert not is_right(answers[name], BY_NAME[name].values)


@pytest.fixture(scope="module")
def raw_answers(local: str) -> dict[str, Json]:
    """Read some shards themselves with one node."""
    found = read(f"{local}/raw/{name}" for name in READABLE_ONLY_HERE)
    return {url.removeprefix(f"{local}/raw/"): answer for url, answer in found.items()}


@pytest.mark.parametrize("name", READABLE_ONLY_HERE)
def test_cannot_read_the_shards_of_some(raw_answers: dict[str, Json], name: str) -> None:
    """Of the same array as shards, zarrita makes an error or wrong values."""
    assert not is_right(raw_answers[name], BY_NAME[name].values)
