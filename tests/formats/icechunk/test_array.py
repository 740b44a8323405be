"""`app.formats.icechunk.listing`: keys in the order of their bytes."""

import json
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.formats.icechunk.layout import Grid, key_blocks
from app.formats.icechunk.snapshot import SnapshotDecoder
from app.formats.listing import Window
from app.formats.zarr.keys import ChunkKeys
from tests.formats.icechunk.building import SNAPSHOT, Node, envelope, snapshot
from tests.formats.icechunk.repositories import GROUP

SEPARATORS = st.sampled_from("/.")
PREFIXES = ["", "t/", "t/c", "t/c/", "t/c/1", "t/c/1/", "t/c/1/1", "t/c.1.", "u/", "t/zarr.json"]


@st.composite
def grids(draw: st.DrawFn) -> tuple[Grid, list[str]]:
    """Draw a grid, and the keys of all its chunks."""
    ndim = draw(st.integers(0, 3))
    shape = tuple(draw(st.integers(1, 25 if ndim < 3 else 5)) for _ in range(ndim))
    each = tuple(draw(st.integers(1, 4)) for _ in range(ndim))
    cells = st.tuples(*(st.integers(0, (n - 1) // k) for n, k in zip(shape, each, strict=True)))
    stored = sorted(draw(st.sets(cells, max_size=30)))
    keys = ChunkKeys("c", draw(SEPARATORS), ndim)
    rows = np.array(stored, np.uint32).reshape(len(stored), ndim)
    inside = [
        coords
        for cell in stored
        for coords in product(
            *(range(at * k, min(at * k + k, n)) for at, k, n in zip(cell, each, shape, strict=True))
        )
    ]
    names = [f"t/{keys.format(coords)}" for coords in inside]
    return Grid(rows, each, shape, lambda coords: f"t/{keys.beginning(coords)}"), names


@given(grids(), st.sampled_from(PREFIXES), st.data())
def test_wanted_keys_come_in_the_order_of_their_bytes(
    grid_and_keys: tuple[Grid, list[str]], prefix: str, data: st.DataObject
) -> None:
    """Whatever is stored and wherever one begins, the wanted keys come sorted, and each once."""
    grid, keys = grid_and_keys
    after = data.draw(st.sampled_from(["", *keys, *PREFIXES, "t/c/007", "t/c/1z"]))
    window = Window(prefix, after)
    found = [key for key in map(grid.spell, grid.walk(window)) if window.admits(key)]

    assert found == sorted(
        (key for key in keys if key.startswith(prefix) and key > after), key=str.encode
    )


@given(grids(), st.sampled_from(PREFIXES), st.data())
def test_folded_keys_are_cut_behind_the_delimiter(
    grid_and_keys: tuple[Grid, list[str]], prefix: str, data: st.DataObject
) -> None:
    """What has the delimiter behind the prefix is told once, up to there."""
    grid, keys = grid_and_keys
    window = Window(prefix, data.draw(st.sampled_from(["", *keys])), "/")
    found = [window.fold(key) or key for key in map(grid.spell, grid.walk(window))]
    wanted = [key for key in keys if key.startswith(prefix) and key > window.after]
    folded = {window.fold(key) or key for key in wanted}

    assert found == sorted(set(found))
    assert folded <= set(found)
    assert {key for key in found if window.opens(key)} <= {window.fold(key) or key for key in keys}


@pytest.mark.parametrize(
    ("key", "folded"),
    [("a/b/c", "a/b/"), ("a/b", None), ("a/", None), ("b/c", None), ("a/b/", "a/b/")],
)
def test_a_key_is_folded_behind_the_prefix(key: str, folded: str | None) -> None:
    """Only a delimiter behind the prefix counts, in keys that have the prefix."""
    assert Window("a/", "", "/").fold(key) == folded


@pytest.mark.parametrize(
    ("after", "is_wanted"), [("", True), ("a/", False), ("a/b", True), ("a0", False), ("Z", True)]
)
def test_folded_keys_are_wanted_while_some_of_them_are(after: str, *, is_wanted: bool) -> None:
    """Whoever begins in the middle of folded keys is told of the rest; who had them is not."""
    assert Window("", after, "/").opens("a/") is is_wanted


def test_nodes_in_no_group_are_not_listed() -> None:
    """Nor what is in them; of two nodes with one path the first is."""
    group = json.dumps(GROUP).encode()
    paths = ["/", "/a", "/a", "/a/b", "/lone/g", "/lone/g/x"]
    nodes = [Node(node_id=b"thegroup", path=path, user_data=group) for path in paths]
    data = envelope(snapshot(b"the snapshot", nodes), SNAPSHOT)
    decoded = SnapshotDecoder(b"the snapshot", 2**20)(data)

    found = [block.start for block in key_blocks(decoded, Window("", ""))]
    assert found == ["a/b/zarr.json", "a/zarr.json", "zarr.json"]
