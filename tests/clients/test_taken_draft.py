"""Chunks are put into shards of the draft of 2022; zarr-python reads those, past the service.

Its codec of today writes such shards, where the index has no checksum: each lies once where the
draft has it, and once more where an array of today does.
"""

import json
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tests.clients.taking import Taker, lay_out, mixed, taking_into_folder
from tests.clients.writing import GZIP, LITTLE, Json, Values, counted, same, sharding, v2_keys
from tests.formats.zarr import draft

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
def test_shards_hold_what_was_put(taker: Taker, tmp_path: Path, codecs: list[Json]) -> None:
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
