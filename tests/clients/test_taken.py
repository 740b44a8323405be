"""Inner chunks are put over HTTP; zarr-python and TensorStore read the shards, past the service."""

import json
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import tensorstore
import zarr

from tests.clients.arrays import BY_NAME
from tests.clients.services import (
    Files,
    Taker,
    chunks_in,
    lay_out,
    mixed,
    taking_into_folder,
    taking_into_seaweedfs,
)
from tests.clients.test_reading import BEYOND
from tests.clients.writing import (
    GZIP,
    LITTLE,
    Case,
    Json,
    Values,
    by_tensorstore,
    counted,
    quiet,
    read_tensorstore,
    read_zarr,
    same,
    sharding,
    v2_keys,
)
from tests.formats.zarr import draft
from tests.seaweedfs import SeaweedFS

ONLY_TENSORSTORE: Final = ("transpose/outer_", "transpose/both", "nested/transposes_everywhere")
"""What zarr-python cannot read where it is sharded."""
ONLY_ZARR: Final = ("after/", *BEYOND["tensorstore"])
"""What TensorStore cannot read there."""
OLD: Final = "document/endian"
"""What neither reads there: the service alone calls the codec by the name that it has now."""
TABLE: Final = [name for name in BY_NAME if not name.startswith(OLD)]
ON_SEAWEEDFS: Final = (
    "index/zarr_start_big_crc", "index/tensorstore_end_little_plain", "nested/two_tensorstore",
    "after/crc_after_both", "inside/zstd_crc_tensorstore", "keys/v2_dot", "fill/nan_zarr",
    "shape/0d_default_zarr", "plain/v2",
)  # fmt: skip
LESS: Final = (
    "dtype/", "fill/", "inside/", "index/tensorstore_", "transpose/outer_", "nested/three",
    "nested/transpose",
)  # fmt: skip
FURTHER: Final = [name for name in TABLE if name.endswith("_tensorstore") or name.startswith(LESS)]
"""What differs from others in ways that shards know nothing of, or that plans alone are tested in:
see `tests/formats/zarr/test_rewrite.py`."""
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
            same(read_zarr(taker.zarr_store(case.name)), expected)
        if not case.name.startswith(ONLY_ZARR):
            same(read_tensorstore(taker.kvstore(case.name)), expected)


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


SHAPE, SHARD, CHUNK = (9, 14), (4, 6), (2, 3)
VALUES = counted(SHAPE, "u4")


@pytest.fixture
def taker(tmp_path: Path) -> Generator[Taker]:
    """Take data sets into a folder."""
    with taking_into_folder(tmp_path / "taken") as taker:
        yield taker


def _create(path: Path, chunks: tuple[int, ...], codecs: list[Json]) -> Any:
    return zarr.create(
        store=path,
        shape=SHAPE,
        dtype="u4",
        chunks=chunks,
        codecs=codecs,
        chunk_key_encoding=v2_keys("/"),  # type: ignore[arg-type]  # takes JSON as well
        fill_value=0,
        zarr_format=3,
    )


def _as_draft(folder: Path) -> dict[str, bytes]:
    """Call what is stored in *folder* as the draft does."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != "zarr.json"]
    return {f"data/root/a/c{f.relative_to(folder).as_posix()}": f.read_bytes() for f in files}


def _chunks(path: Path, codecs: list[Json], values: Values) -> dict[str, bytes]:
    _create(path, CHUNK, codecs)[...] = values
    return _as_draft(path)


def _read_shards(taker: Taker, template: Path) -> Values:
    """Read the shards of the draft as those of the array of today at *template*."""
    for old in template.iterdir():
        if old.is_dir():
            shutil.rmtree(old)
    begin = "data/root/a/c"
    stored = {key.removeprefix(begin) for key in taker.stored("draft") if key.startswith(begin)}
    for key in stored:
        (template / key).parent.mkdir(exist_ok=True)
        shutil.copy(taker.folder / f"draft/{begin}{key}", template / key)
    return np.asarray(zarr.open_array(template, mode="r")[...])


@pytest.mark.parametrize("codecs", [[LITTLE], [LITTLE, GZIP]])
def test_shards_of_the_draft_hold_what_was_put(
    taker: Taker, tmp_path: Path, codecs: list[Json]
) -> None:
    """A third of the chunks is kept, replaced and deleted each; then all are put, then deleted."""
    template = tmp_path / "template"
    _create(template, SHARD, [sharding(CHUNK, codecs, index=[LITTLE])])[...] = VALUES
    metadata = draft.array_metadata(
        list(SHAPE), list(CHUNK), [draft.sharding([2, 2])], separator="/", data_type="<u4"
    )
    if GZIP in codecs:
        metadata["compressor"] = draft.ANY_LENGTH["compressor"]
    objects = _as_draft(template) | {
        "zarr.json": json.dumps(draft.ENTRY_POINT).encode(),
        "meta/root/a.array.json": draft.encode(metadata),
    }
    lay_out(tmp_path / "source", {}, objects)
    taker.place(tmp_path / "source", "draft")
    before = _chunks(tmp_path / "before", codecs, VALUES)
    after = _chunks(tmp_path / "after", codecs, VALUES[::-1])
    some = mixed(before, after)

    taker.push("draft", before, some)
    same(_read_shards(taker, template), _read_chunks(tmp_path / "after", some))
    taker.push("draft", some, after)
    same(_read_shards(taker, template), VALUES[::-1])
    taker.push("draft", after, {})
    assert not [key for key in taker.stored("draft") if key.startswith("data/")]


def _read_chunks(folder: Path, chunks: dict[str, bytes]) -> Values:
    """Read *chunks* as those of an array of today without shards, in *folder*."""
    begin = "data/root/a/c"
    now = {key.removeprefix(begin): data for key, data in chunks.items()}
    there = {key.removeprefix(begin): data for key, data in _as_draft(folder).items()}
    lay_out(folder, there, now)
    return np.asarray(zarr.open_array(folder, mode="r")[...])
