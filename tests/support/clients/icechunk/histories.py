"""Histories: the same changes in a session of the service and in one of the library.

Between the begin of both sessions and their commits, the library changes both branches alike.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import icechunk
import zarr
from hypothesis import strategies as st

from tests.support.formats.icechunk.peer import delete, read, write
from tests.support.sessions import GROUP

OURS: Final = "main"
COPY: Final = "copy"
"""Branch of the library's session."""
ARRAYS: Final = ("a", "g/b", "r", "s")
NODES: Final = ("g", "g/b", "a", "g/q", "q")
_SELECTIONS: Final = {
    "ours": icechunk.VersionSelection.UseOurs,
    "theirs": icechunk.VersionSelection.UseTheirs,
}

type Edit = tuple[str, bytes | None]
"""A key and its value; `None` deletes the key, or all below one that ends in a slash."""


class Step(NamedTuple):
    """A change of a node or chunk that *where* and *value* choose; an impossible one is skipped."""

    what: str
    where: int
    value: int


def _steps(*what: str) -> st.SearchStrategy[Step]:
    return st.builds(Step, st.sampled_from(what), st.integers(0, 4), st.integers(0, 4))


_OF_CHUNKS: Final = ("write", "erase", "same", "clear")
STEP: Final = _steps(
    "write", "write", "erase", "erase", "same", "clear", "note", "note", "same note", "resize",
    "resize", "regrid", "remove", "remake", "reshape", "create",
)  # fmt: skip
EVENT: Final = st.tuples(
    st.sampled_from(
        ("commit", "commit", "commit", "amend", "move", "shift", "rewrite", "expire", "reset")
    ),
    st.lists(STEP, min_size=1, max_size=3),
)


class Decision(NamedTuple):
    """Result of a commit."""

    kinds: frozenset[str]
    """Of the conflicts; empty if the commit was made."""
    content: Mapping[str, bytes]
    """Of the branch afterwards."""


def create(folder: Path) -> icechunk.Repository:
    """Create a repository of arrays of five chunks: regular, rectilinear and sharded."""
    repo = icechunk.Repository.create(icechunk.local_filesystem_storage(str(folder)))
    session = repo.writable_session(OURS)
    root = zarr.create_group(session.store)
    options: Any = {"shape": (5,), "dtype": "u1", "compressors": None}
    for path in ("a", "g/b"):
        root.create_array(path, chunks=(1,), **options)[:2] = [1, 2]
    with zarr.config.set({"array.rectilinear_chunks": True}):
        root.create_array("r", chunks=[[2, 1, 1, 1]], **options)[:3] = [1, 2, 3]
    root.create_array("s", chunks=(1,), shards=(1,), **options)[:2] = [1, 2]
    repo.create_branch(COPY, session.commit("base"))
    return repo


def edit(session: icechunk.Session, steps: Sequence[Step], base: Mapping[str, bytes]) -> list[Edit]:
    """Make *steps* in a session that began at *base*, and return the edits that were possible."""
    made: list[Edit] = []
    for step in steps:
        for key, data in _edits(session, step, base):
            try:
                _make(session, key, data)
            except icechunk.IcechunkError:  # a chunk outside of its grid, or of no array
                break
            made.append((key, data))
    return made


def _edits(session: icechunk.Session, step: Step, base: Mapping[str, bytes]) -> list[Edit]:  # noqa: PLR0911 - one for each step
    is_of_array = step.what in (*_OF_CHUNKS, "resize", "regrid", "reshape")
    nodes = ARRAYS if is_of_array else NODES
    node = nodes[step.where % len(nodes)]
    key = f"{node}/zarr.json"
    document = read(session, key)
    if document is None:
        above = node.rpartition("/")[0]
        has_group = read(session, f"{above}/zarr.json".lstrip("/")) is not None
        return [(key, GROUP)] if step.what == "create" and has_group else []
    if step.what in _OF_CHUNKS:
        return _chunk_edits(session, step, node)
    parsed = json.loads(document)
    resized = json.dumps(parsed | {"shape": [1 + step.value]}).encode()
    match step.what:
        case "note":
            noted = json.dumps(parsed | {"attributes": {"n": step.value}}).encode()
            return [(key, noted if step.value % 2 else base.get(key, noted))]
        case "same note":
            return [(key, document)]
        case "resize":
            return [(key, resized)]
        case "regrid" if node != "s":
            return [(key, json.dumps(parsed | _grid(node, step.value)).encode())]
        case "remove":
            return [(f"{node}/", None)]
        case "remake":
            return [(f"{node}/", None), (key, document)]
        case "reshape" if node != "s":  # a session creates no sharded array
            return [(f"{node}/", None), (key, resized), (f"{node}/c/{step.value}", None)]
    return []


def _chunk_edits(session: icechunk.Session, step: Step, node: str) -> list[Edit]:
    chunk = f"{node}/c/{step.value}"
    match step.what:
        case "write" if node != "s":
            return [(chunk, bytes([step.value + 7]))]
        case "erase":
            return [(chunk, None)]
        case "clear":
            return [(f"{node}/c/", None)]
        case "same" if node != "s" and (data := read(session, chunk)) is not None:
            return [(chunk, data)]
    return []


def _grid(node: str, value: int) -> dict[str, Any]:
    """Return a shape and a grid of other chunks; in a rectilinear array, of fewer or more."""
    if node != "r":
        size = 1 + value % 2
        grid = {"name": "regular", "configuration": {"chunk_shape": [size]}}
        return {"shape": [5 * size], "chunk_grid": grid}
    edges = [2, 1, 1, 1, 1][: 1 + value]
    grid = {"name": "rectilinear", "configuration": {"kind": "inline", "chunk_shapes": [edges]}}
    return {"shape": [sum(edges)], "chunk_grid": grid}


def _make(session: icechunk.Session, key: str, data: bytes | None) -> None:
    if data is not None:
        write(session, key, data)
    elif key.endswith("/"):
        asyncio.run(session.store.delete_dir(key.rstrip("/")))
    else:
        delete(session, key)


@dataclass(frozen=True)
class ServiceSession:
    """A session of the service on a repository of the dataset ``data``."""

    client: httpx.Client
    name: str
    session_id: str

    @classmethod
    def begin(cls, client: httpx.Client, name: str) -> "ServiceSession":
        """Begin a session."""
        url = "/api/datasets/data/sessions"
        answer = client.post(url, params={"path": name}, json={"branch": OURS})
        return cls(client, name, answer.json()["session_id"])

    def send(self, edits: Sequence[Edit]) -> None:
        """Make *edits*."""
        for key, data in edits:
            below = f"{self.name}/@session.{self.session_id}/{key}"
            if data is not None:
                answer = self.client.put(f"/data/{below}", content=data)
            elif key.endswith("/"):
                answer = self.client.delete("/data", params={"prefix": below})
            else:
                answer = self.client.delete(f"/data/{below}")
            assert answer.is_success, (key, answer.status_code, answer.text)

    def commit(self, repo: icechunk.Repository, policy: str) -> Decision:
        """Commit, and read the branch with the library."""
        answer = self.client.post(
            f"/api/datasets/data/sessions/{self.session_id}/commit",
            params={"path": self.name},
            json={"message": "by the service", "on_conflict": policy, "allow_empty": True},
        )
        assert answer.status_code in (201, 409), answer.text
        conflicts = answer.json().get("conflicts", [])
        assert bool(conflicts) == (answer.status_code == 409), answer.text
        return Decision(frozenset(each["kind"] for each in conflicts), content(repo, OURS))


def happen(repo: icechunk.Repository, what: str, steps: Sequence[Step]) -> None:
    """Change both branches alike by the library."""
    if what == "expire":
        repo.expire_snapshots(datetime.now(UTC))
        return
    for branch in (OURS, COPY):
        if what == "rewrite":
            repo.rewrite_manifests("rewritten", branch=branch)
        elif what == "reset":
            ancestors = list(repo.ancestry(branch=branch))
            repo.reset_branch(branch, ancestors[min(1, len(ancestors) - 1)].id)
        elif what == "move":
            _move(repo, branch, steps[0])
        else:
            session = repo.writable_session(branch)
            if what == "shift":
                _shift(session, steps[0])
            else:
                edit(session, steps, {})
            _finish(session, is_amend=what == "amend")


def _move(repo: icechunk.Repository, branch: str, step: Step) -> None:
    session = repo.rearrange_session(branch)
    try:
        session.move(f"/{NODES[step.where]}", f"/moved{step.value}")
    except icechunk.IcechunkError:  # there is no such node, or one is there
        return
    session.commit("moved")


def _shift(session: icechunk.Session, step: Step) -> None:
    try:
        session.shift_array("/a", [step.value - 2])
    except icechunk.IcechunkError:  # it was deleted
        return


def _finish(session: icechunk.Session, *, is_amend: bool) -> None:
    try:
        if is_amend:
            session.amend("theirs", allow_empty=True)
        else:
            session.commit("theirs", allow_empty=True)
    except icechunk.IcechunkError:  # a commit that moved nodes cannot be amended
        return


def decide(repo: icechunk.Repository, session: icechunk.Session, policy: str) -> Decision:
    """Commit a session of the library, which rebases it by *policy*."""
    solver: Any = icechunk.ConflictDetector()
    if policy != "fail":
        solver = icechunk.BasicConflictSolver(
            on_chunk_conflict=_SELECTIONS[policy],
            fail_on_delete_of_updated_array=True,
            fail_on_delete_of_updated_group=True,
        )
    kinds = frozenset[str]()
    try:
        session.commit("by the library", rebase_with=solver, allow_empty=True)
    except icechunk.RebaseFailedError as error:
        found = (str(each.conflict_type) for each in error.conflicts)
        kinds = frozenset(each.lower().replace(" ", "_") for each in found)
    except icechunk.IcechunkError as error:
        kinds = frozenset([type(error).__name__])
    return Decision(kinds, content(repo, COPY))


def content(repo: icechunk.Repository, branch: str) -> dict[str, bytes]:
    """Read all keys of a branch with the library."""
    session = repo.readonly_session(branch)

    async def keys() -> list[str]:
        return [key async for key in session.store.list()]

    found = {key: read(session, key) for key in asyncio.run(keys())}
    return {key: data for key, data in found.items() if data is not None}
