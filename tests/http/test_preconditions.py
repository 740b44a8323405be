"""`app.http.preconditions`: what a write demands of what it replaces."""

import pytest

from app.errors import BadHeaderError
from app.http.preconditions import parse_demand
from app.model import ETag

A, B = ETag('"a"'), ETag('"b"')


@pytest.mark.parametrize(
    ("if_match", "if_none_match", "fulfilled_by"),
    [
        ("*", None, {"a", "b", "ab"}),
        ('"a"', None, {"a", "ab"}),
        ('"x", "a"', None, {"a", "ab"}),
        (' , "x" ,, "a",', None, {"a", "ab"}),
        ("a", None, {"a", "ab"}),
        ('W/"a"', None, set()),
        (None, "*", {""}),
        (None, '"a"', {"", "b"}),
        (None, 'W/"a"', {"", "b"}),
        (None, '"a","b"', {""}),
        (None, "b", {"", "a"}),
        ('"a"', '"b"', {"a"}),
        ("*", "*", set()),
    ],
)
def test_demands(if_match: str | None, if_none_match: str | None, fulfilled_by: set[str]) -> None:
    """One of all names of the current version decides; where nothing is there are none."""
    demand = parse_demand(if_match, if_none_match)
    current = {"": (), "a": (A,), "b": (B,), "ab": (A, B)}

    assert demand is not None
    assert {name for name, tags in current.items() if demand(tags)} == fulfilled_by


def test_no_header_is_no_demand() -> None:
    """A plain PUT replaces whatever is there."""
    assert parse_demand(None, None) is None


@pytest.mark.parametrize("value", ["", '"a', 'a"', '"a" "b"', '*, "a"', '"a\n"', "a b"])
def test_what_is_no_list_of_tags_is_refused(value: str) -> None:
    """A condition that is not understood must not pass for one that holds."""
    with pytest.raises(BadHeaderError):
        parse_demand(value, None)
    with pytest.raises(BadHeaderError):
        parse_demand(None, value)
