"""`shardgate.formats.neuroglancer_precomputed.keys`: names of chunks, and their ids."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgate.formats.neuroglancer_precomputed.keys import (
    MAX_ID,
    CellNames,
    IdNames,
    MortonGrid,
    Names,
    VoxelBounds,
)
from tests.support.formats.neuroglancer_precomputed.shards import morton

_grids = st.lists(st.integers(1, 2**12), min_size=1, max_size=5).map(tuple).map(
    MortonGrid
) | st.just(MortonGrid((2**21, 2**21, 2**22)))
_sizes = st.integers(1, 2**20)


def _triples(elements: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[int, int, int]]:
    return st.tuples(elements, elements, elements)


_bounds = st.builds(
    VoxelBounds, _triples(st.integers(-(2**62), 2**62)), _triples(_sizes), _triples(_sizes)
)
_names = st.one_of(st.just(IdNames()), st.just(IdNames(".index")), _grids.map(CellNames), _bounds)
_pieces = st.sampled_from(["0", "1", "7", "64", "007", "-", "-1", "+1", "_", ".index", " ", "\n"])
_texts = st.one_of(
    st.text(),
    st.text("-_0123456789"),
    st.lists(_pieces | st.characters(categories=["Nd"])).map("".join),
)


def _cell(data: st.DataObject, grid: MortonGrid) -> tuple[int, ...]:
    return data.draw(st.tuples(*[st.integers(0, n - 1) for n in grid.shape]))


def _chunk_id(data: st.DataObject, names: Names) -> int:
    match names:
        case VoxelBounds(grid=grid) | CellNames(grid):
            return grid.encode(_cell(data, grid))
        case _:
            return data.draw(st.integers(0, MAX_ID))


@given(_grids, st.data())
def test_morton_code_interleaves_the_bits_of_a_cell(grid: MortonGrid, data: st.DataObject) -> None:
    """The Morton code of a cell equals that of an independent implementation."""
    cell = _cell(data, grid)

    assert grid.encode(cell) == morton(cell, grid.shape)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.lists(st.integers(0, 2**12)))
def test_grid_covers_only_the_codes_of_its_cells(shape: list[int], ids: list[int]) -> None:
    """A grid covers exactly the codes of its cells."""
    codes = {morton(cell, tuple(shape)) for cell in product(*map(range, shape))}
    found = MortonGrid(tuple(shape)).covers(np.array(ids, np.uint64))

    assert found.tolist() == [each in codes for each in ids]


@given(_names, st.data())
def test_formatted_name_parses_to_its_id(names: Names, data: st.DataObject) -> None:
    """A formatted name parses to its id."""
    chunk_id = _chunk_id(data, names)

    assert names.parse(names.format(chunk_id)) == chunk_id


@given(_names, _texts)
def test_only_canonical_names_parse(names: Names, text: str) -> None:
    """A text that parses is the canonical name of its id."""
    chunk_id = names.parse(text)

    assert chunk_id is None or names.format(chunk_id) == text


def _spelled(bounds: VoxelBounds, cell: Sequence[int], *, is_clipped: bool) -> str:
    """Return the bounds of the voxels of *cell*, which may lie off the grid."""
    pairs = []
    for at, offset, chunk_size, size in zip(
        cell, bounds.voxel_offset, bounds.chunk_size, bounds.size, strict=True
    ):
        end = (at + 1) * chunk_size
        pairs.append(
            f"{offset + at * chunk_size}-{offset + (min(end, size) if is_clipped else end)}"
        )
    return "_".join(pairs)


@given(_bounds, st.data())
def test_name_of_a_chunk_has_the_bounds_of_its_voxels(
    bounds: VoxelBounds, data: st.DataObject
) -> None:
    """A chunk's name has the bounds of its voxels, clipped to the volume."""
    cell = _cell(data, bounds.grid)

    assert bounds.parse(_spelled(bounds, cell, is_clipped=True)) == bounds.grid.encode(cell)


@given(_bounds, st.data())
def test_bounds_off_the_grid_do_not_parse(bounds: VoxelBounds, data: st.DataObject) -> None:
    """Bounds before or behind the volume, clipped or not, do not parse."""
    axis = data.draw(st.integers(0, 2))
    count = bounds.grid.shape[axis]
    cell = list(_cell(data, bounds.grid))
    cell[axis] = data.draw(st.sampled_from([-1, -2, count, count + 1]))
    for is_clipped in (True, False):
        assert bounds.parse(_spelled(bounds, cell, is_clipped=is_clipped)) is None


_VOLUME = VoxelBounds((-1, 5, 0), (7, 5, 1), (3, 3, 1))


_NO_NAMES: list[tuple[Names, list[str]]] = [
    (_VOLUME,
     ["5-8_5-8_0-1", "-1-1_5-8_0-1", "-1-3_5-8_0-1", "0-3_5-8_0-1", "2-5_5-8", "2-5_5-8_0-1_0-1",
      "8-11_5-8_0-1", "-4--1_5-8_0-1", "2-5_2-5_0-1", "2-5_5-8_1-2", "5-2_5-8_0-1", "2-2_5-8_0-1",
      "02-5_5-8_0-1", "2-05_5-8_0-1", "2-5_5-8_-0-1", "+2-5_5-8_0-1", "2-5_5-8_0-1 ",
      "2-5_5-8_0-1\n", "\u0662-5_5-8_0-1", "\uff12-5_5-8_0-1", "2\u20135_5-8_0-1", "2-5-5-8-0-1",
      "2-5_5-8_0-1.gz", "--1-2_5-8_0-1", "", "_", "2-5__0-1", "2.0-5_5-8_0-1", "0x2-5_5-8_0-1",
      "2-5/5-8/0-1", "2-" + "9" * 5000 + "_5-8_0-1"]),
    (VoxelBounds((0, 0, 0), (0, 5, 1), (3, 3, 1)), ["0-0_0-3_0-1", "0-3_0-3_0-1"]),
    (IdNames(),
     ["", "00", "07", "+7", "-7", "-0", "7.0", "7 ", "7\n", "1e3", "0x7", "1_0", "\u0667", "\uff17",
      "\u00b2", str(2**64), "9" * 20, "9" * 5000, "7.index", "7:0"]),
    (IdNames(".index"), ["7", ".index", "7.Index", "7.index.index", "07.index", "7index"]),
    (CellNames(MortonGrid((2, 1, 3))),
     ["", "0", "0_0", "0_0_0_0", "2_0_0", "0_1_0", "0_0_3", "00_0_0", "0_0_-1", "0_0_0_", "_0_0",
      "0__0", "0-0-0", "0_0_\u0661", "0_0_0\n", "0_0_" + "9" * 5000]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "name"), [(names, name) for names, others in _NO_NAMES for name in others]
)
def test_noncanonical_name_does_not_parse(names: Names, name: str) -> None:
    """Names off the grid, wrongly clipped, reversed or spelled otherwise do not parse."""
    assert names.parse(name) is None


@pytest.mark.parametrize(
    ("names", "name", "is_owned"),
    [(IdNames(), "07", True), (IdNames(), "\u0667", True), (IdNames(), str(2**64), True),
     (IdNames(), "", False), (IdNames(), "info", False), (IdNames(), "7:0", False),
     (IdNames(), "0.shard", False), (IdNames(".index"), "07.index", True),
     (IdNames(".index"), "a.index", False), (CellNames(MortonGrid((1, 1))), "7_7", True),
     (CellNames(MortonGrid((1, 1))), "0", True), (CellNames(MortonGrid((1, 1))), "0_", False),
     (CellNames(MortonGrid((1, 1))), "notes", False), (_VOLUME, "900-901_5-8_0-1", True),
     (_VOLUME, "5-8_5-8", False), (_VOLUME, "0.shard", False)],
)  # fmt: skip
def test_part_owns_names_spelled_like_its_chunks(
    names: Names, name: str, *, is_owned: bool
) -> None:
    """A part owns each name that is spelled like a chunk's, and no others."""
    assert names.owns(name) is is_owned
