"""Which parts of an object the server copies."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.model import ByteRange, Piece
from app.storage.parts import MIN_NBYTES, Part, nbytes_of, plan_parts
from app.storage.spans import assemble, plan_spans

OLD = bytes(range(256)) * 8
MIN = 50
MIB = 1024**2

ranges = st.tuples(st.integers(0, len(OLD)), st.integers(0, len(OLD))).map(
    lambda ends: ByteRange(min(ends), max(ends))
)
pieces = st.lists(st.binary(max_size=2 * MIN) | ranges, max_size=12)


def made(parts: Sequence[Part | Piece]) -> bytes:
    """Make the object of *parts*."""
    data = b""
    for part in parts:
        if isinstance(part, list):
            data += made(part)
        else:
            data += OLD[part.start : part.stop] if isinstance(part, ByteRange) else part
    return data


def nbytes(part: Part) -> int:
    """Count the bytes of a part."""
    return part.length if isinstance(part, ByteRange) else sum(map(nbytes_of, part))


def sent(parts: Sequence[Part]) -> int:
    """Count the bytes that pass through us."""
    return sum(nbytes(part) for part in parts if not isinstance(part, ByteRange))


@given(pieces)
def test_parts_make_the_same_bytes(given: list[Piece]) -> None:
    """Whatever the pieces are, the parts hold their bytes and no others."""
    assert made(plan_parts(given, min_nbytes=MIN)) == made([*given])
    assert made(plan_parts(given, copies=False)) == made([*given])


@given(pieces)
def test_parts_are_legal(given: list[Piece]) -> None:
    """Every part but the last is long enough, and none is empty."""
    parts = plan_parts(given, min_nbytes=MIN)

    assert all(nbytes(part) >= MIN for part in parts[:-1])
    assert all(nbytes(part) > 0 for part in parts)


@given(pieces)
def test_little_is_sent_again(given: list[Piece]) -> None:
    """No more than a least part is sent for every piece, beside what is new."""
    parts = plan_parts(given, min_nbytes=MIN)
    new = sum(len(piece) for piece in given if isinstance(piece, bytes))

    assert sent(parts) <= new + MIN * len(given)


def test_a_hole_in_a_large_object_costs_one_least_part() -> None:
    """A small chunk in the middle and an index at the end move 5 MiB, and the index."""
    hole, size, index = 300 * MIB, 1024 * MIB, b"i" * 1000

    parts = plan_parts([ByteRange(0, hole), b"new", ByteRange(hole + 3, size), index])

    assert sent(parts) == MIN_NBYTES + len(index)


@pytest.mark.parametrize("new", [b"", b"index"])
def test_an_end_may_be_short(new: bytes) -> None:
    """The last part has no least length, be it copied or sent."""
    parts = plan_parts([b"n" * MIN, ByteRange(0, 3 * MIN), ByteRange(9, 10), new], min_nbytes=MIN)

    assert parts[1] == ByteRange(0, 3 * MIN)
    assert nbytes(parts[-1]) == 1 + len(new)


def test_a_range_between_two_holes_is_sent_if_little_would_be_left() -> None:
    """What would be too short to be copied goes up with both its neighbours."""
    given: list[Piece] = [ByteRange(0, 1000), b"1", ByteRange(0, 60), b"2", ByteRange(0, 1000)]

    parts = plan_parts(given, min_nbytes=MIN)

    assert parts == [given[0], given[1:4], given[4]]


def test_ranges_side_by_side_are_one() -> None:
    """Chunks that stay where they were are copied together."""
    assert plan_parts([ByteRange(n, n + 1) for n in range(500)], min_nbytes=MIN) == [
        ByteRange(0, 500)
    ]


def test_long_ranges_are_copied_in_parts() -> None:
    """No part takes the server long; all of them are about alike."""
    parts = plan_parts([ByteRange(0, 1000 * MIB)])

    assert [nbytes(part) for part in parts] == [250 * MIB] * 4


def test_there_are_never_too_many_parts() -> None:
    """S3 takes 10,000 parts; where there would be more, the least part is longer."""
    given: list[Piece] = [ByteRange(at, at + 60) for at in range(0, 61 * 25_000, 61)]

    parts = plan_parts([each for kept in given for each in (kept, b"x")], min_nbytes=MIN)

    assert len(parts) <= 10_000


def test_what_is_new_is_sent_in_parts() -> None:
    """Nothing has to be held in memory as a whole."""
    parts = plan_parts([b"x" * (20 * MIB), ByteRange(0, 20 * MIB)], copies=False)

    assert max(map(nbytes, parts)) < 32 * MIB
    assert not any(isinstance(part, ByteRange) for part in parts)


@given(pieces)
def test_spans_hold_all_ranges(given: list[Piece]) -> None:
    """What was read in few spans makes the same bytes."""
    spans = plan_spans(piece for piece in given if isinstance(piece, ByteRange))
    read = [OLD[span.start : span.stop] for span in spans]

    assert assemble(given, spans, read) == made([*given])
    assert len(spans) <= 1


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 40)), max_size=20))
def test_spans_are_short(given: list[tuple[int, int]]) -> None:
    """Spans join what is near, and grow no longer than a request should be."""
    ranges = [ByteRange(start * MIB, (start + length) * MIB) for start, length in given]

    spans = plan_spans(ranges)

    assert all(any(s.start <= r.start and r.stop <= s.stop for s in spans) for r in ranges)
    longest = max((each.length for each in ranges), default=0)
    assert all(span.length <= max(16 * MIB, longest) for span in spans)
