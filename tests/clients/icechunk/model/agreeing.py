"""What the service and the library tell of a repository, compared with each other and a model."""

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from html import unescape
from typing import Any, Final

import icechunk
from zarr.core.buffer import default_buffer_prototype

from tests.clients.icechunk.comparing import without_members
from tests.clients.icechunk.model.trees import Tree, chunk_key, key_of
from tests.clients.icechunk.model.writers import Replica

NODES: Final = (
    "new_groups",
    "new_arrays",
    "deleted_groups",
    "deleted_arrays",
    "updated_groups",
    "updated_arrays",
)

type Content = Mapping[str, bytes | None]
"""What is under each key, also under those that are not there."""


def compare_tree(content: Content, tree: Tree) -> None:
    """Be sure that *content* is that of *tree*, and nothing else."""
    there = {key for key, data in content.items() if data is not None}
    assert there == set(keys_of(tree))
    for path, node in tree.items():
        data = content[key_of(path, "zarr.json")]
        assert data is not None
        assert without_members(json.loads(data)) == node.document, path
        for coords, chunk in node.chunks.items():
            assert content[chunk_key(path, coords)] == chunk, (path, coords)


def keys_of(tree: Tree) -> Iterator[str]:
    """Give the keys that there are."""
    for path, node in tree.items():
        yield key_of(path, "zarr.json")
        yield from (chunk_key(path, coords) for coords in node.chunks)


def asked_keys(tree: Tree) -> list[str]:
    """Give the keys of *tree*, of the places of its grids, and some that are not there."""
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
    """Read a ref from the service, all in one request; what is *listed* too."""
    keys = asked_keys(tree)
    if listed:
        keys = list(dict.fromkeys([*keys, *list_keys(replica, ref)]))
    start = f"{replica.path}/{ref}/"
    wanted = {"keys": [{"key": start + key} for key in keys]}
    answer = replica.client.post("/data?batch", json=wanted)
    assert answer.status_code == 200, answer.text
    found: dict[str, bytes | None] = {}
    rest = answer.content
    while rest:
        line, _, rest = rest.partition(b"\n")
        told = json.loads(line)
        assert told["status"] in (200, 404), told
        data, rest = rest[: told["length"]], rest[told["length"] :]
        found[told["key"].removeprefix(start)] = data if told["status"] == 200 else None
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


def diff_by_library(repo: icechunk.Repository, start: str, stop: str) -> dict[str, Any]:
    """Tell the changes as the library does."""
    diff = repo.diff(from_snapshot_id=start, to_snapshot_id=stop)
    return {
        **{name: sorted(getattr(diff, name)) for name in NODES},
        "updated_chunks": diff.updated_chunks,
        "moved_nodes": sorted(diff.moved_nodes),
    }


def compare_diff(replica: Replica, repo: icechunk.Repository, start: str, stop: str) -> None:
    """Compare what changed; of an array that replaced another the library leaves some out."""
    expected = diff_by_library(repo, start, stop)
    told = replica.tell("/diff", from_=f"@{start}", to=f"@{stop}")
    found = {name: told[name] for name in NODES}
    found["moved_nodes"] = sorted((each["from"], each["to"]) for each in told["moved_nodes"])
    found["updated_chunks"] = {at: each["chunks"] for at, each in told["updated_chunks"].items()}
    if not {*expected["new_arrays"]}.isdisjoint(expected["deleted_arrays"]):
        for path, chunks in expected.pop("updated_chunks").items():
            assert [each for each in chunks if each not in found["updated_chunks"][path]] == []
        found.pop("updated_chunks")
    assert found == expected


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


def kind_of(update: icechunk.Update) -> str:
    """Spell the kind of an update as the specification does."""
    name = type(update.kind).__name__.removeprefix("UpdateType_").removesuffix("Update")
    return re.sub(r"(?<!^)(?=[A-Z][a-z])", "_", name).lower()
