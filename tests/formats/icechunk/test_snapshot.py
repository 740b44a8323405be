"""Snapshots: nodes, their documents and the manifests of arrays; read and written."""

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
from hypothesis import given
from hypothesis import strategies as st

from shardgate.formats.icechunk.ids import decode_id
from shardgate.formats.icechunk.repo_info import Metadata
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
from tests.formats.icechunk import building
from tests.formats.icechunk.building import (
    SNAPSHOT,
    Number,
    Struct,
    Structs,
    envelope,
    payload,
)
from tests.formats.icechunk.case import PLAIN, SHARDED
from tests.formats.icechunk.repositories import GROUP
from tests.formats.zarr.building import LITTLE, array_metadata

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
    """Return why *node* is damaged, beside one that is not."""
    snapshot = _decode(node, _group("/beside"))
    assert isinstance(snapshot.nodes["beside"], SnapshotNode)
    (found,) = (each for path, each in snapshot.nodes.items() if path != "beside")
    assert isinstance(found, DecodeError)
    return str(found)


def _root(*nodes: building.Node) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(_decode(*nodes).root_document)
    return document


@pytest.mark.parametrize("version", [1, 2])
def test_a_snapshot_has_its_nodes(version: int) -> None:
    """By path in the order of bytes, whatever their order in the file; in either version."""
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
def test_the_grid_is_told_in_two_ways(
    shape: Sequence[tuple[int, int]], chunk_shape: tuple[int, ...] | None, grid: tuple[int, ...]
) -> None:
    """As a number of chunks, or by lengths in version 1; the form that is there decides."""
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
def test_a_manifest_covers_a_box(
    coords: tuple[int, ...],
    extents: tuple[tuple[int, int], ...],
    expected: bool,  # noqa: FBT001
) -> None:
    """From and up to; of no dimensions is the whole, which old writers gave one."""
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
def test_chunks_are_asked_for_as_the_document_says(encoding: Any, key: str) -> None:
    """Though the library has one spelling only, which stands in for those that are unknown."""
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
def test_a_path_leads_to_the_nearest_node(path: str, expected: tuple[str, str]) -> None:
    """And the rest is looked for in it."""
    snapshot = _decode(_group("/"), _group("/g"), _array("/g/a"), _group("/lone/node"))

    assert snapshot.find(path) == expected


def test_the_root_tells_of_all_nodes() -> None:
    """Its own members stay, but for nodes there were; others are told as they are served."""
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
def test_where_a_node_is_damaged_the_root_tells_of_none(damaged: building.Node) -> None:
    """Who came to know the others from it would take the damaged one for absent."""
    assert "consolidated_metadata" not in _root(_group("/"), damaged, _array("/b"))


def test_an_array_may_be_the_root_or_there_may_be_none() -> None:
    """Its document is served as it is; the first snapshot of a repository has no nodes."""
    snapshot = _decode(_array("/", SHARDED))

    assert json.loads(snapshot.root_document) == array_metadata([5, 7], [2, 2], [LITTLE])
    assert _decode().find("zarr.json") is None
    assert _decode().root_document == b""


def test_the_first_of_a_path_counts() -> None:
    """The library can commit two nodes of one path, and reads one of them."""
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
def test_what_is_no_path_is_at_none(path: str) -> None:
    """It is told of, and the rest is read."""
    snapshot = _decode(_group("/"), _group(path), _group("/b"))

    assert list(snapshot.nodes) == ["", "b"]
    assert snapshot.faults == ((path, "no path of a node"),)


def test_nodes_in_no_group_are_read_but_not_consolidated() -> None:
    """The library can commit them, and what is in them; readers of the whole fail over them."""
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
def test_a_damaged_document_hurts_its_node_only(node: building.Node, reason: str) -> None:
    """Every other node stays readable; what is told twice has to be the same."""
    assert reason in _why(node)


def test_numbers_that_are_none_are_served_as_they_are() -> None:
    """Writers put NaN into documents though JSON has none."""
    text = json.dumps({**PLAIN, "attributes": {"x": float("nan"), "y": float("inf")}}).encode()
    snapshot = _decode(_group("/"), _array("/a", text))

    node = snapshot.nodes["a"]
    assert isinstance(node, SnapshotNode)
    assert node.document.served == text
    assert text in snapshot.root_document


def _decode_tables(*tables: building.Table) -> Snapshot:
    root: building.Table = {0: Struct(ID), 2: tables, 6: Structs([], 32, 8)}
    return SnapshotDecoder(ID, LIMIT)(envelope(payload(root), SNAPSHOT))


@pytest.mark.parametrize(
    ("slot", "value", "reason"),
    [(0, None, "node id"), (1, None, "path"), (2, None, "user_data"), (4, None, "node_data"),
     *((3, Number("B", kind), f"unknown type {kind}") for kind in (0, 3, 255))],
)  # fmt: skip
def test_a_node_that_cannot_be_read_is_damage_of_the_snapshot(
    slot: int, value: Any, reason: str
) -> None:
    """Nobody writes such a file; what is in its document hurts only the node."""
    table = building.node_table(_array("/a")) | {slot: value}
    with pytest.raises(DecodeError, match=reason):
        _decode_tables({at: each for at, each in table.items() if each is not None})


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
def test_what_is_no_snapshot_is_refused(data: bytes, reason: str) -> None:
    """Or not the one that is asked for."""
    with pytest.raises(DecodeError, match=reason):
        SnapshotDecoder(ID, LIMIT)(data)


def test_a_snapshot_weighs_what_it_holds() -> None:
    """Twice as many nodes weigh about twice as much, and no less than their documents."""
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
    """Draw what an array has; the library takes any number of names for right."""
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


@given(snapshots())
def test_what_is_written_is_read_alike(given_snapshot: StoredSnapshot) -> None:
    """Not a field is lost, those that nobody knows included."""
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


def test_the_library_reads_migrated_snapshots_in_version_2(tmp_path: Path) -> None:
    """A snapshot of version 1 with chunks becomes one of version 2 without a change."""
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
