"""Bodies of commits: edits of nodes, and of chunks as objects and in columns."""

import json
from base64 import b64encode
from typing import Any, Final

import orjson
import pytest

from shardgate.api.commit_body import read_edits
from shardgate.errors import BadBodyError
from shardgate.formats.icechunk.changes import DeleteNode, PutNode, SetChunks
from shardgate.formats.icechunk.ids import encode_id
from shardgate.formats.icechunk.manifest import InlineChunk, Native, Virtual
from shardgate.model import ByteRange, ETag, UnmodifiedSince
from tests.support.payloads import references

ID = bytes(range(12))
SPELLED = encode_id(ID)
NATIVE = {"coords": [0, 1], "chunk_id": SPELLED, "length": 9}
VIRTUAL = {"coords": [0, 1], "location": "s3://b/k", "offset": 1, "length": 9}


def change(op: str, path: Any = "/a", **told: Any) -> dict[str, Any]:
    """Return a change of a node."""
    return {"op": op, "path": path, **told}


def chunks(*entries: Any, **more: Any) -> list[Any]:
    """Return a request that puts chunks as a list of objects."""
    return [change("put_chunks", chunks=list(entries), **more)]


def columns(**told: Any) -> list[Any]:
    """Return a request that puts chunks in columns."""
    return [change("put_chunks", **told)]


def only(items: Any) -> SetChunks:
    """Read the only edit, of chunks."""
    (edit,) = read_edits(items)
    assert isinstance(edit, SetChunks)
    return edit


def nested(depth: int) -> Any:
    """Return lists nested *depth* levels deep."""
    return orjson.loads(b"[" * depth + b"]" * depth)


def test_put_and_delete_of_nodes_are_parsed() -> None:
    """Requests to put and delete nodes become edits, with the metadata as sent."""
    metadata = {"node_type": "group", "zarr_format": 3, "attributes": {"b": 1, "a": [2.5]}}

    put = change("put_node", "/", metadata=metadata)
    edits = read_edits([put, change("delete_node", "/a/b")])

    assert edits == [PutNode("/", orjson.dumps(metadata), is_array=False), DeleteNode("/a/b")]


def test_deeply_nested_metadata_of_a_node_are_parsed() -> None:
    """Metadata of a node that nest 1,000 deep become an edit."""
    metadata = {"node_type": "group", "attributes": nested(1000)}

    (edit,) = read_edits([change("put_node", "/", metadata=metadata)])

    assert isinstance(edit, PutNode)
    assert json.loads(edit.document) == metadata


def test_chunks_of_each_kind_are_parsed() -> None:
    """Native, inline and virtual chunks with any checksum are parsed from a list of objects."""
    inline = {"coords": [2, 0], "inline": b64encode(b"xy").decode()}
    etagged = VIRTUAL | {"coords": [1, 1], "etag": "abc"}
    dated = VIRTUAL | {"coords": [3, 1], "last_modified": "2026-01-31T12:00:00.5+01:00"}
    plain = VIRTUAL | {"coords": [0, 2]}

    edit = only(chunks(plain, NATIVE, inline, etagged, dated))

    told = zip(map(tuple, edit.coords.tolist()), references(edit.payloads), strict=True)
    assert dict(told) == {
        (0, 1): Native(ID, ByteRange(0, 9)),
        (2, 0): InlineChunk(b"xy"),
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
    assert references(one_by_one.payloads) == references(as_columns.payloads)
    assert references(as_columns.payloads)[3] == Native(ID, ByteRange(3, 12))


def test_deleted_chunks_and_scalar_chunks_are_parsed() -> None:
    """Deleted chunks have no payload, and the chunk of a scalar has no coordinates."""
    deleted = only([change("delete_chunks", coords=[[3], [1]])])
    scalar = only(chunks({"coords": [], "chunk_id": SPELLED, "length": 1}))

    assert deleted.coords.tolist() == [[3], [1]]
    assert references(deleted.payloads) == [None, None]
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
_LONG: Final = ("/" + "a" * 1024, "/" + "é" * 512)
_NO_NODES: list[Any] = ["x", {}, {"node_type": "tree"}]


@pytest.mark.parametrize(
    "items",
    [
        *([item] for item in (1, {}, {"op": "drop"}, {"op": ["put_node"]}, {"op": "delete_node"})),
        *([change("delete_node", path)] for path in ("a", "/a/", "/a//b", "/../b", *_LONG, 5)),
        [change("delete_node", more=1)],
        *([change("put_node", metadata=metadata)] for metadata in _NO_NODES),
        *([change("delete_chunks", coords=coords)] for coords in _NO_COORDS),
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
