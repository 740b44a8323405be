"""Gateways end, and the store fails or lies, at random while many write."""

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

from tests.faults.sites import IMPATIENT
from tests.storage.proxy import Fault, Lie, Mishap, Proxy, Twist
from tests.support.crowds import Plans, impossible, plans, play
from tests.support.gateways import Gateway, forked, of_dataset, start_gateway
from tests.support.histories import Write, ever, possible
from tests.support.labs import SMALL, Lab, requested_lab, value
from tests.support.seaweedfs import SeaweedFS

SITES: Final = ("folder", pytest.param("seaweedfs", marks=pytest.mark.soak))
"""What becomes of each request to the other, `test_rewrites.py` has."""
WRITERS: Final = 16
TTL_S: Final = 60
"""Of what the gateways remember: longer than any test, so that nothing is right by chance."""
GRACE_S: Final = 25
"""A gateway that is asked to ends by then."""
STOPPED_S: Final = 0.3


class Mischief(NamedTuple):
    """What is done to one of the gateways after a while."""

    delay_s: float
    gateway: int
    what: Literal["kill", "terminate", "stop"]


class Pair:
    """The store with arrays in it, and the gateways."""

    def __init__(self, lab: Lab, environ: Mapping[str, str]) -> None:
        self.lab = lab
        self._environ = environ
        self.gateways = [self._started() for _ in range(2)]
        self.urls = [each.url for each in self.gateways]

    def play(self, name: str, plans: Plans, mischief: list[Mischief]) -> list[str]:
        """Let all write meanwhile, and name the keys under which there is what cannot be there."""

        async def do_all() -> None:
            for each in mischief:
                await asyncio.sleep(each.delay_s)
                await self._do(each)

        writes = asyncio.run(play(self.urls, name, plans, do_all))
        assert all(write.end < inf for write in writes)
        return impossible(writes, self.lab.read(name))

    def close(self) -> None:
        """End the gateways."""
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
    """Start the gateways."""
    lab = requested_lab(request, tmp_path_factory)
    environ = of_dataset(lab.url, lab.seaweedfs, ttl_s=TTL_S)
    with closing(Pair(lab, environ)) as made:
        yield made


@pytest.mark.parametrize("examples", [4, pytest.param(40, marks=pytest.mark.soak)])
def test_what_is_acknowledged_is_there(pair: Pair, examples: int) -> None:
    """Writers who repeat what was not acknowledged find what was, for who reads directly too."""

    @settings(QUIET, max_examples=examples)
    @given(steps=plans(WRITERS), mischief=MISCHIEF)
    def check(steps: Plans, mischief: list[Mischief]) -> None:
        assert pair.play(pair.lab.new_array(), steps, mischief) == []

    check()


@pytest.mark.parametrize("pair", ["seaweedfs"], indirect=True)
@settings(QUIET, max_examples=5)
@given(steps=plans(2 * WRITERS))
def test_concurrent_writers_of_a_bucket_lose_nothing(pair: Pair, steps: Plans) -> None:
    """32 clients put and delete chunks of the same shards through both gateways."""
    assert pair.play(pair.lab.new_array(), steps, []) == []


LATE_S: Final = 3.5
"""Longer than the gateways wait for an answer."""
READS: Final = {"GET", "HEAD"}


class Erratic(Proxy):
    """Spoils requests by chance, or passes writes on too late; answers may come too late too."""

    def __init__(self, upstream: str) -> None:
        super().__init__(upstream)
        self.between = lambda: time.sleep(LATE_S if self._draw() < self._late else 0)
        self.told: Counter[str] = Counter()
        """How often the requests of a method were spoilt."""
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
        """Choose one of *faults* for a share of the reads and of the writes from now on."""
        self._random = random.Random(seed)
        self._faults, self._late = faults, late
        self._shares = reads, writes

    def note(self, request: str) -> Fault | None:
        """Choose what is to become of a request."""
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


@pytest.mark.parametrize("examples", [2, pytest.param(30, marks=pytest.mark.soak)])
def test_no_error_of_the_store_loses_what_is_acknowledged(
    erring: tuple[Pair, Erratic], examples: int
) -> None:
    """Each chunk is one that was put last, and readers never see anything else or a failure.

    Nothing is taken away here: the request that first made an object, and arrives after that was
    seen to be made by another and removed, makes it again. No condition of S3 tells them apart.
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
"""Statuses that say nothing of a chunk's absence, and that nothing in the gateway has failed."""
ENVIRON: Final = {
    "SHARDGATE_CACHE__CHUNK_BYTES": "0",
    "SHARDGATE_LIMITS__TIMEOUT_S": "5",
    "SHARDGATE_LIMITS__DEADLINE_S": "5",
}
"""Keep nothing, so that each request asks the store."""


class LyingSite:
    """A store with arrays in it, and a gateway that reaches it through the proxy."""

    def __init__(self, lab: Lab, proxy: Erratic, url: str) -> None:
        self.lab = lab
        self.proxy = proxy
        self.url = url

    def play(self, lies: list[Fault], share: float, reads: int, writes: int) -> Counter[str]:
        """Read and write the chunks of an array amid *lies*; count what is answered."""
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
    """Start the proxy and the gateway, which has found out already what the store can do."""
    lab = Lab(tmp_path_factory.mktemp("lies"), seaweedfs)
    proxy = Erratic(seaweedfs.endpoint_url)
    with proxy.running():
        environ = of_dataset(lab.url, seaweedfs, ttl_s=0.001, endpoint_url=proxy.url) | ENVIRON
        with forked(environ) as gateway:
            site = LyingSite(lab, proxy, gateway.url)
            assert site.play([], 0, 0, 1) == {"PUT 200": 1}
            yield site


def test_lies_are_not_believed(site: LyingSite) -> None:
    """Chunks are answered with their bytes or with an error; what is acknowledged is there.

    What no length, checksum or ETag can show is not among the lies: another body of the same
    length under the right ETag, and a 204 to a DELETE that was not passed on, as S3 answers.
    """
    answers = site.play(LIES, 0.1, 300, 60)

    assert answers["GET 200"] > 150
    assert answers["PUT 200"] > 20
    assert site.proxy.told["GET"] > 30
    assert site.proxy.told["PUT"] > 0


@pytest.mark.soak
@pytest.mark.parametrize("lie", LIES)
def test_no_lie_is_believed(site: LyingSite, lie: Fault) -> None:
    """The same of each lie, many times."""
    site.play([lie], 0.2, 200, 100)
