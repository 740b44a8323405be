"""A proxy in front of the store lies by chance: no chunk is lost, foreign or taken for absent.

What no length, checksum or ETag can show is not among the lies: another body of the same length
under the right ETag, and a 204 to a DELETE that was not passed on, which is what S3 answers.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Generator
from contextlib import closing
from typing import Final

import httpx
import pytest

from tests.gateways import Start, of_dataset
from tests.histories import Write, ever, possible
from tests.labs import SMALL, Lab, value
from tests.seaweedfs import SeaweedFS
from tests.storage.proxy import Fault, Lie, Proxy, Twist

CLIENTS: Final = 8
LIES: Final[list[Fault]] = [*Lie, *Twist]
ANSWERED: Final = {200, 403, 502, 503, 504}
"""Statuses that say nothing of a chunk's absence, and that nothing in the gateway has failed."""
ENVIRON: Final = {
    "SHARDGATE_CACHE__CHUNK_BYTES": "0",
    "SHARDGATE_LIMITS__TIMEOUT_S": "5",
    "SHARDGATE_LIMITS__DEADLINE_S": "5",
}
"""Keep nothing, so that each request asks the store."""


class Lying(Proxy):
    """Lies by chance, of what it has passed on and of what it has not."""

    def __init__(self, upstream: str) -> None:
        super().__init__(upstream)
        self.told: Counter[str] = Counter()
        """How often a lie was the answer to a method."""
        self._lies: list[Fault] = []
        self._share = 0.0
        self._random = random.Random(0)

    def lie(self, lies: list[Fault], share: float) -> None:
        """Choose one of *lies* for a share of the reads, and for three times that of the writes."""
        self._lies, self._share = lies, share

    def note(self, request: str) -> Fault | None:
        """Choose what is answered."""
        method = request.partition(" ")[0]
        share = self._share if method in {"GET", "HEAD"} else 3 * self._share
        if self._random.random() >= share:
            return None
        lie = self._random.choice(self._lies)
        if method == "DELETE" and lie is Lie.EMPTY_204:
            return None
        self.passes_on = self._random.random() < 0.5
        self.told[method] += 1
        return lie


class Site:
    """A store with arrays in it, and a gateway that reaches it through the proxy."""

    def __init__(self, lab: Lab, proxy: Lying, url: str) -> None:
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
        self.proxy.lie(lies, share)
        try:
            answers = asyncio.run(self._play(name, steps, history))
        finally:
            self.proxy.lie([], 0)
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
def site(
    seaweedfs: SeaweedFS, tmp_path_factory: pytest.TempPathFactory, start: Start
) -> Generator[Site]:
    """Start the proxy and the gateway, which has found out already what the store can do."""
    lab = Lab(tmp_path_factory.mktemp("lies"), seaweedfs)
    with Lying(seaweedfs.endpoint_url).running() as proxy:
        assert isinstance(proxy, Lying)
        environ = of_dataset(lab.url, seaweedfs, ttl_s=0.001, endpoint_url=proxy.url) | ENVIRON
        with closing(start(environ)) as gateway:
            site = Site(lab, proxy, gateway.url)
            assert site.play([], 0, 0, 1) == {"PUT 200": 1}
            yield site


def test_lies_are_not_believed(site: Site) -> None:
    """Chunks are answered with their bytes or with an error; what is acknowledged is there."""
    answers = site.play(LIES, 0.1, 300, 60)

    assert answers["GET 200"] > 150
    assert answers["PUT 200"] > 20
    assert site.proxy.told["GET"] > 30
    assert site.proxy.told["PUT"] > 0


@pytest.mark.soak
@pytest.mark.parametrize("lie", LIES)
def test_no_lie_is_believed(site: Site, lie: Fault) -> None:
    """The same of each lie, many times."""
    site.play([lie], 0.2, 200, 100)
