"""Change sets applied to snapshots, compared with a tree in a dict; chunk grids."""

import json
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardgate.errors import BadBodyError, ConflictError
from shardgate.formats.icechunk.apply import apply_changes, read_grid
from shardgate.formats.icechunk.changes import ChangeSet, ChunkChanges, NodeDocument
from shardgate.formats.icechunk.manifest import InlineChunk
from shardgate.formats.icechunk.payloads import Payloads
from shardgate.formats.icechunk.snapshot import Dimension, StoredSnapshot
from shardgate.formats.icechunk.transaction_log import TransactionLog
from shardgate.formats.reading import DecodeError
from tests.support.formats.icechunk.repositories import array, group
from tests.support.formats.icechunk.trees import (
    EMPTY,
    STEP,
    Node,
    Tree,
    TreeStore,
    array_in_a_group,
    by_uid,
    changed,
    difference,
    run,
)
from tests.support.formats.zarr.building import rectilinear, regular

A, B, C, D = (b"%08d" % number for number in range(4))


def _check_log(log: TransactionLog, before: Tree, after: Tree) -> None:
    """Compare a log with the difference of two trees."""
    old, new = ({node.node_id: node for _, node in by_uid(at).values()} for at in (before, after))
    both = old.keys() & new.keys()
    updated = {at for at in both if old[at].document != new[at].document}
    groups = {at for at, node in {**old, **new}.items() if node.shape is None}
    for nodes, found_groups, found_arrays in (
        (new.keys() - old.keys(), log.new_groups, log.new_arrays),
        (old.keys() - new.keys(), log.deleted_groups, log.deleted_arrays),
        (updated, log.updated_groups, log.updated_arrays),
    ):
        assert found_groups == nodes & groups
        assert found_arrays == nodes - groups
    found = {at: [batch.tolist() for batch in each] for at, each in log.updated_chunks.items()}
    assert found == {
        at: [[list(coords) for coords in sorted(told)]]
        for at, node in new.items()
        if (told := _told(old.get(at), node))
    }


def _told(before: Node | None, node: Node) -> set[tuple[int, ...]]:
    """Return the chunks that a log lists, including those outside of the new grid."""
    return {*changed(before, node), *(set(before.chunks if before else ()) - set(node.places()))}


@settings(max_examples=40)
@given(st.lists(st.lists(STEP, max_size=12), min_size=1, max_size=6))
def test_random_commits_agree_with_a_model(commits: list[list[Any]]) -> None:
    """After each random commit, nodes, chunks, listed manifests and log are those of a model."""
    store, ids = TreeStore(), count()
    snapshot = EMPTY
    tree: Tree = {}
    for steps in commits:
        after = run(tree, steps, ids)
        changes = difference(tree, after)
        assert apply_changes(changes, snapshot).is_empty == changes.is_empty
        snapshot, log = store.commit(changes, snapshot, after)
        assert store.tree(snapshot) == after
        _check_log(log, tree, after)
        referred = {
            ref.object_id
            for node in snapshot.nodes.values()
            for ref in (node.array.manifests if node.array else ())
        }
        assert snapshot.manifest_files.keys() == referred
        tree = after


def _chunks(*at: int) -> ChunkChanges:
    coords = np.array(at, np.uint32).reshape(len(at), 1)
    return ChunkChanges(coords, Payloads.of([InlineChunk(b"x")] * len(at)))


@pytest.mark.parametrize(
    ("changes", "message", "error"),
    [
        *((changes, message, ConflictError) for changes, message in [
            (ChangeSet(new={D: NodeDocument("/x/y", group())}), "/x/y: its group /x does not"),
            (ChangeSet(new={D: NodeDocument("/g/a/y", group())}), "/g/a/y: /g/a is an array"),
            (ChangeSet(new={D: NodeDocument("/g", group())}), "/g: there is a node already"),
            (ChangeSet(deleted=frozenset([B])), "/g/a: its group /g does not exist"),
            (ChangeSet(deleted=frozenset([A])), "/g: its group / does not exist"),
            (ChangeSet(deleted=frozenset([B]), new={D: NodeDocument("/g", array([1], [1]))}),
             "/g/a: /g is an array"),
            (ChangeSet(deleted=frozenset([D])), "no node"),
            (ChangeSet(updated={D: group()}), "no node"),
            (ChangeSet(chunks={D: _chunks(0)}), "no array"),
            (ChangeSet(deleted=frozenset([C]), chunks={C: _chunks(0)}), "no array"),
            (ChangeSet(new={C: NodeDocument("/b", group())}), "/b: another node has the id"),
        ]),
        *((changes, message, BadBodyError) for changes, message in [
            *((ChangeSet(new={D: NodeDocument(path, group())}), "is no path of a node")
              for path in ("", "x", "//", "/x/", "/g/../y", "/g/.", "/g//x", "/\ud800")),
            (ChangeSet(new={D: NodeDocument("/x", b"?")}), "/x: zarr.json is not JSON"),
            (ChangeSet(updated={C: b"{}"}), "/g/a: zarr.json is not Zarr v3 metadata"),
            (ChangeSet(updated={C: group()}), "/g/a: an array cannot become a group"),
            (ChangeSet(updated={B: array([1], [1])}), "/g: an array cannot become a group"),
            (ChangeSet(chunks={C: _chunks(1, 3)}),
             r"/g/a: chunk \[3\] is outside of .* \[3\] chunks"),
            (ChangeSet(updated={C: array([2], [2])}, chunks={C: _chunks(1)}), r"chunk \[1\] is"),
            (ChangeSet(updated={C: array([2, 2], [2, 2])}, chunks={C: _chunks(0)}), "is outside"),
            (ChangeSet(chunks={C: _chunks(1, 1)}),
             "/g/a: chunks are not in C order, or listed twice"),
            (ChangeSet(chunks={C: _chunks(1, 0)}), "not in C order"),
            (ChangeSet(chunks={B: _chunks(0)}), "/g: a group has no chunks"),
        ]),
    ],
)  # fmt: skip
def test_change_set_that_contradicts_the_snapshot_is_refused(
    changes: ChangeSet, message: str, error: type[Exception]
) -> None:
    """A change set that contradicts the snapshot raises ConflictError with path and reason.

    One that fits no snapshot raises BadBodyError.
    """
    with pytest.raises(error, match=message):
        apply_changes(changes, array_in_a_group(6))


def test_document_that_was_changed_back_is_logged() -> None:
    """An update with the document of the parent is logged as the library does, and changes no node.

    Callers leave out documents that were never another one.
    """
    start = array_in_a_group(6)
    applied = apply_changes(ChangeSet(updated={C: array([6], [2])}), start)

    assert applied.log.updated_arrays == {C}
    assert not applied.is_empty
    assert applied.nodes == start.nodes


def test_orphaned_nodes_may_stay() -> None:
    """Nodes without a group, as the library leaves them, stay; a group can be made for them."""
    start = array_in_a_group(6)
    nodes = {path: node for path, node in start.nodes.items() if path != "/g"}
    orphaned = StoredSnapshot(b"another   id", nodes, {}, 1, "", EMPTY.metadata)

    edited = apply_changes(ChangeSet(updated={C: array([4], [2])}), orphaned)
    assert edited.log.updated_arrays == {C}
    healed = apply_changes(ChangeSet(new={D: NodeDocument("/g", group())}), orphaned)
    assert sorted(healed.nodes) == ["/", "/g", "/g/a"]
    with pytest.raises(ConflictError, match="/g/a: /g is an array"):
        apply_changes(ChangeSet(new={D: NodeDocument("/g", array([1], [1]))}), orphaned)


def test_unlisted_manifest_is_refused() -> None:
    """A snapshot that refers to a manifest without listing it raises DecodeError."""
    store = TreeStore()
    tree: Tree = {"/": Node(0, shape=(4,), chunks={(0,): b"1"})}
    snapshot, _ = store.commit(difference({}, tree), EMPTY, tree)
    damaged = StoredSnapshot(b"another   id", snapshot.nodes, {}, 1, "", EMPTY.metadata)

    with pytest.raises(DecodeError, match=r"it does not list manifest .*, which / refers to"):
        apply_changes(ChangeSet(), damaged).finish({})


def test_changed_number_of_dimensions_drops_all_chunks() -> None:
    """A change of the number of dimensions drops all chunks, which are logged."""
    store = TreeStore()
    tree: Tree = {"/": Node(0, shape=(4,), chunks={(0,): b"1", (1,): b"1"})}
    snapshot, _ = store.commit(difference({}, tree), EMPTY, tree)
    for document in (array([4, 4], [2, 2]), array([], [])):
        applied = apply_changes(ChangeSet(updated={A: document}), snapshot)

        (rewrite,) = applied.rewrites
        assert rewrite.manifests == ()
        dropped = rewrite.dropped(store.manifests)
        assert [coords.tolist() for coords in dropped] == [[[0], [1]]]


def _document(shape: Any, grid: Any, **more: Any) -> bytes:
    fields = {"zarr_format": 3, "node_type": "array", "data_type": "int8", "codecs": ["bytes"]}
    return json.dumps({**fields, "shape": shape, "chunk_grid": grid, **more}).encode()


@pytest.mark.parametrize(
    ("shape", "grid", "counts"),
    [
        ([], regular(), ()),
        ([4, 5, 0], regular(2, 2, 2), (2, 3, 0)),
        ([0], regular(0), (0,)),
        ([2**32 - 1], regular(1), (2**32 - 1,)),
        ([10, 9], rectilinear([4, 4, 2], 2), (3, 5)),
        ([10, 6], rectilinear([[4, 2], 2], [[3, 2]]), (3, 2)),
        ([5], rectilinear([[4, 3]]), (3,)),
        ([0], rectilinear([]), (0,)),
    ],
)
def test_chunks_of_a_grid_are_counted_as_by_the_library(
    shape: list[int], grid: dict[str, Any], counts: tuple[int, ...]
) -> None:
    """Regular and rectilinear grids have the number of chunks that the library counts."""
    found = read_grid(_document(shape, grid))

    assert found is not None
    assert found.array.grid == counts
    assert read_grid(b'{"zarr_format": 3, "node_type": "group", "shape": 4}') is None


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (b"\xff", "not JSON"),
        (b"[" * 99_999, "not JSON"),
        (b"[]", "not Zarr v3"),
        (b'{"zarr_format": 2, "node_type": "group"}', "not Zarr v3"),
        (b'{"zarr_format": 3, "node_type": "table"}', "neither array nor group"),
        (_document([-1], regular(1)), "shape"),
        (_document([2**32], regular(1)), "4294967296 chunks"),
        (_document([2], rectilinear([[1, 2**40]])), "chunks along a dimension"),
        (_document([2], regular(2), dimension_names=[]), "dimension_names"),
        (_document([2], regular(2), dimension_names="x"), "dimension_names"),
        (_document([2], regular(2), dimension_names=[1]), "not text"),
        (_document([2], regular(2), dimension_names=["\ud800"]), "not UTF-8"),
    ],
)
def test_invalid_array_document_is_refused(document: bytes, message: str) -> None:
    """An array document with an invalid grid, shape or names raises DecodeError."""
    with pytest.raises(DecodeError, match=message):
        read_grid(document)


@pytest.mark.parametrize(
    ("names", "found"), [(None, None), (["x", None], ("x", None)), (["", "y"], (None, "y"))]
)
def test_dimension_names_are_optional(names: Any, found: Any) -> None:
    """Dimension names may be absent; an empty one is None, as to the library."""
    grid = read_grid(_document([2, 3], regular(2, 2), dimension_names=names))
    assert grid is not None
    assert grid.array.names == found
    assert grid.array.dimensions == (Dimension(2, 1), Dimension(3, 2))


_LISTED = _document([10], rectilinear([[4, 2], 2]))
_LINE = _document([8], regular(2))


@pytest.mark.parametrize(
    ("before", "after", "coords", "kept"),
    [
        (_document([8, 8], regular(2, 4)), _document([3, 99], regular(2, 4)),
         [[0, 0], [1, 1], [2, 0], [0, 2]], [True, True, False, False]),
        (_LINE, _document([8], regular(4)), [[0], [1]], [False, False]),
        (_LINE, _document([8], regular(2), codecs=["gzip"]), [[0]], [False]),
        (_LINE, _document([8], regular(2), data_type="int16"), [[0]], [False]),
        (_LINE, _document([8, 1], regular(2, 1)), [[0]], [False]),
        (_LINE, _document([8], regular(2), attributes={"a": 1}), [[3]], [True]),
        (_LISTED, _document([13], rectilinear([4, 4, 2, 3])), [[0], [1], [2]], [True] * 3),
        (_LISTED, _document([13], rectilinear([4, 5, 2, 2])), [[0], [1], [2]],
         [True, False, False]),
        (_LISTED, _document([13], rectilinear([2, 2, 4, 2, 3])), [[0], [1], [2]], [False] * 3),
        (_LISTED, _document([13], rectilinear([2, 6, 2, 3])), [[0], [1], [2]],
         [False, False, True]),
        (_LISTED, _document([0], rectilinear([])), [[0]], [False]),
    ],
)  # fmt: skip
def test_chunks_that_a_new_document_leaves_readable_are_kept(
    before: bytes, after: bytes, coords: list[list[int]], kept: list[bool]
) -> None:
    """Chunks are kept if they have the same place in the array, size, codecs and data type."""
    then, now = read_grid(before), read_grid(after)

    assert then is not None
    assert now is not None
    assert now.keeps(np.array(coords, np.uint32), then).tolist() == kept
