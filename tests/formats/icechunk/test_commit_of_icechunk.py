"""What the library commits, we commit alike: the nodes, their manifests, and the log."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import icechunk
import pytest
import zarr

from app.formats.icechunk.commit import Outcome, Rewritten, apply_changes
from app.formats.icechunk.ids import encode_id
from app.formats.icechunk.manifest import Manifest, ManifestDecoder
from app.formats.icechunk.snapshot import ManifestRef
from app.formats.icechunk.transaction_log import TransactionLog
from tests.formats.icechunk.peer import LIMIT, change_set, logged, open_array, open_root, stored


@pytest.fixture(autouse=True)
def rectilinear() -> Iterator[None]:
    """Let zarr have such chunk grids."""
    with zarr.config.set({"array.rectilinear_chunks": True}):
        yield


def _create(session: icechunk.Session) -> None:
    root = open_root(session)
    for path in ("n/x", "n/x-", "n/y/z"):
        names = ["y", None]
        array = root.create_array(
            path, shape=(5, 7), chunks=(2, 3), dtype="i2", dimension_names=names
        )
        array[1:, 2:] = 4
    root.create_array("scalar", shape=(), dtype="i2")[...] = 4
    root.create_array("none", shape=(0, 5), chunks=(2, 5), dtype="i2")
    root.create_array("rect", shape=(10, 6), chunks=[[4, 4, 2], [3, 3]], dtype="i2")[:] = 4
    root.create_array("shards", shape=(9,), chunks=(2,), shards=(4,), dtype="i2")[:] = 4


def _delete(session: icechunk.Session) -> None:
    del open_root(session)["g"]


def _replace(session: icechunk.Session) -> None:
    _delete(session)
    open_root(session).create_array("g", shape=(4,), chunks=(2,), dtype="i2")[:] = 3


def _edit(session: icechunk.Session) -> None:
    root = open_root(session)
    root.attrs["a"] = 1
    root["g"].attrs["a"] = 1
    root["a"].attrs["a"] = 1


def _shrink(session: icechunk.Session) -> None:
    open_array(session, "a").resize((3, 4))
    open_array(session, "g/b").resize((1,))


def _shrink_and_fill(session: icechunk.Session) -> None:
    _shrink(session)
    open_array(session, "a")[0, 0] = 8


def _grow(session: icechunk.Session) -> None:
    open_array(session, "a").resize((9, 9))
    open_array(session, "a")[8, 8] = 8


def _erase(session: icechunk.Session) -> None:
    asyncio.run(session.store.delete("a/c/0/0"))


CHANGES = (_create, _delete, _replace, _edit, _shrink, _shrink_and_fill, _grow, _erase)


class Committed:
    """A commit of the library upon another."""

    def __init__(self, folder: Path, change: Callable[[icechunk.Session], None]) -> None:
        self.folder = folder
        self.repo = icechunk.Repository.create(icechunk.local_filesystem_storage(str(folder)))
        session = self.repo.writable_session("main")
        root = open_root(session)
        root.create_array("a", shape=(5, 7), chunks=(2, 3), dtype="i2")[:] = 3
        root.create_array("g/b", shape=(5,), chunks=(1,), dtype="i2")[:] = 3
        root.create_group("g/c/d")
        first = session.commit("first")
        session = self.repo.writable_session("main")
        change(session)
        self.snapshot_id = session.commit("second")
        self.before = stored(folder, first)
        self.after = stored(folder, self.snapshot_id)
        self.log = logged(folder, self.snapshot_id)

    def manifest(self, ref: ManifestRef) -> Manifest:
        """Read a manifest."""
        data = (self.folder / "manifests" / encode_id(ref.object_id)).read_bytes()
        return ManifestDecoder(ref.object_id, LIMIT)(data)

    def by_us(self) -> Outcome:
        """Make the same of the snapshot before, with the manifests that the library wrote."""
        applied = apply_changes(change_set(self.before, self.after, self.log), self.before)
        rewritten: dict[bytes, Rewritten] = {}
        for rewrite in applied.rewrites:
            array = self.after.nodes[rewrite.path].array
            assert array is not None
            dropped = rewrite.dropped([self.manifest(ref) for ref in rewrite.leaving])
            rewritten[rewrite.node_id] = Rewritten(array.manifests, dropped)
        return applied.finish(rewritten, self.after.manifest_files.values())


def _plain(log: TransactionLog) -> tuple[TransactionLog, dict[bytes, list[object]]]:
    chunks = {
        node_id: [coords.tolist() for coords in batches]
        for node_id, batches in log.updated_chunks.items()
    }
    return replace(log, updated_chunks={}), chunks


@pytest.mark.parametrize("change", CHANGES)
def test_a_commit_is_the_same_by_whomever_it_is_made(
    tmp_path: Path, change: Callable[[icechunk.Session], None]
) -> None:
    """Shapes, numbers of chunks, names, manifests, and every list of the log."""
    committed = Committed(tmp_path, change)
    outcome = committed.by_us()

    assert outcome.nodes == committed.after.nodes
    assert outcome.manifest_files == committed.after.manifest_files
    assert _plain(outcome.log) == _plain(committed.log)
