"""Concurrent writers while gateways end, and the store fails or lies, at random."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import ExitStack, closing
from math import inf
from typing import Final, Literal, NamedTuple

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.crowds import Plans, impossible, plans, play
from tests.support.faults.sites import IMPATIENT
from tests.support.gateways import Gateway, forked, of_dataset, start_gateway
from tests.support.histories import Write, ever, possible
from tests.support.labs import SMALL, Lab, requested_lab, value
from tests.support.seaweedfs import SeaweedFS
from tests.support.storage.proxy import Fault, Lie, Mishap, Proxy, Twist

SITES: Final = ("folder", pytest.param("seaweedfs", marks=pytest.mark.soak))
"""`test_rewrites.py` tests faults of each single request to SeaweedFS."""
WRITERS: Final = 16
TTL_S: Final = 60
"""Lifetime of cached entries: longer than any test, so that no expiry hides a stale entry."""
GRACE_S: Final = 25
"""Longest time that a gateway takes to end after SIGTERM."""
STOPPED_S: Final = 0.3


class Mischief(NamedTuple):
    """A signal that is sent to one of the gateways after a delay."""

    delay_s: float
    gateway: int
    what: Literal["kill", "terminate", "stop"]


class Pair:
    """Arrays in a store, and two gateways before it."""

    def __init__(self, lab: Lab, environ: Mapping[str, str]) -> None:
        self.lab = lab
        self._environ = environ
        self.gateways = [self._started() for _ in range(2)]
        self.urls = [each.url for each in self.gateways]

    def play(self, name: str, plans: Plans, mischief: list[Mischief]) -> list[str]:
        """Play *plans* and *mischief* concurrently; return the keys with impossible values."""

        async def do_all() -> None:
            for each in mischief:
                await asyncio.sleep(each.delay_s)
                await self._do(each)

        writes = asyncio.run(play(self.urls, name, plans, do_all))
        assert all(write.end < inf for write in writes)
        return impossible(writes, self.lab.read(name))

    def close(self) -> None:
        """Stop the gateways."""
        with ExitStack() as stack:
            for each in self.gateways:
                stack.enter_context(closing(each))

    async def _do(self, mischief: Mischief) -> None:
        gateway = self.gateways[mischief.gateway]
        if mischief.what == "stop":
            gateway.stop()
            await asyncio.sleep(STOPPED_S)
            gateway.go_on()
            return
        if mischief.what == "terminate":
            gateway.terminate()
            assert await asyncio.to_thread(gateway.wait, GRACE_S)
        await asyncio.to_thread(self._restart, mischief.gateway)

    def _restart(self, number: int) -> None:
        self.gateways[number].close()
        self.gateways[number] = self._started()
        self.urls[number] = self.gateways[number].url

    def _started(self) -> Gateway:
        return start_gateway(self._environ)


MISCHIEF: Final = st.lists(
    st.builds(
        Mischief,
        st.floats(0.005, 0.3),
        st.integers(0, 1),
        st.sampled_from(["kill", "terminate", "stop"]),
    ),
    min_size=1,
    max_size=4,
)
QUIET: Final = settings(suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module", params=SITES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Pair]:
    """Start the two gateways."""
    lab = requested_lab(request, tmp_path_factory)
    environ = of_dataset(lab.url, lab.seaweedfs, ttl_s=TTL_S)
    with closing(Pair(lab, environ)) as made:
        yield made


@pytest.mark.parametrize("examples", [2, pytest.param(40, marks=pytest.mark.soak)])
def test_acknowledged_writes_survive_signals_to_gateways(pair: Pair, examples: int) -> None:
    """Acknowledged writes survive random kills, ends and stops of the gateways."""

    @settings(QUIET, max_examples=examples)
    @given(steps=plans(WRITERS), mischief=MISCHIEF)
    def check(steps: Plans, mischief: list[Mischief]) -> None:
        assert pair.play(pair.lab.new_array(), steps, mischief) == []

    check()


@pytest.mark.parametrize("pair", ["seaweedfs"], indirect=True)
@settings(QUIET, max_examples=1)
@given(steps=plans(2 * WRITERS))
def test_concurrent_writers_of_a_bucket_lose_nothing(pair: Pair, steps: Plans) -> None:
    """No acknowledged write of 32 clients to the same shards through two gateways is lost."""
    assert pair.play(pair.lab.new_array(), steps, []) == []


LATE_S: Final = 3.5
"""Longer than the gateways wait for an answer."""
READS: Final = {"GET", "HEAD"}


class Erratic(Proxy):
    """Proxy that spoils random requests, or passes them on or answers them too late."""

    def __init__(self, upstream: str) -> None:
        super().__init__(upstream)
        self.between = lambda: time.sleep(LATE_S if self._draw() < self._late else 0)
        self.told: Counter[str] = Counter()
        """Number of spoilt requests by method."""
        self.begin([])

    def begin(
        self,
        faults: list[Fault],
        seed: int = 1,
        *,
        reads: float = 0,
        writes: float = 0,
        late: float = 0,
    ) -> None:
        """Spoil a share of the reads and of the writes by random *faults* from now on."""
        self._random = random.Random(seed)
        self._faults, self._late = faults, late
        self._shares = reads, writes

    def note(self, request: str) -> Fault | None:
        """Return the fault of this request, if any."""
        method = request.partition(" ")[0]
        if self._draw() >= self._shares[method not in READS]:
            return None
        if self._draw() < self._late:
            time.sleep(LATE_S)
            return None
        fault = self._random.choice(self._faults)
        if method == "DELETE" and fault is Lie.EMPTY_204:
            return None
        self.passes_on = self._draw() < 0.5
        self.told[method] += 1
        return fault

    def _draw(self) -> float:
        return self._random.random()


@pytest.fixture(scope="module")
def erring(
    seaweedfs: SeaweedFS, tmp_path_factory: pytest.TempPathFactory
) -> Generator[tuple[Pair, Erratic]]:
    """Start the proxy and two gateways that reach the store through it."""
    lab = Lab(tmp_path_factory.mktemp("erring"), seaweedfs)
    proxy = Erratic(seaweedfs.endpoint_url)
    with proxy.running():
        environ = of_dataset(lab.url, seaweedfs, endpoint_url=proxy.url) | IMPATIENT
        with closing(Pair(lab, environ)) as made:
            yield made, proxy


@pytest.mark.parametrize("examples", [1, pytest.param(30, marks=pytest.mark.soak)])
def test_acknowledged_writes_survive_errors_of_the_store(
    erring: tuple[Pair, Erratic], examples: int
) -> None:
    """Acknowledged writes survive random errors and late responses of the store.

    Deletions are left out: a request that creates an object may arrive after its retry succeeded
    and the object was deleted, and creates it again. No condition of S3 prevents this.
    """
    pair, proxy = erring

    @settings(QUIET, max_examples=examples)
    @given(steps=plans(WRITERS, deletes=False), seed=st.integers(0, 2**32))
    def check(steps: Plans, seed: int) -> None:
        name = pair.lab.new_array()
        proxy.begin(list(Mishap), seed, writes=0.3, late=0.05)
        try:
            assert pair.play(name, steps, []) == []
        finally:
            proxy.begin([])

    check()


CLIENTS: Final = 8
LIES: Final[list[Fault]] = [*Lie, *Twist]
ANSWERED: Final = {200, 403, 424, 503, 504}
"""Allowed statuses: neither absence nor an internal error."""
ENVIRON: Final = {
    "SHARDGATE_CACHE__CHUNK_BYTES": "0",
    "SHARDGATE_LIMITS__TIMEOUT_S": "5",
    "SHARDGATE_LIMITS__DEADLINE_S": "5",
}
"""Without a cache of chunks, so that each request reads the store."""


class LyingSite(NamedTuple):
    """Arrays in a store, and a gateway that reaches it through the proxy."""

    lab: Lab
    proxy: Erratic
    url: str

    def play(self, lies: list[Fault], share: float, reads: int, writes: int) -> Counter[str]:
        """Read and write the chunks of an array amid *lies*; return the number of each response."""
        old = {at: value(SMALL, 0, at) for at in range(SMALL.chunks)}
        name = self.lab.new_array(SMALL, old)
        history = [Write(f"{name}/c/{at}", data, -1, 0) for at, data in old.items()]
        steps = ["GET"] * reads + ["PUT"] * writes
        random.Random(1).shuffle(steps)
        self.proxy.begin(lies, reads=share, writes=3 * share)
        try:
            answers = asyncio.run(self._play(name, steps, history))
        finally:
            self.proxy.begin([])
        found = self.lab.read(name)
        assert [key for key, data in found.items() if data not in possible(history, key)] == []
        assert self._objects(name) == {"zarr.json", "c/0", "c/1"}
        return answers

    async def _play(self, name: str, steps: list[str], history: list[Write]) -> Counter[str]:
        answers = Counter[str]()

        async def work(client: httpx.AsyncClient, number: int) -> None:
            for step in range(number, len(steps), CLIENTS):
                key = f"{name}/c/{random.Random(step).randrange(SMALL.chunks)}"
                url = f"{self.url}/data/{key}"
                if steps[step] == "GET":
                    answer = await client.get(url)
                    assert not answer.is_success or answer.content in ever(history, key) - {None}
                else:
                    data = value(SMALL, 1 + number, step)
                    write = Write(key, data, time.monotonic())
                    history.append(write)
                    answer = await client.put(url, content=data)
                    if answer.is_success:
                        write.end = time.monotonic()
                answers[f"{steps[step]} {answer.status_code}"] += 1
                assert answer.status_code in ANSWERED, f"{steps[step]}: {answer.text}"

        async with httpx.AsyncClient(timeout=60) as client, asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(work(client, number))
        return answers

    def _objects(self, name: str) -> set[str]:
        server = self.lab.seaweedfs
        assert server is not None
        prefix = f"{self.lab.folder.name}/{name}/"
        listed = server.client.list_objects_v2(Bucket=server.bucket, Prefix=prefix)["Contents"]
        return {each["Key"].removeprefix(prefix) for each in listed}


@pytest.fixture(scope="module")
def site(seaweedfs: SeaweedFS, tmp_path_factory: pytest.TempPathFactory) -> Generator[LyingSite]:
    """Start the proxy and a gateway that has already probed the store."""
    lab = Lab(tmp_path_factory.mktemp("lies"), seaweedfs)
    proxy = Erratic(seaweedfs.endpoint_url)
    with proxy.running():
        environ = of_dataset(lab.url, seaweedfs, ttl_s=0.001, endpoint_url=proxy.url) | ENVIRON
        with forked(environ) as gateway:
            site = LyingSite(lab, proxy, gateway.url)
            assert site.play([], 0, 0, 1) == {"PUT 200": 1}
            yield site


def test_wrong_responses_of_the_store_yield_no_wrong_bytes(site: LyingSite) -> None:
    """Random wrong responses of the store yield no wrong bytes and lose no acknowledged write.

    Left out are lies that no length, checksum or ETag can reveal: another body of the same length
    under the right ETag, and a 204 to a DELETE that was not passed on, as S3 answers.
    """
    answers = site.play(LIES, 0.1, 200, 40)

    assert answers["GET 200"] > 100
    assert answers["PUT 200"] > 13
    assert site.proxy.told["GET"] > 20
    assert site.proxy.told["PUT"] > 0


@pytest.mark.soak
@pytest.mark.parametrize("lie", LIES)
def test_one_kind_of_wrong_response_yields_no_wrong_bytes(site: LyingSite, lie: Fault) -> None:
    """One kind of wrong response yields no wrong bytes and loses no acknowledged write."""
    site.play([lie], 0.2, 200, 100)
