"""Repositories that the library Icechunk writes, read back and changed behind its back."""

import asyncio
import base64
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import icechunk
import numpy as np
import zarr
from zarr.core.buffer import default_buffer_prototype

from app.formats.icechunk.changes import ChangeSet, ChunkChanges, NodeDocument
from app.formats.icechunk.coords import inside
from app.formats.icechunk.payloads import Inlaid, Payloads
from app.formats.icechunk.snapshot import StoredSnapshot, StoredSnapshotDecoder
from app.formats.icechunk.transaction_log import TransactionLog, TransactionLogDecoder
from tests.formats.icechunk.building import SNAPSHOT, Node, envelope, snapshot
from tests.formats.icechunk.repositories import spell

ARCHIVE = "s3://archive/"

_CROCKFORD = str.maketrans("0123456789ABCDEFGHJKMNPQRSTVWXYZ", "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567")

type Refs = Sequence[tuple[bytes, Sequence[tuple[int, int]]]]
"""Ids and extents of manifests."""


def read_id(text: str) -> bytes:
    """Read an id as file names spell it."""
    padded = text.translate(_CROCKFORD) + "=" * (-len(text) % 8)
    return base64.b32decode(padded)


class Peer:
    """A repository in *folder*."""

    def __init__(self, folder: Path, splitting: Any = None) -> None:
        config = icechunk.RepositoryConfig.default()
        config.set_virtual_chunk_container(
            icechunk.VirtualChunkContainer(ARCHIVE, icechunk.s3_store(region="us-east-1"))
        )
        if splitting is not None:
            config.manifest = icechunk.ManifestConfig(splitting=splitting)
        self.folder = folder
        self._config = config
        self._storage = icechunk.local_filesystem_storage(str(folder))
        self.repository = icechunk.Repository.create(self._storage, config=config)
        self.repository.save_config()

    def reopen(self, splitting: Any = None) -> None:
        """Open the repository as if for the first time."""
        if splitting is not None:
            self._config.manifest = icechunk.ManifestConfig(splitting=splitting)
        self.repository = icechunk.Repository.open(self._storage, config=self._config)
        if splitting is not None:
            self.repository.save_config()

    def session(self) -> icechunk.Session:
        """Begin to write."""
        return self.repository.writable_session("main")

    def tip(self) -> str:
        """Name the last snapshot."""
        return self.repository.lookup_branch("main")

    def inspected(self) -> dict[str, Any]:
        """Return what the last snapshot has."""
        found: Any = self.repository.inspect_snapshot(self.tip())
        return dict(found)

    def node(self, path: str) -> dict[str, Any]:
        """Return what the last snapshot has at *path*."""
        return next(dict(node) for node in self.inspected()["nodes"] if node["path"] == path)

    def boxes(self, path: str) -> list[list[list[int]]]:
        """Return the extents of the manifests of an array."""
        return [item["extents"] for item in self.node(path)["manifest_refs"]]

    def manifest_ids(self, path: str) -> list[str]:
        """Name the manifests of an array."""
        return [item["id"] for item in self.node(path)["manifest_refs"]]

    def manifest(self, manifest_id: str) -> bytes:
        """Read a manifest."""
        return (self.folder / "manifests" / manifest_id).read_bytes()

    def put(self, path: str, refs: Refs, files: Mapping[bytes, bytes]) -> None:
        """Make the array at *path* have the manifests *refs*; *files* are those that are new."""
        folder, found = self.folder / "manifests", self.inspected()
        folder.mkdir(exist_ok=True)
        for object_id, data in files.items():
            (folder / spell(object_id)).write_bytes(data)
        nodes = [
            self._node(each, refs if each["path"] == path else None) for each in found["nodes"]
        ]
        listed = {object_id for node in nodes for object_id, _ in node.manifests}
        sizes = [(each, (folder / spell(each)).stat().st_size) for each in listed]
        data = snapshot(
            read_id(found["id"]),
            nodes,
            manifest_files=[(each, size, 1) for each, size in sorted(sizes)],
            flushed_at=round(datetime.fromisoformat(found["flushed_at"]).timestamp() * 1e6),
            message=found["commit_message"],
        )
        (self.folder / "snapshots" / found["id"]).write_bytes(envelope(data, SNAPSHOT))
        self.reopen()

    def _node(self, node: Mapping[str, Any], refs: Refs | None) -> Node:
        old = [
            (read_id(item["id"]), [(start, stop) for start, stop in item["extents"]])
            for item in node.get("manifest_refs", ())
        ]
        shape = node.get("shape")
        return Node(
            node_id=read_id(node["id"])[:8],
            path=node["path"],
            user_data=self.document(node["path"]),
            shape=None if shape is None else [(d["array_length"], d["num_chunks"]) for d in shape],
            dimension_names=None if not shape else [d.get("name") for d in shape],
            manifests=old if refs is None else refs,
        )

    def document(self, path: str) -> bytes:
        """Read the metadata of a node."""
        data = self.get(f"{path}/zarr.json".lstrip("/"))
        assert data is not None
        return data

    def get(self, key: str) -> bytes | None:
        """Read what is at *key*, as the library serves it."""
        return read(self.repository.readonly_session("main"), key)


def read(session: icechunk.Session, key: str) -> bytes | None:
    """Read what is at *key* in a session."""
    found = asyncio.run(session.store.get(key, default_buffer_prototype()))
    return None if found is None else found.to_bytes()


def write(session: icechunk.Session, key: str, data: bytes) -> None:
    """Write *data* to *key* in a session."""
    buffer = default_buffer_prototype().buffer.from_bytes(data)
    asyncio.run(session.store.set(key, buffer))


def delete(session: icechunk.Session, key: str) -> None:
    """Delete *key* in a session."""
    asyncio.run(session.store.delete(key))


def open_root(session: icechunk.Session) -> zarr.Group:
    """Open the root to be written."""
    return zarr.open_group(session.store, mode="a")


def open_array(session: icechunk.Session, path: str) -> zarr.Array[Any]:
    """Open an array to be written."""
    found = open_root(session)[path]
    assert isinstance(found, zarr.Array)
    return found


def array(session: icechunk.Session, name: str, shape: Sequence[int], **more: Any) -> Any:
    """Make an array with chunks of one element each."""
    fields: dict[str, Any] = {"chunks": (1,) * len(shape), "dtype": "u1", "compressors": None}
    return zarr.create_array(
        session.store, name=name, shape=tuple(shape), filters=None, **fields | more
    )


LIMIT = 2**24


def stored(folder: Path, snapshot_id: str) -> StoredSnapshot:
    """Read a snapshot."""
    data = (folder / "snapshots" / snapshot_id).read_bytes()
    return StoredSnapshotDecoder(read_id(snapshot_id), LIMIT)(data)


def logged(folder: Path, snapshot_id: str) -> TransactionLog:
    """Read the transaction log of a snapshot."""
    data = (folder / "transactions" / snapshot_id).read_bytes()
    return TransactionLogDecoder(read_id(snapshot_id), LIMIT)(data)


def change_set(before: StoredSnapshot, after: StoredSnapshot, log: TransactionLog) -> ChangeSet:
    """Make the change set that leads from one snapshot to the other; chunks hold one byte."""
    nodes = {node.node_id: node for node in after.nodes.values()}
    chunks: dict[bytes, ChunkChanges] = {}
    for node_id, batches in log.updated_chunks.items():
        array = nodes[node_id].array
        if batches and array is not None:
            coords = np.concatenate(batches)
            coords = coords[inside(coords, array.grid)]
            if len(coords):
                chunks[node_id] = ChunkChanges(coords, Payloads.of([Inlaid(b"\1")] * len(coords)))
    return ChangeSet(
        new={
            node_id: NodeDocument(nodes[node_id].path, nodes[node_id].document)
            for node_id in log.new_groups | log.new_arrays
        },
        updated={
            node_id: nodes[node_id].document for node_id in log.updated_groups | log.updated_arrays
        },
        deleted=log.deleted_groups | log.deleted_arrays,
        chunks=chunks,
    )
