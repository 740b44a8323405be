"""Snapshots that are written again hold the same, to us and to the real library."""

from pathlib import Path
from typing import Any

import icechunk
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from app.formats.icechunk.ids import decode_id
from app.formats.icechunk.repo_info import Metadata
from app.formats.icechunk.snapshot import (
    Dimension,
    ManifestFile,
    ManifestRef,
    StoredArray,
    StoredNode,
    StoredSnapshot,
    StoredSnapshotDecoder,
    write_snapshot,
)
from tests.formats.icechunk.building import SNAPSHOT, Node, envelope, snapshot

LIMIT = 2**24
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


def _same(one: StoredSnapshot, other: StoredSnapshot) -> bool:
    """Compare all but what they weigh."""
    fields = StoredSnapshot.__slots__
    return all(getattr(one, name) == getattr(other, name) for name in fields if name != "nbytes")


@given(snapshots())
def test_what_is_written_is_read_alike(given_snapshot: StoredSnapshot) -> None:
    """Not a field is lost, those that nobody knows included."""
    data = write_snapshot(given_snapshot)
    found = StoredSnapshotDecoder(given_snapshot.object_id, LIMIT)(data)

    assert _same(found, given_snapshot)
    assert list(found.nodes) == sorted(given_snapshot.nodes, key=str.encode)


def test_snapshots_of_version_1_tell_the_same() -> None:
    """Their grid is counted from lengths, and their manifests are listed in structs."""
    manifest = ManifestRef(b"manifest  id", ((0, 2), (1, 3)))
    nodes = [
        Node(node_id=b"rootnode", path="/", user_data=b"{}"),
        Node(
            node_id=b"arraynod",
            path="/a",
            user_data=b"[]",
            shape=[(5, 0), (9, 0)],
            chunk_shape=[3, 4],
            manifests=[manifest],
        ),
    ]
    data = snapshot(b"snapshot  id", nodes, manifest_files=[(manifest.object_id, 7, 4)], version=1)
    found = StoredSnapshotDecoder(b"snapshot  id", LIMIT)(envelope(data, SNAPSHOT, version=1))

    array = StoredArray((Dimension(5, 2), Dimension(9, 3)), None, (manifest,))
    assert list(found.nodes.values()) == [
        StoredNode(b"rootnode", "/", b"{}"),
        StoredNode(b"arraynod", "/a", b"[]", array),
    ]
    assert found.manifest_files == {manifest.object_id: ManifestFile(manifest.object_id, 7, 4)}


def test_metadata_of_version_1_are_not_written() -> None:
    """They are spelled otherwise, and a snapshot that is written has metadata of its own."""
    given_snapshot = StoredSnapshot(b"i" * 12, {}, {}, 0, "", Metadata(1, (("a", b"\xc0"),)))

    with pytest.raises(ValueError, match="version 1"):
        write_snapshot(given_snapshot)


def _rewrite(folder: Path, snapshot_id: str) -> StoredSnapshot:
    """Write the file of a snapshot again."""
    file = folder / "snapshots" / snapshot_id
    object_id = decode_id(snapshot_id)
    assert object_id is not None
    found = StoredSnapshotDecoder(object_id, LIMIT)(file.read_bytes())
    file.write_bytes(write_snapshot(found))
    return found


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
    before = _read(repo.readonly_session("main"))
    icechunk.upgrade_icechunk_repository(repo, dry_run=False)
    found = _rewrite(tmp_path, snapshot_id)

    assert found.metadata.items == ()
    again = icechunk.Repository.open(storage)
    assert _read(again.readonly_session("main")) == before
    session = again.writable_session("main")
    array = zarr.open_group(session.store, mode="a")["é/x"]
    assert isinstance(array, zarr.Array)
    array.resize((2, 6))
    session.commit("on top")
    assert np.shape(_read(again.readonly_session("main"))["é/x"]) == (2, 6)
