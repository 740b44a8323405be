"""`shardgate.formats.listing`: cells of a grid in the order of their keys."""

import numpy as np

from shardgate.formats.listing import Grid, GridAxis


def test_cells_beyond_2_63_are_sorted_by_their_keys() -> None:
    """Cells whose numbers in keys reach past 2^63 are sorted by the texts of these."""
    axis = GridAxis(4, first=2**63 - 128, step=64)
    grid = Grid((axis,), lambda cell: str(axis.first + axis.step * cell[0]))
    cells = np.arange(4, dtype=np.uint64).reshape(-1, 1)

    assert grid.sort(cells).tolist() == [[0], [1], [2], [3]]
