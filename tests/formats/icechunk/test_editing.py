"""What edits of a snapshot change, by the ids of its nodes."""

from itertools import count
from typing import Any

import pytest

from app.errors import BadBodyError
from app.formats.icechunk.change_set import ChangeSet, NodeDocument
from app.formats.icechunk.editing import edit
from app.formats.icechunk.metadata_items import Metadata
from app.formats.icechunk.requested import read_edits
from app.formats.icechunk.stored_nodes import (
    Dimension,
    StoredArray,
    StoredNode,
    StoredSnapshot,
)

GROUP = {"node_type": "group"}
ARRAY = {"node_type": "array"}
PATHS = {"/": None, "/g": None, "/g/a": 1, "/g/h": None, "/g/h/b": 1, "/g-": 1}


def parent() -> StoredSnapshot:
    """Make a snapshot whose nodes are called by their paths."""
    array = StoredArray((Dimension(8, 4),), None)
    nodes = {
        path: StoredNode(path.encode(), path, b"{}", array if is_array else None)
        for path, is_array in PATHS.items()
    }
    return StoredSnapshot(bytes(12), nodes, {}, 0, "", Metadata(2, ()))


def made(*items: dict[str, Any]) -> ChangeSet:
    """Edit it; new nodes are called 0, 1 and so on."""
    numbers = count()
    return edit(parent(), read_edits(list(items)), lambda: b"%d" % next(numbers))


def put(path: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """Put a node."""
    return {"op": "put_node", "path": path, "metadata": metadata}


def delete(path: str) -> dict[str, Any]:
    """Delete a node."""
    return {"op": "delete_node", "path": path}


def drop(path: str, *coords: list[int]) -> dict[str, Any]:
    """Delete chunks."""
    return {"op": "delete_chunks", "path": path, "coords": list(coords)}


def write(path: str, *coords: list[int]) -> dict[str, Any]:
    """Write chunks."""
    told = [{"coords": each, "inline": "AAAA"} for each in coords]
    return {"op": "put_chunks", "path": path, "chunks": told}


def test_a_node_that_is_there_keeps_its_id() -> None:
    """Only its metadata are others."""
    assert made(put("/g", GROUP)).updated == {b"/g": b'{"node_type":"group"}'}


def test_a_new_node_has_the_last_of_its_metadata() -> None:
    """It is new once."""
    changes = made(put("/n", GROUP), put("/n", GROUP | {"zarr_format": 3}))

    assert changes.new == {b"0": NodeDocument("/n", b'{"node_type":"group","zarr_format":3}')}
    assert not changes.updated


def test_a_node_of_the_other_kind_makes_way() -> None:
    """All that was in it is gone."""
    changes = made(put("/g", ARRAY))

    assert list(changes.new.values()) == [NodeDocument("/g", b'{"node_type":"array"}')]
    assert changes.deleted == {b"/g", b"/g/a", b"/g/h", b"/g/h/b"}


def test_what_is_deleted_takes_along_what_is_below() -> None:
    """And all that was changed of it before, but nothing beside it."""
    changes = made(
        write("/g/a", [0]), put("/g/n", GROUP), put("/g", GROUP | {"x": 1}), delete("/g")
    )

    assert changes == ChangeSet(deleted=frozenset({b"/g", b"/g/a", b"/g/h", b"/g/h/b"}))


def test_a_node_can_be_replaced_by_another() -> None:
    """What is put where a node was deleted has an id of its own, and no chunks."""
    changes = made(delete("/g/a"), put("/g/a", ARRAY), write("/g/a", [1]))

    assert changes.deleted == {b"/g/a"}
    assert list(changes.new) == list(changes.chunks) == [b"0"]


def test_everything_can_be_deleted_and_made_anew() -> None:
    """The root is a node like others."""
    changes = made(delete("/"), put("/", GROUP))

    assert changes.deleted == {path.encode() for path in PATHS}
    assert changes.new[b"0"].path == "/"


def test_changed_chunks_are_in_order_and_the_last_counts() -> None:
    """Edits are made one after the other."""
    changed = made(write("/g/a", [3], [1]), drop("/g/a", [2], [1]))
    chunks = changed.chunks[b"/g/a"]

    assert chunks.coords.tolist() == [[1], [2], [3]]
    assert [each is None for each in chunks.payloads] == [True, True, False]


@pytest.mark.parametrize(
    "items",
    [
        [delete("/x")],
        [delete("/g"), delete("/g/a")],
        [write("/g", [0])],
        [write("/x", [0])],
        [write("/g/a", [0]), drop("/g/a", [0, 0])],
    ],
)
def test_what_cannot_be_done_is_refused(items: list[dict[str, Any]]) -> None:
    """The request is told, before anything is written."""
    with pytest.raises(BadBodyError):
        made(*items)
