"""`app.resolve.icechunk.older_than`: ages, as people say them."""

import pytest

from app.errors import ConfigurationError
from app.resolve.icechunk.older_than import parse_older_than, spell_moment

_S = 1_000_000
NOW_US = 1_800_000_000 * _S


@pytest.mark.parametrize(
    ("text", "ago_s"),
    [("0s", 0), ("90s", 90), ("5m", 300), ("2h", 7200), ("30d", 30 * 86400), ("1w", 7 * 86400)],
)
def test_a_duration_is_counted_from_now(text: str, ago_s: int) -> None:
    """Each unit."""
    assert parse_older_than(text, NOW_US) == NOW_US - ago_s * _S


@pytest.mark.parametrize(
    "text",
    ["2026-01-31T12:00:00Z", "2026-01-31T13:00:00+01:00", "2026-01-31 12:00:00.000000+00:00"],
)
def test_a_time_has_its_zone(text: str) -> None:
    """All of these are one moment, which is spelled in UTC."""
    assert spell_moment(parse_older_than(text, NOW_US)) == "2026-01-31T12:00:00.000000Z"


@pytest.mark.parametrize(
    "text", ["", "30", "d", "-1d", "1.5d", "1 d", "٣d", "2026-01-31", "2026-01-31T12:00:00", "x"]
)
def test_all_else_is_refused(text: str) -> None:
    """A time without a zone could be anywhere."""
    with pytest.raises(ConfigurationError, match="--older-than"):
        parse_older_than(text, NOW_US)


def test_what_is_yet_to_come_is_refused() -> None:
    """All that is written until then would be garbage."""
    with pytest.raises(ConfigurationError, match="has not come yet"):
        parse_older_than("2999-01-01T00:00:00Z", NOW_US)


def test_what_is_too_long_ago_to_spell_is_the_first_moment() -> None:
    """Nothing is older."""
    assert spell_moment(parse_older_than("999999999w", NOW_US)) == "0001-01-01T00:00:00Z"
