"""`shardgate.api.sessions`: sessions on two replicas, and refused requests."""

import asyncio
import json
import re
import secrets
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import icechunk
import pytest
import zarr
from pydantic import ByteSize

from shardgate.model import ObjectRef
from shardgate.settings import DatasetSettings, LimitSettings, Settings
from tests.support.formats.icechunk.building_repo import Repo
from tests.support.read.stores import CallOn, Tapped
from tests.support.serving import client_of
from tests.support.sessions import GROUP, Replicas, array_document, listed_keys, replicas
from tests.support.writable_repositories import Place

ARRAY = json.dumps(array_document((6,), (2,))).encode()
SESSIONS = "/api/datasets/data/sessions"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Generator[Replicas]:
    """Serve one repository by two services."""
    with replicas(Place(tmp_path_factory.mktemp("sessions"))) as pair:
        yield pair


@pytest.fixture
def session_id(pair: Replicas) -> str:
    """Begin a session with the array ``a``."""
    session_id = pair.begin()
    assert pair.put(session_id, "a/zarr.json", ARRAY).status_code == 200
    return session_id


def tell(pair: Replicas, session_id: str, at: int = 0) -> httpx.Response:
    """Read the state of a session."""
    return pair.clients[at].get(f"{SESSIONS}/{session_id}")


def test_session_state_is_the_same_on_all_replicas(pair: Replicas, session_id: str) -> None:
    """Each replica reports a session's branch, parent and state, before and after its commit."""
    told = tell(pair, session_id, at=1).json()
    snapshot_id = pair.committed(session_id)
    after = tell(pair, session_id, at=1).json()

    assert (told["branch"], told["state"], told["snapshot_id"]) == ("main", "open", None)
    assert told["parent_id"] == pair.history[1]
    assert (after["state"], after["snapshot_id"]) == ("committed", snapshot_id)


def test_a_session_begins_on_a_branch(pair: Replicas) -> None:
    """A session begins on ``main`` by default, for a day; unknown branches and members fail."""
    client = pair.clients[0]
    bare = client.build_request("POST", SESSIONS)
    del bare.headers["content-length"]

    for answer in (client.send(bare), client.post(SESSIONS, json={})):
        assert (answer.status_code, answer.json()["branch"]) == (201, "main")
        lasts = datetime.fromisoformat(answer.json()["expires_at"]) - datetime.now(UTC)
        assert abs(lasts.total_seconds() - 24 * 3600) < 120
    assert client.post(SESSIONS, json={"branch": "none"}).status_code == 404
    assert client.post(SESSIONS, json={"branches": "main"}).status_code == 400


def test_repository_of_many_virtual_containers_takes_a_commit(tmp_path: Path) -> None:
    """2,000 virtual chunk containers can be committed to; a configuration over 1 MiB is 424."""
    store = icechunk.s3_store(region="us-east-1")
    containers = {
        url: icechunk.VirtualChunkContainer(url, store)
        for url in (f"s3://bucket-{number}/prefix/" for number in range(2_000))
    }
    config = icechunk.RepositoryConfig(virtual_chunk_containers=containers)
    storage = icechunk.local_filesystem_storage(str(tmp_path / "repo"))
    repo = icechunk.Repository.create(storage, config=config)
    settings = DatasetSettings(url=(tmp_path / "repo").as_uri(), writable=True)
    with client_of(Settings(datasets={"data": settings})) as client:
        pair = Replicas((client,), repo)
        session_id = pair.begin()
        assert pair.put(session_id, "zarr.json", GROUP).status_code == 200
        assert pair.committed(session_id) == pair.history[0]

        (tmp_path / "repo/repo").write_bytes(Repo(more={9: bytes(2**20 + 1)}).file())
        answer = client.post(SESSIONS)

    assert answer.status_code == 424
    assert "a configuration of more than 1048576 bytes" in answer.json()["detail"]


def test_discarded_session_is_not_found(pair: Replicas, session_id: str) -> None:
    """A discarded session is 404 on every replica, as an unknown one is, and leaves no commit."""
    pair.get(session_id, "a/zarr.json", at=1)
    path = f"{SESSIONS}/{session_id}"
    before = pair.history
    assert pair.clients[0].delete(path).status_code == 204
    assert pair.clients[1].delete(path).status_code == 404

    for name in (session_id, "0" * 20, "x", "0" * 21):
        assert tell(pair, name, at=1).status_code == 404
        assert pair.get(name, "a/zarr.json", at=1).status_code == 404
        assert pair.put(name, "a/c/0", b"12", at=1).status_code == 404
        assert pair.delete(name, "a/zarr.json", at=1).status_code == 404
        assert pair.commit(name, at=1).status_code == 404
    assert pair.history == before


@pytest.mark.parametrize(
    ("key", "body", "status"),
    [
        ("a/c/3", b"12", 400),
        ("a/c/00", b"12", 400),
        ("a/c/0/0", b"12", 400),
        ("a/readme.txt", b"12", 400),
        ("a/.zattrs", b"{}", 400),
        ("b/c/0", b"12", 409),
        ("readme.txt", b"12", 409),
        ("a/c/0", b"", 400),
        ("a/b/zarr.json", GROUP, 409),
        ("b/zarr.json", b"{}", 400),
        ("b/zarr.json", b'{"zarr_format": 2, "node_type": "group"}', 400),
        ("b/zarr.json", b'{"zarr_format": 3, "node_type": "array", "shape": [1]}', 400),
        ("b/zarr.json", ARRAY.replace(b'"default"', b'"v2"'), 400),
        ("b/zarr.json", GROUP[:-1] + b', "attributes": {"a": "\xff"}}', 400),
    ],
)
def test_invalid_zarr_key_or_document_is_refused(
    pair: Replicas, session_id: str, key: str, body: bytes, status: int
) -> None:
    """A write to an invalid key or of an invalid zarr.json fails with 400 or 409."""
    answer = pair.put(session_id, key, body)

    assert answer.status_code == status, answer.text
    if key != "a/c/0":
        assert pair.get(session_id, key).status_code == 404
    assert pair.delete(session_id, key).status_code in (200, 204)


def test_zero_dimensional_array_is_listed(pair: Replicas, session_id: str) -> None:
    """A listing of a zero-dimensional array has its document, and its chunk while that exists."""
    lead = secrets.token_hex(4)
    document, chunk = f"{lead}/zarr.json", f"{lead}/c"
    pair.put(session_id, document, json.dumps(array_document((), ())).encode())
    assert pair.keys(session_id, f"{lead}/") == {document}
    pair.put(session_id, chunk, b"1")
    assert pair.keys(session_id, f"{lead}/", at=1) == {document, chunk}
    pair.committed(session_id)
    later = pair.begin()
    assert pair.keys(later, f"{lead}/") == {document, chunk}
    pair.put(later, chunk, b"2")
    assert pair.keys(later, f"{lead}/") == {document, chunk}
    pair.delete(later, chunk)
    assert pair.keys(later, f"{lead}/") == {document}


def test_chunk_conditions_hold_on_both_replicas(pair: Replicas, session_id: str) -> None:
    """If-Match and If-None-Match hold on both replicas; responses of sessions are `no-store`."""
    url = f"/data/@session.{session_id}/a/c/0"
    one, other = pair.clients
    assert one.put(url, content=b"12", headers={"if-none-match": "*"}).status_code == 200
    assert other.put(url, content=b"34", headers={"if-none-match": "*"}).status_code == 412
    etag = other.get(url).headers["etag"]
    assert other.put(url, content=b"56", headers={"if-match": etag}).status_code == 200
    assert one.put(url, content=b"78", headers={"if-match": etag}).status_code == 412
    assert one.delete(url, headers={"if-match": etag}).status_code == 412
    assert one.get(url, headers={"range": "bytes=1-"}).content == b"6"
    assert one.get(url, headers={"if-none-match": one.get(url).headers["etag"]}).status_code == 304
    for key in ("a/c/0", "a/c/1", "a/zarr.json", "a/", "none/"):
        control = pair.get(session_id, key).headers["cache-control"]
        assert control.partition(", ")[0] == "no-store", key


def test_committed_session_is_read_only(pair: Replicas, session_id: str) -> None:
    """A committed session is 409 to writes, and its commit can be repeated."""
    pair.put(session_id, "a/c/0", b"12")
    first = pair.committed(session_id, key="k1")
    outside = pair.clients[0].put("/data/a/c/0", content=b"12")

    assert pair.committed(session_id, at=1, key="k1") == first
    assert pair.committed(session_id, at=1) == first
    assert pair.commit(session_id, at=1, key="k2").status_code == 409
    assert pair.history[0] == first

    assert (outside.status_code, "/sessions" in outside.json()["detail"]) == (405, True)
    assert pair.put(session_id, "a/c/0", b"34", at=1).status_code == 409
    assert pair.delete(session_id, "a/zarr.json").status_code == 409
    assert pair.get(session_id, "a/c/0", at=1).content == b"12"


def test_session_is_committed_without_its_branch(pair: Replicas, session_id: str) -> None:
    """A detached commit of a session moves no branch, and is made once."""
    pair.put(session_id, "a/c/0", b"12")
    before = pair.history[0]
    made = pair.committed(session_id, detached=True)

    assert pair.committed(session_id, at=1) == made != before
    assert pair.history[0] == before
    assert pair.clients[1].get(f"/data/@{made}/a/c/0").content == b"12"


def test_commit_with_a_missing_parent_group_is_refused(pair: Replicas, session_id: str) -> None:
    """A commit without a parent group is 409 and names it; the session stays open."""
    bare = pair.clients[0].post(f"{SESSIONS}/{session_id}/commit")
    assert (bare.status_code, bare.json()["detail"]) == (400, "message: Field required")
    pair.put(session_id, "x/y/zarr.json", GROUP)
    answer = pair.commit(session_id)
    pair.put(session_id, "x/zarr.json", GROUP, at=1)

    assert answer.status_code == 409
    assert "/x for /x/y" in answer.json()["detail"]
    pair.committed(session_id)
    assert "x/y" in pair.group()


def test_session_stays_open_after_a_conflict(pair: Replicas) -> None:
    """A commit that conflicts is 409 and lists the conflicts, which `on_conflict` resolves."""
    name = secrets.token_hex(4)
    begun = pair.begin()
    pair.put(begun, f"{name}/zarr.json", ARRAY)
    pair.committed(begun)
    ours, theirs = pair.begin(), pair.begin()
    pair.put(theirs, f"{name}/c/0", b"\x01\x01")
    pair.put(theirs, f"{name}/c/1", b"\x02\x02")
    pair.put(ours, f"{name}/c/0", b"\x07\x07")
    pair.committed(theirs)
    answer = pair.commit(ours, at=1)
    assert answer.status_code == 409
    assert f"chunk_double_update at /{name}" in answer.json()["detail"]
    (conflict,) = answer.json()["conflicts"]
    assert (conflict["path"], conflict["chunks"]) == (f"/{name}", [[0]])

    assert tell(pair, ours).json()["state"] == "open"
    assert pair.put(ours, f"{name}/c/2", b"\x09\x09").status_code == 200
    pair.committed(ours, on_conflict="ours")
    assert pair.group()[name][:].tolist() == [7, 7, 2, 2, 9, 9]


def test_deletion_of_an_absent_inner_chunk_conflicts(pair: Replicas) -> None:
    """Deleting an absent inner chunk conflicts with its write; with ``ours`` it stays absent."""
    name = secrets.token_hex(4)
    writer = pair.repo.writable_session("main")
    options: Any = {"shape": (4,), "chunks": (1,), "shards": (2,), "dtype": "u1"}
    root = zarr.open_group(writer.store, mode="a")
    root.create_array(name, compressors=None, **options)[:1] = 1
    writer.commit("one inner chunk")
    session_id = pair.begin()
    assert pair.delete(session_id, f"{name}/c/1").is_success
    writer = pair.repo.writable_session("main")
    zarr.open_array(writer.store, path=name)[1:2] = 9
    writer.commit("the other inner chunk")

    refused = pair.commit(session_id, at=1).json()
    assert [each["kind"] for each in refused["conflicts"]] == ["chunk_double_update"]
    pair.committed(session_id, on_conflict="ours")
    assert pair.group()[name][:].tolist() == [1, 0, 0, 0]


def folders(pair: Replicas, lead: str, start: str = "") -> list[str]:
    """List the common prefixes below *lead* that follow *start*."""
    params = {"list-type": "2", "prefix": lead, "delimiter": "/", "start-after": start}
    return re.findall("<Prefix>([^<]*)", pair.clients[0].get("/data", params=params).text)[1:]


def test_folder_is_listed_if_keys_in_it_follow_the_start(pair: Replicas, session_id: str) -> None:
    """A listing that starts inside of a folder has its common prefix only if keys in it follow."""
    name = secrets.token_hex(4)
    pair.put(session_id, f"{name}/zarr.json", GROUP)
    pair.put(session_id, f"{name}/b/zarr.json", ARRAY)
    pair.put(session_id, f"{name}/b/c/1", b"12")

    def is_listed(lead: str, start: str) -> bool:
        return f"{lead}{name}/" in folders(pair, lead, f"{lead}{name}/{start}")

    starts = ("", "b/c/0", "b/c/1", "b/d", "b/zarr.json", "zarr.json", "zz")
    listed = [is_listed(f"@session.{session_id}/", start) for start in starts]
    pair.committed(session_id)

    assert listed == [False, True, True, True, True, False, False]
    assert [is_listed("@branch.main/", start) for start in starts] == listed


def test_folder_of_one_chunk_is_listed(pair: Replicas, session_id: str) -> None:
    """A listing by folders has the folder of chunks as soon as there is one."""
    name = secrets.token_hex(4)
    pair.put(session_id, f"{name}/zarr.json", ARRAY)
    lead = f"@session.{session_id}/{name}/"
    before = folders(pair, lead)
    pair.put(session_id, f"{name}/c/1", b"12")

    assert f"{lead}c/" not in before
    assert f"{lead}c/" in folders(pair, lead)


def test_prefix_of_a_session_is_deleted(pair: Replicas, session_id: str) -> None:
    """A deleted prefix has a number of keys; DeleteObjects reports those of no session."""
    pair.put(session_id, "g/zarr.json", GROUP)
    pair.put(session_id, "g/b/zarr.json", ARRAY)
    for number in range(3):
        pair.put(session_id, f"a/c/{number}", b"12")
    lead = f"@session.{session_id}/"
    erase = pair.clients[0].delete
    assert erase("/data", params={"prefix": f"{lead}a/c/"}).json() == {"deleted": 3}
    assert erase("/data", params={"prefix": f"{lead}g/"}).json() == {"deleted": 2}

    left = pair.keys(session_id, at=1)
    assert "a/zarr.json" in left
    assert not {key for key in left if key.startswith(("g/", "a/c/"))}

    keys = [f"{lead}a/zarr.json", "@session.none/a/c/0"]
    body = "".join(f"<Object><Key>{key}</Key></Object>" for key in keys)
    told = pair.clients[0].post("/data?delete", content=f"<Delete>{body}</Delete>".encode())
    assert told.status_code == 200, told.text
    assert f"<Deleted><Key>{keys[0]}</Key></Deleted>" in told.text
    assert f"<Error><Key>{keys[1]}</Key><Code>NoSuchKey</Code>" in told.text
    assert pair.get(session_id, "a/zarr.json").status_code == 404


def test_session_stays_open_after_damage(tmp_path: Path) -> None:
    """A commit that finds a damaged manifest is 424; without the array it can be committed."""
    with replicas(Place(tmp_path)) as pair:
        first = pair.begin()
        pair.put(first, "a/zarr.json", ARRAY)
        pair.put(first, "a/c/0", b"12")
        pair.committed(first)
        session_id = pair.begin()
        pair.put(session_id, "a/c/1", b"34")
        pair.put(session_id, "g/zarr.json", GROUP)
        (manifest,) = (tmp_path / "manifests").iterdir()
        manifest.write_bytes(b"damaged")

        assert pair.commit(session_id, at=1).status_code == 424
        assert tell(pair, session_id).json()["state"] == "open"
        assert pair.delete(session_id, "a/zarr.json").status_code in (200, 204)
        pair.committed(session_id)
        assert list(pair.group()) == ["g"]


def test_session_with_a_lost_parent_can_be_discarded(tmp_path: Path) -> None:
    """A session whose parent snapshot was collected answers 424 to reads, and can be discarded."""
    with replicas(Place(tmp_path)) as pair:
        session_id = pair.begin()
        (tmp_path / "snapshots" / pair.history[0]).unlink()

        assert pair.get(session_id, "zarr.json").status_code == 424
        assert tell(pair, session_id).json()["state"] == "open"
        assert pair.clients[0].delete(f"{SESSIONS}/{session_id}").status_code == 204
        assert tell(pair, session_id, at=1).status_code == 404


def test_node_of_another_kind_or_rank_drops_its_content(pair: Replicas, session_id: str) -> None:
    """A node of another kind or rank loses its content; a missing group that has some is 409."""
    pair.put(session_id, "a/c/0", b"12")
    matrix = json.dumps(array_document((6, 6), (2, 2))).encode()
    assert pair.put(session_id, "a/zarr.json", matrix).status_code == 200
    assert pair.keys(session_id, "a/") == {"a/zarr.json"}
    pair.put(session_id, "a/c/0/0", b"1234")
    pair.put(session_id, "a/zarr.json", json.dumps(array_document((6,), (2,))).encode())
    pair.put(session_id, "a/zarr.json", GROUP)
    pair.put(session_id, "a/b/zarr.json", ARRAY)
    assert pair.keys(session_id, "a/", at=1) == {"a/zarr.json", "a/b/zarr.json"}
    pair.put(session_id, "a/zarr.json", ARRAY)
    assert pair.keys(session_id, "a/", at=1) == {"a/zarr.json"}
    pair.put(session_id, "k/y/zarr.json", GROUP)
    assert pair.put(session_id, "k/zarr.json", ARRAY).status_code == 409


def test_locked_repository_refuses_sessions_and_commits(pair: Replicas, session_id: str) -> None:
    """A read-only repository is 423 to sessions and commits, which are made once it is unlocked."""
    client, read_only = pair.clients[0], icechunk.RepoAvailability.read_only
    pair.repo.set_status(icechunk.RepoStatus(read_only, limited_availability_reason="moving"))
    refused = [
        client.post(SESSIONS),
        client.post("/api/datasets/data/commits", json={"message": "m", "changes": []}),
        pair.commit(session_id),
    ]
    state = tell(pair, session_id).json()["state"]
    pair.repo.set_status(icechunk.RepoStatus(icechunk.RepoAvailability.online))

    assert state == "open"
    assert [answer.status_code for answer in refused] == [423] * 3
    assert all("moving" in answer.json()["detail"] for answer in refused)
    assert pair.put(session_id, "a/c/0", b"12").status_code == 200
    pair.committed(session_id)


def test_session_of_a_nested_repository(tmp_path: Path) -> None:
    """The keys of a session of a nested repository begin with the repository's path."""
    icechunk.Repository.create(icechunk.local_filesystem_storage(str(tmp_path / "lab/repo")))
    settings = Settings(datasets={"data": DatasetSettings(url=tmp_path.as_uri(), writable=True)})
    with client_of(settings) as client:
        query = {"path": "lab/repo"}
        session_id = client.post(SESSIONS, json={}, params=query).json()["session_id"]
        lead = f"lab/repo/@session.{session_id}/"
        assert client.put(f"/data/{lead}zarr.json", content=GROUP).status_code == 200
        assert "zarr.json" in client.get(f"/data/{lead}").text
        assert listed_keys(client, "data", lead) == [f"{lead}zarr.json"]
        answer = client.post(f"{SESSIONS}/{session_id}/commit", json={"message": "x"}, params=query)
        assert answer.status_code == 201, answer.text
        assert client.get("/data/lab/repo/@branch.main/zarr.json").status_code == 200


class HeldWrites(Tapped):
    """A store that answers the first write of the entry of shard 1 once a session is sealed."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.is_written = threading.Event()
        self._is_sealed = asyncio.Event()

    async def around(self, name: str, ref: ObjectRef, call: CallOn) -> Any:
        """Do the call, and hold its answer if it is that one."""
        answer = await call()
        if self.is_written.is_set() and name == "put" and ref.key.endswith(".session"):
            self._is_sealed.set()
        if not self.is_written.is_set() and name == "put" and ref.key.endswith("/1"):
            self.is_written.set()
            await self._is_sealed.wait()
        return answer


def test_commit_does_not_wait_for_the_room_of_writes(tmp_path: Path) -> None:
    """A commit joins a shard while a write, which waits for the commit, holds room for another."""
    repo = icechunk.Repository.create(icechunk.local_filesystem_storage(str(tmp_path)))
    created = repo.writable_session("main")
    film: Any = {"shape": (2**21,), "chunks": (2**19,), "shards": (2**20,), "dtype": "u1"}
    zarr.create_group(created.store).create_array("film", **film, compressors=None)
    created.commit("an empty film")
    settings = Settings(
        datasets={"data": DatasetSettings(url=str(tmp_path), writable=True)},
        limits=LimitSettings(repository_file_bytes=ByteSize(2**21)),
    )
    stores: list[HeldWrites] = []

    def hold(store: Any) -> Any:
        stores.append(HeldWrites(store))
        return stores[-1]

    with client_of(settings, wrap=hold) as client, ThreadPoolExecutor(1) as threads:
        pair = Replicas((client,), repo)
        session_id = pair.begin()
        bodies = [bytes([number]) * 2**19 for number in (1, 2, 3)]
        for number in (0, 1):
            pair.put(session_id, f"film/c/{number}", bodies[number]).raise_for_status()
        writing = threads.submit(pair.put, session_id, "film/c/2", bodies[2])
        assert stores[0].is_written.wait(60)
        pair.committed(session_id)

        assert writing.result().status_code == 200
    assert pair.group()["film"][:: 2**19].tolist() == [1, 2, 3, 0]
