"""Chunk grids of Zarr v3, regular and rectilinear."""

from typing import Any

import numpy as np
import pytest

from shardgate.formats.reading import DecodeError
from shardgate.formats.zarr.grid import parse_grid, read_chunk_shape


def _regular(*sizes: Any) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": list(sizes)}}


def _rectilinear(*sizes: Any) -> dict[str, Any]:
    configuration = {"kind": "inline", "chunk_shapes": list(sizes)}
    return {"name": "rectilinear", "configuration": configuration}


@pytest.mark.parametrize(
    ("grid", "lengths"),
    [
        (_regular(4), [4, 4, 4]),
        (_rectilinear(4), [4, 4, 4]),
        (_rectilinear([5, [2, 3]]), [5, 2, 2, 2]),
        (_rectilinear([]), []),
    ],
)
def test_chunks_have_the_lengths_of_their_grid(grid: dict[str, Any], lengths: list[int]) -> None:
    """A grid has one edge length for each chunk, those past the end of the array included."""
    found = parse_grid(grid, (9,))

    assert found.counts == (len(lengths),)
    assert found.edge_lengths(0, np.arange(len(lengths), dtype=np.uint32)).tolist() == lengths


def test_only_a_regular_grid_has_a_chunk_shape() -> None:
    """The chunk shape of a regular grid is read alone; other grids have none."""
    assert read_chunk_shape(_regular(2, 0)) == (2, 0)
    assert read_chunk_shape(_rectilinear(2)) is read_chunk_shape("hexagonal") is None


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (_regular(0), "chunk_shape is 0"),
        (_regular(1, 1), "instead of 1"),
        ({"name": "hexagonal"}, "hexagonal"),
        (None, "without a name"),
        (_rectilinear(), "1 dimensions"),
        (_rectilinear(0), "no list of sizes"),
        (_rectilinear("2"), "no list of sizes"),
        (_rectilinear(["2"]), "no list of sizes"),
        (_rectilinear([[2]]), "instead of 2"),
        (_rectilinear([-2]), "no list of sizes"),
    ],
)
def test_invalid_grid_is_refused_with_the_reason(grid: Any, message: str) -> None:
    """A grid that is neither regular nor rectilinear, or has other sizes, cannot be decoded."""
    with pytest.raises(DecodeError, match=message):
        parse_grid(grid, (2,))
