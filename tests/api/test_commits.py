"""Commits without a session, read again by the icechunk library."""

import json
from base64 import b64encode
from collections.abc import Generator
from contextlib import closing
from datetime import UTC, datetime
from http.client import HTTPConnection
from pathlib import Path
from secrets import token_hex
from typing import Any

import httpx
import icechunk
import numpy as np
import pytest
import zarr

from shardgate.settings import LimitSettings, VirtualPrefix
from tests.support.committing import ONES, Client, delete_chunks, put_array, put_chunks, put_group
from tests.support.writable_repositories import Api, Place, api, new_place, serve

FIRST = [put_group("/"), put_array("/a", 4, 4), put_group("/g"), put_array("/g/b", 4)]


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[httpx.Client, Path]]:
    """Serve a folder of repositories."""
    place = Place(tmp_path_factory.mktemp("commits"))
    with api(place) as opened:
        yield opened.client, place.folder


def begin(bucket: tuple[httpx.Client, Path]) -> Client:
    """Create a repository that has two arrays without chunks."""
    place = new_place(bucket[1])
    place.create()
    made = Client(Api(bucket[0], place.folder.name), place)
    made.commit(*FIRST, message="first")
    return made


@pytest.fixture
def client(bucket: tuple[httpx.Client, Path]) -> Client:
    """Create a repository for one test."""
    return begin(bucket)


@pytest.fixture(scope="module")
def unchanged(bucket: tuple[httpx.Client, Path]) -> Client:
    """Create a repository for the tests whose requests are all refused."""
    return begin(bucket)


def test_commit_is_read_by_the_library(client: Client) -> None:
    """The icechunk library reads a commit's chunks, history, diff and operation as sent."""
    before = client.tip
    inline = {"coords": [0, 1], "inline": b64encode(bytes((5, 6, 7, 8))).decode()}
    native = {"coords": [1, 1], "chunk_id": client.chunk(bytes(3) + ONES), "offset": 3, "length": 4}

    changes = {"op": "put_chunks", "path": "/a", "chunks": [inline, native]}
    made = client.commit(changes, message="é🧊", metadata={"n": {"k": [1, None]}})

    assert client.values("a") == [[0, 0, 5, 6], [0, 0, 7, 8], [0, 0, 1, 1], [0, 0, 1, 1]]
    tip = next(iter(client.repo.ancestry(branch="main")))
    assert (tip.id, tip.parent_id, tip.message) == (made, before, "é🧊")
    assert tip.metadata["n"] == {"k": [1, None]}
    changed = client.repo.diff(from_snapshot_id=before, to_branch="main").updated_chunks
    assert changed == {"/a": [[0, 1], [1, 1]]}
    assert str(next(iter(client.repo.ops_log())).kind).count(made) == 1


@pytest.mark.parametrize(("policy", "value"), [("ours", 1), ("theirs", 9)])
def test_chunk_conflict_is_reported_or_resolved(client: Client, policy: str, value: int) -> None:
    """A commit to changed chunks is 409 unless `on_conflict` resolves it; others are rebased."""
    parent = client.tip
    theirs = client.library_commit("theirs", "a", 9)
    change = put_chunks("/a", client.chunk(), [0, 1])

    refused = client.ask(change, parent_id=parent)
    assert refused.status_code == 409
    told = refused.json()
    assert (told["expected_parent"], told["actual_parent"]) == (parent, theirs)
    conflict = {"kind": "chunk_double_update", "path": "/a", "count": 1, "chunks": [[0, 1]]}
    assert told["conflicts"] == [conflict]
    assert client.tip == theirs

    client.commit(change, parent_id=parent, on_conflict=policy)
    assert client.values("a")[0] == [9, 9, value, value]

    parent = client.tip
    theirs = client.library_commit("theirs", "g/b", 3)
    answer = client.ask(put_chunks("/a", client.chunk(), [0, 0]), parent_id=parent)
    assert answer.json()["parent_id"] == theirs
    tip = next(iter(client.repo.ancestry(branch="main")))
    assert tip.metadata["__icechunk"] == {"rebase_attempts": 1}
    assert client.values("g/b") == [3] * 4
    assert client.values("a")[0] == [1, 1, value, value]


def test_only_the_last_commit_can_be_amended(client: Client) -> None:
    """Amending anything but a tip that moves no nodes is 409; so is a parent out of the history."""
    parent = client.tip
    moving = client.repo.rearrange_session("main")
    moving.move("/g", "/h")
    moving.commit("moved")

    late = client.ask(put_group("/g"), amend=True, parent_id=parent)
    mixed = client.ask(put_group("/g"), amend=True)

    assert late.status_code == mixed.status_code == 409
    assert late.json()["conflicts"][0]["kind"] == "branch_moved"
    assert "moves nodes" in mixed.json()["detail"]
    client.repo.create_branch("young", list(client.repo.ancestry(branch="main"))[-1].id)
    assert client.ask(put_group("/"), branch="young", amend=True).status_code == 409
    gone = client.tip
    client.repo.reset_branch("main", parent)
    refused = client.ask(delete_chunks("/a", [0, 0]), parent_id=gone)
    assert refused.status_code == 409
    assert [each["kind"] for each in refused.json()["conflicts"]] == ["parent_not_in_history"]


def test_moved_nodes_are_read_by_the_library(client: Client) -> None:
    """A group that is moved among other changes keeps its chunks, and the library's log has it."""
    before = client.commit(put_chunks("/g/b", client.chunk(), [1], length=2))
    move = {"op": "move_node", "path": "/g", "to": "/h"}
    made = client.commit(move, put_group("/g"), put_chunks("/h/b", client.chunk(), [0], length=2))

    assert client.values("h/b") == [1, 1, 1, 1]
    found = client.repo.diff(from_snapshot_id=before, to_snapshot_id=made)
    assert found.moved_nodes == [("/g", "/h"), ("/g/b", "/h/b")]
    assert (found.new_groups, found.updated_chunks) == ({"/g"}, {"/h/b": [[0]]})
    late = client.ask(put_chunks("/g/b", client.chunk(), [0], length=2), parent_id=before)
    assert [each["kind"] for each in late.json()["conflicts"]] == [
        "move_operation_cannot_be_rebased"
    ]


def test_detached_snapshot_is_read_by_the_library(client: Client) -> None:
    """A commit without a branch moves none, needs a parent, amends nothing and is made once."""
    parent = client.tip
    client.library_commit("theirs", "a", 9)
    tip = client.tip
    options: dict[str, Any] = {"branch": None, "parent_id": parent, "message": "aside"}
    made = client.commit(put_group("/x"), key="aside", **options)

    assert client.commit(put_group("/x"), key="aside", **options) == made
    assert client.tip == tip
    tree: Any = zarr.open_group(client.repo.readonly_session(snapshot_id=made).store, mode="r")
    assert "x" in tree
    assert not tree["a"][...].any()
    assert str(next(iter(client.repo.ops_log())).kind) == (
        f'icechunk.ops.UpdateType.NewDetachedSnapshot(new_snap_id="{made}")'
    )
    assert client.ask(put_group("/x"), branch=None).status_code == 400
    assert client.ask(put_group("/x"), **options, amend=True).status_code == 400
    assert client.ask(put_group("/x"), branch=None, parent_id="0" * 20).status_code == 404


def test_commit_with_an_idempotency_key_is_made_once(client: Client) -> None:
    """A key stands for one commit and its result; an empty commit has to be meant."""
    change = put_chunks("/a", client.chunk(), [0, 0])
    answers = [client.ask(change, key="k1").json() for _ in range(3)]

    other = client.ask(delete_chunks("/a", [0, 0]), key="k1")

    assert answers[1:] == answers[:1] * 2
    assert other.status_code == 409
    assert len(client.messages()) == 2
    assert client.ask(change, key="a b").status_code == 400

    first = client.tip
    assert client.ask().status_code == 400
    client.commit(message="empty", allow_empty=True)
    assert client.ask(parent_id=first).status_code == 400
    assert client.ask(put_array("/a", 4, 4), parent_id=first).status_code == 400
    assert client.messages()[0] == "empty"
    assert len(client.messages()) == 3


def test_commit_in_lines_is_one_commit(client: Client) -> None:
    """JSON lines are one commit; empty ones count in the number of a wrong one."""
    chunk_id = client.chunk()
    options = json.dumps({"message": "lines", "parent_id": client.tip})
    changes = [json.dumps(put_chunks("/a", chunk_id, [at, at])) for at in range(2)]
    body = f"\n{options}\n\n{changes[0]}\n \n{changes[1]}\n"
    headers = {"Content-Type": "application/x-ndjson"}

    made = client.post("/commits", content=body, headers=headers)
    wrong = client.post("/commits", content=f"{body}?", headers=headers)

    assert made.status_code == 201, made.text
    assert client.messages()[0] == "lines"
    assert client.tip == made.json()["snapshot_id"]
    assert client.values("a") == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    assert (wrong.status_code, "line 7" in wrong.json()["detail"]) == (400, True)


@pytest.mark.parametrize(
    ("lines", "status", "detail"),
    [
        ([], 400, "no line with the options"),
        ([{"message": "x", "changes": []}], 400, "line 1: changes"),
        ([{"message": "x"}, put_group("/x"), {"op": "move"}], 400, "line 3: "),
        ([{"message": "x"}, "x" * 2 * 1024**2], 413, "line 2 has 2097154 bytes"),
    ],
)
def test_wrong_line_of_a_commit_is_named(
    unchanged: Client, lines: list[Any], status: int, detail: str
) -> None:
    """The response to a commit in lines names the line that is wrong or too long."""
    refused = unchanged.ask_in_lines(*lines)

    assert refused.status_code == status
    assert detail in refused.json()["detail"]
    assert unchanged.messages() == ["first"]


def test_invalid_reference_is_refused_before_writing(client: Client) -> None:
    """A commit with an invalid chunk reference fails with 400, names it, and writes no file."""
    chunk_id, tip = client.chunk(), client.tip
    files = sorted(client.place.folder.rglob("*"))

    short = client.ask(put_chunks("/a", chunk_id, [0, 0], [1, 0], length=5))
    missing = client.ask(put_chunks("/a", "0" * 20, [0, 1]))
    outside = client.ask(put_chunks("/a", chunk_id, [0, 2]))
    large = {"coords": [0, 0], "inline": b64encode(bytes(513)).decode()}
    inline = client.ask({"op": "put_chunks", "path": "/a", "chunks": [large]})

    assert {each.status_code for each in (short, missing, outside, inline)} == {400}
    assert f"chunk [0, 0] refers to [0, 5) of {chunk_id}, which has 4" in short.json()["detail"]
    assert "does not exist" in missing.json()["detail"]
    assert "[0, 2]" in outside.json()["detail"]
    assert "inline" in inline.json()["detail"]
    assert client.tip == tip
    assert sorted(client.place.folder.rglob("*")) == files


BOTH: Any = {**put_chunks("/a", "0" * 20, [0, 0]), "coords": [[0, 0]]}
"""A change that has chunks both as objects and in columns."""


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"parent_id": "1" * 20}, 404),
        ({"parent_id": "x"}, 404),
        ({"branch": "nowhere"}, 404),
        ({"metadata": {"__shardgate": 1}}, 400),
        ({"metadata": {"__icechunk": 1}}, 400),
        ({"metadata": []}, 400),
        ({"metadata": {"deep": json.loads("[" * 200 + "]" * 200)}}, 400),
        ({"message": None}, 400),
        ({"on_conflict": "mine"}, 400),
        ({"unknown": 1}, 400),
        ({"changes": {}}, 400),
        ({"changes": [{"op": "delete_node", "path": "/x"}]}, 400),
        ({"changes": [put_group("/x/y")]}, 409),
        ({"changes": [put_group("/a/y")]}, 409),
        ({"changes": [BOTH]}, 400),
        ({"changes": [{"op": "put_node", "path": "/x", "metadata": {"node_type": "array"}}]}, 400),
    ],
)
def test_invalid_commit_is_refused(unchanged: Client, change: dict[str, Any], status: int) -> None:
    """An invalid commit fails with 400, 404 or 409, and leaves the branch unchanged."""
    tip = unchanged.tip

    answer = unchanged.ask(**{"changes": [put_group("/new")]} | change)

    assert answer.status_code == status, answer.text
    assert unchanged.tip == tip


def test_commit_with_an_unknown_split_condition_is_refused(
    bucket: tuple[httpx.Client, Path],
) -> None:
    """A commit to a repository whose split condition RE2 does not accept fails with 409."""
    condition = icechunk.ManifestSplitCondition.path_matches("(?=a)")
    split = icechunk.ManifestSplittingConfig.from_dict(
        {condition: {icechunk.ManifestSplitDimCondition.Any(): 2}}
    )
    place = new_place(bucket[1])
    place.create(manifest=icechunk.ManifestConfig(splitting=split)).save_config()
    client = Client(Api(bucket[0], place.folder.name), place)
    client.commit(put_group("/"))
    answer = client.ask(put_array("/a", 4), put_chunks("/a", client.chunk(), [0]))

    assert answer.status_code == 409
    assert "'(?=a)'" in answer.json()["detail"]
    assert bucket[0].get(f"/repo/{place.folder.name}/zarr.json").status_code == 200


def test_unreadable_file_is_not_written(tmp_path: Path) -> None:
    """A commit whose files would exceed the size limit fails with 409."""
    place = new_place(tmp_path)
    place.create()
    limits = LimitSettings(repository_file_bytes=2**16)
    with api(place, limits=limits) as served:
        client = Client(served, place)
        grid = {"name": "regular", "configuration": {"chunk_shape": [1]}}
        client.commit(put_group("/"), put_array("/a", 4000, chunk_grid=grid))
        tip = client.commit(put_group("/m"), message="x" * 40_000)
        chunk_id = client.chunk()
        refused = [
            client.ask(put_group("/n"), message="x" * 40_000),
            client.ask(put_group("/n", x="x" * 70_000)),
            client.ask(put_group("/n", x=token_hex(35_000))),
            client.ask(put_chunks("/a", chunk_id, *([at] for at in range(4000)))),
        ]

        assert {each.status_code for each in refused} == {409}
        assert all("repository_file_bytes" in each.json()["detail"] for each in refused)
        assert client.tip == tip
        client.commit(put_chunks("/a", chunk_id, [0]))


def test_bodies_are_checked_before_reading(unchanged: Client) -> None:
    """A body without a length is 411, one too long 413, an invalid one 400, a coded one 415."""
    assert unchanged.post("/chunks", content=b"").status_code == 400
    assert unchanged.post("/chunks", content=iter([b"abc"])).status_code == 411
    for body in (b"{", b"[]"):
        assert unchanged.post("/commits", content=body).status_code == 400
    for route in ("/chunks", "/commits"):
        assert _announce(unchanged, route, 2**30) == 413
    long = unchanged.ask(put_group("/x", text="x" * 2 * 1024**2))
    assert (long.status_code, "application/x-ndjson" in long.json()["detail"]) == (413, True)
    coded = {"content-encoding": "gzip"}
    assert unchanged.post("/commits", content=b"x", headers=coded).status_code == 415


def _announce(client: Client, route: str, nbytes: int) -> int:
    """Announce a body of *nbytes*, send none, and return the status."""
    connection = HTTPConnection(client.api.client.base_url.netloc.decode(), timeout=20)
    url = f"/api/datasets/repo{route}?path={client.api.path}"
    headers = {"content-length": str(nbytes), "expect": "100-continue"}
    with closing(connection):
        connection.request("POST", url, headers=headers)
        return connection.getresponse().status


def test_virtual_reference_needs_prefix_and_container(tmp_path: Path) -> None:
    """A virtual reference outside of allowed prefixes and containers is 403, an invalid one 400."""
    archive, beside = tmp_path / "archive", tmp_path / "beside"
    for folder in (archive, beside, tmp_path / "secret"):
        folder.mkdir()
        (folder / "f").write_bytes(b"--abcd--")
    place = new_place(tmp_path)
    prefix = f"{archive.as_uri()}/"
    config = icechunk.RepositoryConfig()
    store = icechunk.local_filesystem_store(str(archive))
    config.set_virtual_chunk_container(icechunk.VirtualChunkContainer(prefix, store, name="arc"))
    icechunk.Repository.create(place.storage, config=config).save_config()
    allowed = tuple(VirtualPrefix(url=each.as_uri()) for each in (archive, beside))
    with serve(place.folder, writable=True, virtual_chunk_prefixes=allowed) as opened:
        client = Client(opened, place)
        client.commit(put_group("/"), put_array("/a", 8))
        client.commit(_virtual(0, f"{prefix}f"), _virtual(1, "vcc://arc/f"))
        wrong = [
            client.ask(_virtual(2, each))
            for each in (f"{beside.as_uri()}/f", f"{tmp_path.as_uri()}/secret/f", "vcc://no/f", "f")
        ]
        key = "/repo/a/c/0"
        assert client.api.client.get(key).content == b"ab"

    assert [each.status_code for each in wrong] == [403, 403, 400, 400]
    authorized = icechunk.Repository.open(
        place.storage,
        authorize_virtual_chunk_access={prefix: icechunk.Credentials.LocalFileSystemAccess()},
    )
    session = authorized.readonly_session("main")
    values = np.asarray(zarr.open_array(session.store, path="a", mode="r")[:4])
    assert values.tolist() == [*b"abab"]


def _virtual(at: int, location: str) -> dict[str, Any]:
    modified = datetime(2100, 1, 1, tzinfo=UTC).isoformat()
    told = {"location": location, "offset": 2, "length": 2, "last_modified": modified}
    return {"op": "put_chunks", "path": "/a", "chunks": [{"coords": [at]} | told]}
