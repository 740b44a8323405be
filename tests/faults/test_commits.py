"""A gateway is killed or loses its store at each step of a commit."""

from collections.abc import Generator
from itertools import count
from typing import Final

import pytest

from tests.faults.sites import IMPATIENT, Commit, RepositorySite, Session, killed, opened_repository
from tests.storage.proxy import Mishap
from tests.support.seaweedfs import SeaweedFS

type Kind = type[Commit]

NUMBERS: Final = count()
USUAL: Final = {Commit: {Mishap.ANSWER_LOST, Mishap.CONFLICT}, Session: {Mishap.ANSWER_LOST}}
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
            site.proxy, doomed, nth, moment, lambda: acknowledged.append(work.commit(client))
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
        for kind in (Commit, Session)
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
