"""Patterns match what the library's do, and take their time from nobody."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.formats.icechunk.pattern_classes import PatternError
from app.formats.icechunk.patterns import Pattern

NO_EDGE = r"(?!\b)"
"""What ``\\B`` is, which Python before 3.14 does not find in an empty text."""

_ATOMS = st.sampled_from(
    [*"ab/_1é.^", r"\d", r"\W", r"\.", r"\b", NO_EDGE, "[a-c]", "[^a/]", r"[\d_-]", "[]a]",
     "$(?!\n)"]
)  # fmt: skip
_SUFFIXES = st.sampled_from(["*", "+", "?", "{2}", "{1,}", "{0,2}", "*?"])


def _extend(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("|".join),
        inner.map("({})".format),
        inner.map("(?:{})".format),
        inner.map("(?i:{})".format),
        st.tuples(inner, _SUFFIXES).map(lambda both: f"(?:{both[0]}){both[1]}"),
    )


PATTERNS = st.recursive(_ATOMS, _extend, max_leaves=8)


@given(PATTERNS, st.text("abA/_.1é-", max_size=8))
def test_a_pattern_matches_where_python_s_does(pattern: str, text: str) -> None:
    """Of what both understand alike."""
    ours = pattern.replace("$(?!\n)", "$").replace(NO_EDGE, r"\B")

    assert Pattern(ours).search(text) == (re.search(pattern, text) is not None)


@pytest.mark.parametrize(
    "pattern",
    ["(", ")", "*", "a{", "a{x}", "a{2,1}", "[a", "[b-a]", "[[a]]", r"\q", r"\1", "(?=a)", "(?x)a",
     "a{9999}", "(" * 99 + ")" * 99, "(?P<>a)", "\\", r"\p{L}", "a{1,2000}", "(a{99}){99}"],
)  # fmt: skip
def test_what_is_not_understood_is_refused(pattern: str) -> None:
    """Or is no pattern to the library either."""
    with pytest.raises(PatternError):
        Pattern(pattern)


def test_there_is_no_end_of_a_word_in_nothing() -> None:
    """As Rust's library of regular expressions has it."""
    assert Pattern(r"\B").search("")
    assert not Pattern(r"\b").search("")


def test_no_pattern_takes_long() -> None:
    """These take Python's own more than a lifetime."""
    begun = time.process_time()
    for pattern in ["^(a+)+$", "^(a|a)*$", "^(a|aa)+$", "(a*)*b", "(x+x+)+y"]:
        assert not Pattern(pattern).search("a" * 60 + "!")
    assert time.process_time() - begun < 1
