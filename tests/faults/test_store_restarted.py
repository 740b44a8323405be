"""The store dies while many read and write, and comes back: nothing acknowledged is lost."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http import HTTPStatus
from pathlib import Path
from threading import Event
from typing import Final

import httpx

from tests.gateways import Start, of_dataset
from tests.labs import SMALL, Lab, value
from tests.seaweedfs import own_ports, running

WRITERS: Final = 6
READERS: Final = 2
LONGEST_S: Final = 30
SOON_S: Final = 5


class Writer:
    """Writes numbered values to one chunk, and tells how far it came."""

    def __init__(self, base: str, chunk: int) -> None:
        self.chunk = chunk
        self.tried = self.acknowledged = self.refused = 0
        self._url = f"{base}/c/{chunk}"

    def write(self, ended: Event) -> None:
        """Write on, whatever the answer."""
        with httpx.Client(timeout=LONGEST_S) as client:
            while not ended.is_set():
                self.tried += 1
                answer = client.put(self._url, content=value(SMALL, self.chunk + 1, self.tried))
                if answer.is_success:
                    self.acknowledged = self.tried
                else:
                    assert answer.status_code in (502, 503, 504), answer.text
                    assert answer.headers.get("retry-after") or answer.status_code == 502
                    self.refused += 1

    @property
    def possible(self) -> set[bytes]:
        """What may be there: what was acknowledged last, or was tried since."""
        numbers = range(self.acknowledged, self.tried + 1)
        return {value(SMALL, self.chunk + 1, number) for number in numbers}

    def wait_for_more(self, deadline: float) -> None:
        """Wait until another write is acknowledged."""
        before = self.acknowledged
        while self.acknowledged == before:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def read_on(base: str, ended: Event) -> set[int]:
    """Read chunks over and over; tell which answers there were."""
    seen = set()
    with httpx.Client(timeout=LONGEST_S) as client:
        while not ended.is_set():
            for chunk in range(SMALL.chunks):
                answer = client.get(f"{base}/c/{chunk}")
                seen.add(answer.status_code)
                assert not answer.is_success or len(answer.content) == SMALL.chunk_nbytes
    return seen


def test_a_store_that_comes_back_is_used_again(tmp_path: Path, weed: Path, start: Start) -> None:
    """By itself and soon; meanwhile nobody is told that a chunk is absent."""
    (tmp_path / "weed").mkdir()
    ports, ended = own_ports(tmp_path / "weed"), Event()
    chunks = {at: value(SMALL, 99, at) for at in range(SMALL.chunks)}
    with running(weed, tmp_path / "weed", ports) as store:
        lab = Lab(tmp_path / "lab", store)
        name = lab.new_array(SMALL, chunks)
        environ = of_dataset(lab.url, store, ttl_s=0.1) | {"SHARDGATE_CACHE__CHUNK_BYTES": "0"}
        gateway = start(environ | {"SHARDGATE_LIMITS__DEADLINE_S": "3"})
    with closing(gateway), ThreadPoolExecutor(WRITERS + READERS) as pool:
        base = f"{gateway.url}/data/{name}"
        writers = [Writer(base, chunk) for chunk in range(WRITERS)]
        try:
            with running(weed, tmp_path / "weed", ports):
                writing = [pool.submit(each.write, ended) for each in writers]
                reading = [pool.submit(read_on, base, ended) for _ in range(READERS)]
                for each in writers:
                    each.wait_for_more(time.monotonic() + LONGEST_S)
            time.sleep(0.5)
            with running(weed, tmp_path / "weed", ports) as store:
                for each in writers:
                    each.wait_for_more(time.monotonic() + SOON_S)
                ended.set()
                for done in writing:
                    done.result(LONGEST_S)
                seen = set.union(*(done.result(LONGEST_S) for done in reading))
                found = Lab(tmp_path / "lab", store).read(name)
        finally:
            ended.set()

    assert sum(each.refused for each in writers) > 0
    assert HTTPStatus.NOT_FOUND not in seen
    for each in writers:
        assert found[f"{name}/c/{each.chunk}"] in each.possible
    for chunk in range(WRITERS, SMALL.chunks):
        assert found[f"{name}/c/{chunk}"] == chunks[chunk]
