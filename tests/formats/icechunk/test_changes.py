"""Change sets made against a parent; payloads in columns."""

from itertools import count

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardgate.errors import BadBodyError
from shardgate.formats.icechunk.changes import (
    ChangeSet,
    ChunkChanges,
    DeleteNode,
    Edit,
    MoveNode,
    NodeDocument,
    PutNode,
    SetChunks,
    check_natives,
    edit,
    nbytes_of,
)
from shardgate.formats.icechunk.ids import decode_id, decode_ids, encode_id
from shardgate.formats.icechunk.manifest import InlineChunk, Native, PayloadKind, Reference, Virtual
from shardgate.formats.icechunk.metadata_items import Metadata
from shardgate.formats.icechunk.payloads import Payloads
from shardgate.formats.icechunk.snapshot import Dimension, StoredArray, StoredNode, StoredSnapshot
from shardgate.model import ByteRange, ETag, UnmodifiedSince
from tests.support.payloads import references

GROUP = b'{"node_type":"group"}'
ARRAY = b'{"node_type":"array"}'


def put(path: str, document: bytes) -> PutNode:
    """Return the request to put a node."""
    return PutNode(path, document, is_array=document == ARRAY)


def drop(path: str, *coords: list[int]) -> SetChunks:
    """Return the request to delete chunks."""
    return SetChunks(path, np.array(coords, np.uint32), Payloads.gone(len(coords)))


def write(path: str, *coords: list[int]) -> SetChunks:
    """Return the request to write inline chunks."""
    payloads = Payloads.of([InlineChunk(b"xyz")] * len(coords))
    return SetChunks(path, np.array(coords, np.uint32), payloads)


@example([], [f"{'0' * 19}1"])  # with bits after the last byte
@example([], [f"{'0' * 19}I"])  # with a letter of no id
@settings(max_examples=30)
@given(
    st.lists(st.binary(min_size=12, max_size=12), max_size=9),
    st.lists(st.text("0AZIl1G", min_size=19, max_size=21), min_size=1, max_size=3),
)
def test_ids_decoded_in_bulk_equal_ids_decoded_singly(ids: list[bytes], texts: list[str]) -> None:
    """Ids decoded in bulk equal those decoded singly; a single invalid one makes all None."""
    singly = [decode_id(each) for each in texts]

    assert decode_ids([encode_id(each) for each in ids]) == ids
    assert decode_ids(texts) == (None if None in singly else singly)


PATHS = {"/": None, "/g": None, "/g/a": 1, "/g/h": None, "/g/h/b": 1, "/g-": 1, "/lost/a": 1}
"""The last one is in no group."""
LONG = "/" + "x" * 1000


def parent() -> StoredSnapshot:
    """Return a snapshot whose nodes have their paths as ids."""
    array = StoredArray((Dimension(8, 4),), None)
    nodes = {
        path: StoredNode(path.encode(), path, b"{}", array if is_array else None)
        for path, is_array in PATHS.items()
    }
    return StoredSnapshot(bytes(12), nodes, {}, 0, "", Metadata(2, ()))


def made(*edits: Edit) -> ChangeSet:
    """Apply the edits to the parent; new nodes have the ids 0, 1 and so on."""
    numbers = count()
    return edit(parent(), edits, lambda: b"%d" % next(numbers))


_BELOW_G = frozenset([b"/g", b"/g/a", b"/g/h", b"/g/h/b"])
_OTHER = b'{"node_type":"group","zarr_format":3}'


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([put("/g", GROUP)], ChangeSet(updated={b"/g": GROUP})),
        ([put("/n", GROUP), put("/n", _OTHER)],
         ChangeSet(new={b"0": NodeDocument("/n", _OTHER)})),
        ([put("/g", ARRAY)],
         ChangeSet(new={b"0": NodeDocument("/g", ARRAY)}, deleted=_BELOW_G)),
        ([write("/g/a", [0]), put("/g/n", GROUP), put("/g", _OTHER), DeleteNode("/g")],
         ChangeSet(deleted=_BELOW_G)),
        ([DeleteNode("/"), put("/", GROUP)],
         ChangeSet(new={b"0": NodeDocument("/", GROUP)},
                   deleted=frozenset(path.encode() for path in PATHS))),
        ([MoveNode("/g", "/n"), put("/g", GROUP), MoveNode("/n/h/b", "/g/b")],
         ChangeSet(new={b"0": NodeDocument("/g", GROUP)},
                   moves={b"/g": "/n", b"/g/a": "/n/a", b"/g/h": "/n/h", b"/g/h/b": "/g/b"})),
        ([MoveNode("/g-", "/x"), MoveNode("/g/a", "/g-"), MoveNode("/x", "/g/a")],
         ChangeSet(moves={b"/g-": "/g/a", b"/g/a": "/g-"})),
        ([MoveNode("/g", "/n"), MoveNode("/n", "/g")], ChangeSet()),
        ([put("/n", GROUP), MoveNode("/n", "/g/n"), MoveNode("/g-", "/g/n/x"), DeleteNode("/g")],
         ChangeSet(deleted=_BELOW_G | {b"/g-"})),
    ],
    ids=["a node that is there keeps its id", "a new node has the last of its metadata",
         "a node of the other kind makes way", "what is deleted takes along what is below",
         "everything can be deleted and made anew",
         "a moved group takes along what is below, and leaves its place to another",
         "moved nodes change places", "a node that is moved back is not moved",
         "moved nodes are deleted"],
)  # fmt: skip
def test_edits_are_applied_in_order(items: list[Edit], expected: ChangeSet) -> None:
    """Edits are applied in order to the nodes of the parent and give a change set."""
    assert made(*items) == expected


def test_node_put_after_its_deletion_has_a_new_id() -> None:
    """A node that is deleted and put again has a new id and only chunks written since."""
    changes = made(DeleteNode("/g/a"), put("/g/a", ARRAY), write("/g/a", [1]))

    assert changes.deleted == {b"/g/a"}
    assert list(changes.new) == list(changes.chunks) == [b"0"]


def test_last_change_of_a_chunk_counts() -> None:
    """Changed chunks are sorted by coordinates, and the last change of a chunk counts."""
    changed = made(write("/g/a", [3], [1]), drop("/g/a", [2], [1]))
    chunks = changed.chunks[b"/g/a"]

    assert chunks.coords.tolist() == [[1], [2], [3]]
    assert [each is None for each in references(chunks.payloads)] == [True, True, False]


@pytest.mark.parametrize(
    "items",
    [[DeleteNode("/x")], [DeleteNode("/g"), DeleteNode("/g/a")], [write("/g", [0])],
     [write("/x", [0])], [write("/g/a", [0]), drop("/g/a", [0, 0])]],
)  # fmt: skip
def test_edit_of_a_missing_node_is_refused(items: list[Edit]) -> None:
    """Edits of missing nodes, of chunks in groups, or of wrong dimensions raise BadBodyError."""
    with pytest.raises(BadBodyError):
        made(*items)


@pytest.mark.parametrize(
    "items",
    [[MoveNode("/x", "/y")], [MoveNode("/", "/g/r")], [MoveNode("/g", "/g/h/g")],
     [MoveNode("/g", "/g")], [MoveNode("/g-", "/g/a")], [MoveNode("/g-", "/x/y")],
     [MoveNode("/g-", "/g/a/x")], [MoveNode("/g", "/")],
     [DeleteNode("/g/a"), MoveNode("/g-", "/g/a")],
     [MoveNode("/g", "/x"), MoveNode("/x", "/g")] * 13_000,
     [MoveNode("/g", "/" + "x" * 1020)],
     [MoveNode("/g-", LONG), *[MoveNode(LONG, LONG[:-1]), MoveNode(LONG[:-1], LONG)] * 8_400],
     [MoveNode("/g", "/lost")]],
)  # fmt: skip
def test_impossible_move_is_refused(items: list[Edit]) -> None:
    """Moves of missing nodes, into themselves, over others or nodes in no group, into no group, of
    too many nodes or letters, or to the place of a node that the same commit deletes raise
    BadBodyError.
    """
    with pytest.raises(BadBodyError):
        made(*items)


def test_paths_count_as_memory() -> None:
    """Edits and changes hold at least the letters of their paths."""
    edits: list[Edit] = [put(LONG, GROUP), MoveNode("/g-", f"{LONG}/x")]

    assert nbytes_of(edits) > 2 * len(LONG)
    assert made(*edits).nbytes > 2 * len(LONG)


EACH: list[Reference | None] = [
    Native(b"a" * 12, ByteRange(1, 5)),
    None,
    Virtual("s3://b/k", ByteRange(0, 2**62), ETag('"e"')),
    InlineChunk(b"xy"),
    Virtual("s3://b/é", ByteRange(2, 3), None),
    Virtual("s3://b/k", ByteRange(7, 9), UnmodifiedSince(5)),
]


def test_payload_columns_return_the_payloads() -> None:
    """Payloads of each kind, or none, are returned from columns, selected or joined."""
    taken = Payloads.of(EACH).take(np.array([5, 0, 0, 1]))

    assert references(Payloads.of(EACH)) == EACH
    assert references(taken) == [EACH[5], EACH[0], EACH[0], None]
    assert list(taken.values_of(PayloadKind.LOCATION)) == [b"s3://b/k"]
    assert len(taken.of_kind(PayloadKind.NATIVE)) == 2
    assert references(Payloads.joined([])) == references(Payloads.of([])) == []
    parts = [Payloads.of(EACH), Payloads.gone(2), Payloads.of(EACH[::-1])]
    assert references(Payloads.joined(parts)) == [*EACH, None, None, *EACH[::-1]]
    assert references(parts[2]) == EACH[::-1], "the parts stay as they were"


def test_first_reference_past_its_chunk_file_is_named() -> None:
    """The first native reference that ends past its chunk file, or has none, is named."""
    ids = [bytes([number]) * 12 for number in range(3)]
    payloads = Payloads.of([Native(each, ByteRange(2, 9)) for each in ids])
    coords = np.array([[0], [1], [2]], np.uint32)
    changes = ChangeSet(chunks={b"the node": ChunkChanges(coords, payloads)})
    wanted = dict.fromkeys(ids, 9)

    check_natives(changes, wanted, wanted)
    with pytest.raises(BadBodyError, match=rf"\[1\] .*{encode_id(ids[1])}, which has 8 bytes"):
        check_natives(changes, wanted, wanted | {ids[1]: 8})
    with pytest.raises(BadBodyError, match=rf"\[2\] .*{encode_id(ids[2])}, which does not exist"):
        check_natives(changes, wanted, dict.fromkeys(ids[:2], 9))
