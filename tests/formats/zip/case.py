"""Archives have no chunks of their own for the conformance suite: arrays in them are Zarr's."""

from tests.formats.case import Case

CASES: tuple[Case, ...] = ()
