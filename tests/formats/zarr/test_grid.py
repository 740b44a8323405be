"""Chunk grids of Zarr v3, regular and rectilinear."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgate.formats.reading import DecodeError
from shardgate.formats.zarr.grid import ShardEdges, parse_grid, read_chunk_shape, read_shard_edges
from tests.support.formats.zarr.building import rectilinear, regular


@pytest.mark.parametrize(
    ("grid", "lengths"),
    [
        (regular(4), [4, 4, 4]),
        (rectilinear(4), [4, 4, 4]),
        (rectilinear([5, [2, 3]]), [5, 2, 2, 2]),
        (rectilinear(4.0), [4, 4, 4]),
        (rectilinear([5.0, [2.0, 3.0]]), [5, 2, 2, 2]),
        (rectilinear([]), []),
    ],
)
def test_chunks_have_the_extents_of_their_grid(grid: dict[str, Any], lengths: list[int]) -> None:
    """A grid has an extent for each chunk, those past the end of the array included."""
    found = parse_grid(grid, (9,))
    starts = [sum(lengths[:at]) for at in range(len(lengths))]

    assert found.counts == (len(lengths),)
    every = np.arange(len(lengths), dtype=np.uint32)
    assert found.extents(0, every).tolist() == [starts, lengths]


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


_RUNS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=6)


@given(_RUNS.map(tuple))
def test_shards_of_several_lengths_follow_one_another(runs: tuple[tuple[int, int], ...]) -> None:
    """Each element is in the shard that the lengths before it lead to."""
    lengths = [length for length, repeats in runs for _ in range(repeats)]
    owners = [shard for shard, length in enumerate(lengths) for _ in range(length)]
    edges = ShardEdges.of(runs, len(owners))

    assert [edges.shard_of(element) for element in range(len(owners))] == owners
    extents = [(owners.index(shard), length) for shard, length in enumerate(lengths)]
    assert [edges.extent(shard) for shard in range(len(lengths))] == extents


@pytest.mark.parametrize(
    "sizes", [[[1, 2**62]], [[1, 2**61], 1, [1, 2**62]], [*[1] * 999, [1, 2**62]]]
)
def test_countless_shards_are_kept_as_runs(sizes: list[Any]) -> None:
    """Shards beyond counting take the memory of their runs."""
    (edges,) = read_shard_edges(rectilinear(sizes), (2**62,))

    assert edges.shard_of(2**62 - 1) == 2**62 - 1
    assert edges.extent(2**62 - 1) == (2**62 - 1, 1)
    assert edges.nbytes < 100


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([0], "size of 0"),
        ([2, [0, 3]], "size of 0"),
        ([], "has no shards"),
        ([1], "covers 1 elements of 2"),
        ([[2, 0]], "covers 0 elements of 2"),
        ([[2**62, 2**62], 1], r"a sum above 2\^63-1"),
        ([2**63], r"above 2\^63-1"),
        ([[1, 2**63]], r"above 2\^63-1"),
        ([[1, 1.5]], "no list of sizes"),
        ([[1, -1]], "no list of sizes"),
        ([True, 2], "no list of sizes"),
    ],
)
def test_invalid_shards_are_refused_with_the_reason(sizes: list[Any], message: str) -> None:
    """Shards without a length, or that do not cover the array, cannot be decoded."""
    with pytest.raises(DecodeError, match=message):
        read_shard_edges(rectilinear(sizes), (2,))


@pytest.mark.parametrize("kind", [None, "external", ["inline"]])
def test_shards_of_another_kind_of_grid_are_refused(kind: Any) -> None:
    """A rectilinear grid whose sizes are not inline may mean something else."""
    grid = {"name": "rectilinear", "configuration": {"kind": kind, "chunk_shapes": [[2]]}}
    with pytest.raises(DecodeError, match="is not inline"):
        read_shard_edges(grid, (2,))
