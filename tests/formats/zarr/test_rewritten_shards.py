"""Shards that were planned anew, read by their real readers: the files themselves."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.formats.contract import Entry, ShardRewriter, Slot
from app.formats.zarr.layout import ZarrLayout
from app.model import VirtualKey
from app.resolve.perform import DirectFetch
from app.storage.memory import MemoryStore
from tests.clients.arrays import BY_NAME, INNER, SHARDS, VALUES, WRITERS
from tests.clients.writing import (
    CRC32C,
    GZIP,
    LITTLE,
    Case,
    Json,
    Values,
    quiet,
    read_tensorstore,
    read_zarr,
    same,
    sharding,
    write,
)
from tests.formats.rendering import render
from tests.resolving import ROOT, known_formats

_ONLY_TENSORSTORE = ("transpose/outer", "transpose/both", "nested/transposes")
"""What zarr-python cannot read."""
_ONLY_ZARR = ("after/", "dtype/string", "dtype/fixed", "dtype/time", "document/endian")
"""What TensorStore cannot read."""


def _is_written(case: Case) -> bool:
    return (
        not case.name.startswith(("plain/", "document/"))
        and "zstd" not in case.name.removeprefix("inside/")
        and not case.name.startswith("after/gzip")
        and "zero_length" not in case.name
    )


_CASES = [case for case in BY_NAME.values() if _is_written(case)]


def _copy(folder: Path) -> MemoryStore:
    store = MemoryStore()
    for file in folder.rglob("*"):
        if file.is_file():
            store.place(ROOT.join(file.relative_to(folder).as_posix()), file.read_bytes())
    return store


async def _layout(folder: Path) -> tuple[ZarrLayout, DirectFetch]:
    fetch = DirectFetch(_copy(folder))
    layout = await known_formats()[0].open(ROOT, fetch)
    assert isinstance(layout, ZarrLayout)
    return layout, fetch


async def _write_through(case: Case, folder: Path, twin: Path, values: Values) -> None:
    """Write *values* into the shards in *folder* as a client would that sees no shards.

    What such a client writes is what lies in *twin* once the case's writer has written there.
    """
    layout, fetch = await _layout(folder)
    document = json.loads(layout.node.value.served)
    shape = tuple(document["chunk_grid"]["configuration"]["chunk_shape"])
    with quiet():
        plain = replace(case, shards=shape, codecs=document["codecs"], values=values, edit=None)
        case.write(plain, twin)
    assert layout.node.value.array is not None
    shards: dict[ShardRewriter[Any], dict[Entry, bytes | None]] = {}
    for coords in _differing(case.values, values, shape):
        key = layout.node.value.array.keys.format(coords)
        target = await layout.target(VirtualKey(key), fetch)
        assert isinstance(target, Slot)
        file = twin / key
        body = file.read_bytes() if file.is_file() else None
        if body is not None:
            body = target.shard.encode(target.entry, body, is_gzip=False)
        shards.setdefault(target.shard, {})[target.entry] = body
    for shard, changes in shards.items():
        file = folder / shard.ref.key.removeprefix(f"{ROOT.key}/")
        plan = shard.plan(await shard.open(list(changes), fetch), changes)
        if plan is None:
            file.unlink(missing_ok=True)
        else:
            old = file.read_bytes() if file.is_file() else b""
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(render(plan.pieces, old))


def _differing(old: Values, new: Values, shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Find the chunks of *shape* that are not the same in both."""
    for coords in np.ndindex(*(-(-n // size) for n, size in zip(old.shape, shape, strict=True))):
        box = tuple(slice(at * n, at * n + n) for at, n in zip(coords, shape, strict=True))
        if not np.array_equal(old[box], new[box]):
            yield coords


def _read_by_all(case: Case, folder: Path, expected: Values) -> None:
    readers = {"zarr": read_zarr, "tensorstore": read_tensorstore}
    if case.name.startswith(_ONLY_TENSORSTORE):
        del readers["zarr"]
    if case.name.startswith(_ONLY_ZARR):
        del readers["tensorstore"]
    for read in readers.values():
        with quiet():
            same(read(folder), expected)


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case.name)
async def test_readers_find_what_was_written(case: Case, tmp_path: Path) -> None:
    """Every chunk is replaced, in the form that the inner codecs give it."""
    write(case, tmp_path / "shards")
    values = np.flip(case.values).copy()

    await _write_through(case, tmp_path / "shards", tmp_path / "twin", values)

    _read_by_all(case, tmp_path / "shards", values)


@pytest.mark.parametrize(
    ("writer", "after"), [("zarr", []), ("tensorstore", []), ("zarr", [CRC32C])]
)
@pytest.mark.parametrize("location", ["start", "end"])
@pytest.mark.parametrize("nested", [False, True])
async def test_readers_find_what_was_kept(
    writer: str, location: str, after: list[Json], tmp_path: Path, *, nested: bool
) -> None:
    """One chunk in the middle is replaced by one of another length, and one is taken away."""
    inner = [sharding((1, 3, 2), [LITTLE, GZIP], location=location)] if nested else [LITTLE, GZIP]
    codecs = [sharding(INNER, inner, location=location), *after]
    case = Case("after/" if after else writer, WRITERS[writer], VALUES, SHARDS, codecs)
    write(case, tmp_path / "shards")
    values = VALUES.copy()
    values[2:4, 0:3, 0:4] = 7
    values[0:2, 3:5, 4:8] = 0

    await _write_through(case, tmp_path / "shards", tmp_path / "twin", values)

    _read_by_all(case, tmp_path / "shards", values)
