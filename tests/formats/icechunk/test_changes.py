"""Change sets made against a parent; payloads in columns."""

from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgate.errors import BadBodyError
from shardgate.formats.icechunk.changes import (
    ChangeSet,
    DeleteNode,
    Edit,
    NodeDocument,
    PutNode,
    SetChunks,
    edit,
)
from shardgate.formats.icechunk.ids import decode_id, decode_ids, encode_id
from shardgate.formats.icechunk.manifest import (
    InlineChunk,
    Native,
    PayloadKind,
    Reference,
    Virtual,
)
from shardgate.formats.icechunk.payloads import Payloads
from shardgate.formats.icechunk.repo_info import Metadata
from shardgate.formats.icechunk.snapshot import Dimension, StoredArray, StoredNode, StoredSnapshot
from shardgate.model import ByteRange, ETag, UnmodifiedSince

GROUP = b'{"node_type":"group"}'
ARRAY = b'{"node_type":"array"}'


def put(path: str, document: bytes) -> PutNode:
    """Put a node."""
    return PutNode(path, document, is_array=document == ARRAY)


def drop(path: str, *coords: list[int]) -> SetChunks:
    """Delete chunks."""
    return SetChunks(path, np.array(coords, np.uint32), Payloads.gone(len(coords)))


def write(path: str, *coords: list[int]) -> SetChunks:
    """Write chunks."""
    payloads = Payloads.of([InlineChunk(b"xyz")] * len(coords))
    return SetChunks(path, np.array(coords, np.uint32), payloads)


@given(
    st.lists(st.binary(min_size=12, max_size=12), max_size=9),
    st.lists(st.text("0AZIl1G", min_size=19, max_size=21), min_size=1, max_size=3),
)
def test_ids_are_read_together_as_one_by_one(ids: list[bytes], texts: list[str]) -> None:
    """Only the speed differs; of many ids one that is none spoils all."""
    singly = [decode_id(each) for each in texts]

    assert decode_ids([encode_id(each) for each in ids]) == ids
    assert decode_ids(texts) == (None if None in singly else singly)


PATHS = {"/": None, "/g": None, "/g/a": 1, "/g/h": None, "/g/h/b": 1, "/g-": 1}


def parent() -> StoredSnapshot:
    """Make a snapshot whose nodes are called by their paths."""
    array = StoredArray((Dimension(8, 4),), None)
    nodes = {
        path: StoredNode(path.encode(), path, b"{}", array if is_array else None)
        for path, is_array in PATHS.items()
    }
    return StoredSnapshot(bytes(12), nodes, {}, 0, "", Metadata(2, ()))


def made(*edits: Edit) -> ChangeSet:
    """Edit it; new nodes are called 0, 1 and so on."""
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
    ],
    ids=["a node that is there keeps its id", "a new node has the last of its metadata",
         "a node of the other kind makes way", "what is deleted takes along what is below",
         "everything can be deleted and made anew"],
)  # fmt: skip
def test_edits_make_a_change_set(items: list[Edit], expected: ChangeSet) -> None:
    """One after the other, of the nodes that are there."""
    assert made(*items) == expected


def test_a_node_can_be_replaced_by_another() -> None:
    """What is put where a node was deleted has an id of its own, and no chunks."""
    changes = made(DeleteNode("/g/a"), put("/g/a", ARRAY), write("/g/a", [1]))

    assert changes.deleted == {b"/g/a"}
    assert list(changes.new) == list(changes.chunks) == [b"0"]


def test_changed_chunks_are_in_order_and_the_last_counts() -> None:
    """Edits are made one after the other."""
    changed = made(write("/g/a", [3], [1]), drop("/g/a", [2], [1]))
    chunks = changed.chunks[b"/g/a"]

    assert chunks.coords.tolist() == [[1], [2], [3]]
    assert [each is None for each in chunks.payloads] == [True, True, False]


@pytest.mark.parametrize(
    "items",
    [[DeleteNode("/x")], [DeleteNode("/g"), DeleteNode("/g/a")], [write("/g", [0])],
     [write("/x", [0])], [write("/g/a", [0]), drop("/g/a", [0, 0])]],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(items: list[Edit]) -> None:
    """The request is told, before anything is written."""
    with pytest.raises(BadBodyError):
        made(*items)


EACH: list[Reference | None] = [
    Native(b"a" * 12, ByteRange(1, 5)),
    None,
    Virtual("s3://b/k", ByteRange(0, 2**62), ETag('"e"')),
    InlineChunk(b"xy"),
    Virtual("s3://b/é", ByteRange(2, 3), None),
    Virtual("s3://b/k", ByteRange(7, 9), UnmodifiedSince(5)),
]


def test_columns_give_back_what_was_put_in() -> None:
    """Of every kind, and any in any order, with what they refer to; or nothing."""
    taken = Payloads.of(EACH).take(np.array([5, 0, 0, 1]))

    assert list(Payloads.of(EACH)) == EACH
    assert list(taken) == [EACH[5], EACH[0], EACH[0], None]
    assert list(taken.values_of(PayloadKind.LOCATION)) == [b"s3://b/k"]
    assert len(taken.of_kind(PayloadKind.NATIVE)) == 2
    assert list(Payloads.joined([])) == list(Payloads.of([])) == []


def test_parts_are_joined() -> None:
    """Each keeps what it refers to."""
    parts = [Payloads.of(EACH), Payloads.gone(2), Payloads.of(EACH[::-1])]

    assert list(Payloads.joined(parts)) == [*EACH, None, None, *EACH[::-1]]
    assert list(parts[2]) == EACH[::-1], "the parts stay as they were"
