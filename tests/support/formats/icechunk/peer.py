"""Repositories written by the Icechunk library, read and modified behind its back."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import icechunk
import numpy as np
import zarr
from zarr.core.buffer import default_buffer_prototype

from shardgate.formats.icechunk.changes import ChangeSet, ChunkChanges, NodeDocument
from shardgate.formats.icechunk.coords import inside
from shardgate.formats.icechunk.ids import decode_id, encode_id
from shardgate.formats.icechunk.manifest import InlineChunk, Manifest, ManifestDecoder
from shardgate.formats.icechunk.payloads import Payloads
from shardgate.formats.icechunk.snapshot import (
    ManifestFile,
    ManifestRef,
    StoredArray,
    StoredNode,
    StoredSnapshot,
    StoredSnapshotDecoder,
    write_snapshot,
)
from shardgate.formats.icechunk.transaction_log import TransactionLog, TransactionLogDecoder

ARCHIVE = "s3://archive/"

LIMIT = 2**26


def read_id(text: str) -> bytes:
    """Decode an id of a file name."""
    found = decode_id(text)
    assert found is not None
    return found


class Peer:
    """A repository of the library in *folder*."""

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
        """Open the repository anew, without the library's caches."""
        if splitting is not None:
            self._config.manifest = icechunk.ManifestConfig(splitting=splitting)
        self.repository = icechunk.Repository.open(self._storage, config=self._config)
        if splitting is not None:
            self.repository.save_config()

    def session(self) -> icechunk.Session:
        """Begin a writable session."""
        return self.repository.writable_session("main")

    def tip(self) -> str:
        """Return the id of the last snapshot."""
        return self.repository.lookup_branch("main")

    def node(self, path: str) -> StoredNode:
        """Return the node at *path* in the last snapshot."""
        return stored(self.folder, self.tip()).nodes[path]

    def array(self, path: str) -> StoredArray:
        """Return the array at *path* in the last snapshot."""
        found = self.node(path).array
        assert found is not None
        return found

    def inspect_manifests(self, path: str) -> list[dict[str, Any]]:
        """Return the manifests of a node as the library reports them."""
        nodes: Any = self.repository.inspect_snapshot(self.tip())["nodes"]
        return next(list(each["manifest_refs"]) for each in nodes if each["path"] == path)

    def put(self, path: str, refs: Sequence[ManifestRef], files: Mapping[bytes, bytes]) -> None:
        """Replace the manifests of the array at *path* by *refs*; *files* are the new ones."""
        folder, found = self.folder / "manifests", stored(self.folder, self.tip())
        folder.mkdir(exist_ok=True)
        for object_id, data in files.items():
            (folder / encode_id(object_id)).write_bytes(data)
        array = replace(self.array(path), manifests=tuple(refs))
        nodes = {**found.nodes, path: replace(found.nodes[path], array=array)}
        listed = [ref for each in nodes.values() if each.array for ref in each.array.manifests]
        sizes = {
            each: ManifestFile(each, (folder / encode_id(each)).stat().st_size, 1)
            for each in sorted({ref.object_id for ref in listed})
        }
        written = write_snapshot(replace(found, nodes=nodes, manifest_files=sizes))
        (self.folder / "snapshots" / self.tip()).write_bytes(written)
        self.reopen()

    def get(self, key: str) -> bytes | None:
        """Return the value of *key* as the library reads it."""
        return read(self.repository.readonly_session("main"), key)


def read(session: icechunk.Session, key: str) -> bytes | None:
    """Return the value of *key* in a session."""
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
    """Open the root group for writing."""
    return zarr.open_group(session.store, mode="a")


def open_array(session: icechunk.Session, path: str) -> zarr.Array[Any]:
    """Open an array for writing."""
    found = open_root(session)[path]
    assert isinstance(found, zarr.Array)
    return found


def array(session: icechunk.Session, name: str, shape: Sequence[int], **more: Any) -> Any:
    """Create an array with chunks of one element each."""
    fields: dict[str, Any] = {"chunks": (1,) * len(shape), "dtype": "u1", "compressors": None}
    return zarr.create_array(
        session.store, name=name, shape=tuple(shape), filters=None, **fields | more
    )


def stored(folder: Path, snapshot_id: str) -> StoredSnapshot:
    """Read and decode a snapshot."""
    data = (folder / "snapshots" / snapshot_id).read_bytes()
    return StoredSnapshotDecoder(read_id(snapshot_id), LIMIT)(data)


def logged(folder: Path, snapshot_id: str) -> TransactionLog:
    """Read and decode the transaction log of a snapshot."""
    data = (folder / "transactions" / snapshot_id).read_bytes()
    return TransactionLogDecoder(read_id(snapshot_id), LIMIT)(data)


def read_manifest(folder: Path, object_id: bytes) -> Manifest:
    """Read and decode a manifest."""
    data = (folder / "manifests" / encode_id(object_id)).read_bytes()
    return ManifestDecoder(object_id, LIMIT)(data)


def change_set(before: StoredSnapshot, after: StoredSnapshot, log: TransactionLog) -> ChangeSet:
    """Return the change set between two snapshots, with chunks of one byte."""
    nodes = {node.node_id: node for node in after.nodes.values()}
    chunks: dict[bytes, ChunkChanges] = {}
    for node_id, batches in log.updated_chunks.items():
        array = nodes[node_id].array
        if batches and array is not None:
            coords = np.concatenate(batches)
            coords = coords[inside(coords, array.grid)]
            if len(coords):
                chunks[node_id] = ChunkChanges(
                    coords, Payloads.of([InlineChunk(b"\1")] * len(coords))
                )
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
