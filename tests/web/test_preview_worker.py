"""`shardgate.web.preview_worker`: numbers of the values in a picture."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import DTypeLike, NDArray

from shardgate.web.preview_worker import count_labels, histogram


@given(arrays(np.float64, st.integers(1, 9), elements=st.floats(allow_nan=False, width=16)))
def test_histogram_counts_each_value(values: NDArray[np.float64]) -> None:
    """All values are counted, also of a range that has an infinite width."""
    measured = histogram(values)

    assert sum(measured.get("counts", [values.size])) == values.size


def test_neighbouring_numbers_are_counted_in_one_part() -> None:
    """Between neighbouring numbers there are none that could separate parts of a histogram."""
    values = np.array([1e9, np.nextafter(1e9, 2e9)])

    assert histogram(values)["counts"] == [2]


@pytest.mark.parametrize("data_type", [np.float32, np.float64, ml_dtypes.bfloat16])
def test_labels_that_are_not_finite_are_not_counted(data_type: DTypeLike) -> None:
    """NaN and infinities are no labels."""
    ids = np.array([0, 3, np.nan, 7, 7, np.inf, -np.inf]).astype(data_type)

    assert count_labels(ids) == {"labels": (2, 3, 7)}


@pytest.mark.parametrize("data_type", [np.uint64, ml_dtypes.int4])
def test_integers_are_counted_as_labels(data_type: DTypeLike) -> None:
    """Integers of any type are labels, but for 0."""
    assert count_labels(np.array([0, 7, 1]).astype(data_type)) == {"labels": (2, 1, 7)}
