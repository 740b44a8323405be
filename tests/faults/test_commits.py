"""A gateway is killed or loses its store at each step of a commit."""

import re
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Final

import pytest

from tests.support.committing import Client, put_array, put_chunks
from tests.support.faults.sites import (
    DEADLINE_S,
    IMPATIENT,
    PATIENT,
    Commit,
    Detached,
    Move,
    NthOf,
    RepositorySite,
    Session,
    Setting,
    client_of,
    configured,
    held_up,
    killed,
    opened_repository,
)
from tests.support.gateways import forked
from tests.support.icechunk.train_repository import consistent_history
from tests.support.processes import wait_until
from tests.support.seaweedfs import SeaweedFS
from tests.support.storage.proxy import Mishap

type Kind = type[Commit]

NUMBERS: Final = count()
USUAL: Final[dict[Kind, set[Mishap]]] = {
    Commit: {Mishap.CONFLICT},
    Session: {Mishap.ANSWER_LOST},
    Detached: {Mishap.ANSWER_LOST},
    Move: set(),
    Setting: set(),
}
"""The mishaps most likely to reveal a fault of commits; the others are left to soak runs."""
soak = pytest.mark.soak


@pytest.fixture(scope="module")
def site(
    seaweedfs: SeaweedFS, tmp_path_factory: pytest.TempPathFactory
) -> Generator[RepositorySite]:
    """Start a repository with its direct gateway and the proxy."""
    with opened_repository(seaweedfs, tmp_path_factory.mktemp("commits")) as made:
        yield made


def cut_off(site: RepositorySite, work: Commit, nth: int, moment: Mishap) -> bool:
    """Kill the committing gateway at its *nth* request; return whether it was killed."""
    acknowledged: list[str] = []
    with site.behind_proxy() as (doomed, client):
        is_killed = killed(
            site.proxy, doomed, [nth], moment, lambda: acknowledged.append(work.commit(client))
        )
    work.demand(acknowledged=acknowledged[0] if acknowledged else None)
    return is_killed


@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        pytest.param(Commit, Mishap.REQUEST_LOST, marks=soak),
        (Commit, Mishap.ANSWER_LOST),
        pytest.param(Session, Mishap.REQUEST_LOST, marks=soak),
        pytest.param(Session, Mishap.ANSWER_LOST, marks=soak),
        pytest.param(Move, Mishap.ANSWER_LOST, marks=soak),
        pytest.param(Detached, Mishap.REQUEST_LOST, marks=soak),
        pytest.param(Detached, Mishap.ANSWER_LOST, marks=soak),
        pytest.param(Setting, Mishap.ANSWER_LOST, marks=soak),
    ],
)
def test_commit_of_a_killed_gateway_is_made_once(
    site: RepositorySite, kind: Kind, moment: Mishap
) -> None:
    """A commit whose gateway is killed at any request is made once when it is repeated."""
    nth = 0
    while cut_off(site, kind(site, next(NUMBERS)), nth, moment):
        nth += 1
    assert nth >= kind.steps
    assert len(set(site.healthy.messages())) == len(site.healthy.messages())


@pytest.mark.parametrize(
    ("kind", "mishap"),
    [
        pytest.param(kind, mishap, marks=() if mishap in USUAL[kind] else soak)
        for kind in USUAL
        for mishap in Mishap
    ],
)
def test_commit_succeeds_after_one_failed_request_to_the_store(
    site: RepositorySite, kind: Kind, mishap: Mishap
) -> None:
    """A commit of which any one request to the store fails once is made and acknowledged."""
    nth, is_reached = 0, True
    with site.behind_proxy() as (_, client):
        while is_reached:
            work = kind(site, next(NUMBERS))
            site.proxy.spoil([nth], mishap)
            acknowledged = work.commit(client)
            is_reached = len(site.proxy.seen) > nth
            site.proxy.spoil([], mishap)
            work.demand(acknowledged=acknowledged)
            nth += 1
    assert nth > kind.steps


@pytest.mark.parametrize(("kind", "steps"), [(Commit, (0, 3, 6)), (Session, (0, 3, 8, 12))])
def test_commit_during_an_outage_of_the_store_is_made_once(
    site: RepositorySite, kind: Kind, steps: tuple[int, ...]
) -> None:
    """A commit during an outage of the store succeeds or gets a 5xx; repeated, it is made once."""
    with site.behind_proxy(**IMPATIENT) as (_, client):
        for nth in steps:
            work = kind(site, next(NUMBERS))
            site.proxy.spoil(range(nth, 10**9), Mishap.ANSWER_LOST)
            answer = work.ask(client)
            site.proxy.spoil([], Mishap.ERROR)
            assert answer.is_success or answer.is_server_error, answer.text
            work.demand(acknowledged=answer.json().get("snapshot_id"))


CLIENTS: Final = 4
FILE: Final = r"PUT \S+/%s/"
SWAP: Final = r"PUT \S+/repo[? ]"
LONE, ALL = 1, CLIENTS
"""Numbers of commits that are visible: the first is a train by itself, the second has the rest."""
_STATS: Final = re.compile(r'shardgate_upstream_seconds_count\{.*method="stat".*\} (\S+)')


class Crowd:
    """Clients of which each commits one chunk of a new array, by a request with a key."""

    def __init__(self, site: RepositorySite, number: int) -> None:
        self.path = f"/crowd{number}"
        self.messages = [f"{self.path}-{at}" for at in range(CLIENTS)]
        site.healthy.commit(put_array(self.path, 2 * CLIENTS))
        self._chunk_ids = [site.healthy.chunk(bytes([at + 1] * 2)) for at in range(CLIENTS)]

    def commit(self, client: Client, at: int) -> str:
        """Commit a chunk, and return the id of the snapshot."""
        chunk = put_chunks(self.path, self._chunk_ids[at], [at], length=2)
        return client.commit(chunk, key=self.messages[at], message=self.messages[at])

    def commit_all(self, client: Client, pool: ThreadPoolExecutor) -> list[str]:
        """Commit all chunks at once, and return the ids of the snapshots."""
        return list(pool.map(lambda at: self.commit(client, at), range(CLIENTS)))

    def visible(self, client: Client) -> list[str]:
        """Return the messages of the commits that the library sees, sorted."""
        history = consistent_history(client.repo)
        return sorted(each.message for each in history if each.message in self.messages)


@pytest.mark.parametrize(
    ("pattern", "nth", "count"),
    # Before the swap the files of a train change nothing: soak runs kill after each of them.
    [
        pytest.param(SWAP, 0, LONE, id="first swap"),
        pytest.param(FILE % "manifests", 0, LONE, id="manifest", marks=soak),
        pytest.param(FILE % "snapshots", 1, LONE, id="snapshot", marks=soak),
        pytest.param(FILE % "transactions", 2, LONE, id="transaction log", marks=soak),
        pytest.param(FILE % "overwritten", 0, LONE, id="backup"),
        pytest.param(SWAP, 1, ALL, id="second swap"),
    ],
)
def test_train_of_a_killed_gateway_is_visible_as_a_whole_or_not_at_all(
    site: RepositorySite, pattern: str, nth: int, count: int
) -> None:
    """A train whose gateway is killed is visible as a whole or not; repeated commits are made once.

    The kill follows the *nth* matching request after the first train's files; *count* commits are
    visible then.
    """
    crowd = Crowd(site, next(NUMBERS))
    with (
        ThreadPoolExecutor(CLIENTS) as pool,
        site.behind_proxy(**PATIENT) as (doomed, client),
        held_up(site.proxy, SWAP) as hold,
    ):
        asked = [pool.submit(crowd.commit, client, 0)]
        assert hold.has_arrived.wait(DEADLINE_S)
        asked += [pool.submit(crowd.commit, client, at) for at in range(1, CLIENTS)]
        wait_for_stats(client, CLIENTS)

        def proceed() -> None:
            hold.end()
            for each in asked:
                each.result(DEADLINE_S)

        assert killed(
            site.proxy, doomed, NthOf(site.proxy, pattern, nth), Mishap.ANSWER_LOST, proceed
        )
        assert crowd.visible(site.healthy) == crowd.messages[:count]

        with forked(configured(site.place)) as started, client_of(started, site.place) as new:
            made = crowd.commit_all(new, pool)
    assert crowd.visible(site.healthy) == crowd.messages
    results = {at: each.result() for at, each in enumerate(asked) if each.exception() is None}
    assert results.items() <= dict(enumerate(made)).items()
    expected = [at + 1 for at in range(CLIENTS) for _ in range(2)]
    assert site.healthy.values(crowd.path) == expected


def wait_for_stats(client: Client, count: int) -> None:
    """Wait until the gateway has looked up *count* chunk files, and acted on that.

    A commit joins its train as soon as it knows its chunk files.
    """

    def looked_up() -> float:
        return sum(map(float, _STATS.findall(client.api.client.get("/metrics").text)))

    wait_until(lambda: looked_up() >= count)
    client.api.client.get("/healthz").raise_for_status()
