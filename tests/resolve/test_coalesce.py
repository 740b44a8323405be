"""Planning reads of neighbouring ranges."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.model import ByteRange
from app.resolve.coalesce import plan_reads, span_of

_ranges = st.lists(
    st.tuples(st.integers(0, 200), st.integers(0, 30)).map(lambda r: ByteRange(r[0], r[0] + r[1])),
    max_size=12,
)
_gaps, _limits = st.integers(0, 20), st.integers(1, 80)


@st.composite
def _apart(draw: st.DrawFn) -> list[ByteRange]:
    """Ranges of which no two share a byte, in any order."""
    steps = st.tuples(st.integers(0, 12), st.integers(1, 20))
    at, found = 0, []
    for gap, length in draw(st.lists(steps, max_size=12)):
        found.append(ByteRange(at + gap, at + gap + length))
        at += gap + length
    return draw(st.permutations(found))


def _holds(span: ByteRange, wanted: ByteRange) -> bool:
    return span.start <= wanted.start and wanted.stop <= span.stop


@given(_ranges, _gaps, _limits)
def test_every_range_lies_in_a_span(ranges: list[ByteRange], gap: int, limit: int) -> None:
    """The span that is found for a range holds it and is one that was planned."""
    spans = plan_reads(ranges, max_gap_bytes=gap, max_span_bytes=limit)
    for wanted in ranges:
        assert span_of(wanted, spans) in spans
        assert _holds(span_of(wanted, spans), wanted)


@given(_apart(), _gaps, _limits)
def test_ranges_apart_lie_in_one_span_each(ranges: list[ByteRange], gap: int, limit: int) -> None:
    """Ranges that share no byte are read once."""
    spans = plan_reads(ranges, max_gap_bytes=gap, max_span_bytes=limit)

    assert all(sum(_holds(span, wanted) for span in spans) == 1 for wanted in ranges)


@given(_apart(), _gaps, _limits)
def test_spans_of_ranges_apart_do_not_overlap(
    ranges: list[ByteRange], gap: int, limit: int
) -> None:
    """No byte is read twice unless it was asked for twice."""
    spans = plan_reads(ranges, max_gap_bytes=gap, max_span_bytes=limit)

    assert all(a.stop <= b.start for a, b in itertools.pairwise(spans))


@given(_ranges, _gaps, _limits)
def test_a_span_is_no_longer_than_the_limit(ranges: list[ByteRange], gap: int, limit: int) -> None:
    """Only a range that is longer by itself makes a longer span."""
    spans = plan_reads(ranges, max_gap_bytes=gap, max_span_bytes=limit)

    assert all(span.length <= limit or span in ranges for span in spans)


@given(_ranges, _gaps, _limits)
def test_a_span_bridges_no_wider_gap(ranges: list[ByteRange], gap: int, limit: int) -> None:
    """Unwanted bytes in a row inside a span are at most the gap."""
    wanted = {at for each in ranges for at in range(each.start, each.stop)}
    empty = {each.start for each in ranges if not each.length}
    for span in plan_reads(ranges, max_gap_bytes=gap, max_span_bytes=limit):
        run = 0
        for at in range(span.start, span.stop):
            run = 0 if at in wanted or at in empty else run + 1
            assert run <= gap


@given(_ranges, _gaps, _limits)
def test_a_span_begins_and_ends_with_ranges(ranges: list[ByteRange], gap: int, limit: int) -> None:
    """Nothing is read before the first or after the last wanted byte."""
    spans = plan_reads(ranges, max_gap_bytes=gap, max_span_bytes=limit)

    assert {span.start for span in spans} <= {each.start for each in ranges}
    assert {span.stop for span in spans} <= {each.stop for each in ranges}


@given(_apart(), _gaps, _limits)
def test_what_could_be_one_read_is(ranges: list[ByteRange], gap: int, limit: int) -> None:
    """Neighbouring spans are too far apart or too long together with the next range."""
    spans = plan_reads(ranges, max_gap_bytes=gap, max_span_bytes=limit)
    for a, b in itertools.pairwise(spans):
        first = next(each for each in sorted(ranges) if each.start == b.start)
        assert b.start - a.stop > gap or first.stop - a.start > limit


@pytest.mark.parametrize(
    ("ranges", "spans"),
    [
        ([], []),
        ([(0, 4)], [(0, 4)]),
        ([(4, 8), (0, 4)], [(0, 8)]),
        ([(0, 4), (6, 8)], [(0, 8)]),
        ([(0, 4), (7, 8)], [(0, 4), (7, 8)]),
        ([(0, 4), (0, 4)], [(0, 4)]),
        ([(0, 6), (6, 12)], [(0, 6), (6, 12)]),
        ([(0, 20), (20, 22)], [(0, 20), (20, 22)]),
        ([(0, 20), (3, 5)], [(0, 20)]),
    ],
)
def test_plans(ranges: list[tuple[int, int]], spans: list[tuple[int, int]]) -> None:
    """With gaps of 2 and spans of 10 bytes allowed, these ranges become these reads."""
    planned = plan_reads([ByteRange(*r) for r in ranges], max_gap_bytes=2, max_span_bytes=10)

    assert planned == [ByteRange(*s) for s in spans]
