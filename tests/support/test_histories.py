"""Histories of writes, and the values that may be read after them."""

from math import inf

import pytest

from tests.support.histories import Write, possible

FIRST = Write("k", b"a", 0, 1)


@pytest.mark.parametrize(
    ("writes", "expected"),
    [
        ([], {None}),
        ([FIRST], {b"a"}),
        ([Write("k", b"a", 0, inf)], {None, b"a"}),
        ([FIRST, Write("k", b"b", 2, 3)], {b"b"}),
        ([FIRST, Write("k", b"b", 2, inf)], {b"a", b"b"}),
        ([Write("k", b"a", 0, 2), Write("k", b"b", 1, 3)], {b"a", b"b"}),
    ],
    ids=["none", "one", "unanswered", "in turn", "unanswered after", "concurrent"],
)
def test_acknowledged_write_is_lost_to_concurrent_ones_only(
    writes: list[Write], expected: set[bytes | None]
) -> None:
    """An acknowledged write is lost only to one that had not ended when it began."""
    assert possible(writes, "k") == expected
