"""What a ``zarr.json`` says of the chunks of an array."""

import json
from typing import Any

import numpy as np
import pytest

from app.formats.icechunk.commit import read_grid
from app.formats.icechunk.snapshot import Dimension
from app.formats.reading import DecodeError


def _regular(*sizes: Any) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": list(sizes)}}


def _rectilinear(*sizes: Any) -> dict[str, Any]:
    configuration = {"kind": "inline", "chunk_shapes": list(sizes)}
    return {"name": "rectilinear", "configuration": configuration}


def _document(shape: Any, grid: Any, **more: Any) -> bytes:
    fields = {"zarr_format": 3, "node_type": "array", "data_type": "int8", "codecs": ["bytes"]}
    return json.dumps({**fields, "shape": shape, "chunk_grid": grid, **more}).encode()


def _counts(shape: list[int], grid: dict[str, Any]) -> tuple[int, ...]:
    found = read_grid(_document(shape, grid))
    assert found is not None
    return found.array.grid


@pytest.mark.parametrize(
    ("shape", "grid", "counts"),
    [
        ([], _regular(), ()),
        ([4, 5, 0], _regular(2, 2, 2), (2, 3, 0)),
        ([0], _regular(0), (0,)),
        ([2**32 - 1], _regular(1), (2**32 - 1,)),
        ([10, 9], _rectilinear([4, 4, 2], 2), (3, 5)),
        ([10, 6], _rectilinear([[4, 2], 2], [[3, 2]]), (3, 2)),
        ([5], _rectilinear([[4, 3]]), (3,)),
        ([0], _rectilinear([]), (0,)),
    ],
)
def test_chunks_are_counted_as_the_library_does(
    shape: list[int], grid: dict[str, Any], counts: tuple[int, ...]
) -> None:
    """In a grid of lists all chunks count, also those past the end of the array."""
    assert _counts(shape, grid) == counts


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (b"\xff", "not JSON"),
        (b"[" * 99_999, "not JSON"),
        (b"[]", "not Zarr v3"),
        (b'{"zarr_format": 2, "node_type": "group"}', "not Zarr v3"),
        (b'{"zarr_format": 3, "node_type": "table"}', "neither array nor group"),
        (_document([-1], _regular(1)), "shape"),
        (_document([2], _regular(0)), "chunk_shape is 0"),
        (_document([2], _regular(1, 1)), "instead of 1"),
        (_document([2**32], _regular(1)), "4294967296 chunks"),
        (_document([2], {"name": "hexagonal"}), "hexagonal"),
        (_document([2], None), "without a name"),
        (_document([2], _rectilinear()), "1 dimensions"),
        (_document([2], _rectilinear(0)), "no list of sizes"),
        (_document([2], _rectilinear("2")), "no list of sizes"),
        (_document([2], _rectilinear(["2"])), "no list of sizes"),
        (_document([2], _rectilinear([[2]])), "instead of 2"),
        (_document([2], _rectilinear([-2])), "no list of sizes"),
        (_document([2], _rectilinear([[1, 2**40]])), "chunks along a dimension"),
        (_document([2], _regular(2), dimension_names=[]), "dimension_names"),
        (_document([2], _regular(2), dimension_names="x"), "dimension_names"),
        (_document([2], _regular(2), dimension_names=[1]), "not text"),
    ],
)
def test_what_cannot_be_is_refused(document: bytes, message: str) -> None:
    """The library takes many of these, and counts chunks as it then may."""
    with pytest.raises(DecodeError, match=message):
        read_grid(document)


def test_a_group_has_no_grid() -> None:
    """It may say so of itself in any words."""
    assert read_grid(b'{"zarr_format": 3, "node_type": "group", "shape": 4}') is None


@pytest.mark.parametrize(
    ("names", "found"), [(None, None), (["x", None], ("x", None)), (["", "y"], (None, "y"))]
)
def test_names_may_be_missing(names: Any, found: Any) -> None:
    """To the library an empty name is none."""
    grid = read_grid(_document([2, 3], _regular(2, 2), dimension_names=names))
    assert grid is not None
    assert grid.array.names == found
    assert grid.array.dimensions == (Dimension(2, 1), Dimension(3, 2))


def _kept(before: bytes, after: bytes, coords: list[list[int]]) -> list[bool]:
    then, now = read_grid(before), read_grid(after)
    assert then is not None
    assert now is not None
    kept: list[bool] = now.keeps(np.array(coords, np.uint32), then).tolist()
    return kept


def test_a_resize_keeps_what_stays_inside() -> None:
    """Chunks at the edge are as long as all others."""
    before, after = _document([8, 8], _regular(2, 4)), _document([3, 99], _regular(2, 4))

    assert _kept(before, after, [[0, 0], [1, 1], [2, 0], [0, 2]]) == [True, True, False, False]


def test_another_size_or_coding_makes_other_chunks() -> None:
    """Whatever is not where it was, or not to be read as it was, is lost."""
    before = _document([8], _regular(2))

    assert _kept(before, _document([8], _regular(4)), [[0], [1]]) == [False, False]
    assert _kept(before, _document([8], _regular(2), codecs=["gzip"]), [[0]]) == [False]
    assert _kept(before, _document([8], _regular(2), data_type="int16"), [[0]]) == [False]
    assert _kept(before, _document([8, 1], _regular(2, 1)), [[0]]) == [False]
    assert _kept(before, _document([8], _regular(2), attributes={"a": 1}), [[3]]) == [True]


def test_sizes_in_lists_are_compared_chunk_by_chunk() -> None:
    """An array that grew has one chunk more, and the others still."""
    before = _document([10], _rectilinear([[4, 2], 2]))

    assert _kept(before, _document([13], _rectilinear([4, 4, 2, 3])), [[0], [1], [2]]) == [True] * 3
    kept = _kept(before, _document([13], _rectilinear([4, 5, 2, 2])), [[0], [1], [2]])
    assert kept == [True, False, True]
    assert _kept(before, _document([0], _rectilinear([])), [[0]]) == [False]
