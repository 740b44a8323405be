"""Content, history and operations of a repository, by the service and by the library."""

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from html import unescape
from typing import Any

import icechunk
from zarr.core.buffer import default_buffer_prototype

from tests.clients.icechunk.library import without_members
from tests.clients.icechunk.model.trees import Tree, chunk_key, key_of
from tests.clients.icechunk.model.writers import Replica

type Content = Mapping[str, bytes | None]
"""Body of each key; `None` for absent keys."""


def compare_tree(content: Content, tree: Tree) -> None:
    """Check that *content* is exactly that of *tree*."""
    there = {key for key, data in content.items() if data is not None}
    assert there == set(keys_of(tree))
    for path, node in tree.items():
        data = content[key_of(path, "zarr.json")]
        assert data is not None
        assert without_members(json.loads(data)) == node.document, path
        for coords, chunk in node.chunks.items():
            assert content[chunk_key(path, coords)] == chunk, (path, coords)


def keys_of(tree: Tree) -> Iterator[str]:
    """Yield the present keys."""
    for path, node in tree.items():
        yield key_of(path, "zarr.json")
        yield from (chunk_key(path, coords) for coords in node.chunks)


def asked_keys(tree: Tree) -> list[str]:
    """Return the keys of *tree*, of its grids, and some absent ones."""
    keys = [*keys_of(tree), "zarr.json", "none/zarr.json", "none/c/0"]
    for path, node in tree.items():
        outside = [] if node.shape is None else [node.grid]
        keys += [chunk_key(path, coords) for coords in (*node.places(), *outside)]
    return list(dict.fromkeys(keys))


def by_library(session: icechunk.Session, tree: Tree) -> dict[str, bytes | None]:
    """Read a snapshot with the library."""
    return asyncio.run(_read(session.store, asked_keys(tree)))


async def _read(store: Any, keys: list[str]) -> dict[str, bytes | None]:
    prototype = default_buffer_prototype()
    keys = list(dict.fromkeys([*keys, *[key async for key in store.list()]]))
    found: dict[str, bytes | None] = {}
    for key in keys:
        data = await store.get(key, prototype)
        found[key] = None if data is None else data.to_bytes()
    return found


def by_service(replica: Replica, ref: str, tree: Tree, *, listed: bool) -> dict[str, bytes | None]:
    """Read a ref from the service, what is *listed* too."""
    keys = asked_keys(tree)
    if listed:
        keys = list(dict.fromkeys([*keys, *list_keys(replica, ref)]))
    found: dict[str, bytes | None] = {}
    for key in keys:
        answer = replica.client.get(replica.key(ref, key))
        assert answer.status_code in (200, 404), answer.text
        found[key] = answer.content if answer.status_code == 200 else None
    return found


def list_keys(replica: Replica, ref: str) -> list[str]:
    """List the keys of a ref as S3 clients do."""
    start, found, token = f"{replica.path}/{ref}/", list[str](), None
    while True:
        query = {"list-type": "2", "prefix": start, "max-keys": "7"}
        query |= {"continuation-token": token} if token else {}
        answer = replica.client.get("/data", params=query)
        assert answer.status_code == 200, answer.text
        found += map(unescape, re.findall("<Key>([^<]*)", answer.text))
        tokens = re.findall("<NextContinuationToken>([^<]*)", answer.text)
        if (token := next(iter(tokens), None)) is None:
            return [key.removeprefix(start) for key in found]


def compare_history(replica: Replica, ref: str, ancestry: list[icechunk.SnapshotInfo]) -> None:
    """Compare a history with the one that the library tells."""
    told = replica.pages("/history", "history", ref=ref, limit=3)
    assert [
        (each["snapshot_id"], each["parent_id"], each["message"], _moment(each["flushed_at"]))
        for each in told
    ] == [(each.id, each.parent_id, each.message, each.written_at) for each in ancestry]
    assert [each["metadata"] for each in told] == [each.metadata for each in ancestry]


def compare_operations(replica: Replica, repo: icechunk.Repository) -> list[str]:
    """Compare the operations with those that the library tells, and give their kinds."""
    told = replica.pages("/operations", "operations", limit=4)
    found = [(each["kind"], _moment(each["updated_at"]), each["backup"]) for each in told]
    assert found == [(kind_of(each), each.updated_at, each.backup_path) for each in repo.ops_log()]
    return [kind for kind, _, _ in found]


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


def kind_of(update: icechunk.Update) -> str:
    """Return the kind of an update as the specification spells it."""
    name = type(update.kind).__name__.removeprefix("UpdateType_").removesuffix("Update")
    return re.sub(r"(?<!^)(?=[A-Z][a-z])", "_", name).lower()
