"""`shardgate.web.sections`: the part of an array that a picture shows."""

from math import prod
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgate.survey.arrays import ArrayView, Axis
from shardgate.web.nodes import NodeView
from shardgate.web.sections import (
    MOST_VALUES,
    Choice,
    UndrawableError,
    choices_of,
    plan_section,
    plane_of,
)

KINDS: Final = {"s": "space", "t": "time", "c": "channel"}


def node_of(shape: tuple[int, ...], kinds: str) -> NodeView:
    """Return an array whose axes have the names and kinds of the letters *kinds*."""
    axes = [Axis(f"{kind}{at}", KINDS[kind], shape[at]) for at, kind in enumerate(kinds)]
    return NodeView("", "array", {}, ArrayView("", "zarr", "array", shape, axes=axes))


@pytest.mark.parametrize(
    ("shape", "chunks", "kinds", "ranges"),
    [
        ((9, 8), (4, 4), "ss", [(0, 9), (0, 8)]),
        ((3, 5, 7, 9, 8), (1,) * 5, "tcsss", [(0, 1), (0, 1), (3, 4), (0, 9), (0, 8)]),
        ((9, 8), (4, 4), "ts", [(0, 9), (0, 8)]),
        ((5000, 4000), (500, 500), "ss", [(1500, 3500), (1000, 3000)]),
        ((10, 8_000_000), (10, 10**6), "ss", [(0, 10), (3_800_000, 4_200_000)]),
        ((2000, 2000), (10, 10), "ss", [(840, 1160), (840, 1160)]),
        ((1, 10**9), (1, 1), "ss", [(0, 1), (499_999_488, 500_000_512)]),
    ],
)
def test_section_is_cut_to_the_middle(
    shape: tuple[int, ...], chunks: tuple[int, ...], kinds: str, ranges: list[tuple[int, int]]
) -> None:
    """A section has at most 4 million values and about 1,024 chunks, from the middle."""
    node = node_of(shape, kinds)
    section = plan_section(shape, chunks, plane_of(node), choices_of(node, {}))

    assert [(each.start, each.stop) for each in section.ranges] == ranges
    assert prod(map(len, section.ranges)) <= MOST_VALUES


@pytest.mark.parametrize("shape", [(), (9,), (0, 9), (9, 9, 0)])
def test_empty_and_short_shapes_have_no_section(shape: tuple[int, ...]) -> None:
    """An array without values, or with fewer than two axes, is refused."""
    with pytest.raises(UndrawableError):
        choices_of(node_of(shape, "s" * len(shape)), {})


@given(st.integers(1, 2**40), st.integers(1, 2**40), st.data())
def test_position_lies_in_every_level(size: int, level_size: int, data: st.DataObject) -> None:
    """A position of the finest level is one of each other level, and the same at equal sizes."""
    choice = Choice(0, "z", size, data.draw(st.integers(0, size - 1)))

    assert 0 <= choice.index_in(level_size) < level_size
    assert choice.index_in(size) == choice.at
