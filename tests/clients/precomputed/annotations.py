"""Annotations as the `neuroglancer` package writes them, and put into shards by TensorStore.

The package writes one spatial level of one cell. Finer levels are made of its files, too: each
cell is the spatial file of a collection that holds the annotations of that cell alone.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
from neuroglancer import AnnotationPropertySpec, CoordinateSpace
from neuroglancer.write_annotations import AnnotationWriter

from tests.clients.precomputed.volumes import (
    MURMUR,
    compressed_morton_code,
    document,
    sharding,
    write_shards,
)
from tests.clients.writing import Json

type Cell = tuple[int, ...]

BOUND: Final = 60.0
"""All coordinates lie in [0, BOUND]."""
COUNT: Final = 40
LAST_ID: Final = 2**64 - 1
SEGMENTS: Final = (3, 2**40, 2**64 - 2)


@dataclass(frozen=True, slots=True)
class Collection:
    """Annotations of one type; they are the same each time."""

    kind: str
    rank: int
    relationships: Sequence[str]
    grids: Sequence[Cell]
    """The cells of each spatial level."""
    how: Callable[[str], Json | None]
    """How the folder of that name is sharded; `None` for not at all."""


def _murmur(folder: str) -> Json:
    bits = (0, 1, 1) if folder.startswith("spatial") else (0, 2, 3)
    return sharding(bits, MURMUR, index="gzip", data="gzip")


def _all_64_bits(_: str) -> Json:
    return sharding((1, 2, 61))


def _each_its_own(folder: str) -> Json | None:
    table = {
        "by_id": sharding((0, 0, 0), MURMUR, data="gzip"),
        "rel_cells": sharding((3, 1, 2), index="gzip"),
        "rel_synapses": None,
        "spatial0": None,
        "spatial1": sharding((0, 1, 3)),
    }
    return table.get(folder, sharding((1, 1, 2), data="gzip"))


COLLECTIONS: Final = {
    "points": Collection("point", 3, ["cells"], [(1, 1, 1), (2, 1, 2), (3, 2, 5)], _murmur),
    "lines": Collection("line", 2, [], [(1, 1), (4, 3)], _all_64_bits),
    "boxes": Collection(
        "axis_aligned_bounding_box",
        3,
        ["cells", "synapses"],
        [(1, 1, 1), (2, 2, 2), (5, 3, 2)],
        _each_its_own,
    ),
}


def write_annotations(collection: Collection, path: Path, twin: Path) -> None:
    """Write *collection* unsharded to *twin*, and in shards to *path*."""
    _write_unsharded(collection, twin)
    info = document(twin)
    path.mkdir(parents=True)
    for part in (info["by_id"], *info["relationships"], *info["spatial"]):
        folder, how = part["key"], collection.how(part["key"])
        if how is None:
            shutil.copytree(twin / folder, path / folder)
            continue
        part["sharding"] = how
        (path / folder).mkdir()
        write_shards(path / folder, how, _by_chunk_id(twin / folder, part.get("grid_shape")))
    (path / "info").write_text(json.dumps(info))


def _by_chunk_id(folder: Path, grid: Sequence[int] | None) -> Mapping[int, bytes]:
    values = {file.name: file.read_bytes() for file in folder.iterdir()}
    if grid is None:
        return {int(name): value for name, value in values.items()}
    return {
        compressed_morton_code(tuple(map(int, name.split("_"))), grid): value
        for name, value in values.items()
    }


def _write_unsharded(collection: Collection, path: Path) -> None:
    everything = range(COUNT)
    _written(collection, everything, path)
    info = document(path)
    shutil.rmtree(path / "spatial0")
    info["lower_bound"] = [0.0] * collection.rank
    info["upper_bound"] = [BOUND] * collection.rank
    info["spatial"] = []
    for level, grid in enumerate(collection.grids):
        folder = f"spatial{level}"
        (path / folder).mkdir()
        size = [BOUND / cells for cells in grid]
        part = {"key": folder, "grid_shape": grid, "chunk_size": size, "limit": COUNT}
        info["spatial"].append(part)
        chosen = everything[level :: len(collection.grids)]
        for cell in product(*map(range, grid)):
            inside = [n for n in chosen if _cell_of(_start(collection, n), size) == cell]
            if inside:
                _written(collection, inside, path / "cell")
                name = "_".join(map(str, cell))
                next((path / "cell/spatial0").iterdir()).rename(path / folder / name)
                shutil.rmtree(path / "cell")
    (path / "info").write_text(json.dumps(info))


def _written(collection: Collection, numbers: Sequence[int], path: Path) -> None:
    """Write the annotations *numbers* with the package's writer."""
    names = ["x", "y", "z"][: collection.rank]
    space = CoordinateSpace(names=names, units=["nm"] * len(names), scales=[1] * len(names))
    writer = AnnotationWriter(
        space,
        collection.kind,
        relationships=collection.relationships,
        properties=[
            AnnotationPropertySpec(id="size", type="float32"),
            AnnotationPropertySpec(id="colour", type="rgb"),
        ],
    )
    add: Any = getattr(writer, f"add_{collection.kind}")
    for n in numbers:
        start = _start(collection, n)
        ends = [start] if collection.kind == "point" else [start, [c + 1.5 for c in start]]
        related = {name: list(SEGMENTS[: n % 4]) for name in collection.relationships}
        add(*ends, id=_id(n), size=n / 4, colour=(n, 5, 250), **related)
    writer.write(path)


def _id(number: int) -> int:
    return LAST_ID if number == 0 else number**5


def _start(collection: Collection, number: int) -> list[float]:
    random = np.random.default_rng(number)
    return [float(c) for c in random.integers(0, int(BOUND), collection.rank)]


def _cell_of(point: Sequence[float], size: Sequence[float]) -> Cell:
    return tuple(int(c // s) for c, s in zip(point, size, strict=True))
