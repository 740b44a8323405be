"""`shardgate.formats.icechunk.snapshot`: nodes, documents and manifests, read and written."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import icechunk
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from shardgate.formats.icechunk.ids import decode_id
from shardgate.formats.icechunk.metadata_items import Metadata
from shardgate.formats.icechunk.snapshot import (
    Chunks,
    Dimension,
    ManifestFile,
    ManifestRef,
    Snapshot,
    SnapshotDecoder,
    SnapshotNode,
    StoredArray,
    StoredNode,
    StoredSnapshot,
    StoredSnapshotDecoder,
    write_snapshot,
)
from shardgate.formats.reading import DecodeError
from tests.support.formats.icechunk import building
from tests.support.formats.icechunk.building import (
    SNAPSHOT,
    Number,
    Struct,
    Structs,
    envelope,
    payload,
)
from tests.support.formats.icechunk.case import PLAIN, SHARDED
from tests.support.formats.icechunk.repositories import GROUP
from tests.support.formats.zarr.building import LITTLE, array_metadata

LIMIT = 2**20
ID = b"the snapshot"
MANIFEST = b"the manifest"


def _document(document: Mapping[str, Any] | bytes) -> bytes:
    return document if isinstance(document, bytes) else json.dumps(document).encode()


def _group(path: str, document: Mapping[str, Any] | bytes = GROUP) -> building.Node:
    return building.Node(node_id=b"thegroup", path=path, user_data=_document(document))


def _array(path: str, document: Mapping[str, Any] | bytes = PLAIN, **more: Any) -> building.Node:
    fields = {"shape": [(5, 3), (7, 4)], **more}
    return building.Node(node_id=b"thearray", path=path, user_data=_document(document), **fields)


def _decode(*nodes: building.Node, version: int = 2, **more: Any) -> Snapshot:
    data = building.snapshot(ID, nodes, version=version, **more)
    return SnapshotDecoder(ID, LIMIT)(envelope(data, SNAPSHOT, version=version))


def _chunks(node: building.Node, version: int = 2) -> Chunks:
    (found,) = _decode(node, version=version).nodes.values()
    assert isinstance(found, SnapshotNode)
    assert found.chunks is not None
    return found.chunks


def _why(node: building.Node) -> str:
    """Return the damage of *node*, while another node beside it is decoded."""
    snapshot = _decode(node, _group("/beside"))
    assert isinstance(snapshot.nodes["beside"], SnapshotNode)
    (found,) = (each for path, each in snapshot.nodes.items() if path != "beside")
    assert isinstance(found, DecodeError)
    return str(found)


def _root(*nodes: building.Node) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(_decode(*nodes).root_document)
    return document


@pytest.mark.parametrize("version", [1, 2])
def test_nodes_of_a_snapshot_are_sorted_by_path(version: int) -> None:
    """Nodes of a snapshot in either version are sorted by the bytes of their paths."""
    nodes = map(_group, ["/a/b", "/é", "/", "/a-b", "/z", "/a"])
    snapshot = _decode(*nodes, version=version)

    assert list(snapshot.nodes) == ["", "a", "a-b", "a/b", "z", "é"]
    assert snapshot.faults == ()


@pytest.mark.parametrize(
    ("shape", "chunk_shape", "grid"),
    [
        ([(5, 3), (7, 4)], None, (3, 4)),
        ([(0, 0), (5, 1)], None, (0, 1)),
        ([(2**64 - 1, 2**32 - 1), (1, 1)], None, (2**32 - 1, 1)),
        ([(5, 9), (7, 9)], (2, 2), (3, 4)),
        ([(0, 9), (7, 9)], (2, 7), (0, 1)),
        ([(5, 9), (7, 9)], (0, 2**64 - 1), (5, 1)),
    ],
)
def test_grid_is_decoded_from_counts_or_lengths(
    shape: Sequence[tuple[int, int]], chunk_shape: tuple[int, ...] | None, grid: tuple[int, ...]
) -> None:
    """The grid is decoded from numbers of chunks, or in version 1 from chunk lengths."""
    node = _array("/a", shape=shape, chunk_shape=chunk_shape)

    assert _chunks(node, 1).grid == grid
    assert chunk_shape or _chunks(node, 2).grid == grid


@pytest.mark.parametrize(
    ("coords", "extents", "expected"),
    [((0, 0), ((0, 1), (0, 1)), True), ((0, 1), ((0, 1), (0, 1)), False),
     ((3, 4), ((3, 9), (2, 5)), True), ((2, 4), ((3, 9), (2, 5)), False),
     ((0, 0), ((0, 0), (0, 1)), False), ((0, 0), ((1, 0), (0, 1)), False),
     ((0, 0), ((0, 1),), False), ((0,), ((0, 1), (0, 1)), False),
     ((2**64, 0), ((0, 2**32 - 1), (0, 1)), False), ((), (), True), ((), ((0, 1),), True),
     ((), ((0, 2),), False), ((0,), (), False)],
)  # fmt: skip
def test_manifest_covers_its_extents(
    coords: tuple[int, ...],
    extents: tuple[tuple[int, int], ...],
    expected: bool,  # noqa: FBT001
) -> None:
    """A manifest covers the coordinates in its extents; a scalar may have one dimension."""
    assert ManifestRef(MANIFEST, extents).covers(coords) is expected


@pytest.mark.parametrize(
    ("encoding", "key"),
    [
        ({"name": "default"}, "c/1/2"),
        ({"name": "default", "configuration": {"separator": "."}}, "c.1.2"),
        ({"name": "v2", "configuration": {"separator": "/"}}, "1/2"),
        ({"name": "v2"}, "1.2"),
        ({"name": "spiral"}, "c/1/2"),
    ],
)
def test_chunk_keys_have_the_encoding_of_the_document(encoding: Any, key: str) -> None:
    """Chunk keys have the encoding of the document, or the default one if it is unknown."""
    document = {**PLAIN, "chunk_key_encoding": encoding}

    assert _chunks(_array("/a", document)).keys.parse(key) == (1, 2)


@pytest.mark.parametrize(
    ("path", "expected"),
    [("", ("", "")), ("zarr.json", ("", "zarr.json")), ("g/a/c/0", ("g/a", "c/0")),
     ("g/a", ("g/a", "")), ("g/ab", ("g", "ab")), ("g/", ("g", "")),
     ("g/a/c/0/", ("g/a", "c/0/")), ("zarr.json/", ("", "zarr.json/")), ("g//x", ("g", "/x")),
     ("x/y/z", ("", "x/y/z")), ("lone/node/zarr.json", ("lone/node", "zarr.json")),
     ("lone/zarr.json", ("", "lone/zarr.json"))],
)  # fmt: skip
def test_path_is_split_at_the_nearest_node(path: str, expected: tuple[str, str]) -> None:
    """A path is split into the nearest node above it and the rest."""
    snapshot = _decode(_group("/"), _group("/g"), _array("/g/a"), _group("/lone/node"))

    assert snapshot.find(path) == expected


@pytest.mark.parametrize(
    ("key", "expected"),
    [("zarr.json", ("", "zarr.json")), ("zarr.json/zarr.json", ("zarr.json", "zarr.json")),
     ("a/c/0/1", ("a", "c/0/1")), ("a/c/0/2", ("a", "c/0/2")),
     ("a/c/0/zarr.json", ("a/c/0", "zarr.json")), ("a/c/0/x", ("a/c/0", "x"))],
)  # fmt: skip
def test_document_or_chunk_is_found_whatever_nodes_lie_at_its_key(
    key: str, expected: tuple[str, str]
) -> None:
    """Nodes named like a document, or in an array, hide neither documents nor chunks."""
    nodes = map(_group, ["/", "/zarr.json", "/a/c/0", "/a/c/0/1"])
    snapshot = _decode(*nodes, _array("/a"))

    assert snapshot.find(key) == expected


def test_root_document_consolidates_all_nodes() -> None:
    """The root document keeps its members and has the served documents of all nodes."""
    stale = {"kind": "inline", "must_understand": False, "metadata": {"gone": GROUP}}
    text = b' {"node_type":"group",\r\n "zarr_format": 3}\n'
    nodes = (
        _group("/", {**GROUP, "attributes": {"é": 1}, "x": None, "consolidated_metadata": stale}),
        _group("/g", text),
        _array("/g/a"),
        _array('/"\\é', SHARDED),
    )
    root, group = _root(*nodes), _decode(*nodes).nodes["g"]
    consolidated = root.pop("consolidated_metadata")

    assert root == {**GROUP, "attributes": {"é": 1}, "x": None}
    assert consolidated.pop("metadata") == {
        "g": GROUP,
        "g/a": PLAIN,
        '"\\é': array_metadata([5, 7], [2, 2], [LITTLE]),
    }
    assert consolidated == {"kind": "inline", "must_understand": False}
    assert isinstance(group, SnapshotNode)
    assert group.document.served == text


@pytest.mark.parametrize("damaged", [_group("/g", b"{"), _array("/a", shape=[(5, 3)])])
def test_root_document_is_not_consolidated_with_a_damaged_node(damaged: building.Node) -> None:
    """The root document has no consolidated metadata if any node is damaged."""
    assert "consolidated_metadata" not in _root(_group("/"), damaged, _array("/b"))


def test_root_may_be_an_array_or_absent() -> None:
    """An array as root is served without shards; a snapshot without nodes has no root."""
    snapshot = _decode(_array("/", SHARDED))

    assert json.loads(snapshot.root_document) == array_metadata([5, 7], [2, 2], [LITTLE])
    assert _decode().find("zarr.json") is None
    assert _decode().root_document == b""


def test_first_node_of_a_path_counts() -> None:
    """The first of several nodes with one path is read; the others are faults."""
    snapshot = _decode(_group("/"), _array("/a"), _group("/a"), _array("/a", b"{"))

    found = snapshot.nodes["a"]
    assert isinstance(found, SnapshotNode)
    assert found.chunks is not None
    assert [path for path, _ in snapshot.faults] == ["/a", "/a"]
    assert json.loads(snapshot.root_document)["consolidated_metadata"]["metadata"] == {"a": PLAIN}


@pytest.mark.parametrize(
    "path",
    ["", "a", "//", "/a/", "//a", "/a//b", "/.", "/..", "/../x", "/a/../../x", "/a/./b", "a/b"],
)
def test_invalid_path_is_reported_and_skipped(path: str) -> None:
    """A node with an invalid path is reported as a fault and skipped; others are read."""
    snapshot = _decode(_group("/"), _group(path), _group("/b"))

    assert list(snapshot.nodes) == ["", "b"]
    assert snapshot.faults == ((path, "no path of a node"),)


def test_orphaned_nodes_are_read_but_not_consolidated() -> None:
    """Nodes without a group are read and reported as faults, and not consolidated."""
    paths = ["/", "/a", "/lone/g", "/lone/g/x", "/lone/g/x/y"]
    snapshot = _decode(*map(_group, paths), _array("/b"), _group("/b/n"), _group("/b/n/m"))

    assert {path for path, _ in snapshot.faults} == {*paths[2:], "/b/n", "/b/n/m"}
    assert all(isinstance(node, SnapshotNode) for node in snapshot.nodes.values())
    document = json.loads(snapshot.root_document)
    assert set(document["consolidated_metadata"]["metadata"]) == {"a", "b"}


_OF_GROUPS: list[tuple[Any, str]] = [
    (b"", "not JSON"),
    (b"{", "not JSON"),
    (b"null", "no JSON object"),
    (b"[]", "no JSON object"),
    (b"\xff\xfe", "not JSON"),
    (json.dumps(GROUP).encode("utf-16"), "not JSON"),
    (json.dumps(GROUP).encode("utf-8-sig"), "not JSON"),
    (b"[" * 100_000, "too many"),
    (b'{"zarr_format": 3, "node_type": "group", "x": ' + b"1" * 5000 + b"}", "not JSON"),
    ({"zarr_format": 2}, "zarr_format"),
    ({"zarr_format": 3}, "node_type"),
    ({"zarr_format": 3, "node_type": ["group"]}, "node_type"),
    (PLAIN, "disagree"),
]


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        *((_group("/g", document), reason) for document, reason in _OF_GROUPS),
        *((_array("/a", {**PLAIN, "shape": shape}), "dimensions")
          for shape in ([5], [5, 7, 1], [1] * 1000)),
        *((_array("/a", {**PLAIN, "shape": shape}), "shape")
          for shape in ([5, -7], "5", None, [True, 1], [5, 7.5], [5, 2**63], [5, float("nan")])),
        (_array("/a", GROUP), "disagree"),
        (_array("/a", {**SHARDED, "shape": [5]}), "dimensions"),
    ],
)  # fmt: skip
def test_damaged_document_affects_only_its_node(node: building.Node, reason: str) -> None:
    """A damaged or contradictory document is a DecodeError of its node only."""
    assert reason in _why(node)


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_root_document_is_not_consolidated_with_numbers_that_are_not_finite(constant: str) -> None:
    """A document with NaN or an infinity, and a root beside it, are served byte for byte."""
    text = json.dumps({**PLAIN, "attributes": {'"': float(constant)}}).encode()
    root = b'{"node_type":"group",\n"zarr_format":3}'
    snapshot = _decode(_group("/", root), _array("/a", text))

    node = snapshot.nodes["a"]
    assert isinstance(node, SnapshotNode)
    assert node.document.served == text
    assert snapshot.root_document == root
    odd_root = root[:-1] + b',"attributes":{"x":%b}}' % constant.encode()
    assert _decode(_group("/", odd_root), _array("/b")).root_document == odd_root


def test_root_beside_nan_loses_stored_consolidated_metadata() -> None:
    """Consolidated metadata of the root that are stored with NaN do not hide it."""
    array = {**PLAIN, "attributes": {"x": float("nan")}}
    stale = {"kind": "inline", "must_understand": False, "metadata": {"a": array}}

    assert _root(_group("/", {**GROUP, "consolidated_metadata": stale}), _array("/a", array)) == {
        **GROUP
    }


@pytest.mark.parametrize("text", ["NaN", "a: NaN, ", '\\" : -Infinity', '\\\\"', "\\"])
def test_words_of_strings_are_consolidated(text: str) -> None:
    """NaN and Infinity within strings, such as fill values, do not prevent consolidation."""
    document = {**PLAIN, "attributes": {text: text, "NaN": "Infinity"}}

    metadata = _root(_group("/"), _array("/a", document))["consolidated_metadata"]["metadata"]
    assert metadata == {"a": document}


@pytest.mark.parametrize(
    ("slot", "value", "reason"),
    [(0, None, "node id"), (1, None, "path"), (2, None, "user_data"), (4, None, "node_data"),
     *((3, Number("B", kind), f"unknown type {kind}") for kind in (0, 3, 255))],
)  # fmt: skip
def test_node_without_a_required_field_is_damage_of_the_snapshot(
    slot: int, value: Any, reason: str
) -> None:
    """A node without a required field, or of unknown type, raises DecodeError for the snapshot."""
    table = building.node_table(_array("/a")) | {slot: value}
    root: building.Table = {0: Struct(ID), 2: [table], 6: Structs([], 32, 8)}
    with pytest.raises(DecodeError, match=reason):
        SnapshotDecoder(ID, LIMIT)(envelope(payload(root), SNAPSHOT))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "magic number"),
        (envelope(building.snapshot(ID, []), building.MANIFEST), "not a snapshot"),
        (envelope(building.snapshot(b"another one!", []), SNAPSHOT), "it is the snapshot"),
        (envelope(b"", SNAPSHOT), "FlatBuffer"),
        (envelope(bytes(100), SNAPSHOT), "no id"),
        (envelope(payload({0: Struct(ID)}), SNAPSHOT), "no nodes"),
    ],
)
def test_invalid_snapshot_is_refused(data: bytes, reason: str) -> None:
    """A file that is no snapshot, or another one, raises DecodeError."""
    with pytest.raises(DecodeError, match=reason):
        SnapshotDecoder(ID, LIMIT)(data)


def test_size_of_a_snapshot_grows_with_its_nodes() -> None:
    """The counted size of a snapshot grows with its nodes and includes their documents."""
    nodes = [_group(f"/{n}", {**GROUP, "attributes": {"n": n}}) for n in range(200)]
    few, many = _decode(*nodes[:100]), _decode(*nodes)

    assert 1.9 < many.nbytes / few.nbytes < 2.1
    assert few.nbytes > 100 * len(_document(GROUP)) + len(few.root_document)


WRITTEN_LIMIT = 2**24
IDS = st.binary(min_size=12, max_size=12)
U32S = st.integers(0, 2**32 - 1)
U64S = st.integers(0, 2**64 - 1)
MAYBE = st.none() | st.binary(max_size=9)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)


@st.composite
def arrays(draw: st.DrawFn) -> StoredArray:
    """Draw the fields of an array, with any number of names."""
    dimensions = draw(st.lists(st.builds(Dimension, U64S, U32S), max_size=4))
    names = draw(st.none() | st.lists(st.none() | TEXT, max_size=4).map(tuple))
    extent = st.tuples(U32S, U32S)
    extents = st.lists(extent, min_size=len(dimensions), max_size=len(dimensions)).map(tuple)
    manifests = draw(st.lists(st.builds(ManifestRef, IDS, extents), max_size=3))
    return StoredArray(tuple(dimensions), names, tuple(manifests))


@st.composite
def snapshots(draw: st.DrawFn) -> StoredSnapshot:
    """Draw any snapshot."""
    node = st.builds(
        StoredNode,
        st.binary(min_size=8, max_size=8),
        TEXT.map("/{}".format),
        st.binary(max_size=40),
        st.none() | arrays(),
        MAYBE,
    )
    file = st.builds(ManifestFile, IDS, U64S, U32S, MAYBE)
    return StoredSnapshot(
        draw(IDS),
        {node.path: node for node in draw(st.lists(node, max_size=6))},
        {file.object_id: file for file in draw(st.lists(file, max_size=4))},
        draw(U64S),
        draw(TEXT),
        Metadata(2, tuple(sorted(draw(st.lists(st.tuples(TEXT, st.binary())))))),
        draw(MAYBE),
    )


@settings(max_examples=40)
@given(snapshots())
def test_written_snapshot_is_read_back(given_snapshot: StoredSnapshot) -> None:
    """A written snapshot is read back with all fields, unknown ones included, sorted by path."""
    data = write_snapshot(given_snapshot)
    found = StoredSnapshotDecoder(given_snapshot.object_id, WRITTEN_LIMIT)(data)

    assert replace(found, nbytes=0) == given_snapshot
    assert list(found.nodes) == sorted(given_snapshot.nodes, key=str.encode)


def _fill(session: icechunk.Session) -> None:
    root = zarr.open_group(session.store, mode="a")
    for path in ("a", "a/native", "a-b", "a b", "é", "z/deep/er"):
        array = root.create_array(
            f"{path}/x", shape=(4, 6), chunks=(2, 3), dtype="u1", dimension_names=["y", None]
        )
        array[:] = len(path)
    root.create_array("scalar", shape=(), dtype="u1")[...] = 7
    root.create_array("empty", shape=(0, 5), chunks=(1, 5), dtype="u1")
    root.attrs["é"] = {"b": [1, 2]}


def _read(session: icechunk.Session) -> dict[str, Any]:
    root = zarr.open_group(session.store, mode="r")
    return {
        path: np.asarray(node[...]).tolist() if isinstance(node, zarr.Array) else dict(node.attrs)
        for path, node in root.members(max_depth=None)
    }


def test_library_reads_a_snapshot_rewritten_in_version_2(tmp_path: Path) -> None:
    """The library reads a snapshot of version 1 that is rewritten in version 2, and writes on."""
    storage = icechunk.local_filesystem_storage(str(tmp_path))
    repo = icechunk.Repository.create(storage, spec_version=1)
    session = repo.writable_session("main")
    _fill(session)
    snapshot_id = session.commit("fill")
    told, before = repo.inspect_snapshot(snapshot_id), _read(repo.readonly_session("main"))
    icechunk.upgrade_icechunk_repository(repo, dry_run=False)
    file = tmp_path / "snapshots" / snapshot_id
    decode = StoredSnapshotDecoder(decode_id(snapshot_id) or b"", WRITTEN_LIMIT)
    file.write_bytes(write_snapshot(decode(file.read_bytes())))

    again = icechunk.Repository.open(storage)
    assert told["manifests"]
    assert again.inspect_snapshot(snapshot_id) == {**told, "header": ANY}
    assert _read(again.readonly_session("main")) == before
    session = again.writable_session("main")
    array = zarr.open_group(session.store, mode="a")["é/x"]
    assert isinstance(array, zarr.Array)
    array.resize((2, 6))
    session.commit("on top")
    assert np.shape(_read(again.readonly_session("main"))["é/x"]) == (2, 6)
