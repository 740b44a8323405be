"""The commit of a session is cut off, stopped or killed at each step: it is made once, whole."""

from collections.abc import Generator
from itertools import count, pairwise
from typing import Final

import httpx
import pytest

from tests.faults.repository_sites import Site, opened_repository
from tests.faults.session_work import NBYTES, Session, make_array
from tests.faults.sites import DEADLINE_S
from tests.gateways import Start
from tests.seaweedfs import SeaweedFS
from tests.storage.proxy import Late, Mishap

STEPS: Final = 14
"""So many requests it takes at least: sealed, listed, read, checked, committed, marked."""
PATIENT: Final = {"SHARDGATE_LIMITS__TIMEOUT_S": "30", "SHARDGATE_LIMITS__DEADLINE_S": "30"}
NUMBERS: Final = count()


@pytest.fixture(scope="module")
def site(
    seaweedfs: SeaweedFS, tmp_path_factory: pytest.TempPathFactory, start: Start
) -> Generator[Site]:
    """Start what nothing happens to."""
    with opened_repository(seaweedfs, tmp_path_factory.mktemp("sessions"), start) as made:
        make_array(made)
        yield made


@pytest.mark.soak
@pytest.mark.parametrize("moment", [Mishap.REQUEST_LOST, Mishap.ANSWER_LOST])
def test_another_one_goes_on_where_one_was_killed(site: Site, moment: Mishap) -> None:
    """When the lease is over; what was acknowledged is all in one commit."""
    nth, is_killed = 0, True
    while is_killed:
        session = Session(site, next(NUMBERS))
        is_killed = killed(site, session, nth, moment)
        nth += 1
    assert nth > STEPS


@pytest.mark.parametrize("nth", [1, 8, 11, 13])
def test_another_one_goes_on_at_some_steps(site: Site, nth: int) -> None:
    """The same, not at each of them."""
    assert killed(site, Session(site, next(NUMBERS)), nth, Mishap.ANSWER_LOST)


def killed(site: Site, session: Session, nth: int, moment: Mishap) -> bool:
    """Kill who commits a session at the request *nth*; tell whether he got there."""
    acknowledged, is_killed = None, False
    with site.behind_proxy() as (doomed, client):
        site.proxy.between = doomed.kill
        site.proxy.spoil([nth], moment)
        try:
            acknowledged = session.commit(client)
        except httpx.TransportError:
            assert doomed.wait(DEADLINE_S)
            is_killed = True
        finally:
            site.proxy.between = lambda: None
    session.release()
    session.demand(acknowledged=acknowledged)
    return is_killed


@pytest.mark.parametrize("body", [b"\x09" * NBYTES, pytest.param(None, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "moment", [pytest.param(Mishap.REQUEST_LOST, marks=pytest.mark.soak), Mishap.ANSWER_LOST]
)
def test_a_write_cut_off_at_each_step_is_done_or_not(
    site: Site, moment: Mishap, body: bytes | None
) -> None:
    """Another gateway continues the session of the one that was killed, and commits it."""
    nth, is_killed = 0, True
    while is_killed:
        session = Session(site, next(NUMBERS))
        old = session.get(site.healthy, "b/c/0")
        with site.behind_proxy() as (doomed, client):
            site.proxy.between = doomed.kill
            site.proxy.spoil([nth], moment)
            try:
                assert session.put(client, "b/c/0", body).is_success
                is_killed = False
            except httpx.TransportError:
                assert doomed.wait(DEADLINE_S)
            finally:
                site.proxy.between = lambda: None
        found = session.get(site.healthy, "b/c/0")
        assert found == body or (is_killed and found == old)
        assert session.put(site.healthy, "a/c/0/0", b"\x07" * 4).is_success
        session.commit(site.healthy)
        assert bytes(site.healthy.values("b")[:NBYTES]) == (found or bytes(NBYTES))
        assert site.healthy.values("a")[0][0] == 7
        nth += 1
    assert nth > 2


@pytest.mark.soak
def test_a_lease_is_over_after_a_while(site: Site) -> None:
    """Nobody has to do anything about it but to wait."""
    session = Session(site, next(NUMBERS))
    with site.behind_proxy() as (doomed, client):
        site.proxy.between = doomed.kill
        site.proxy.spoil([6], Mishap.ANSWER_LOST)
        with pytest.raises(httpx.TransportError):
            session.commit(client)
    site.proxy.between = lambda: None

    session.demand(acknowledged=None)


@pytest.mark.parametrize(
    ("moment", "stride"),
    [
        (Late.REQUEST, 2),
        pytest.param(Late.REQUEST, 1, marks=pytest.mark.soak),
        pytest.param(Late.ANSWER, 1, marks=pytest.mark.soak),
    ],
)
def test_who_wakes_up_when_another_one_has_gone_on_commits_no_second_time(
    site: Site, moment: Late, stride: int
) -> None:
    """He was stopped at any step: he is told what has become of the session, or to ask again."""
    nth, is_stopped = 0, True
    with site.behind_proxy(**PATIENT) as (sleeper, client):
        while is_stopped:
            session = Session(site, next(NUMBERS))
            made: list[str] = []

            def overtake(session: Session = session, made: list[str] = made) -> None:
                sleeper.stop()
                session.release()
                made.append(session.commit(site.healthy))
                sleeper.go_on()

            site.proxy.between = overtake
            site.proxy.spoil([nth], moment)
            told = session.ask(client)
            site.proxy.spoil([], moment)
            is_stopped = bool(made)
            assert told.status_code in ({201, 503} if is_stopped else {201}), told.text
            session.demand(acknowledged=told.json().get("snapshot_id"))
            assert made in ([], [session.commit(site.healthy)])
            nth += stride
    site.proxy.between = lambda: None
    assert nth > STEPS


@pytest.mark.parametrize(
    "mishap",
    [
        pytest.param(
            each,
            marks=() if each is Mishap.ANSWER_LOST else pytest.mark.soak,
            id=each.name,
        )
        for each in Mishap
    ],
)
def test_one_failure_of_the_store_is_made_good(site: Site, mishap: Mishap) -> None:
    """Whichever request of the commit it is, it is made, and told."""
    nth, is_reached = 0, True
    with site.behind_proxy() as (_, client):
        while is_reached:
            session = Session(site, next(NUMBERS))
            site.proxy.spoil([nth], mishap)
            acknowledged = session.commit(client)
            is_reached = len(site.proxy.seen) > nth
            site.proxy.spoil([], mishap)
            session.demand(acknowledged=acknowledged)
            nth += 1
    assert nth > STEPS


def test_a_store_that_fails_on_is_told_of(site: Site) -> None:
    """What was acknowledged in the session is committed when it can be reached again."""
    with site.behind_proxy() as (_, client):
        for nth in (0, 3, 8, 12):
            session = Session(site, next(NUMBERS))
            site.proxy.spoil(range(nth, 10**9), Mishap.ANSWER_LOST)
            answer = session.ask(client)
            site.proxy.spoil([], Mishap.ERROR)
            assert answer.is_success or answer.is_server_error, answer.text
            session.release()
            session.demand(acknowledged=answer.json().get("snapshot_id"))


def test_the_library_sees_one_line_of_history(site: Site) -> None:
    """After all this each commit has one parent and one child, and changed what it tells of."""
    repo = site.place.open()
    ancestors = list(repo.ancestry(branch="main"))

    assert [each.parent_id for each in ancestors[:-1]] == [each.id for each in ancestors[1:]]
    for child, parent in list(pairwise(ancestors))[:10]:
        if child.message.startswith("session"):
            diff = repo.diff(from_snapshot_id=parent.id, to_snapshot_id=child.id)
            assert diff.new_groups == {f"/g{child.message.removeprefix('session ')}"}
            assert set(diff.updated_chunks) == {"/a", "/b"}
