"""`shardgate.formats.icechunk.changes`: change sets of requests, and payloads in columns."""

from base64 import b64encode
from itertools import count
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgate.errors import BadBodyError
from shardgate.formats.icechunk.changes import (
    ChangeSet,
    DeleteNode,
    NodeDocument,
    PutNode,
    SetChunks,
    edit,
    read_edits,
)
from shardgate.formats.icechunk.ids import decode_id, decode_ids, encode_id
from shardgate.formats.icechunk.manifest import Native, PayloadKind, Virtual
from shardgate.formats.icechunk.payloads import Inlaid, Payload, Payloads
from shardgate.formats.icechunk.repo_info import Metadata
from shardgate.formats.icechunk.snapshot import Dimension, StoredArray, StoredNode, StoredSnapshot
from shardgate.model import ByteRange, ETag, UnmodifiedSince

ID = bytes(range(12))
SPELLED = encode_id(ID)
NATIVE = {"coords": [0, 1], "chunk_id": SPELLED, "length": 9}
VIRTUAL = {"coords": [0, 1], "location": "s3://b/k", "offset": 1, "length": 9}


def chunks(*entries: Any, **more: Any) -> list[Any]:
    """Return a request that puts chunks as a list of objects."""
    return [{"op": "put_chunks", "path": "/a", "chunks": list(entries), **more}]


def columns(**told: Any) -> list[Any]:
    """Return a request that puts chunks in columns."""
    return [{"op": "put_chunks", "path": "/a", **told}]


def only(items: Any) -> SetChunks:
    """Read the only edit, of chunks."""
    (edit,) = read_edits(items)
    assert isinstance(edit, SetChunks)
    return edit


GROUP = {"node_type": "group"}
ARRAY = {"node_type": "array"}


def put(path: str, metadata: Any) -> dict[str, Any]:
    """Return the request to put a node."""
    return {"op": "put_node", "path": path, "metadata": metadata}


def delete(path: Any) -> dict[str, Any]:
    """Return the request to delete a node."""
    return {"op": "delete_node", "path": path}


def drop(path: str, *coords: Any) -> dict[str, Any]:
    """Return the request to delete chunks."""
    return {"op": "delete_chunks", "path": path, "coords": list(coords)}


def write(path: str, *coords: list[int]) -> dict[str, Any]:
    """Return the request to write inline chunks."""
    told = [{"coords": each, "inline": "AAAA"} for each in coords]
    return {"op": "put_chunks", "path": path, "chunks": told}


def nested(depth: int) -> Any:
    """Return lists nested *depth* levels deep."""
    return orjson.loads(b"[" * depth + b"]" * depth)


def test_put_and_delete_of_nodes_are_parsed() -> None:
    """Requests to put and delete nodes become edits, with the metadata as sent."""
    metadata = {"node_type": "group", "zarr_format": 3, "attributes": {"b": 1, "a": [2.5]}}

    edits = read_edits([put("/", metadata), delete("/a/b")])

    assert edits == [PutNode("/", orjson.dumps(metadata), is_array=False), DeleteNode("/a/b")]


def test_chunks_of_each_kind_are_parsed() -> None:
    """Native, inline and virtual chunks with any checksum are parsed from a list of objects."""
    inline = {"coords": [2, 0], "inline": b64encode(b"xy").decode()}
    etagged = VIRTUAL | {"coords": [1, 1], "etag": "abc"}
    dated = VIRTUAL | {"coords": [3, 1], "last_modified": "2026-01-31T12:00:00.5+01:00"}

    plain = VIRTUAL | {"coords": [0, 2]}

    edit = only(chunks(plain, NATIVE, inline, etagged, dated))

    told = zip(map(tuple, edit.coords.tolist()), edit.payloads, strict=True)
    assert dict(told) == {
        (0, 1): Native(ID, ByteRange(0, 9)),
        (2, 0): Inlaid(b"xy"),
        (0, 2): Virtual("s3://b/k", ByteRange(1, 10), None),
        (1, 1): Virtual("s3://b/k", ByteRange(1, 10), ETag('"abc"')),
        (3, 1): Virtual("s3://b/k", ByteRange(1, 10), UnmodifiedSince(1769857201)),
    }


def test_chunks_in_columns_equal_chunks_in_a_list() -> None:
    """Chunks sent in columns give the same edit as chunks sent in a list."""
    several = [NATIVE | {"coords": [0, i], "offset": i} for i in range(4)]
    told = {
        "coords": [each["coords"] for each in several],
        "chunk_ids": [SPELLED] * 4,
        "offsets": [0, 1, 2, 3],
        "lengths": [9] * 4,
    }

    one_by_one, as_columns = only(chunks(*several)), only(columns(**told))

    assert one_by_one.coords.tolist() == as_columns.coords.tolist()
    assert list(one_by_one.payloads) == list(as_columns.payloads)
    assert list(as_columns.payloads)[3] == Native(ID, ByteRange(3, 12))


def test_deleted_chunks_and_scalar_chunks_are_parsed() -> None:
    """Deleted chunks have no payload, and the chunk of a scalar has no coordinates."""
    deleted = only([drop("/a", [3], [1])])
    scalar = only(chunks({"coords": [], "chunk_id": SPELLED, "length": 1}))

    assert deleted.coords.tolist() == [[3], [1]]
    assert list(deleted.payloads) == [None, None]
    assert scalar.coords.shape == (1, 0)


_NO_COORDS: list[list[Any]] = [
    [[0], [0]], [[], []], [[0], [0, 1]], [[-1]], [[2**32]], [[True]], [[1.0]], ["0"], [[0] * 65],
]  # fmt: skip
_NO_NATIVE: list[dict[str, Any]] = [
    {"inline": "AAAA"}, {"etag": "x"}, {"unknown": 1}, {"length": 0}, {"length": True},
    {"length": 2**63}, {"offset": 2**63 - 1}, {"offset": -1}, {"offset": ""}, {"offset": False},
    {"chunk_id": SPELLED.lower()}, {"chunk_id": SPELLED[:-1]}, {"chunk_id": SPELLED[:-1] + "é"},
    {"chunk_id": 5},
]  # fmt: skip
_NO_VIRTUAL: list[dict[str, Any]] = [
    {"location": "s3://" + "x" * 1024}, {"location": None}, {"etag": 'W/"a"'}, {"etag": "\r\n"},
    {"etag": 5}, {"last_modified": "2026-01-31T12:00:00"}, {"last_modified": "yesterday"},
    {"last_modified": "1969-01-31T12:00:00Z"},
    {"etag": "a", "last_modified": "2026-01-31T12:00:00Z"},
]  # fmt: skip
_NO_NODES: list[Any] = ["x", {}, {"node_type": "tree"}, {"node_type": "group", "a": nested(400)}]


@pytest.mark.parametrize(
    "items",
    [
        *([item] for item in (1, {}, {"op": "drop"}, {"op": ["put_node"]}, {"op": "delete_node"})),
        *([delete(path)] for path in ("a", "/a/", "/a//b", "/../b", 5)),
        [delete("/a") | {"more": 1}],
        *([put("/a", metadata)] for metadata in _NO_NODES),
        *([drop("/a", *coords)] for coords in _NO_COORDS),
        chunks(1),
        chunks({"coords": [0]}),
        chunks({"chunk_id": SPELLED, "length": 1}),
        chunks({"coords": [0], "chunk_id": SPELLED}),
        *(chunks(NATIVE | more) for more in _NO_NATIVE),
        chunks(NATIVE, NATIVE),
        *(chunks({"coords": [0], "inline": inline}) for inline in ("AA", "", 5)),
        *(chunks(VIRTUAL | more) for more in _NO_VIRTUAL),
        chunks(NATIVE, more=1),
        columns(),
        columns(coords=[[0]]),
        columns(coords=[[0]], chunk_ids=[SPELLED], lengths=[]),
        columns(coords=[[0]], chunk_ids=SPELLED, lengths=[1]),
        columns(coords=[[0]], chunk_ids=[SPELLED], lengths=[1], inlines=["AAAA"]),
    ],
)
def test_invalid_change_is_refused(items: Any) -> None:
    """A request with any invalid change raises BadBodyError."""
    with pytest.raises(BadBodyError, match=r"changes|node"):
        read_edits(items)


@given(
    st.lists(st.binary(min_size=12, max_size=12), max_size=9),
    st.lists(st.text("0AZIl1G", min_size=19, max_size=21), min_size=1, max_size=3),
)
def test_ids_decoded_in_bulk_equal_ids_decoded_singly(ids: list[bytes], texts: list[str]) -> None:
    """Ids decoded in bulk equal those decoded singly; a single invalid one makes all None."""
    singly = [decode_id(each) for each in texts]

    assert decode_ids([encode_id(each) for each in ids]) == ids
    assert decode_ids(texts) == (None if None in singly else singly)


PATHS = {"/": None, "/g": None, "/g/a": 1, "/g/h": None, "/g/h/b": 1, "/g-": 1}


def parent() -> StoredSnapshot:
    """Return a snapshot whose nodes have their paths as ids."""
    array = StoredArray((Dimension(8, 4),), None)
    nodes = {
        path: StoredNode(path.encode(), path, b"{}", array if is_array else None)
        for path, is_array in PATHS.items()
    }
    return StoredSnapshot(bytes(12), nodes, {}, 0, "", Metadata(2, ()))


def made(*items: dict[str, Any]) -> ChangeSet:
    """Apply the edits to the parent; new nodes have the ids 0, 1 and so on."""
    numbers = count()
    return edit(parent(), read_edits(list(items)), lambda: b"%d" % next(numbers))


_BELOW_G = frozenset([b"/g", b"/g/a", b"/g/h", b"/g/h/b"])
_DOCUMENT = b'{"node_type":"group"}'


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([put("/g", GROUP)], ChangeSet(updated={b"/g": _DOCUMENT})),
        ([put("/n", GROUP), put("/n", GROUP | {"zarr_format": 3})],
         ChangeSet(new={b"0": NodeDocument("/n", b'{"node_type":"group","zarr_format":3}')})),
        ([put("/g", ARRAY)],
         ChangeSet(new={b"0": NodeDocument("/g", b'{"node_type":"array"}')}, deleted=_BELOW_G)),
        ([write("/g/a", [0]), put("/g/n", GROUP), put("/g", GROUP | {"x": 1}), delete("/g")],
         ChangeSet(deleted=_BELOW_G)),
        ([delete("/"), put("/", GROUP)],
         ChangeSet(new={b"0": NodeDocument("/", _DOCUMENT)},
                   deleted=frozenset(path.encode() for path in PATHS))),
    ],
    ids=["a node that is there keeps its id", "a new node has the last of its metadata",
         "a node of the other kind makes way", "what is deleted takes along what is below",
         "everything can be deleted and made anew"],
)  # fmt: skip
def test_edits_are_applied_in_order(items: list[dict[str, Any]], expected: ChangeSet) -> None:
    """Edits are applied in order to the nodes of the parent and give a change set."""
    assert made(*items) == expected


def test_node_put_after_its_deletion_has_a_new_id() -> None:
    """A node that is deleted and put again has a new id and only chunks written since."""
    changes = made(delete("/g/a"), put("/g/a", ARRAY), write("/g/a", [1]))

    assert changes.deleted == {b"/g/a"}
    assert list(changes.new) == list(changes.chunks) == [b"0"]


def test_last_change_of_a_chunk_counts() -> None:
    """Changed chunks are sorted by coordinates, and the last change of a chunk counts."""
    changed = made(write("/g/a", [3], [1]), drop("/g/a", [2], [1]))
    chunks = changed.chunks[b"/g/a"]

    assert chunks.coords.tolist() == [[1], [2], [3]]
    assert [each is None for each in chunks.payloads] == [True, True, False]


@pytest.mark.parametrize(
    "items",
    [[delete("/x")], [delete("/g"), delete("/g/a")], [write("/g", [0])], [write("/x", [0])],
     [write("/g/a", [0]), drop("/g/a", [0, 0])]],
)  # fmt: skip
def test_edit_of_a_missing_node_is_refused(items: list[dict[str, Any]]) -> None:
    """Edits of missing nodes, of chunks in groups, or of wrong dimensions raise BadBodyError."""
    with pytest.raises(BadBodyError):
        made(*items)


EACH: list[Payload | None] = [
    Native(b"a" * 12, ByteRange(1, 5)),
    None,
    Virtual("s3://b/k", ByteRange(0, 2**62), ETag('"e"')),
    Inlaid(b"xy"),
    Virtual("s3://b/é", ByteRange(2, 3), None),
    Virtual("s3://b/k", ByteRange(7, 9), UnmodifiedSince(5)),
]


def test_payload_columns_return_the_payloads() -> None:
    """Payloads of each kind, or none, are returned from columns, also in a selection."""
    taken = Payloads.of(EACH).take(np.array([5, 0, 0, 1]))

    assert list(Payloads.of(EACH)) == EACH
    assert list(taken) == [EACH[5], EACH[0], EACH[0], None]
    assert list(taken.values_of(PayloadKind.LOCATION)) == [b"s3://b/k"]
    assert len(taken.of_kind(PayloadKind.NATIVE)) == 2
    assert list(Payloads.joined([])) == list(Payloads.of([])) == []


def test_joined_payload_columns_keep_all_payloads() -> None:
    """Joined columns have the payloads of all parts, which stay unchanged."""
    parts = [Payloads.of(EACH), Payloads.gone(2), Payloads.of(EACH[::-1])]

    assert list(Payloads.joined(parts)) == [*EACH, None, None, *EACH[::-1]]
    assert list(parts[2]) == EACH[::-1], "the parts stay as they were"
