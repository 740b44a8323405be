"""The nginx of the chart, with the files that the chart gives it, finds gateways by DNS."""

import json
import subprocess
import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import httpx
import numpy as np
import pytest
import zarr

from tests.deploy.charts import Chart
from tests.deploy.naming import Names, naming
from tests.deploy.programs import helm, new_nginx
from tests.gateways import forked, of_dataset
from tests.seaweedfs import free_ports

SERVICE: Final = "demo-shardgate-replicas.lab.svc.cluster.local"
REPLICAS: Final = 3
SHARDS: Final = 24
CHUNKS: Final = 4
"""Of each shard."""
LONGEST_S: Final = 20.0


class Balanced:
    """nginx, and the names that it asks for."""

    def __init__(self, names: Names, client: httpx.Client, output: Path) -> None:
        self.names = names
        self._client = client
        self._output = output

    def read(self) -> dict[int, set[str]]:
        """Read every chunk, and tell where those of each shard came from."""
        before = len(self._logged())
        for chunk in range(SHARDS * CHUNKS):
            assert self._client.get(f"/data/c/{chunk}").content == bytes([chunk])
        replicas = defaultdict(set)
        for line in self._logged(before, at_least=SHARDS * CHUNKS):
            replicas[int(line["path"].rpartition("/")[2]) // CHUNKS].add(line["replica"])
        return dict(replicas)

    def _logged(self, since: int = 0, at_least: int = 0) -> list[dict[str, str]]:
        deadline = time.monotonic() + LONGEST_S
        while True:
            lines = [line for line in self._output.read_text().splitlines() if "/data/c/" in line]
            if len(lines) >= since + at_least:
                return [json.loads(line) for line in lines[since:]]
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def balanced(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Balanced]:
    """Run three gateways, a name server that knows them, and nginx as the chart has it."""
    made = zarr.create_array(
        tmp_path / "data", shape=(SHARDS * CHUNKS,), shards=(CHUNKS,), chunks=(1,), dtype="u1",
        compressors=None, fill_value=255,
    )  # fmt: skip
    made[:] = np.arange(SHARDS * CHUNKS, dtype="u1")
    with ExitStack() as stack:
        environ = of_dataset(str(tmp_path / "data"))
        gateways = [stack.enter_context(forked(environ)) for _ in range(REPLICAS)]
        ports = [int(gateway.url.rpartition(":")[2]) for gateway in gateways]
        names = Names(SERVICE, {f"10-0-0-{n}": port for n, port in enumerate(ports)})
        resolver = stack.enter_context(naming(names))
        (port,) = free_ports(1)
        files = Chart(helm(request)).render(**{"balancer.resolver": resolver})
        for name, text in files.resources["ConfigMap", "demo-shardgate-balancer"]["data"].items():
            here = text.replace("listen 8080", f"listen 127.0.0.1:{port}")
            (tmp_path / name).write_text(here.replace("valid=5s", "valid=1s"))
        output = tmp_path / "output"
        told = ["-p", f"{tmp_path}", "-e", "stderr", "-c", f"{tmp_path}/nginx.conf"]
        command = [new_nginx(request), *told, "-g", "daemon off;"]
        with output.open("wb") as written:
            process = stack.enter_context(subprocess.Popen(command, stdout=written, stderr=written))
        stack.callback(process.terminate)
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}"))
        _wait_until_it_answers(client, output)
        yield Balanced(names, client, output)


def _wait_until_it_answers(client: httpx.Client, output: Path) -> None:
    deadline = time.monotonic() + LONGEST_S
    while True:
        with suppress(httpx.TransportError):
            if client.get("/data/zarr.json").is_success:
                return
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.05)


def test_replicas_are_found_and_forgotten(balanced: Balanced) -> None:
    """Each shard has one of them, and only those of one that goes get another."""
    before = balanced.read()
    assert {len(replicas) for replicas in before.values()} == {1}
    assert len(set.union(*before.values())) == REPLICAS

    gone, port = next(iter(balanced.names.pods.items()))
    balanced.names.pods = {k: v for k, v in balanced.names.pods.items() if k != gone}
    deadline = time.monotonic() + LONGEST_S
    while f"127.0.0.1:{port}" in set.union(*(after := balanced.read()).values()):
        assert time.monotonic() < deadline

    assert {shard for shard in before if before[shard] != after[shard]} == {
        shard for shard in before if before[shard] == {f"127.0.0.1:{port}"}
    }
