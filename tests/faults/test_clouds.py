"""The service writes to Google's and Azure's services, also while it is killed."""

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import icechunk
import pytest
import zarr

from shardgate.settings import StoreSettings
from tests.support.committing import Client, put_array, put_chunks, put_group
from tests.support.faults.cloud_sites import CloudSite, cloud_site
from tests.support.faults.sites import DEADLINE_S, killed
from tests.support.gateways import Gateway
from tests.support.labs import SMALL, value
from tests.support.storage.google import ENVIRON
from tests.support.storage.proxy import Mishap
from tests.support.storage.reading import az_settings
from tests.support.writable_repositories import Api, Place


@pytest.fixture(params=["gs", "az"])
def site(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Generator[CloudSite]:
    """Take a prefix of a bucket of each kind."""
    for name, text in ENVIRON.items():
        monkeypatch.setenv(name, text)
    server = request.getfixturevalue("google_server" if request.param == "gs" else "azurite")
    settings = StoreSettings(endpoint_url=server.url)
    if request.param == "az":
        settings = az_settings(server)
    with cloud_site(request.param, settings, server, tmp_path) as made:
        yield made


def put(gateway: Gateway, key: str, data: bytes, **headers: str) -> httpx.Response:
    """Put *data* under *key*."""
    return httpx.put(f"{gateway.url}/data/{key}", content=data, headers=headers, timeout=DEADLINE_S)


def test_chunks_objects_and_prefixes_are_written(site: CloudSite) -> None:
    """Chunks are put and deleted in shards, objects keep their headers, and prefixes are removed.

    The last chunk of a shard leaves an empty shard, since no version alone can be deleted.
    """
    old = {at: value(SMALL, 1, at) for at in (0, 1, 8)}
    name = site.new_array(old)
    new = value(SMALL, 2, 5)
    with site.gateway() as gateway, httpx.Client(base_url=f"{gateway.url}/data") as client:
        assert put(gateway, f"{name}/c/5", new).is_success
        for at in (0, 8):
            assert client.delete(f"/{name}/c/{at}").is_success
        kinds = {"Content-Type": "text/plain", "x-amz-meta-a-b": "c d"}
        made = put(gateway, "notes/a.txt", b"text", **kinds)
        stale = put(gateway, "notes/a.txt", b"other", **{"If-Match": '"another"'})
        fresh = put(
            gateway, "notes/a.txt", b"text 2", **kinds, **{"If-Match": made.headers["ETag"]}
        )
        answer = client.get("/notes/a.txt")
        put(gateway, "notes/b/c", b"1")
        removed = client.delete("", params={"prefix": "notes/b/"})

    assert [made.status_code, stale.status_code, fresh.status_code] == [200, 412, 200]
    assert (answer.content, answer.headers["content-type"]) == (b"text 2", "text/plain")
    assert removed.json() == {"deleted": 1}
    expected = {f"{name}/c/{at}": None for at in range(SMALL.chunks)}
    assert site.read(name) == expected | {f"{name}/c/1": old[1], f"{name}/c/5": new}
    shards = [f"{name}/c/0", f"{name}/c/1"]
    assert site.names() == [*shards, f"{name}/zarr.json", "notes/a.txt"]


def test_commits_and_sessions_of_a_repository_are_read_by_the_library(site: CloudSite) -> None:
    """A commit by one request, and one of a session, are those that the Icechunk library reads."""
    folder = site.folder / "repo"
    icechunk.Repository.create(icechunk.local_filesystem_storage(str(folder)))
    site.upload("repo")
    with (
        site.gateway() as gateway,
        httpx.Client(base_url=gateway.url, timeout=DEADLINE_S) as client,
    ):
        api = Api(client, "repo", "data")
        writer = Client(api, Place(folder))
        chunk_id = writer.chunk()
        writer.commit(
            put_group("/"), put_array("/a", 4, 4), put_chunks("/a", chunk_id, [0, 0]), message="one"
        )
        session_id = api.do("POST", "/sessions", {}).json()["session_id"]
        key = f"repo/@session.{session_id}/a/c/1/1"
        assert put(gateway, key, bytes([7] * 4)).is_success
        api.do("POST", f"/sessions/{session_id}/commit", {"message": "two"})

    read = Client(api, Place(site.download() / "repo"))
    assert read.messages() == ["two", "one"]
    values = read.values("a")
    assert values[0][0] == 1
    assert values[2][2] == 7


@pytest.mark.soak
def test_library_and_gateway_lose_no_commit_of_one_another(site: CloudSite) -> None:
    """The Icechunk library and a gateway commit to one branch at the same time."""
    commits = 10
    storage = site.library_storage("repo")
    repository = icechunk.Repository.create(storage)

    def commit_by_library() -> None:
        for number in range(commits):
            is_made = False
            while not is_made:
                session = repository.writable_session("main")
                zarr.open_group(session.store, mode="a").attrs[f"library {number}"] = number
                with suppress(icechunk.ConflictError):
                    session.commit(f"library {number}", rebase_with=icechunk.ConflictDetector())
                    is_made = True

    with (
        site.gateway() as gateway,
        httpx.Client(base_url=gateway.url, timeout=DEADLINE_S) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        writer = Client(Api(client, "repo", "data"), Place(site.folder))
        writer.commit(put_group("/"), put_array("/a", 4, 4), message="first")
        chunk_id = writer.chunk()
        committing = pool.submit(commit_by_library)
        for number in range(commits):
            writer.commit(put_chunks("/a", chunk_id, [0, 0]), message=f"gateway {number}")
        committing.result()

    made = [each.message for each in icechunk.Repository.open(storage).ancestry(branch="main")]
    expected = {f"{who} {number}" for who in ("library", "gateway") for number in range(commits)}
    assert expected <= set(made)
    assert len(made) == 2 * commits + 2


@pytest.mark.parametrize("writers", [4, pytest.param(20, marks=pytest.mark.soak)])
def test_killed_writers_lose_nothing(site: CloudSite, writers: int) -> None:
    """Gateways are killed, each at another request of a PUT: chunks that were answered are there.

    All other chunks are as they were, and nothing unfinished is left.
    """
    old = {at: value(SMALL, 1, at) for at in range(0, SMALL.chunks, 2)}
    name = site.new_array(old)
    expected = {f"{name}/c/{at}": old.get(at) for at in range(SMALL.chunks)}
    count = 0
    for writer in range(writers):
        key = f"{name}/c/{writer % SMALL.chunks}"
        new = value(SMALL, 2 + writer, 0)
        moment = (Mishap.ANSWER_LOST, Mishap.REQUEST_LOST)[writer // 2 % 2]
        with site.gateway(is_behind_proxy=True) as doomed:
            site.proxy.heal()
            assert put(doomed, "warm", b"%d" % writer).is_success

            def work() -> None:
                assert put(doomed, key, new).is_success  # noqa: B023  called in this turn

            is_killed = killed(site.proxy, doomed, [5 - writer % 4], moment, work)
        found = site.read(name)
        assert found[key] == new or (is_killed and found[key] == expected[key])
        assert found == expected | {key: found[key]}
        expected = found
        count += is_killed

    assert count >= writers // 4
    assert [each for each in site.names() if ".shardgate-" in each] == []
