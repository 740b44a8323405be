"""The judge of histories."""

from math import inf

from tests.histories import Write, possible


def test_the_last_of_two_writes_is_there() -> None:
    """Where one ended before the other began, only the other may be seen."""
    assert possible([Write("k", b"a", 0, 1), Write("k", b"b", 2, 3)], "k") == {b"b"}


def test_of_two_writes_at_once_either_may_be_there() -> None:
    """Nobody knows which came first."""
    assert possible([Write("k", b"a", 0, 2), Write("k", b"b", 1, 3)], "k") == {b"a", b"b"}


def test_a_write_without_an_answer_is_there_or_not() -> None:
    """It may also come late, but what was acknowledged is gone only for it."""
    writes = [Write("k", b"a", 0, 1), Write("k", b"b", 2, inf)]

    assert possible(writes, "k") == {b"a", b"b"}


def test_a_key_begins_with_nothing() -> None:
    """What was not written is not there, until something was acknowledged."""
    assert possible([], "k") == {None}
    assert possible([Write("k", b"a", 0, inf)], "k") == {None, b"a"}
    assert possible([Write("k", b"a", 0, 1)], "k") == {b"a"}
