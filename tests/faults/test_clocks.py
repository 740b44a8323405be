"""Gateways whose clocks are off or jump."""

import re
import time
from collections.abc import Generator
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import httpx
import pytest

from tests.support.commands import AHEAD_S, JUMPS_S
from tests.support.committing import Client, put_array, put_group
from tests.support.faults.sites import asked, begun, client_of, configured, put
from tests.support.gateways import Gateway, forked, of_dataset, start_gateway
from tests.support.labs import SMALL, Lab, requested_lab, value
from tests.support.writable_repositories import Place, new_place

A_BIT_S: Final = 4
"""Tolerated difference between two clocks."""
WRONG_S: Final = 60
HOURS_S: Final = 5 * 3600
DAYS_S: Final = 3 * 24 * 3600
OLD: Final = [[0, 0], [0, 0]]


class Folder:
    """A repository in a folder, and gateways whose clocks differ."""

    def __init__(self, place: Place, stack: ExitStack) -> None:
        self.place = place
        self._stack = stack
        self.right = self.gateway(0)
        self.right.commit(put_group("/"), put_array("/a", 4, 4), message="first")

    def gateway(self, ahead_s: float) -> Client:
        """Start a gateway whose clock is *ahead_s* seconds ahead."""
        started = start_gateway(configured(self.place) | {AHEAD_S: str(ahead_s)})
        self._stack.enter_context(closing(started))
        return self._stack.enter_context(client_of(started, self.place))

    def demand(self, *messages: str, values: list[list[int]]) -> None:
        """Assert the history of commits, and the first value of each chunk."""
        assert self.right.messages() == [*messages, "first"]
        assert [row[::2] for row in self.right.values("a")[::2]] == values
        moments = [each.written_at for each in self.right.repo.ancestry(branch="main")]
        assert all(later > earlier for later, earlier in pairwise(moments))


@pytest.fixture
def folder(tmp_path: Path) -> Generator[Folder]:
    """Create a repository and a gateway with the right clock."""
    place = new_place(tmp_path)
    place.create()
    with ExitStack() as stack:
        yield Folder(place, stack)


def test_clocks_a_few_seconds_apart_are_tolerated(folder: Folder) -> None:
    """Gateways whose clocks differ by 4 s commit each other's sessions with 201."""
    clients = [folder.gateway(A_BIT_S), folder.right, folder.gateway(-A_BIT_S)]
    for number in range(6):
        session_id = begun(clients[number % 3])
        value = bytes([number + 1] * 4)
        assert put(clients[(number + 1) % 3], session_id, "a/c/0/0", value).is_success
        answer = asked(clients[(number + 2) % 3], session_id, message=f"{number}")
        assert answer.status_code == 201, answer.text

    folder.demand(*"543210", values=[[6, 0], [0, 0]])


def test_commit_onto_a_future_snapshot_is_refused_with_503(folder: Folder) -> None:
    """A commit or tag on a snapshot 60 s in the future fails with a 503 that names it.

    The session of such a commit stays open.
    """
    session_id = begun(folder.right)
    assert put(folder.right, session_id, "a/c/0/0", bytes([1] * 4)).is_success
    fast = folder.gateway(WRONG_S)
    newest = fast.commit(put_group("/g"), message="of tomorrow")

    for answer in (
        asked(folder.right, session_id, message="ours"),
        folder.right.ask(put_group("/h"), message="ours too"),
        folder.right.api.send("POST", "/tags", {"name": "t", "snapshot_id": newest}),
    ):
        assert (answer.status_code, "clock" in answer.text) == (503, True)
        assert re.search(rf"snapshot {newest} was written (60|5\d) s ahead", answer.text)
        assert "retry-after" in answer.headers
    assert put(folder.right, session_id, "a/c/1/1", bytes([2] * 4)).is_success
    folder.demand("of tomorrow", values=OLD)

    assert asked(fast, session_id, message="ours").status_code == 201
    folder.demand("ours", "of tomorrow", values=[[1, 0], [0, 2]])


@pytest.mark.parametrize("ahead_s", [HOURS_S, -HOURS_S])
def test_wrong_clock_creates_no_repository(tmp_path: Path, ahead_s: float) -> None:
    """A gateway whose clock is hours off gets 503 when it creates a repository; another 201."""
    place = new_place(tmp_path)
    with ExitStack() as stack:
        wrong, right = (
            stack.enter_context(closing(start_gateway(configured(place) | {AHEAD_S: str(each)})))
            for each in (ahead_s, 0)
        )
        answers = [
            httpx.post(f"{gateway.url}/api/datasets", json={"name": "repo"}, timeout=30)
            for gateway in (wrong, right)
        ]

    assert [each.status_code for each in answers] == [503, 201]
    side = "ahead of" if ahead_s > 0 else "behind"
    assert re.search(rf"the clock of this machine is 1(8000|7999|8001) s {side}", answers[0].text)
    (first,) = place.open().ancestry(branch="main")
    assert abs(first.written_at.timestamp() - time.time()) < 3600


@pytest.mark.parametrize("ahead_s", [-WRONG_S, HOURS_S])
def test_gateway_with_a_wrong_clock_writes_sessions_only(folder: Folder, ahead_s: float) -> None:
    """A gateway with a wrong clock writes into sessions; its commits and tags fail with 503."""
    wrong, session_id = folder.gateway(ahead_s), begun(folder.right)
    assert put(wrong, session_id, "a/c/0/0", bytes([1] * 4)).is_success
    assert put(folder.right, session_id, "a/c/0/1", bytes([2] * 4)).is_success
    tag = {"name": "t", "snapshot_id": folder.right.tip}

    assert asked(wrong, session_id, message="ours").status_code == 503
    assert wrong.api.send("POST", "/tags", tag).status_code == 503
    folder.demand(values=OLD)
    assert put(wrong, session_id, "a/c/1/0", bytes([3] * 4)).is_success
    assert asked(folder.right, session_id, message="ours").status_code == 201
    assert asked(wrong, session_id, message="ours").status_code == 201
    assert folder.right.api.send("POST", "/tags", tag).status_code == 201

    folder.demand("ours", values=[[1, 2], [3, 0]])


@pytest.mark.parametrize("ahead_s", [DAYS_S, -DAYS_S])
def test_gateway_with_a_clock_days_off_ends_no_session(folder: Folder, ahead_s: float) -> None:
    """A gateway whose clock is days off begins no session and removes none of others."""
    wrong = folder.gateway(ahead_s)
    session_id = begun(folder.right)
    assert put(folder.right, session_id, "a/c/0/0", bytes([1] * 4)).is_success

    refused = wrong.api.send("POST", "/sessions")
    assert (refused.status_code, "clock" in refused.text) == (503, True)

    assert asked(folder.right, session_id, message="ours").status_code == 201
    folder.demand("ours", values=[[1, 0], [0, 0]])


CHUNKS: Final = {at: value(SMALL, 1, at) for at in range(SMALL.chunks)}
NEW: Final = value(SMALL, 2, 0)
JUMPED_S: Final = 0.1
TTL_S: Final = 0.3


class Site(NamedTuple):
    """An array, a gateway whose clock jumps and later jumps back, and a client of the array."""

    lab: Lab
    name: str
    gateway: Gateway
    client: httpx.Client

    def jump(self) -> None:
        """Make the clock jump."""
        self.gateway.jump()
        time.sleep(JUMPED_S)

    def get(self, chunk: int) -> httpx.Response:
        """Read a chunk."""
        return self.client.get(f"/c/{chunk}")

    def put(self, chunk: int, data: bytes) -> httpx.Response:
        """Write a chunk."""
        return self.client.put(f"/c/{chunk}", content=data)


@pytest.fixture(params=["folder", "seaweedfs"])
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, jump_s: int
) -> Generator[Site]:
    """Start a gateway whose cache entries expire soon, and whose clock jumps by *jump_s*."""
    lab = requested_lab(request, tmp_path_factory)
    environ = of_dataset(lab.url, lab.seaweedfs, ttl_s=TTL_S) | {JUMPS_S: f"{jump_s} 0"}
    name = lab.new_array(SMALL, CHUNKS)
    with (
        forked(environ | {"SHARDGATE_CACHE__CHUNK_BYTES": "0"}) as gateway,
        httpx.Client(base_url=f"{gateway.url}/data/{name}", timeout=30) as client,
    ):
        yield Site(lab, name, gateway, client)


@pytest.mark.parametrize(
    ("site", "jump_s"),
    [("folder", HOURS_S), ("seaweedfs", HOURS_S), ("seaweedfs", -HOURS_S)],
    indirect=["site"],
)
def test_clock_jump_makes_no_chunk_absent(site: Site) -> None:
    """While the clock is off, a stored chunk is read or fails with 403 or 503, never 404."""
    assert site.get(1).content == CHUNKS[1]
    site.jump()
    during = [site.get(at) for at in (1, 2)]
    written = site.put(0, NEW)
    site.jump()

    assert {answer.status_code for answer in during} <= {200, 403, 503}
    assert all(each.content == CHUNKS[at] for at, each in enumerate(during, 1) if each.is_success)
    assert site.get(2).content == CHUNKS[2]
    assert site.get(0).content == (NEW if written.is_success else CHUNKS[0])
    assert site.put(0, NEW).is_success
    assert site.lab.read(site.name)[f"{site.name}/c/0"] == NEW


@pytest.mark.parametrize(("site", "jump_s"), [("folder", -HOURS_S)], indirect=["site"])
def test_clock_jump_does_not_prolong_cache_entries(site: Site) -> None:
    """A cached shard index expires after its lifetime although the clock has jumped."""
    site.get(1)
    site.jump()
    other = site.lab.folder / site.name / "c"
    for shard in other.iterdir():
        shard.unlink()
    time.sleep(TTL_S)

    assert site.get(1).status_code == 404
