"""A model of a repository as a dict of nodes, and its comparison with the service."""

import asyncio
import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote

import httpx
import icechunk
from zarr.core.buffer import default_buffer_prototype

from tests.support.clients.icechunk.library import without_members
from tests.support.formats.icechunk.trees import Edit, Move, Put, Tree, Write, chunk_key, key_of
from tests.support.sessions import listed_keys
from tests.support.writable_repositories import Api


class Replica(Api):
    """A service in front of the repository *path* of the dataset."""

    def key(self, ref: str, key: str) -> str:
        """Return the path of a key of a ref."""
        return f"/repo/{self.path}/{ref}/{quote(key)}"

    def begin(self, branch: str) -> dict[str, Any]:
        """Begin a session and return its description."""
        told: dict[str, Any] = self.do("POST", "/sessions", {"branch": branch}).json()
        return told

    def edit_session(self, session_id: str, edits: Sequence[Edit]) -> None:
        """Make *edits* in a session, key by key."""
        for edit in edits:
            assert not isinstance(edit, Move)
            method = "DELETE" if edit.data is None else "PUT"
            url = self.key(f"@session.{session_id}", edit.key)
            answer = self.client.request(method, url, content=edit.data)
            assert answer.is_success, (edit, answer.status_code, answer.text)

    def commit_session(self, session_id: str, **options: Any) -> httpx.Response:
        """POST the commit of a session."""
        return self.send("POST", f"/sessions/{session_id}/commit", options)

    def commit(self, edits: Sequence[Edit], *, inline: int, **options: Any) -> httpx.Response:
        """POST a commit of *edits* without a session."""
        changes = [self._change(edit, inline) for edit in edits]
        return self.send("POST", "/commits", {"changes": changes} | options)

    def _change(self, edit: Edit, inline: int) -> dict[str, Any]:
        if isinstance(edit, Move):
            return {"op": "move_node", "path": edit.source, "to": edit.target}
        if isinstance(edit, Put):
            return edit.change
        if edit.data is None:
            return {"op": "delete_chunks", "path": edit.path, "coords": [edit.coords]}
        chunk = {"coords": edit.coords} | self._payload(edit.data, inline)
        return {"op": "put_chunks", "path": edit.path, "chunks": [chunk]}

    def _payload(self, data: bytes, inline: int) -> dict[str, Any]:
        """Return a chunk inline, or uploaded, some with bytes around them."""
        if len(data) <= inline:
            return {"inline": base64.b64encode(data).decode()}
        offset = len(data) % 3
        url = "/api/datasets/repo/chunks"
        body = b"!" * offset + data + b"?"
        answer = self.client.post(url, content=body, params={"path": self.path})
        assert answer.status_code == 201, answer.text
        return {"chunk_id": answer.json()["chunk_id"], "offset": offset, "length": len(data)}


def edit_by_library(session: icechunk.Session, edits: Sequence[Edit]) -> None:
    """Make *edits* in a session of the library."""
    for edit in edits:
        if isinstance(edit, Move):
            session.move(edit.source, edit.target)
        else:
            asyncio.run(_edit_store(session.store, edit))


async def _edit_store(store: Any, edit: Put | Write) -> None:
    if edit.data is not None:
        data = default_buffer_prototype().buffer.from_bytes(edit.data)
        await store.set(edit.key, data)
    elif isinstance(edit, Put):
        await store.delete_dir(edit.path.strip("/"))
    else:
        await store.delete(edit.key)


type Content = Mapping[str, bytes | None]
"""Body of each key; `None` for absent keys."""


def compare_tree(content: Content, tree: Tree) -> None:
    """Assert that *content* is exactly that of *tree*."""
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


def by_service(replica: Replica, ref: str, tree: Tree) -> dict[str, bytes | None]:
    """Read a ref from the service, including all listed keys."""
    keys = dict.fromkeys([*asked_keys(tree), *list_keys(replica, ref)])
    found: dict[str, bytes | None] = {}
    for key in keys:
        answer = replica.client.get(replica.key(ref, key))
        assert answer.status_code in (200, 404), answer.text
        found[key] = answer.content if answer.status_code == 200 else None
    return found


def list_keys(replica: Replica, ref: str) -> list[str]:
    """List the keys of a ref as S3 clients do."""
    start = f"{replica.path}/{ref}/"
    keys = listed_keys(replica.client, "repo", start)
    return [key.removeprefix(start) for key in keys]


def compare_history(api: Api, ref: str, ancestry: list[icechunk.SnapshotInfo]) -> None:
    """Compare the history of a ref with that of the library."""
    told = api.pages("/history", "history", ref=ref, limit=3)
    assert [
        (each["snapshot_id"], each["parent_id"], each["message"], _moment(each["flushed_at"]))
        for each in told
    ] == [(each.id, each.parent_id, each.message, each.written_at) for each in ancestry]
    assert [each["metadata"] for each in told] == [each.metadata for each in ancestry]


def compare_operations(api: Api, repo: icechunk.Repository, limit: int = 4) -> list[str]:
    """Compare the operations with those of the library; return their kinds."""
    told = api.pages("/operations", "operations", limit=limit)
    found = [(each["kind"], _moment(each["updated_at"]), each["backup"]) for each in told]
    assert found == [(kind_of(each), each.updated_at, each.backup_path) for each in repo.ops_log()]
    return [kind for kind, _, _ in found]


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


def kind_of(update: icechunk.Update) -> str:
    """Return the kind of an update as the specification spells it."""
    name = type(update.kind).__name__.removeprefix("UpdateType_").removesuffix("Update")
    return re.sub(r"(?<!^)(?=[A-Z][a-z])", "_", name).lower()


SETS: Final = {
    ("created", "group"): "new_groups",
    ("created", "array"): "new_arrays",
    ("deleted", "group"): "deleted_groups",
    ("deleted", "array"): "deleted_arrays",
    ("updated", "group"): "updated_groups",
    ("updated", "array"): "updated_arrays",
}


def compare_differences(
    api: Api, repo: icechunk.Repository, from_id: str, to_id: str, limit: int
) -> set[tuple[str, str]]:
    """Assert that service and library list the same differences, and return the moves as former and
    later path: those of the library are of each commit.
    """
    refs = {"from": f"@{from_id}", "to": f"@{to_id}"}
    changes = api.pages("/diff", "changes", limit=limit, **refs)
    library = repo.diff(from_snapshot_id=from_id, to_snapshot_id=to_id)
    found: dict[str, set[str]] = {name: set() for name in SETS.values()}
    chunks: dict[str, list[list[int]]] = {}
    moves: set[tuple[str, str]] = set()
    for each in changes:
        path = each["path"]
        assert len(each["chunks"]) <= limit
        if each["change"] == "chunks_updated":
            chunks.setdefault(path, []).extend(each["chunks"])
        elif each["change"] == "moved":
            moves.add((each["former_path"], path))
        else:
            names = found[SETS[each["change"], each["node_type"]]]
            assert path not in names
            names.add(path)
    assert found == {name: getattr(library, name) for name in found}
    assert chunks == {
        path: [list(at) for at in coords] for path, coords in library.updated_chunks.items()
    }
    assert {target for _, target in moves} <= {target for _, target in library.moved_nodes}
    return moves
