"""Reads with the Icechunk library, and comparisons of the service with them."""

import asyncio
import itertools
import json
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import httpx
import icechunk
import numpy as np
import obstore.store
import zarr
import zarr.storage
from icechunk import Repository, Session
from zarr.core.buffer import default_buffer_prototype

from tests.support.clients.arrays import BY_NAME
from tests.support.clients.writing import Json, quiet, same


def refs_of(repo: Repository, folder: Path) -> Iterator[tuple[str, Session]]:
    """Yield each branch, tag and snapshot with its session."""
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
    """A group or array as the library reads it."""

    path: str
    stored: bytes
    chunks: dict[str, bytes | None]
    """Chunks of every key of the grid, and of some outside of it."""

    @property
    def document(self) -> Json:
        """Parsed ``zarr.json`` of the node."""
        document: Json = json.loads(self.stored)
        return document

    @property
    def is_sharded(self) -> bool:
        """Whether the codecs include sharding."""
        return any(each["name"] == "sharding_indexed" for each in self.document.get("codecs", []))

    def with_one_chunk(self) -> Self:
        """Leave out all chunks but the last that is there."""
        there = [(key, data) for key, data in self.chunks.items() if data is not None]
        return replace(self, chunks=dict(there[-1:]))

    def key(self, name: str) -> str:
        """Return the key of *name* in the node."""
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
    """Yield the chunk keys of an array's regular grid, and of a border around it."""
    if document["node_type"] == "group" or document["chunk_grid"]["name"] == "rectilinear":
        return
    sizes = document["chunk_grid"]["configuration"]["chunk_shape"]
    grid = [-(-length // size) + 1 for length, size in zip(document["shape"], sizes, strict=True)]
    for coords in itertools.product(*map(range, grid)):
        yield "/".join(("c", *map(str, coords)))


def compare_nodes(client: httpx.Client, base: str, nodes: list[Node], store: Any) -> None:
    """Compare all documents and chunks below *base*, and the values of sharded arrays."""
    for node in nodes:
        if node.is_sharded:
            compare_values(f"{client.base_url}{base}", store, node.path)
        else:
            compare_chunks(client, base, node)


def compare_documents(client: httpx.Client, base: str, nodes: list[Node]) -> None:
    """Compare each node's ``zarr.json``; that of the root has consolidated metadata."""
    served = {}
    for node in nodes:
        answer = client.get(f"{base}/{node.key('zarr.json')}")
        assert answer.status_code == 200, (base, node.path, answer.text)
        served[node.path] = answer.json()
        if not node.path:
            assert without_members(served[""]) == without_members(node.document), base
        elif not node.is_sharded:
            assert answer.content == node.stored, (base, node.path)
    told = served.pop("")["consolidated_metadata"]

    assert told == {"kind": "inline", "must_understand": False, "metadata": served}


def without_members(document: Json) -> Json:
    """Return *document* without the consolidated metadata that the service adds."""
    return {name: value for name, value in document.items() if name != "consolidated_metadata"}


def compare_chunks(client: httpx.Client, base: str, node: Node) -> None:
    """Compare all chunks of an array without shards."""
    for key, expected in node.chunks.items():
        answer = client.get(f"{base}/{node.key(key)}")
        told = (answer.status_code, answer.content if answer.status_code == 200 else None)
        assert told == (404 if expected is None else 200, expected), (base, node.path, key)


def compare_values(url: str, store: Any, path: str) -> None:
    """Compare the values of a sharded array from the service with the library's.

    Arrays that zarr-python cannot read sharded are compared with the written values.
    """
    options: Any = {"allow_http": True}
    over_http = obstore.store.HTTPStore.from_url(f"{url}/{path}", client_options=options)
    with quiet():
        found: Any = zarr.open_array(zarr.storage.ObjectStore(over_http, read_only=True), mode="r")
        if (case := "/".join(path.split("/")[-2:])) in BY_NAME:
            expected = BY_NAME[case].values
        else:
            expected = np.asarray(zarr.open_array(store, path=path, mode="r")[...])
        assert found.shards is None
        same(found[...], expected)
