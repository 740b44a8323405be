"""A gateway ends or is cut off at every step of a commit: it is there once, or not as yet."""

from collections.abc import Generator
from typing import Any, Final

import httpx
import icechunk
import pytest

from tests.faults.repository_sites import Site, opened_repository
from tests.faults.sites import DEADLINE_S
from tests.gateways import Start
from tests.seaweedfs import SeaweedFS
from tests.storage.proxy import Late, Mishap

STEPS: Final = 8
"""So many requests a commit takes at least: reads, manifest, snapshot, log, backup, swap."""


USUAL: Final = {Mishap.ANSWER_LOST, Mishap.CONFLICT}
"""Those that commits are most likely to get wrong."""


def mishaps() -> list[Any]:
    """Name all that can become of a request; most of it takes long to try."""
    return [
        pytest.param(each, marks=() if each in USUAL else pytest.mark.soak, id=each.name)
        for each in Mishap
    ]


KILLED: Final = [
    pytest.param(Mishap.REQUEST_LOST, marks=pytest.mark.soak),
    Mishap.ANSWER_LOST,
]
"""Before a request the repository is as it was after the one before that."""


@pytest.fixture(scope="module")
def site(
    seaweedfs: SeaweedFS, tmp_path_factory: pytest.TempPathFactory, start: Start
) -> Generator[Site]:
    """Start what nothing happens to."""
    with opened_repository(seaweedfs, tmp_path_factory.mktemp("commits"), start) as made:
        yield made


@pytest.mark.parametrize("moment", KILLED)
def test_who_is_killed_at_any_step_has_committed_once_or_not(site: Site, moment: Mishap) -> None:
    """The same request with the same key finds out, or does it; other gateways go on."""
    nth, is_killed = 0, True
    while is_killed:
        number = 2 * nth + (moment is Mishap.ANSWER_LOST) * 1000
        is_killed, acknowledged = killed(site, nth, moment, number)
        site.demand(number, acknowledged=acknowledged)
        nth += 1
    assert nth > STEPS
    assert len(set(site.healthy.messages())) == len(site.healthy.messages())


def killed(site: Site, nth: int, moment: Mishap, number: int) -> tuple[bool, str | None]:
    """Kill a gateway at the request *nth* that a commit takes; tell whether it got there."""
    with site.behind_proxy() as (doomed, client):
        site.proxy.between = doomed.kill
        site.proxy.spoil([nth], moment)
        try:
            return False, client.commit(**site.change(number), key=f"k{number}")
        except httpx.TransportError:
            assert doomed.wait(DEADLINE_S)
            return True, None
        finally:
            site.proxy.between = lambda: None


LATE: Final = {"SHARDGATE_LIMITS__TIMEOUT_S": "30", "SHARDGATE_LIMITS__DEADLINE_S": "30"}


@pytest.mark.parametrize("moment", Late)
def test_who_is_stopped_at_any_step_has_committed_once_when_he_wakes_up(
    site: Site, moment: Late
) -> None:
    """Another one has made the same commit meanwhile; both are told the same."""
    nth, is_stopped = 0, True
    with site.behind_proxy(**LATE) as (sleeper, client):
        while is_stopped:
            number = 20_000 + nth + (moment is Late.ANSWER) * 1000
            made: list[str] = []

            def overtake(number: int = number, made: list[str] = made) -> None:
                sleeper.stop()
                made.append(site.healthy.commit(**site.change(number), key=f"k{number}"))
                sleeper.go_on()

            site.proxy.between = overtake
            site.proxy.spoil([nth], moment)
            told = client.commit(**site.change(number), key=f"k{number}")
            is_stopped = bool(made)
            assert made in ([], [told])
            site.demand(number, acknowledged=told)
            nth += 1
    site.proxy.between = lambda: None
    assert nth > STEPS


@pytest.mark.parametrize("mishap", mishaps())
def test_one_failure_of_the_store_is_made_good(site: Site, mishap: Mishap) -> None:
    """Whichever request of a commit it is, the commit is made, and told."""
    nth, is_reached = 0, True
    base = 10_000 + 1000 * list(Mishap).index(mishap)
    with site.behind_proxy() as (_, client):
        while is_reached:
            number = base + nth
            site.proxy.spoil([nth], mishap)
            made = client.commit(**site.change(number), key=f"k{number}")
            is_reached = len(site.proxy.seen) > nth
            site.demand(number, acknowledged=made)
            nth += 1
    assert nth > STEPS


def test_a_store_that_fails_on_is_told_of(site: Site) -> None:
    """What was not acknowledged is there once, or not; nobody hangs."""
    with site.behind_proxy() as (_, client):
        for number, nth in enumerate((0, 3, 6), 90_000):
            site.proxy.spoil(range(nth, 10**9), Mishap.ANSWER_LOST)
            answer = client.ask(**site.change(number), key=f"k{number}")
            assert answer.is_success or answer.is_server_error, answer.text
            site.demand(number, acknowledged=None)


def test_the_library_sees_one_line_of_history(site: Site) -> None:
    """After all this each commit has one parent and one child, and all can be read."""
    repo: icechunk.Repository = site.place.open()
    ancestors = list(repo.ancestry(branch="main"))

    assert [each.parent_id for each in ancestors[:-1]] == [each.id for each in ancestors[1:]]
    for each in ancestors[:3]:
        assert repo.readonly_session(snapshot_id=each.id).store is not None
