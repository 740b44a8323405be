"""Reference sets hold no chunks that the conformance suite could write."""

from tests.support.formats.case import Case

CASES: tuple[Case, ...] = ()
