"""Repositories built object by object, with ids that depend on content only."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from tests.support.formats.icechunk import building_repo
from tests.support.formats.icechunk.building import (
    MANIFEST,
    SNAPSHOT,
    Node,
    Ref,
    Table,
    envelope,
    manifest,
    snapshot,
)
from tests.support.formats.zarr.building import LITTLE, array_metadata, encode_shard, sharding

GROUP: dict[str, Any] = {"zarr_format": 3, "node_type": "group"}
_CROCKFORD = str.maketrans("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", "0123456789ABCDEFGHJKMNPQRSTVWXYZ")

type Extents = Sequence[tuple[int, int]]


def digest(content: object, nbytes: int = 12) -> bytes:
    """Return an id for *content*."""
    return blake2b(repr(content).encode(), digest_size=nbytes).digest()


def spell(object_id: bytes) -> str:
    """Encode an id as in file names."""
    return base64.b32encode(object_id).decode().rstrip("=").translate(_CROCKFORD)


@dataclass
class Builder:
    """Collects the files of a repository with one snapshot."""

    version: int = 2
    objects: dict[str, bytes] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    manifests: list[tuple[bytes, int, int]] = field(default_factory=list)

    def chunk(self, data: bytes) -> bytes:
        """Write a chunk file, and return its id."""
        chunk_id = digest(data)
        self.objects[f"chunks/{spell(chunk_id)}"] = data
        return chunk_id

    def native(self, index: Sequence[int], data: bytes, before: bytes = b"", **more: Any) -> Ref:
        """Write *data* into a chunk file, behind *before*, and return a reference to it."""
        chunk_id = self.chunk(before + data)
        fields: dict[str, Any] = {"offset": len(before), "length": len(data), "chunk_id": chunk_id}
        return Ref(index=index, **fields | more)

    def manifest(
        self, arrays: Sequence[tuple[bytes, Sequence[Ref] | Sequence[Table]]], **more: Any
    ) -> bytes:
        """Write a manifest, and return its id."""
        manifest_id = digest(arrays)
        data = envelope(manifest(manifest_id, arrays, **more), MANIFEST, version=self.version)
        self.objects[f"manifests/{spell(manifest_id)}"] = data
        self.manifests.append((manifest_id, len(data), sum(len(refs) for _, refs in arrays)))
        return manifest_id

    def group(self, path: str, document: Mapping[str, Any] | bytes = GROUP) -> None:
        """Add a group."""
        self.nodes.append(Node(node_id=node_id(path), path=path, user_data=_spell(document)))

    def array(
        self,
        path: str,
        document: Mapping[str, Any] | bytes,
        grid: Sequence[int],
        refs: Sequence[Ref] | Sequence[Table] = (),
        *,
        manifests: Sequence[tuple[bytes, Extents]] | None = None,
        shape: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Add an array of *grid* chunks, its *refs* in a manifest that covers the whole grid."""
        if manifests is None:
            manifests = ()
            if refs:
                extents = [(0, count) for count in grid]
                manifests = [(self.manifest([(node_id(path), refs)]), extents)]
        self.nodes.append(
            Node(
                node_id=node_id(path),
                path=path,
                user_data=_spell(document),
                shape=shape or [(count * 2, count) for count in grid],
                chunk_shape=[2] * len(grid) if self.version == 1 else None,
                manifests=manifests,
            )
        )

    def snapshot(self) -> bytes:
        """Write the snapshot, and return its id."""
        snapshot_id = digest(self.nodes)
        data = snapshot(
            snapshot_id, self.nodes, manifest_files=self.manifests, version=self.version
        )
        name = f"snapshots/{spell(snapshot_id)}"
        self.objects[name] = envelope(data, SNAPSHOT, version=self.version)
        return snapshot_id

    def build(self, **more: Any) -> dict[str, bytes]:
        """Return all files, with ``main`` and the tag ``v1``; *more* are fields of `Repo`."""
        snapshot_id = self.snapshot()
        if self.version == 1:
            ref = json.dumps({"snapshot": spell(snapshot_id)}).encode()
            refs = {"refs/branch.main/ref.json": ref, "refs/tag.v1/ref.json": ref}
        else:
            refs = {"repo": repo(snapshot_id, **more)}
        return {**self.objects, **refs}


def repo(snapshot_id: bytes, **more: Any) -> bytes:
    """Return the file ``repo`` with ``main`` and the tag ``v1`` at a snapshot."""
    fields: dict[str, Any] = {
        "tags": [building_repo.ref("v1", 0)],
        "snapshots": [building_repo.snapshot(snapshot_id)],
    }
    return building_repo.Repo(**fields | more).file()


def lab(*refs: Ref, document: Mapping[str, Any] | bytes | None = None) -> Builder:
    """Return a builder with ``a`` of three chunks, *refs* among them, and ``s`` of two shards."""
    builder = Builder()
    builder.group("/")
    line = array_metadata([6], [2], [LITTLE]) if document is None else document
    builder.array("/a", line, [3], [*refs, builder.native([1], b"xy", b".")])
    shard = encode_shard([b"a", b"b", b"c", b"d"])
    shards = [Ref(index=[0], inline=shard), builder.native([1], shard, b"..")]
    builder.array("/s", array_metadata([8], [4], [sharding([1])]), [2], shards)
    return builder


def group() -> bytes:
    """Return the metadata of a group."""
    return json.dumps(GROUP).encode()


def array(shape: Sequence[int], chunk: Sequence[int], codecs: Sequence[Any] = (LITTLE,)) -> bytes:
    """Return the metadata of an array."""
    return json.dumps(array_metadata(list(shape), list(chunk), list(codecs))).encode()


def node_id(path: str) -> bytes:
    """Return the id of the node at *path*."""
    return digest(path, 8)


def _spell(document: Mapping[str, Any] | bytes) -> bytes:
    return document if isinstance(document, bytes) else json.dumps(document).encode()
