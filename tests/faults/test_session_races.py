"""Keys are written into a session at each step of its commit: they are in it, or were refused."""

import time
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import httpx
import pytest
import zarr

from tests.faults.repository_sites import Site, opened_repository
from tests.faults.session_work import NBYTES, asked, begun, make_array, put
from tests.faults.sites import DEADLINE_S
from tests.gateways import Start
from tests.seaweedfs import SeaweedFS
from tests.sessions import GROUP
from tests.storage.proxy import Late

STEPS: Final = 12
HELD_S: Final = 0.2
"""What is written meanwhile has reached the store by then, or waits for the commit."""
PATIENT: Final = {"SHARDGATE_LIMITS__TIMEOUT_S": "30", "SHARDGATE_LIMITS__DEADLINE_S": "30"}


@pytest.fixture(scope="module")
def site(
    seaweedfs: SeaweedFS, tmp_path_factory: pytest.TempPathFactory, start: Start
) -> Generator[Site]:
    """Start what nothing happens to."""
    with opened_repository(seaweedfs, tmp_path_factory.mktemp("races"), start) as made:
        make_array(made)
        yield made


def test_what_is_written_amid_a_commit_is_in_it_or_refused(site: Site) -> None:
    """Through the gateway that commits, and through another one."""
    statuses, nth, is_reached = set[int](), 0, True
    with site.behind_proxy(**PATIENT) as (_, client), ThreadPoolExecutor(6) as pool:
        while is_reached:
            session_id = begun(site.healthy)
            before = bytes([1 + nth])
            for key, data in written(f"old{nth}", before).items():
                assert put(site.healthy, session_id, key, data).is_success
            answers: dict[str, Future[httpx.Response]] = {}

            def write(
                nth: int = nth,
                session_id: str = session_id,
                answers: dict[str, Future[httpx.Response]] = answers,
            ) -> None:
                for number, (key, data) in enumerate(
                    written(f"new{nth}", bytes([101 + nth])).items()
                ):
                    by = (site.healthy, client)[(number + nth) % 2]
                    answers[key] = pool.submit(put, by, session_id, key, data)
                time.sleep(HELD_S)

            site.proxy.between = write
            site.proxy.spoil([nth], Late.REQUEST)
            told = asked(client, session_id, message=f"{nth}")
            site.proxy.spoil([], Late.REQUEST)
            assert told.status_code == 201, told.text
            is_reached = bool(answers)
            found = read(site, told.json()["snapshot_id"], f"new{nth}")
            for key, answer in answers.items():
                got = answer.result(DEADLINE_S)
                assert got.status_code in {200, 201, 204, 409, 503}, got.text
                statuses.add(got.status_code)
                assert found[key] == got.is_success, (nth, key, got.text)
            nth += 1
    site.proxy.between = lambda: None
    assert nth > STEPS
    assert 409 in statuses
    assert statuses & {200, 201, 204}


def written(group: str, value: bytes) -> dict[str, bytes]:
    """Name what is put: a chunk that is kept inline, one with a file of its own, and a node."""
    return {
        "a/c/1/1": value * 4,
        "b/c/1": value * NBYTES,
        f"{group}/zarr.json": GROUP,
    }


def read(site: Site, snapshot_id: str, group: str) -> dict[str, bool]:
    """Tell by the library which of the later writes are in a snapshot."""
    store = site.place.open().readonly_session(snapshot_id=snapshot_id).store
    root: Any = zarr.open_group(store, mode="r")
    values = {"a/c/1/1": root["a"][3, 3], "b/c/1": root["b"][NBYTES]}
    later = {key: bool(value > 100) for key, value in values.items()}
    return later | {f"{group}/zarr.json": group in root}
