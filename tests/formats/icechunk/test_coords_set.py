"""`app.formats.icechunk.coords_set`: a set is a set, however it was filled."""

import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from app.formats.icechunk.coords_set import CoordsSet

ROWS = st.integers(0, 3).flatmap(
    lambda ndim: st.lists(
        st.lists(st.sampled_from([0, 1, 2, 2**32 - 1]), min_size=ndim, max_size=ndim), min_size=1
    )
)


def _fill(batches: list[list[list[int]]]) -> CoordsSet:
    found = CoordsSet()
    for batch in batches:
        found.add(np.array(batch, np.uint32))
    return found


@given(st.lists(ROWS), st.lists(ROWS), st.integers(0, 20))
def test_it_has_what_was_added_once_and_in_order(
    some: list[list[list[int]]], others: list[list[list[int]]], limit: int
) -> None:
    """As a set of lists of Python would, also with lists of several lengths."""
    found = _fill([*some, *others])
    expected = sorted({tuple(row) for batch in (*some, *others) for row in batch})

    assert found.count() == len(expected)
    assert found.first(limit) == [list(row) for row in expected[:limit]]


def test_memory_does_not_grow_with_repetition() -> None:
    """The same coords in commit after commit are held a few times at most."""
    coords = np.argwhere(np.ones((200, 300))).astype(np.uint32)
    found = CoordsSet()
    tracemalloc.start()
    for _ in range(50):
        found.add(coords.copy())
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert held < 6 * coords.nbytes
    assert found.count() == len(coords)
