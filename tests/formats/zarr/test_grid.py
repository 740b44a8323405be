"""Chunk grids of Zarr v3, regular and rectilinear."""

from typing import Any

import numpy as np
import pytest

from shardgate.formats.reading import DecodeError
from shardgate.formats.zarr.grid import parse_grid, read_chunk_shape
from tests.formats.zarr.building import rectilinear, regular


@pytest.mark.parametrize(
    ("grid", "lengths"),
    [
        (regular(4), [4, 4, 4]),
        (rectilinear(4), [4, 4, 4]),
        (rectilinear([5, [2, 3]]), [5, 2, 2, 2]),
        (rectilinear([]), []),
    ],
)
def test_chunks_have_the_lengths_of_their_grid(grid: dict[str, Any], lengths: list[int]) -> None:
    """A grid has one edge length for each chunk, those past the end of the array included."""
    found = parse_grid(grid, (9,))

    assert found.counts == (len(lengths),)
    assert found.edge_lengths(0, np.arange(len(lengths), dtype=np.uint32)).tolist() == lengths


def test_only_a_regular_grid_has_a_chunk_shape() -> None:
    """The chunk shape of a regular grid is read alone; other grids have none."""
    assert read_chunk_shape(regular(2, 0)) == (2, 0)
    assert read_chunk_shape(rectilinear(2)) is read_chunk_shape("hexagonal") is None


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (regular(0), "chunk_shape is 0"),
        (regular(1, 1), "instead of 1"),
        ({"name": "hexagonal"}, "hexagonal"),
        (None, "without a name"),
        (rectilinear(), "1 dimensions"),
        (rectilinear(0), "no list of sizes"),
        (rectilinear("2"), "no list of sizes"),
        (rectilinear(["2"]), "no list of sizes"),
        (rectilinear([[2]]), "instead of 2"),
        (rectilinear([-2]), "no list of sizes"),
    ],
)
def test_invalid_grid_is_refused_with_the_reason(grid: Any, message: str) -> None:
    """A grid that is neither regular nor rectilinear, or has other sizes, cannot be decoded."""
    with pytest.raises(DecodeError, match=message):
        parse_grid(grid, (2,))
