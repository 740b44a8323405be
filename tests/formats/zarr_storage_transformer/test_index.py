"""Chunks in shards."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.formats.zarr_storage_transformer.index import ShardGrid
from app.model import SuffixRange


@pytest.mark.parametrize("coords", [(96, 18), (96, 19), (97, 18), (127, 19)])
def test_shards_of_the_draft(coords: tuple[int, int]) -> None:
    """The draft's own example: these chunks share the shard at 3, 9."""
    assert ShardGrid((200, 200), (32, 2)).shard(coords) == (3, 9)


def test_the_index_has_sixteen_bytes_an_entry() -> None:
    """For 64 chunks these are 1,024, and not the draft's 1,014; there is no checksum."""
    assert ShardGrid((200, 200), (32, 2)).index.request == SuffixRange(1024)


@given(st.data(), st.integers(0, 5))
def test_entries_are_in_c_order(data: st.DataObject, ndim: int) -> None:
    """The last dimension varies fastest, as in numpy, whichever shard it is."""
    counts = data.draw(st.tuples(*[st.integers(1, 6)] * ndim))
    inside = data.draw(st.tuples(*[st.integers(0, n - 1) for n in counts]))
    shard = data.draw(st.tuples(*[st.integers(0, 2**40)] * ndim))
    coords = tuple(s * n + i for s, n, i in zip(shard, counts, inside, strict=True))
    grid = ShardGrid((2**60,) * ndim, counts)
    expected = np.ravel_multi_index(inside, counts) if ndim else 0

    assert (grid.shard(coords), grid.entry(coords)) == (shard, expected)
    assert grid.entry(coords) < grid.index.entry_count


@pytest.mark.parametrize(("coords", "holds"), [((2, 3), True), ((3, 0), False), ((0, 4), False)])
def test_the_grid_ends_with_the_array(coords: tuple[int, int], *, holds: bool) -> None:
    """A shard may reach past the array; a chunk that begins there is none."""
    assert ShardGrid((3, 4), (2, 2)).holds(coords) is holds


def test_an_array_without_dimensions_has_one_chunk() -> None:
    """It is entry 0 of one in the only shard."""
    grid = ShardGrid((), ())

    assert grid.holds(())
    assert (grid.shard(()), grid.entry(()), grid.index.entry_count) == ((), 0, 1)
