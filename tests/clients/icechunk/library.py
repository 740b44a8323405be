"""What the library itself tells of a repository: the answer that ours is compared with."""

import asyncio
import itertools
import json
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import icechunk
from icechunk import Repository, Session
from zarr.core.buffer import default_buffer_prototype

from tests.clients.writing import Json
from tests.seaweedfs import SeaweedFS


def in_seaweedfs(seaweedfs: SeaweedFS, prefix: str) -> icechunk.Storage:
    """Name a prefix of the bucket to the library."""
    return icechunk.s3_storage(
        bucket=seaweedfs.bucket,
        prefix=prefix,
        region=seaweedfs.region,
        endpoint_url=seaweedfs.endpoint_url,
        allow_http=True,
        force_path_style=True,
        access_key_id=seaweedfs.access_key_id,
        secret_access_key=seaweedfs.secret_access_key,
    )


def refs_of(repo: Repository, folder: Path) -> Iterator[tuple[str, Session]]:
    """Open every branch, tag and snapshot; snapshots are found by their files below *folder*."""
    for branch in sorted(repo.list_branches()):
        yield f"@branch.{quote(branch, safe='')}", repo.readonly_session(branch)
    for tag in sorted(repo.list_tags()):
        yield f"@tag.{quote(tag, safe='')}", repo.readonly_session(tag=tag)
    for file in sorted((folder / "snapshots").iterdir()):
        try:
            session = repo.readonly_session(snapshot_id=file.name)
        except icechunk.IcechunkError:
            continue
        yield f"@{file.name}", session


@dataclass(frozen=True)
class Node:
    """A group or array as the library has it."""

    path: str
    stored: bytes
    chunks: dict[str, bytes | None]
    """Every key of the grid, and of some that are in none."""

    @property
    def document(self) -> Json:
        """Its ``zarr.json``."""
        document: Json = json.loads(self.stored)
        return document

    @property
    def is_sharded(self) -> bool:
        """Tell whether its codecs have shards; that they can be opened is another matter."""
        return any(each["name"] == "sharding_indexed" for each in self.document.get("codecs", []))

    def key(self, name: str) -> str:
        """Name something in the node."""
        return f"{self.path}/{name}".lstrip("/")


def nodes_of(session: Session, *, without_chunks: Container[str] = ()) -> list[Node]:
    """Read all nodes, with their chunks except for *without_chunks*."""
    return asyncio.run(_read_all(session.store, without_chunks))


async def _read_all(store: Any, without_chunks: Container[str]) -> list[Node]:
    prototype = default_buffer_prototype()
    found = []
    async for key in store.list():
        path, _, name = key.rpartition("/")
        if name != "zarr.json":
            continue
        stored = (await store.get(key, prototype)).to_bytes()
        chunks: dict[str, bytes | None] = {}
        for chunk in () if path in without_chunks else chunk_keys(json.loads(stored)):
            data = await store.get(f"{path}/{chunk}".lstrip("/"), prototype)
            chunks[chunk] = None if data is None else data.to_bytes()
        found.append(Node(path, stored, chunks))
    return found


def chunk_keys(document: Json) -> Iterator[str]:
    """Spell the keys of an array's grid, and of a border around it."""
    if document["node_type"] == "group":
        return
    sizes = document["chunk_grid"]["configuration"]["chunk_shape"]
    grid = [-(-length // size) + 1 for length, size in zip(document["shape"], sizes, strict=True)]
    for coords in itertools.product(*map(range, grid)):
        yield "/".join(("c", *map(str, coords)))


def contents_of(repo: Repository) -> dict[str, dict[str, bytes]]:
    """Read everything that branches and tags lead to, the parents of their snapshots too."""
    ids = {repo.lookup_branch(name) for name in repo.list_branches()}
    ids |= {repo.lookup_tag(name) for name in repo.list_tags()}
    every = {each.id for tip in ids for each in repo.ancestry(snapshot_id=tip)}
    return {each: _stored(repo.readonly_session(snapshot_id=each)) for each in sorted(every)}


def _stored(session: Session) -> dict[str, bytes]:
    async def read() -> dict[str, bytes]:
        found = {}
        async for key in session.store.list():
            value = await session.store.get(key, default_buffer_prototype())
            assert value is not None, key
            found[key] = value.to_bytes()
        return found

    return asyncio.run(read())
