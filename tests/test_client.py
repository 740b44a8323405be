"""`shardgate.open_session`: sessions of Python programs."""

import pickle
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import zarr

from shardgate import CommitConflictError, SessionError, client, open_session
from shardgate.client import Session
from shardgate.settings import DatasetSettings, Settings
from tests.support.auth.people import TOKENS, caller
from tests.support.clocks import Clock
from tests.support.processes import ROOT, environ
from tests.support.serving import serving
from tests.support.storage.proxy import Fault, Lie, Mishap, Proxy
from tests.support.writable_repositories import Place, new_place


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the folder of all repositories."""
    return tmp_path_factory.mktemp("repositories")


@pytest.fixture(scope="module")
def service(folder: Path) -> Generator[str]:
    """Serve the folder, and as ``private`` a part of it that only Bob may write."""
    (folder / "private").mkdir()
    datasets = {
        "all": DatasetSettings(url=str(folder), writable=True),
        "private": DatasetSettings(
            url=str(folder / "private"), writable=True, read=("bob",), write=("bob",)
        ),
    }
    callers = {"bob": caller(TOKENS["bob"])}
    with serving(Settings(datasets=datasets, callers=callers)) as url:
        yield url


@pytest.fixture
def place(folder: Path) -> Place:
    """Create a repository with the array ``a`` of four chunks."""
    place = new_place(folder)
    session = place.create().writable_session("main")
    array: Any = {"shape": (8,), "chunks": (2,), "dtype": "u1"}
    zarr.create_group(session.store).create_array("a", **array)
    session.commit("an array")
    return place


def values(place: Place) -> list[int]:
    """Read the array by the library."""
    store = place.open().readonly_session("main").store
    found: Any = zarr.open_array(store, path="a", mode="r")
    return [int(value) for value in found[:]]


def write(store: Any, chunk: int, value: int) -> None:
    """Write one chunk of the array."""
    zarr.open_array(store, path="a")[2 * chunk : 2 * chunk + 2] = np.uint8(value)


def test_committed_session_is_read_by_the_library(service: str, place: Place) -> None:
    """The commit has what zarr-python wrote, also through a pickled store, and its message."""
    with open_session(f"{service}/all/", path=place.folder.name) as session:
        write(session.store, 0, 3)
        write(pickle.loads(pickle.dumps(session.store)), 1, 4)  # noqa: S301 - our own
        made = session.commit("two chunks", metadata={"by": "a test"})

    tip = next(iter(place.open().ancestry(branch="main")))
    assert (tip.id, tip.message, tip.metadata["by"]) == (made, "two chunks", "a test")
    assert tip.parent_id == session.parent_id
    assert values(place) == [3, 3, 4, 4, 0, 0, 0, 0]


def test_opened_array_takes_one_request(service: str, place: Place) -> None:
    """The store of a session has no documents of Zarr version 2, and requests none."""
    with (
        Proxy(service).running() as proxy,
        open_session(f"{proxy.url}/all", path=place.folder.name) as session,
    ):
        proxy.heal()
        zarr.open_array(session.store, path="a")
        assert len(proxy.seen) == 1


def test_sessions_of_one_dataset_share_an_http_client(service: str, place: Place) -> None:
    """The next session uses the HTTP client of the one before, and is another store."""
    path = place.folder.name
    with open_session(f"{service}/all", path=path) as one:
        first = one.store
    with open_session(f"{service}/all", path=path) as other:
        assert other.store.store is first.store
        assert other.store != first
        assert other.store == pickle.loads(pickle.dumps(other.store))  # noqa: S301 - our own


def test_conflicting_commit_raises_and_leaves_the_session_open(service: str, place: Place) -> None:
    """A commit of chunks that others wrote raises with these chunks; ``ours`` then commits."""
    with (
        open_session(f"{service}/all", path=place.folder.name) as one,
        open_session(f"{service}/all", path=place.folder.name) as other,
    ):
        for session, value in ((one, 5), (other, 6)):
            write(session.store, 2, value)
        tip = one.commit("one")
        with pytest.raises(CommitConflictError, match="chunk_double_update at /a") as conflict:
            other.commit("other")
        assert (conflict.value.actual_parent, other.snapshot_id) == (tip, None)
        assert conflict.value.conflicts[0]["chunks"] == [[2]]
        copied = pickle.loads(pickle.dumps(conflict.value))  # noqa: S301 - our own
        assert (str(copied), copied.conflicts) == (str(conflict.value), conflict.value.conflicts)
        other.commit("other", on_conflict="ours")

    assert values(place)[4:6] == [6, 6]


def test_abandoned_session_is_discarded(service: str, place: Place) -> None:
    """A block that ends with an error discards its session, which then takes no commit."""
    with (
        pytest.raises(ZeroDivisionError),
        open_session(f"{service}/all", path=place.folder.name) as session,
    ):
        write(session.store, 0, 1 // 0)

    assert status(service, place, session) == 404
    with pytest.raises(SessionError, match="ended with its block"):
        session.commit("late")


def status(service: str, place: Place, session: Session) -> int:
    """Return the status of an answer about the state of *session*."""
    url = f"{service}/api/datasets/all/sessions/{session.session_id}"
    return httpx.get(url, params={"path": place.folder.name}).status_code


def test_session_whose_commit_is_refused_is_discarded(service: str, place: Place) -> None:
    """A block that ends with a refused commit discards its session."""
    with (
        pytest.raises(SessionError, match="nothing changes"),
        open_session(f"{service}/all", path=place.folder.name) as session,
    ):
        session.commit("nothing")

    assert status(service, place, session) == 404


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Mishap.REQUEST_LOST, "disconnected|reset"),
        (Mishap.DONE_AND_500, "answers 500"),
        (Lie.PAGE_200, "names no snapshot"),
    ],
)
def test_session_whose_commit_may_be_made_is_kept(
    service: str, place: Place, monkeypatch: pytest.MonkeyPatch, fault: Fault, message: str
) -> None:
    """A block that ends without the outcome of a commit leaves its session to a later commit."""
    monkeypatch.setattr("shardgate.client._RETRY_S", 0.0)
    with (
        Proxy(service).running() as proxy,
        open_session(f"{proxy.url}/all", path=place.folder.name) as session,
    ):
        write(session.store, 0, 7)
        proxy.spoil([0], fault)
        with pytest.raises(SessionError, match=message):
            session.commit("unanswered")

    assert status(service, place, session) == 200


def test_session_without_a_store_is_discarded(
    service: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session whose store cannot be opened is discarded."""
    monkeypatch.setattr("shardgate.client._open_store", lambda *_, **__: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        open_session(f"{service}/all", path=place.folder.name)

    assert not list((place.folder / "sessions").glob("*.session"))


def test_commit_whose_answer_is_lost_is_made_once(
    service: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit is requested again if its answer is lost after minutes, and made once."""
    clock = Clock()
    send = client._send  # noqa: SLF001 - each request takes five minutes

    def send_slowly(*args: Any, **options: Any) -> httpx.Response:
        clock.now += 300
        return send(*args, **options)

    with (
        Proxy(service).running() as proxy,
        open_session(f"{proxy.url}/all", path=place.folder.name) as session,
    ):
        write(session.store, 0, 7)
        proxy.spoil([0], Mishap.ANSWER_LOST)
        monkeypatch.setattr("shardgate.client._send", send_slowly)
        # Not `time.monotonic` itself, by which the service runs its loop.
        timing = SimpleNamespace(monotonic=clock, sleep=time.sleep)
        monkeypatch.setattr("shardgate.client.time", timing)
        made = session.commit("once")

    assert len(proxy.seen) == 2
    history = list(place.open().ancestry(branch="main"))
    assert (history[0].id, history[1].message) == (made, "an array")


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("{}/none", {}, "there is no such dataset"),
        ("{}/all", {"branch": "none"}, "there is no branch none"),
        ("{}/all", {"path": "nowhere"}, "nowhere"),
        ("{}/private", {"token": "wrong"}, "credentials|token"),
        ("{}/private", {"token": "se\ncret"}, "^token: expected ASCII characters without spaces"),
        ("{}", {}, "expected the URL of a dataset"),
        ("http://127.0.0.1:1/lab", {}, "http://127.0.0.1:1/api/datasets/lab/sessions: "),
        ("{}/docs?x=/y", {}, "expected the URL of a dataset"),
    ],
)
def test_refused_session_says_why(
    service: str, place: Place, url: str, options: Any, message: str
) -> None:
    """A session that cannot begin raises an error with the reason."""
    with pytest.raises(SessionError, match=message):
        open_session(url.format(service), **{"path": place.folder.name} | options)


def test_session_of_a_private_repository_sends_its_token(service: str, folder: Path) -> None:
    """A token is sent with all requests of a session; without it there is no session."""
    place = Place(folder / "private/repository")
    place.folder.mkdir()
    place.create()
    url, path = f"{service}/private", "repository"
    with pytest.raises(SessionError) as refused:
        open_session(url, path=path)
    assert refused.value.status in {401, 404}

    with open_session(url, path=path, token=TOKENS["bob"]) as session:
        zarr.create_group(session.store, attributes={"by": "bob"})
        session.commit("a group")

    read = zarr.open_group(place.open().readonly_session("main").store, mode="r")
    assert read.attrs["by"] == "bob"


def test_importing_shardgate_loads_no_client() -> None:
    """Importing the package loads neither httpx nor zarr-python, nor the service."""
    code = (
        "import sys, shardgate; "
        "sys.exit(any(name in sys.modules for name in ('httpx', 'zarr', 'numpy', 'fastapi')))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environ(), cwd=ROOT, check=False)

    assert done.returncode == 0
