"""`shardgate.processes`: several processes that serve on one port."""

import asyncio
import os
import re
import signal
import socket
import subprocess
from pathlib import Path
from typing import Final

import httpx
import pytest
import uvicorn

from shardgate import processes
from shardgate.main import create_app
from shardgate.settings import Settings
from tests.support.commands import running
from tests.support.files import write_files
from tests.support.processes import environ, wait_until

LATE: Final = """
import os, sys, time
if "spawn_main" in " ".join(sys.orig_argv) and os.path.exists(os.environ["LATE_IF"]):
    time.sleep(8)
"""
"""Makes Python late in a process of the service, if a file exists."""


def serving_processes(supervisor: int) -> set[int]:
    """Return the ids of the processes that serve below *supervisor*."""
    command = ["pgrep", "-P", str(supervisor), "-f", "spawn_main"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return set(map(int, found.stdout.split()))


def answering_process(url: str) -> int:
    """Return the id of a process that answers at *url*."""
    found = re.search('worker="([0-9]+)"', httpx.get(f"{url}/metrics").text)
    assert found is not None
    return int(found[1])


async def test_stopping_process_sends_balancers_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After SIGTERM a process answers 503 to `/healthz`, and other requests as before."""
    monkeypatch.setattr(processes, "_LEAVING_S", 3600.0)
    started = asyncio.Event()
    config = processes.configure(create_app(Settings()), Settings().server)
    server = processes._Server(config, started.set)  # noqa: SLF001 - its command ends in a second
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        running_server = asyncio.create_task(server.serve([listener]))
        await started.wait()
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            before = await client.get("/healthz")
            server.handle_exit(signal.SIGTERM, None)
            while (after := await client.get("/healthz")).is_success:
                pass
            other = await client.get("/api/datasets")
        running_server.cancel()
        await uvicorn.Server.shutdown(server, [listener])
    assert (before.status_code, after.status_code) == (200, 503)
    assert after.headers["retry-after"] == "1"
    assert other.is_success


@pytest.mark.soak
def test_process_that_starts_late_takes_the_place_of_another(tmp_path: Path) -> None:
    """A process that takes 8 s to start serves in place of one that was killed."""
    write_files({"python/sitecustomize.py": LATE.encode(), "data/notes.txt": b"a"}, tmp_path)
    path = os.pathsep.join((str(tmp_path / "python"), environ()["PYTHONPATH"]))
    late_if = tmp_path / "late"
    arguments = ("serve", "--port", "0", "--workers", "2", str(tmp_path / "data"))
    with running(*arguments, PYTHONPATH=path, LATE_IF=str(late_if)) as (process, (line,)):
        url = line.split()[0].rpartition("/data/")[0]
        before = serving_processes(process.pid)
        late_if.touch()
        os.kill(min(before), signal.SIGKILL)
        wait_until(lambda: len(serving_processes(process.pid) - before) == 1)
        (late,) = serving_processes(process.pid) - before

        wait_until(lambda: answering_process(url) == late)

    assert len(before) == 2
