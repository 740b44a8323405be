"""Inner chunks are put over HTTP; zarr-python and TensorStore read the shards, past the service."""

from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import tensorstore
import zarr

from tests.clients.arrays import BY_NAME
from tests.clients.taking import (
    Files,
    Taker,
    chunks_in,
    lay_out,
    mixed,
    taking_into_folder,
    taking_into_seaweedfs,
)
from tests.clients.test_tensorstore import BEYOND
from tests.clients.writing import Case, Values, by_tensorstore, quiet, same
from tests.seaweedfs import SeaweedFS

ONLY_TENSORSTORE: Final = ("transpose/outer_", "transpose/both", "nested/transposes_everywhere")
"""What zarr-python cannot read where it is sharded."""
ONLY_ZARR: Final = ("after/", *BEYOND)
"""What TensorStore cannot read there."""
OLD: Final = "document/endian"
"""What neither reads there: the service alone calls the codec by the name that it has now."""
TABLE: Final = [name for name in BY_NAME if not name.startswith(OLD)]
ON_SEAWEEDFS: Final = (
    "index/zarr_start_big_crc",
    "index/tensorstore_end_little_plain",
    "nested/two_tensorstore",
    "after/crc_after_both",
    "inside/zstd_crc_tensorstore",
    "keys/v2_dot",
    "fill/nan_zarr",
    "shape/0d_default_zarr",
    "plain/v2",
)
LESS: Final = (
    "dtype/",
    "fill/",
    "inside/",
    "index/tensorstore_",
    "transpose/outer_",
    "nested/three",
    "nested/transpose",
)
FURTHER: Final = [name for name in TABLE if name.endswith("_tensorstore") or name.startswith(LESS)]
"""What differs from others in ways that shards know nothing of, or that plans alone are tested in:
see `tests/formats/zarr/test_rewritten_shards.py`."""
STORED: Final = [
    pytest.param(store, name, marks=pytest.mark.soak if is_soak else (), id=f"{store}-{name}")
    for name in TABLE
    for store, is_soak in (("folder", name in FURTHER), ("remote", name not in ON_SEAWEEDFS))
]
"""Stores, a folder and SeaweedFS, and cases; `soak` has all of them in both."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Generator[Taker]:
    """Take arrays into a folder."""
    with taking_into_folder(tmp_path_factory.mktemp("taken")) as taker:
        yield taker


@pytest.fixture(scope="module")
def remote(seaweedfs: SeaweedFS, tmp_path_factory: pytest.TempPathFactory) -> Generator[Taker]:
    """Take them into SeaweedFS."""
    with (
        pytest.MonkeyPatch.context() as patch,
        taking_into_seaweedfs(seaweedfs, tmp_path_factory.mktemp("taken")) as taker,
    ):
        for name, value in seaweedfs.environ.items():
            patch.setenv(name, value)
        yield taker


def with_zarr(store: Any) -> Values:
    """Read with zarr-python."""
    return np.asarray(zarr.open_array(store, mode="r")[...])


def with_tensorstore(kvstore: Any) -> Values:
    """Read with TensorStore."""
    spec = {"driver": "zarr3", "kvstore": kvstore}
    return np.asarray(tensorstore.open(spec).result().read().result())


def open_twin(case: Case, twin: Path) -> Any:
    """Open the unsharded twin with the writer of *case*."""
    if case.write is by_tensorstore:
        spec = {"driver": "zarr3", "kvstore": f"file://{twin}/"}
        return tensorstore.open(spec).result()
    return zarr.open_array(twin, mode="r+")


def other_values(values: Values) -> Values:
    """Move each element on by one place; a single one is doubled."""
    if values.size == 1:
        return values + values
    return np.roll(values.reshape(-1), 1).reshape(values.shape)


def chunks_of(case: Case, twin: Path, values: Values) -> Files:
    """Let the case's writer write *values* without shards, and give the chunks."""
    with quiet():
        open_twin(case, twin)[...] = values
    return chunks_in(twin)


def check(case: Case, taker: Taker, expected: Values) -> None:
    """Read the array with each reader that knows how, past the service."""
    with quiet():
        if not case.name.startswith(ONLY_TENSORSTORE):
            same(with_zarr(taker.zarr_store(case.name)), expected)
        if not case.name.startswith(ONLY_ZARR):
            same(with_tensorstore(taker.kvstore(case.name)), expected)


def write_through(case: Case, bucket: Path, taker: Taker, twin: Path) -> None:
    """Keep, replace and delete a third of the chunks each, put all anew, and delete them all."""
    taker.place(bucket / case.name, case.name)
    twin.mkdir()
    for name in ("zarr.json", ".zarray", ".zattrs"):
        if (answer := taker.client.get(f"/data/{case.name}/{name}")).is_success:
            (twin / name).write_bytes(answer.content)
    before = chunks_of(case, twin, case.values)
    other = other_values(case.values)
    after = chunks_of(case, twin, other)

    some = mixed(before, after)
    lay_out(twin, after, some)
    taker.push(case.name, before, some)
    with quiet():
        check(case, taker, np.asarray(open_twin(case, twin)[...]))
    taker.push(case.name, some, after)
    check(case, taker, other)
    taker.push(case.name, after, {})
    assert taker.stored(case.name) == set()


@pytest.mark.parametrize(("store", "name"), STORED)
def test_shards_hold_what_was_put(
    request: pytest.FixtureRequest, bucket: Path, tmp_path: Path, store: str, name: str
) -> None:
    """Each value of each array is the one that was put last, and nothing is left of the others."""
    write_through(BY_NAME[name], bucket, request.getfixturevalue(store), tmp_path / "twin")
