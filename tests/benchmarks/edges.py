"""Part w: the first byte of a chunk from a shared cache near the client, far from the gateway."""

import shutil
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Final

from tests.support.deploy.edges import varnishing

from .delays import proxying
from .figures import Figure, Goal
from .load import Request
from .servers import DATASET, Server, nginx_deployed, shardgate
from .throughput import read_bodies

_GATEWAY_S: Final = 0.05
"""Delay between the gateway and all others."""
_CHUNKS: Final = 16
_FAR: Final = "gateway"


def measure(home: Path, root: Path, store: Server, *, rounds: int) -> list[Figure]:
    """Get chunks from the gateway and from caches that hold them, in turn."""
    home.mkdir()
    bodies = islice(read_bodies(root / "plain").items(), _CHUNKS)
    requests = [Request(f"/{DATASET}/morton/{key}", {}, body) for key, body in bodies]
    with _servers(home, store) as ports:
        samples: dict[str, list[float]] = {name: [] for name in ports}
        for port in ports.values():
            _first_byte_ms(port, requests)
        for _ in range(rounds):
            for name, port in ports.items():
                samples[name].append(_first_byte_ms(port, requests))
    far = samples.pop(_FAR)
    figures = [Figure.over("w", "first byte, gateway 50 ms away", "ms", far)]
    for name, each in samples.items():
        ratios = [near / origin for near, origin in zip(each, far, strict=True)]
        figures += [
            Figure.over("w", f"first byte, {name} beside the client", "ms", each),
            Figure.over("w", "  the same, beside the gateway", "×", ratios, Goal("at most", 0.2)),
        ]
    return figures


def _first_byte_ms(port: int, requests: Sequence[Request]) -> float:
    """Return the median time to the head of a response, over one connection."""
    times = []
    with closing(HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.connect()
        for request in requests:
            began_at = perf_counter()
            connection.request("GET", request.path)
            answer = connection.getresponse()
            times.append(perf_counter() - began_at)
            if answer.status != 200 or answer.read() != request.body:
                raise RuntimeError(f"{request.path}: {answer.status}")
    return median(times) * 1000


@contextmanager
def _servers(home: Path, store: Server) -> Generator[dict[str, int]]:
    """Start the gateway and the caches, and yield their ports by name."""
    with ExitStack() as running:
        start = running.enter_context
        kept = '\ncache_control = "public, max-age=3600"\n'
        gateway = start(shardgate(home / "gateway", store, chunk_bytes=256 << 20, more=kept))
        far = start(proxying(gateway.port, _GATEWAY_S))
        ports = {_FAR: far.port}
        ports["nginx"] = start(
            nginx_deployed(home / "cache", Server(0, far.port), cached=True)
        ).port
        if shutil.which("varnishd"):
            (home / "varnish").mkdir()
            ports["Varnish"] = start(varnishing(home / "varnish", f"http://:{far.port}"))
        yield ports
