"""How much nginx, configured as in `deploy/`, does at once, and what memory that takes."""

import re
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Final

import httpx
import yaml

from tests.deploy.balancer import Balancer, balancing
from tests.deploy.charts import CHART
from tests.deploy.dockerfile import ROOT
from tests.deploy.recorder import recording

CONFIGURATION: Final = ROOT / "deploy/nginx/nginx.conf"
WITH_ONE_PLACE: Final = "limit_conn requests 1;"


def test_requests_at_once_have_a_bound(tmp_path: Path) -> None:
    """One too many is told to come again, and has a place once another is gone."""
    with recording() as recorder, balancing(tmp_path, [recorder.url]) as balancer:
        path = tmp_path / "nginx.conf"
        path.write_text(path.read_text().replace("limit_conn requests 1024;", WITH_ONE_PLACE))
        balancer.send_to([recorder.url])
        with balancer.client() as client:
            with uploading(balancer):
                refused = until(client, 503)
            until(client, 200)

    assert refused.json()["detail"] == "too many requests are under way"
    assert refused.headers["retry-after"] == "1"
    assert refused.headers["x-request-id"]


@contextmanager
def uploading(balancer: Balancer) -> Generator[None]:
    """Have a request under way, whose body does not come."""
    host, _, port = balancer.host.partition(":")
    with (
        socket.create_connection((host, int(port)), 10) as plain,
        balancer.tls().wrap_socket(plain, server_hostname=host) as connection,
    ):
        connection.sendall(b"PUT /em/c/0 HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n")
        yield


def until(client: httpx.Client, status: int) -> httpx.Response:
    """Ask until the answer is *status*."""
    deadline = time.monotonic() + 9
    while (answer := client.get("/em/c/0")).status_code != status:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return answer


def test_the_chart_gives_the_memory_that_is_needed_at_worst() -> None:
    """What all requests and connections can hold leaves a part of the limit to nginx itself."""
    text = CONFIGURATION.read_text("utf-8")

    def found(name: str) -> list[int]:
        [values] = re.findall(rf"^ *(?:.*[{{] )?{name} ([^;]*);", text, re.MULTILINE)
        return [int(n) * (1024 if k else 1) for n, k in re.findall(r"\b(\d+)(k?)\b", values)]

    buffers = ("large_client_header_buffers", "proxy_buffers")
    request_nbytes = sum(prod(found(name)) for name in buffers) + 2 * found("proxy_buffer_size")[0]
    [requests], [workers] = found("limit_conn"), found("worker_processes")
    connections = workers * found("worker_connections")[0]
    needed_mib = (requests * request_nbytes + connections * 32 * 1024) / 2**20

    limits = yaml.safe_load((CHART / "values.yaml").read_text())["balancer"]["resources"]["limits"]
    assert f"At worst {needed_mib:.0f} MiB, of {limits['memory'].removesuffix('Mi')}" in text
    assert needed_mib < 0.95 * int(limits["memory"].removesuffix("Mi"))
