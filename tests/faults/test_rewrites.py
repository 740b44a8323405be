"""A gateway is killed, or its store fails or restarts, at each request of a rewrite."""

import json
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http import HTTPStatus
from pathlib import Path
from threading import Event
from typing import Final, NamedTuple

import httpx
import pytest

from tests.support.faults.sites import DEADLINE_S, IMPATIENT, PATIENT, Site, killed, opened
from tests.support.gateways import Gateway, of_dataset, start_gateway
from tests.support.labs import LARGE, SMALL, Lab, Shape, value
from tests.support.processes import wait_until
from tests.support.seaweedfs import SeaweedFS, own_ports, running
from tests.support.storage.proxy import Mishap

MOMENTS: Final = (
    pytest.param(Mishap.ANSWER_LOST, id="after"),
    pytest.param(Mishap.REQUEST_LOST, id="before", marks=pytest.mark.soak),
)
"""Soak runs only: before a request, the store is as it was after the previous one."""


class Rewrite(NamedTuple):
    """A rewrite of a shard during which the gateway is killed."""

    shape: Shape
    chunks: range
    """Chunks that exist before the rewrite."""
    chunk: int
    """Chunk that is put or deleted."""
    is_delete: bool
    steps: int
    """Least number of requests that the rewrite sends."""


FIRST: Final = Rewrite(SMALL, range(0), 1, is_delete=False, steps=2)
PUT: Final = Rewrite(SMALL, range(3), 1, is_delete=False, steps=3)
LAST: Final = Rewrite(SMALL, range(1), 0, is_delete=True, steps=2)
COPY: Final = Rewrite(LARGE, range(24), 11, is_delete=False, steps=10)

moments = pytest.mark.parametrize("moment", MOMENTS)


@pytest.fixture(scope="module")
def site(seaweedfs: SeaweedFS, tmp_path_factory: pytest.TempPathFactory) -> Generator[Site]:
    """Start the direct gateway and the proxy."""
    with opened(seaweedfs, tmp_path_factory.mktemp("killed")) as made:
        yield made


@moments
@pytest.mark.parametrize(
    "rewrite",
    [
        # A first shard is written as a later one, under another condition.
        pytest.param(FIRST, id="first", marks=pytest.mark.soak),
        pytest.param(PUT, id="put"),
        pytest.param(LAST, id="last"),
    ],
)
def test_killed_gateway_leaves_a_small_shard_old_or_new(
    site: Site, rewrite: Rewrite, moment: Mishap
) -> None:
    """A gateway killed during a small rewrite leaves the old or the new shard, nothing else."""
    names = rewritten(site, rewrite, moment)

    assert len(names) > rewrite.steps
    assert [site.lab.left(name) for name in names] == [[]] * len(names)


@pytest.mark.soak
@moments
def test_killed_gateway_leaves_a_large_shard_old_or_new(site: Site, moment: Mishap) -> None:
    """A gateway killed during a copy leaves the old or new shard, and one upload at most."""
    names = rewritten(site, COPY, moment)

    assert len(names) > COPY.steps
    assert max(len(site.lab.left(name)) for name in names) == 1
    assert site.lab.left(names[-1]) == []


@moments
def test_killed_gateway_leaves_metadata_old_or_new(site: Site, moment: Mishap) -> None:
    """A gateway killed during a metadata write leaves the old or the new document."""
    nth, is_killed = 0, True
    while is_killed:
        old = {0: value(SMALL, 1, 0)}
        name = site.lab.new_array(SMALL, old)

        is_killed = cut_off(site, nth, moment, f"{name}/zarr.json", document(site, name, new=True))

        attributes = dict(site.lab.open(name).attrs)
        assert attributes == {"new": True} or (is_killed and attributes == {})
        assert site.lab.read(name)[f"{name}/c/0"] == old[0]
        more = site.put(site.healthy, f"{name}/zarr.json", document(site, name, more=1))
        assert more.is_success
        assert dict(site.lab.open(name).attrs) == {"more": 1}
        nth += 1
    assert nth > 1


def document(site: Site, name: str, **attributes: object) -> bytes:
    """Return the metadata of an array, as served, with other attributes."""
    seen = json.loads(site.get(site.healthy, f"{name}/zarr.json") or b"")
    return json.dumps(seen | {"attributes": attributes}).encode()


def cut_off(site: Site, nth: int, moment: Mishap, key: str, data: bytes | None) -> bool:
    """Kill a gateway at the *nth* request of a write; return whether it was killed."""

    def write() -> None:
        assert site.put(doomed, key, data).is_success

    with site.behind_proxy() as doomed:
        return killed(site.proxy, doomed, [nth], moment, write)


def rewritten(site: Site, rewrite: Rewrite, moment: Mishap) -> list[str]:
    """Rewrite a shard of a new array for each request to kill at; return the arrays' names."""
    old = {at: value(rewrite.shape, 1, at) for at in rewrite.chunks}
    new = None if rewrite.is_delete else value(rewrite.shape, 2, 0)
    names: list[str] = []
    is_killed = True
    while is_killed:
        name = site.lab.new_array(rewrite.shape, old)
        key = f"{name}/c/{rewrite.chunk}"
        is_killed = cut_off(site, len(names), moment, key, new)

        expected = {f"{name}/c/{at}": old.get(at) for at in range(rewrite.shape.chunks)}
        found = site.lab.read(name)
        assert found[key] == new or (is_killed and found[key] == expected[key])
        assert found == expected | {key: found[key]}
        _demand_that_all_goes_on(site, rewrite, found, key)
        names.append(name)
    return names


def _demand_that_all_goes_on(
    site: Site, rewrite: Rewrite, found: dict[str, bytes | None], key: str
) -> None:
    """Assert that the direct gateway reads what is stored, and can write the chunk."""
    assert {each: site.get(site.healthy, each) for each in found} == found
    more = value(rewrite.shape, 3, 0)
    assert site.put(site.healthy, key, more).is_success
    name = key.partition("/")[0]
    assert site.lab.read(name) == found | {key: more}


LATE_S: Final = 3.5
"""Longer than the gateway waits for an answer."""
OURS: Final = 1
THEIRS: Final = 2
"""Chunks that are put concurrently, each through one of the two gateways."""
STEPS: Final = {SMALL: 3, LARGE: 10}
"""Least number of requests that the rewrite of a shard sends."""
FOR_EVER: Final = 10**9
PAUSE_S: Final = 0.01
"""Time between requests of those that read or write until the end."""

USUAL: Final = {Mishap.ANSWER_LOST, Mishap.CONFLICT}
"""Those that leave the most doubt; tests/storage/test_lost_messages.py has all in every run."""
mishaps = pytest.mark.parametrize(
    "mishap",
    [
        pytest.param(each, id=each.name, marks=() if each in USUAL else pytest.mark.soak)
        for each in Mishap
    ],
)


@pytest.fixture(scope="module")
def spoilt(site: Site) -> Generator[Gateway]:
    """Start a gateway with short timeouts behind the proxy."""
    with site.behind_proxy(**IMPATIENT) as made:
        yield made


@pytest.fixture(scope="module")
def patient(site: Site) -> Generator[Gateway]:
    """Start a gateway behind the proxy whose timeouts a busy machine does not reach."""
    with site.behind_proxy(**PATIENT) as made:
        yield made


class Race:
    """Two chunks of one shard, put concurrently, beside others that do not change."""

    def __init__(self, site: Site, shape: Shape, nth: range, mishap: Mishap) -> None:
        self._site = site
        self.old = {at: value(shape, 1, at) for at in range(shape.chunks)}
        self.new = {at: value(shape, 2, at) for at in (OURS, THEIRS)}
        self.name = site.lab.new_array(shape, self.old)
        site.proxy.spoil(nth, mishap)

    def run(self, spoilt: Gateway) -> tuple[httpx.Response, httpx.Response]:
        """Put both chunks while the direct gateway reads; return both responses."""
        done = Event()
        with ThreadPoolExecutor(3) as pool:
            reader = pool.submit(self._look_on, done)
            answers = [
                pool.submit(self._put, *each)
                for each in ((spoilt, OURS), (self._site.healthy, THEIRS))
            ]
            try:
                ours, theirs = [each.result(DEADLINE_S) for each in answers]
            finally:
                done.set()
            reader.result(DEADLINE_S)
        return ours, theirs

    def demand(self, gateway: Gateway, *, is_done: bool) -> None:
        """Assert the shard's chunks, and that *gateway* can read and write them."""
        self._site.proxy.spoil([], Mishap.ERROR)
        found = self._site.lab.read(self.name)
        ours = found[self._key(OURS)]
        assert ours == self.new[OURS] or (not is_done and ours == self.old[OURS])
        expected = {self._key(at): data for at, data in (self.old | self.new).items()}
        assert found == expected | {self._key(OURS): ours}
        deadline = time.monotonic() + DEADLINE_S
        while (answer := self._put(gateway, OURS)).status_code == HTTPStatus.GATEWAY_TIMEOUT:
            assert time.monotonic() < deadline
        assert answer.is_success, answer.text
        assert self._site.lab.read(self.name) == expected
        assert self._site.get(gateway, self._key(THEIRS)) == self.new[THEIRS]

    def _put(self, gateway: Gateway, chunk: int) -> httpx.Response:
        return self._site.put(gateway, self._key(chunk), self.new[chunk])

    def _look_on(self, done: Event) -> None:
        while not done.wait(PAUSE_S):
            for at in (OURS, THEIRS, 0):
                seen = self._site.get(self._site.healthy, self._key(at))
                assert seen in (self.old[at], self.new.get(at, self.old[at]))

    def _key(self, chunk: int) -> str:
        return f"{self.name}/c/{chunk}"


@pytest.mark.parametrize(
    "shape",
    [pytest.param(SMALL, id="small"), pytest.param(LARGE, id="copied", marks=pytest.mark.soak)],
)
@mishaps
def test_put_succeeds_after_one_failed_request_to_the_store(
    site: Site, patient: Gateway, mishap: Mishap, shape: Shape
) -> None:
    """A PUT gets 200 when any one request to the store fails, and keeps others' chunks."""
    assert spoil_each_step(site, patient, shape, mishap) == {HTTPStatus.OK}


@pytest.mark.soak
@pytest.mark.parametrize("mishap", [Mishap.ANSWER_LOST, Mishap.REQUEST_LOST])
def test_put_after_a_late_response_of_the_store_gets_200_or_504(
    site: Site, spoilt: Gateway, mishap: Mishap
) -> None:
    """A PUT gets 200 or 504 when any one response of the store is late."""
    site.proxy.between = lambda: time.sleep(LATE_S)
    try:
        told = spoil_each_step(site, spoilt, SMALL, mishap)
        assert told == {HTTPStatus.OK, HTTPStatus.GATEWAY_TIMEOUT}
    finally:
        site.proxy.between = lambda: None


@pytest.mark.parametrize("nth", [pytest.param(0, marks=pytest.mark.soak), 2])
@mishaps
def test_put_during_an_outage_of_the_store_leaves_the_chunk_old_or_new(
    site: Site, spoilt: Gateway, mishap: Mishap, nth: int
) -> None:
    """A PUT during an outage of the store succeeds or gets a 5xx and leaves old or new bytes."""
    race = Race(site, SMALL, range(nth, FOR_EVER), mishap)

    ours, theirs = race.run(spoilt)

    assert theirs.is_success, theirs.text
    assert ours.is_success or ours.is_server_error, ours.text
    race.demand(spoilt, is_done=ours.is_success)


def spoil_each_step(site: Site, spoilt: Gateway, shape: Shape, mishap: Mishap) -> set[int]:
    """Spoil each request of a rewrite in turn; return the statuses of the PUTs."""
    statuses, nth, is_reached = set(), 0, True
    while is_reached:
        race = Race(site, shape, range(nth, nth + 1), mishap)

        ours, theirs = race.run(spoilt)

        is_reached = len(site.proxy.seen) > nth
        assert theirs.is_success, theirs.text
        race.demand(spoilt, is_done=ours.is_success)
        site.lab.remove(race.name)
        statuses.add(ours.status_code)
        nth += 1
    assert nth > STEPS[shape]
    return statuses


WRITERS: Final = 6


class Writer:
    """Writes numbered values to one chunk, and counts acknowledged and refused writes."""

    def __init__(self, base: str, chunk: int) -> None:
        self.chunk = chunk
        self.tried = self.acknowledged = self.refused = 0
        self._url = f"{base}/c/{chunk}"

    def write(self, ended: Event) -> None:
        """Write until *ended*, whatever the responses."""
        with httpx.Client(timeout=DEADLINE_S) as client:
            while not ended.wait(PAUSE_S):
                self.tried += 1
                answer = client.put(self._url, content=value(SMALL, self.chunk + 1, self.tried))
                if answer.is_success:
                    self.acknowledged = self.tried
                else:
                    assert answer.status_code in (424, 503, 504), answer.text
                    assert answer.headers.get("retry-after") or answer.status_code == 424
                    self.refused += 1

    @property
    def possible(self) -> set[bytes]:
        """Values that may be stored: the last acknowledged, and those tried since."""
        numbers = range(self.acknowledged, self.tried + 1)
        return {value(SMALL, self.chunk + 1, number) for number in numbers}

    def wait_for_more(self) -> None:
        """Wait until another write is acknowledged."""
        before = self.acknowledged
        wait_until(lambda: self.acknowledged != before)


def read_on(base: str, ended: Event) -> set[int]:
    """Read all chunks until *ended*; return the statuses seen."""
    seen = set()
    with httpx.Client(timeout=DEADLINE_S) as client:
        while not ended.wait(PAUSE_S):
            for chunk in range(SMALL.chunks):
                answer = client.get(f"{base}/c/{chunk}")
                seen.add(answer.status_code)
                assert not answer.is_success or len(answer.content) == SMALL.chunk_nbytes
    return seen


def test_writes_succeed_after_a_restart_of_the_store(tmp_path: Path, weed: Path) -> None:
    """A store that is back is read and written again; no chunk was 404 in between."""
    (tmp_path / "weed").mkdir()
    ports, ended = own_ports(tmp_path / "weed"), Event()
    chunks = {at: value(SMALL, 99, at) for at in range(SMALL.chunks)}
    with running(weed, tmp_path / "weed", ports) as store:
        lab = Lab(tmp_path / "lab", store)
        name = lab.new_array(SMALL, chunks)
        environ = of_dataset(lab.url, store, ttl_s=0.1) | {"SHARDGATE_CACHE__CHUNK_BYTES": "0"}
        gateway = start_gateway(environ | {"SHARDGATE_LIMITS__DEADLINE_S": "3"})
    with closing(gateway), ThreadPoolExecutor(WRITERS + 1) as pool:
        base = f"{gateway.url}/data/{name}"
        writers = [Writer(base, chunk) for chunk in range(WRITERS)]
        try:
            with running(weed, tmp_path / "weed", ports):
                writing = [pool.submit(each.write, ended) for each in writers]
                reading = pool.submit(read_on, base, ended)
                for each in writers:
                    each.wait_for_more()
            time.sleep(0.5)
            with running(weed, tmp_path / "weed", ports) as store:
                for each in writers:
                    each.wait_for_more()
                ended.set()
                for done in writing:
                    done.result(DEADLINE_S)
                seen = reading.result(DEADLINE_S)
                found = Lab(tmp_path / "lab", store).read(name)
        finally:
            ended.set()

    assert sum(each.refused for each in writers) > 0
    assert HTTPStatus.NOT_FOUND not in seen
    for each in writers:
        assert found[f"{name}/c/{each.chunk}"] in each.possible
    for chunk in range(WRITERS, SMALL.chunks):
        assert found[f"{name}/c/{chunk}"] == chunks[chunk]
