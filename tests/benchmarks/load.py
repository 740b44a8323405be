"""Load by wrk with 16 connections, on the contestants in turn, round after round."""

import json
import subprocess
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from .client import connected
from .figures import cpu_seconds
from .servers import Server

CONNECTIONS: Final = 16
_PROCESSES: Final = 8
_SCRIPT: Final = Path(__file__).with_name("requests.lua")


class Request(NamedTuple):
    """A request and its expected body."""

    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Contestant:
    """A server and its requests; *parts* are the comparisons for which it is needed."""

    name: str
    parts: str
    server: Server
    status: int
    requests: Sequence[Request]


@dataclass(frozen=True, slots=True)
class Sample:
    """Results of one round of one contestant."""

    per_second: float
    p50_ms: float
    p99_ms: float
    cpu_us: float


def check(contestant: Contestant) -> list[dict[str, str]]:
    """Send each request once, compare the bodies, and return the headers of the responses."""
    requests = contestant.requests
    with connected(contestant.server.port, CONNECTIONS) as client:
        answers = client.ask_all([r.path for r in requests], [r.headers for r in requests])
    for request, answer in zip(requests, answers, strict=True):
        if answer.status != contestant.status or answer.body != request.body:
            got = f"{answer.status} with {len(answer.body)} bytes"
            raise RuntimeError(f"{contestant.name}: {request.path}: {got}: {answer.body[:300]!r}")
    return [answer.headers for answer in answers]


def run_rounds(
    home: Path, contestants: Sequence[Contestant], *, rounds: int, seconds: int
) -> dict[str, list[Sample]]:
    """Run the contestants in turn, so that noise affects all alike, after a short warm-up."""
    scripts = {c.name: _write_script(home / f"{i}.tsv", c) for i, c in enumerate(contestants)}
    for contestant in contestants:
        _run(contestant, scripts[contestant.name], 1)
    samples: dict[str, list[Sample]] = {contestant.name: [] for contestant in contestants}
    for number in range(rounds):
        for contestant in contestants if number % 2 else reversed(contestants):
            script = scripts[contestant.name]
            samples[contestant.name].append(_run(contestant, script, seconds))
    return samples


def run_processes(
    home: Path,
    start: Callable[[Path], AbstractContextManager[Sequence[Contestant]]],
    *,
    rounds: int,
    seconds: int,
) -> dict[str, list[Sample]]:
    """Run several processes of each contestant, one after the other.

    The memory layout of a process alone can make it 3 % faster or slower than the next one.
    """
    samples: dict[str, list[Sample]] = {}
    for number in range(_PROCESSES):
        each_home = home / f"{number}"
        each_home.mkdir(parents=True)
        with start(each_home) as contestants:
            for contestant in contestants:
                check(contestant)
            each = run_rounds(
                each_home, contestants, rounds=-(-rounds // _PROCESSES), seconds=seconds
            )
        for name, more in each.items():
            samples.setdefault(name, []).extend(more)
    return samples


def _write_script(path: Path, contestant: Contestant) -> Path:
    lines = (
        "\t".join([r.path, *(f"{name}: {value}" for name, value in r.headers.items())])
        for r in contestant.requests
    )
    path.write_text("\n".join(lines) + "\n")
    return path


def _run(contestant: Contestant, script: Path, seconds: int) -> Sample:
    options = ["-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "-s", str(_SCRIPT)]
    url = f"http://127.0.0.1:{contestant.server.port}"
    before = cpu_seconds(contestant.server.pid)
    command = ["wrk", *options, url, "--", str(script)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    used = cpu_seconds(contestant.server.pid) - before
    found = json.loads(answer.stdout.splitlines()[-1])
    _refuse_errors(contestant, found)
    return Sample(
        found["requests"] / found["seconds"],
        found["p50_ms"],
        found["p99_ms"],
        used / found["requests"] * 1e6,
    )


def _refuse_errors(contestant: Contestant, found: dict[str, float]) -> None:
    """Raise if a figure contains errors, or bodies of another size.

    The last bodies, one for each connection, are cut off, and their bytes counted.
    """
    body = len(contestant.requests[0].body)
    least, most = found["requests"], found["requests"] + CONNECTIONS
    if found["errors"] or not least * body <= found["bytes"] <= most * (body + 2048):
        raise RuntimeError(f"{contestant.name}: {found}")
