"""Repository as a dict of nodes: its changes by steps, their merging, and its comparison."""

import asyncio
import base64
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import quote

import httpx
import icechunk
from hypothesis import strategies as st
from zarr.core.buffer import default_buffer_prototype

from tests.clients.icechunk.library import without_members
from tests.formats.icechunk.trees import NAMES, Step, below, parent
from tests.support.sessions import GROUP, array_document, listed_keys
from tests.support.writable_repositories import Api

type Coords = tuple[int, ...]
type Chunks = Mapping[Coords, bytes]
type Tree = Mapping[str, Node]

_CHUNK: Final = 2


@dataclass(frozen=True)
class Node:
    """An array or, without a shape, a group; *uid* is its own, whatever becomes of it."""

    uid: int
    label: int = 0
    shape: tuple[int, ...] | None = None
    chunks: Chunks = MappingProxyType({})
    """Also those out of the grid, while they may come back."""

    @property
    def grid(self) -> tuple[int, ...]:
        """Shape of the chunk grid."""
        return tuple(-(-length // _CHUNK) for length in self.shape or ())

    @property
    def document(self) -> dict[str, Any]:
        """Its ``zarr.json``."""
        attributes = {"attributes": {"label": self.label}}
        if self.shape is None:
            group: dict[str, Any] = json.loads(GROUP)
            return group | attributes
        return array_document(self.shape, (2,) * len(self.shape), **attributes)

    def places(self) -> list[Coords]:
        """Return all coords of the grid."""
        return [] if self.shape is None else list(itertools.product(*map(range, self.grid)))

    def has(self, coords: Coords) -> bool:
        """Return whether *coords* are in the grid."""
        return all(at < count for at, count in zip(coords, self.grid, strict=True))

    def pruned(self) -> "Node":
        """Forget the chunks out of the grid."""
        return replace(self, chunks={at: self.chunks[at] for at in self.chunks if self.has(at)})


@dataclass(frozen=True)
class Put:
    """A node that gets this document, or is made with it; without one it goes, with all below."""

    path: str
    document: Mapping[str, Any] | None

    @property
    def key(self) -> str:
        """Key of the document."""
        return key_of(self.path, "zarr.json")

    @property
    def data(self) -> bytes | None:
        """Document as clients write it."""
        return None if self.document is None else json.dumps(self.document).encode()

    @property
    def change(self) -> dict[str, Any]:
        """The edit as a request for a commit tells it."""
        if self.document is None:
            return {"op": "delete_node", "path": self.path}
        return {"op": "put_node", "path": self.path, "metadata": self.document}


@dataclass(frozen=True)
class Write:
    """A chunk that is written or, without data, deleted."""

    path: str
    uid: int
    coords: Coords
    data: bytes | None

    @property
    def key(self) -> str:
        """Key of the chunk."""
        return chunk_key(self.path, self.coords)


@dataclass(frozen=True)
class Move:
    """A node that goes elsewhere, with all below."""

    source: str
    target: str


type Edit = Put | Write | Move


def steps(*what: str) -> st.SearchStrategy[Step]:
    """Return a strategy of steps of some kinds."""
    number = st.integers(0, 99)
    return st.builds(Step, st.sampled_from(what), number, number, st.integers(0, 9))


STEP: Final = steps(
    "group", "array", "table", "write", "write", "write", "erase", "edit", "resize", "delete"
)
STEPS: Final = st.lists(STEP, min_size=1, max_size=6)
FIRST: Final = st.lists(steps("group", "array", "table", "write"), min_size=4, max_size=10)
MOVES: Final = st.lists(steps("move"), min_size=1, max_size=2)


class Draft:
    """A tree that is being changed, and by which edits."""

    def __init__(self, tree: Tree, uids: Iterator[int]) -> None:
        self.before = tree
        self.tree = dict(tree)
        self.edits: list[Edit] = []
        self._uids = uids

    def take(self, steps: Iterable[Step]) -> Sequence[Edit]:
        """Take *steps*, and tell the edits that they come to."""
        start = len(self.edits)
        for step in steps:
            self._take(step)
        return self.edits[start:]

    @property
    def after(self) -> dict[str, Node]:
        """The tree that a commit leaves."""
        return {path: node.pruned() for path, node in self.tree.items()}

    def touched(self) -> dict[int, dict[Coords, bytes | None]]:
        """Return the last write to each remaining coords of remaining arrays."""
        nodes = {node.uid: node for node in self.tree.values()}
        found: dict[int, dict[Coords, bytes | None]] = {}
        for edit in self.edits:
            if isinstance(edit, Write) and edit.uid in nodes and nodes[edit.uid].has(edit.coords):
                found.setdefault(edit.uid, {})[edit.coords] = edit.data
        return found

    def _take(self, step: Step) -> None:
        if self.tree:
            self._take_in(step)
        elif step.what != "move":
            self._put("/", Node(next(self._uids)))
            self._take_in(step)

    def _take_in(self, step: Step) -> None:
        path = sorted(self.tree)[step.where % len(self.tree)]
        node = self.tree[path]
        group = path if node.shape is None else parent(path)
        child = f"{group.rstrip('/')}/{NAMES[step.to % len(NAMES)]}"
        match step.what:
            case "group" | "array" | "table" if child not in self.tree:
                shape = {"group": None, "array": (step.value,), "table": (step.value, 3)}
                self._put(child, Node(next(self._uids), step.value, shape[step.what], {}))
            case "write" | "erase":
                data = b"%d|" % next(self._uids) * (1 + step.value)
                self._write_somewhere(step, data if step.what == "write" else None)
            case "edit":
                self._put(path, replace(node, label=step.value))
            case "resize" if node.shape is not None:
                self._put(path, replace(node, shape=(step.value, *node.shape[1:])))
            case "delete" if path != "/":
                for each in below(self.tree, path):
                    del self.tree[each]
                self.edits.append(Put(path, None))
            case "move":
                self._move(path, step)

    def _put(self, path: str, node: Node) -> None:
        """Put a document, unless only its spelling would change, which counts as an update."""
        if self.tree.get(path) == node:
            return
        self.tree[path] = node
        self.edits.append(Put(path, node.document))

    def _write_somewhere(self, step: Step, data: bytes | None) -> None:
        """Write a chunk: one of few, so that others write the same."""
        arrays = sorted(path for path, node in self.tree.items() if node.places())
        if arrays:
            path = arrays[step.where % len(arrays)]
            places = self.tree[path].places()
            self._write(path, places[step.to % min(3, len(places))], data)

    def _write(self, path: str, coords: Coords, data: bytes | None) -> None:
        node = self.tree[path]
        chunks = {at: node.chunks[at] for at in node.chunks if at != coords}
        if data is not None:
            chunks[coords] = data
        self.tree[path] = replace(node, chunks=chunks)
        self.edits.append(Write(path, node.uid, coords, data))

    def _move(self, source: str, step: Step) -> None:
        groups = sorted(path for path, node in self.tree.items() if node.shape is None)
        group = groups[step.to % len(groups)]
        target = f"{group.rstrip('/')}/{NAMES[step.value % len(NAMES)]}"
        if source == "/" or target in self.tree or f"{target}/".startswith(f"{source}/"):
            return
        for path in below(self.tree, source):
            self.tree[target + path[len(source) :]] = self.tree.pop(path)
        self.edits.append(Move(source, target))


def key_of(path: str, name: str) -> str:
    """Name something in a node by its Zarr key."""
    return f"{path.strip('/')}/{name}".lstrip("/")


def chunk_key(path: str, coords: Coords) -> str:
    """Name a chunk by its Zarr key."""
    return key_of(path, "/".join(("c", *map(str, coords))))


def merge(draft: Draft, tip: Tree) -> dict[str, Node]:
    """Put *draft* on top of *tip*, node by node; there are no conflicts."""
    old, new, merged = by_uid(draft.before), by_uid(draft.after), by_uid(tip)
    touched = draft.touched()
    merged = {uid: at for uid, at in merged.items() if uid in new or uid not in old}
    merged |= {uid: at for uid, at in new.items() if uid not in old}
    for uid in old.keys() & new.keys() & merged.keys():
        (path, node), mine = merged[uid], new[uid][1]
        if mine.document != old[uid][1].document:
            node = replace(node, label=mine.label, shape=mine.shape)
        chunks = dict(node.chunks)
        for coords, data in touched.get(uid, {}).items():
            if data is not None:
                chunks[coords] = data
            elif coords in old[uid][1].chunks:
                chunks.pop(coords, None)
        merged[uid] = path, replace(node, chunks=chunks)
    return {path: node.pruned() for path, node in merged.values()}


def by_uid(tree: Tree) -> dict[int, tuple[str, Node]]:
    """Find nodes by what they are."""
    return {node.uid: (path, node) for path, node in tree.items()}


class Replica(Api):
    """A service in front of the repository *path* of the dataset."""

    def key(self, ref: str, key: str) -> str:
        """Return the path of a key of a ref."""
        return f"/repo/{self.path}/{ref}/{quote(key)}"

    def begin(self, branch: str) -> dict[str, Any]:
        """Begin a session."""
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
        assert not isinstance(edit, Move)
        if isinstance(edit, Put):
            return edit.change
        if edit.data is None:
            return {"op": "delete_chunks", "path": edit.path, "coords": [edit.coords]}
        chunk = {"coords": edit.coords} | self._payload(edit.data, inline)
        return {"op": "put_chunks", "path": edit.path, "chunks": [chunk]}

    def _payload(self, data: bytes, inline: int) -> dict[str, Any]:
        """Write a chunk, or put it into the request; some with bytes around them."""
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


def by_service(replica: Replica, ref: str, tree: Tree) -> dict[str, bytes | None]:
    """Read a ref from the service, what is listed too."""
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
    """Compare a history with the one that the library tells."""
    told = api.pages("/history", "history", ref=ref, limit=3)
    assert [
        (each["snapshot_id"], each["parent_id"], each["message"], _moment(each["flushed_at"]))
        for each in told
    ] == [(each.id, each.parent_id, each.message, each.written_at) for each in ancestry]
    assert [each["metadata"] for each in told] == [each.metadata for each in ancestry]


def compare_operations(api: Api, repo: icechunk.Repository, limit: int = 4) -> list[str]:
    """Compare the operations with those that the library tells, and give their kinds."""
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
