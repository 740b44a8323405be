"""`app.formats.listing`: numbers in the order of their texts."""

from itertools import islice

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from app.formats.listing import Steps


@given(
    st.lists(st.integers(0, 60), unique=True).map(sorted),
    st.integers(1, 9),
    st.integers(1, 400),
    st.text("0123456789/.x", max_size=3),
)
def test_numbers_come_as_their_texts_are_ordered(
    runs: list[int], size: int, stop: int, after: str
) -> None:
    """All of the runs below the end, and of those before *after* at most its beginnings."""
    numbers = [run * size + i for run in runs for i in range(size)]
    texts = sorted(str(number) for number in numbers if number < stop)
    found = list(map(str, Steps(np.array(runs, np.uint32), size, stop).walk(after)))

    assert [text for text in found if text >= after] == [text for text in texts if text >= after]
    assert set(found) <= set(texts)
    assert all(after.startswith(text) for text in found if text < after)


def test_runs_may_be_longer_than_memory() -> None:
    """Only the numbers that are asked for are made."""
    walk = Steps(np.array([0, 3], np.uint32), 2**40, 2**42).walk("1099511627775")

    assert list(islice(walk, 13))[-1:] == [1099511627775]


@given(
    st.lists(st.integers(0, 20), unique=True).map(sorted),
    st.integers(1, 5),
    st.integers(0, 60),
    st.integers(-3000, 3000),
    st.integers(1, 70),
    st.text("0123456789-_", max_size=4),
)
def test_numbers_may_begin_anywhere_and_be_far_apart(  # noqa: PLR0917
    runs: list[int], size: int, stop: int, first: int, step: int, after: str
) -> None:
    """Places are walked by what stands for them, negative numbers first, as their sign is."""
    places = [run * size + i for run in runs for i in range(size) if run * size + i < stop]
    ordered = sorted(places, key=lambda place: f"{first + place * step}-")
    walk = Steps(np.array(runs, np.uint64), size, stop, first, step).walk(after)
    found = [(place, f"{first + place * step}-") for place in walk]

    assert [place for place, _ in found] == [
        place
        for place in ordered
        if (text := str(first + place * step)) >= after or after.startswith(text)
    ]
