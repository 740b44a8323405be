"""A small repository, file by file, of which any part can be written otherwise."""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import crc32c

from tests.formats.icechunk.building import (
    MANIFEST,
    SNAPSHOT,
    TRANSACTION_LOG,
    Node,
    Ref,
    envelope,
    manifest,
    snapshot,
)
from tests.formats.icechunk.building_repo import FIRST, Fields, Repo, ref, transaction_log
from tests.formats.icechunk.building_repo import snapshot as listed
from tests.formats.icechunk.repositories import spell

SECOND = b"second snaps"
M, N = b"one manifest", b"two manifest"
C, D = b"chunk file 1", b"chunk file 2"
ROOT, A, S = b"rootnode", b"arraynod", b"shardarr"
ELSEWHERE = "s3://elsewhere/"

_BYTES: dict[str, Any] = {"name": "bytes", "configuration": {"endian": "little"}}
CRC: dict[str, Any] = {"name": "crc32c"}


def group() -> bytes:
    """Write the metadata of a group."""
    return b'{"zarr_format": 3, "node_type": "group"}'


def array(shape: Sequence[int], chunk: Sequence[int], codecs: Sequence[Any] = (_BYTES,)) -> bytes:
    """Write the metadata of an array of bytes."""
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": 0,
        "codecs": codecs,
    }
    return json.dumps(document).encode()


def sharded(length: int = 8) -> bytes:
    """Write the metadata of an array whose shards hold four inner chunks of a byte each."""
    configuration = {"chunk_shape": [1], "codecs": [_BYTES], "index_codecs": [_BYTES, CRC]}
    return array([length], [4], [{"name": "sharding_indexed", "configuration": configuration}])


def checked(data: bytes) -> bytes:
    """Append the checksum of *data*."""
    return data + struct.pack("<I", crc32c.crc32c(data))


SHARD = b"abcd" + checked(struct.pack("<8Q", 0, 1, 1, 1, 2, 1, 3, 1))


@dataclass(frozen=True)
class Small:
    """Two snapshots; in the second an array `a` of three chunks and a sharded one `s` of two."""

    document: bytes = array([6], [2])
    grid: Sequence[tuple[int, int]] = ((6, 3),)
    references: Sequence[Ref] = (
        Ref(index=[0], inline=b"xy"),
        Ref(index=[1], chunk_id=C, offset=1, length=2),
        Ref(index=[2], location=f"{ELSEWHERE}x", offset=3, length=2),
    )
    manifests: Sequence[tuple[bytes, Sequence[tuple[int, int]]]] = ((M, [(0, 3)]),)
    shards: Sequence[Ref] = (
        Ref(index=[0], inline=SHARD),
        Ref(index=[1], chunk_id=D, offset=2, length=len(SHARD)),
    )
    more_nodes: Sequence[Node] = ()
    lists: Sequence[bytes] | None = (M, N)
    """The manifests that the snapshot lists."""
    repo: Repo = field(
        default_factory=lambda: Repo(
            branches=[ref("main", 1)],
            tags=[ref("v 1", 1)],
            snapshots=[listed(FIRST), listed(SECOND, 0)],
        )
    )
    more: Mapping[str, bytes | None] = field(default_factory=dict)
    """Files to put, or to take away, in the end."""

    @property
    def nodes(self) -> list[Node]:
        """The nodes of the second snapshot."""
        a = Node(
            node_id=A, path="/a", user_data=self.document, shape=self.grid, manifests=self.manifests
        )
        shards = [(N, [(0, 2)])]
        s = Node(node_id=S, path="/s", user_data=sharded(), shape=[(8, 2)], manifests=shards)
        return [Node(node_id=ROOT, path="/", user_data=group()), a, s, *self.more_nodes]

    def objects(self) -> dict[str, bytes]:
        """Write all files, by their keys."""
        files = None if self.lists is None else [(item, 99, 9) for item in self.lists]
        second = snapshot(SECOND, self.nodes, manifest_files=files)
        first = snapshot(FIRST, [Node(node_id=ROOT, path="/", user_data=group())])
        objects = {
            "repo": self.repo.file(),
            name("snapshots", FIRST): envelope(first, SNAPSHOT),
            name("snapshots", SECOND): envelope(second, SNAPSHOT),
            name("transactions", FIRST): envelope(transaction_log(FIRST), TRANSACTION_LOG),
            name("transactions", SECOND): envelope(transaction_log(SECOND), TRANSACTION_LOG),
            name("manifests", M): envelope(manifest(M, [(A, self.references)]), MANIFEST),
            name("manifests", N): envelope(manifest(N, [(S, self.shards)]), MANIFEST),
            name("chunks", C): b".xy",
            name("chunks", D): b".." + SHARD,
        }
        changed = {**objects, **self.more}
        return {key: data for key, data in changed.items() if data is not None}


def name(folder: str, object_id: bytes) -> str:
    """Name a file."""
    return f"{folder}/{spell(object_id)}"


def repo(**more: Any) -> Repo:
    """Write `repo` as that of `Small`, but for *more*."""
    fields: dict[str, Any] = {
        "branches": [ref("main", 1)],
        "tags": [ref("v 1", 1)],
        "snapshots": [listed(FIRST), listed(SECOND, 0)],
    }
    return Repo(**fields | more)


def info(snapshot_id: bytes, parent: int = -1, more: Fields | None = None) -> Fields:
    """Describe a snapshot in `repo`."""
    return listed(snapshot_id, parent, more=more)
