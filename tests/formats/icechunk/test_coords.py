"""`shardgate.formats.icechunk.coords`: arrays of coordinates, compared with lists of tuples."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardgate.formats.icechunk.coords import Coords, inside, last_of_each, rows_in, union

type Rows = list[tuple[int, ...]]

ROWS = st.integers(0, 3).flatmap(
    lambda ndim: st.tuples(
        st.just(ndim),
        *[st.lists(st.tuples(*[st.sampled_from([0, 1, 2, 2**32 - 1])] * ndim), max_size=9)] * 2,
    )
)
"""A number of dimensions, and two lists of rows."""


def _coords(rows: Rows, ndim: int) -> Coords:
    return np.array(rows, np.uint32).reshape(len(rows), ndim)


def _tuples(coords: Coords) -> Rows:
    return list(map(tuple, coords.tolist()))


@settings(max_examples=50)
@given(ROWS)
def test_coords_agree_with_lists_of_tuples(drawn: tuple[int, Rows, Rows]) -> None:
    """Union, last occurrences and membership of coordinates agree with lists of tuples."""
    ndim, some, others = drawn
    coords = _coords(some, ndim)
    distinct = sorted(set(some))

    assert [row for each in union(coords) for row in _tuples(each)] == distinct
    last = last_of_each(coords)
    assert [some[at] for at in last] == distinct
    assert all(some[at] not in some[at + 1 :] for at in last)
    found = rows_in(_coords(distinct, ndim), _coords(others, ndim))
    assert found.tolist() == [each in set(others) for each in distinct]


def test_union_has_one_batch_per_ndim() -> None:
    """A union has one sorted batch for each number of dimensions, and no empty ones."""
    batches = [_coords([(1, 1)], 2), _coords([(2,), (1,)], 1), _coords([], 3), _coords([(2,)], 1)]

    assert [_tuples(each) for each in union(*batches)] == [[(1,), (2,)], [(1, 1)]]


def test_coordinates_of_another_ndim_match_nothing() -> None:
    """Coordinates with another number of dimensions are outside of every box and match none."""
    ones = _coords([(0,), (1,)], 1)
    assert inside(ones, (2,)).tolist() == [True, True]
    assert inside(ones, (2,), (1,)).tolist() == [False, True]
    assert inside(ones, (2, 2)).tolist() == [False, False]
    assert inside(_coords([()], 0), ()).tolist() == [True]
    assert rows_in(ones, _coords([(1, 1)], 2)).tolist() == [False, False]
