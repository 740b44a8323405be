"""Programs that listen on ports, and their environment."""

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
_START_S: Final = 180.0
_STOP_S: Final = 20.0


def environ(**more: str) -> dict[str, str]:
    """Return the environment without settings of the service or of AWS, with this tree's code."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SHARDGATE_", "AWS_"))}
    return kept | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT / "app", ROOT)))} | more


def wait_until(is_true: Callable[[], object], longest_s: float = _START_S) -> None:
    """Wait until *is_true* returns something true, and fail after *longest_s*."""
    deadline = time.monotonic() + longest_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def listens(port: int) -> bool:
    """Return whether a server listens on *port*."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_ports(count: int) -> list[int]:
    """Return free ports, all held at once so that they differ."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def listening(
    command: Sequence[str], port: int, output: Path, env: Mapping[str, str] | None = None
) -> Generator[subprocess.Popen[bytes]]:
    """Run *command*, yield when it listens on *port*, and terminate it at the end."""
    with output.open("ab") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=env)
    try:
        deadline = time.monotonic() + _START_S
        while not listens(port):
            if process.poll() is not None or time.monotonic() > deadline:
                said = output.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{command[0]} does not listen: {said}")
            time.sleep(0.01)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def store_process(
    command: Sequence[str], is_ready: Callable[[], bool], folder: Path, env: Mapping[str, str]
) -> Generator[None]:
    """Run *command* in *folder*, yield when it is ready, and kill it at the end."""
    with (
        tempfile.TemporaryFile() as output,
        subprocess.Popen(command, stdout=output, stderr=output, env=env, cwd=folder) as process,
    ):
        try:
            deadline = time.monotonic() + _START_S
            while not is_ready():
                if process.poll() is not None or time.monotonic() > deadline:
                    output.seek(0)
                    raise RuntimeError(f"{command[0]} does not start: {output.read()[-2000:]!r}")
                time.sleep(0.1)
            yield
        finally:
            process.kill()
