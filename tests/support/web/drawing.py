"""Workers that draw pictures, forked one at a time from a process that has imported everything."""

import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Final

import pytest

from shardgate.web import previews

_SERVER: Final = """
import os, select, socket, sys, traceback
from contextlib import suppress

sys.path.insert(0, sys.argv[2])
import preview_worker
import numcodecs

listener = socket.socket(fileno=int(sys.argv[1]))
while select.select([listener, 0], [], [])[0] == [listener]:
    connection, _ = listener.accept()
    if pid := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(OSError), connection:  # who waited for the picture may have left
            connection.send(bytes([code % 256]))
        continue
    for number in range(3):
        os.dup2(connection.fileno(), number)
    status = 1
    try:
        preview_worker.main()
        sys.stdout.flush()
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)
"""
"""Draws for each connection, and sends the status behind the answer."""
_CLIENT: Final = """
import socket, sys

with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    connection.sendall(sys.stdin.buffer.read())
    answer = b"".join(iter(lambda: connection.recv(2**20), b""))
    output = sys.stderr if answer[-1] else sys.stdout
    output.buffer.write(answer[:-1])
    sys.exit(answer[-1])
"""
"""Stands for the worker: its pipes are its own, so that they end with it."""


@pytest.fixture(scope="session")
def drawing_worker() -> Generator[Sequence[str]]:
    """Run the process, and return the command that stands for a worker."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/drawing")
        listener.listen()
        number = listener.fileno()
        command = [sys.executable, "-c", _SERVER, str(number), str(Path(previews.__file__).parent)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[number]):
            yield sys.executable, "-IS", "-c", _CLIENT, f"{folder}/drawing"


@pytest.fixture(scope="module", autouse=True)
def drawing(drawing_worker: Sequence[str]) -> Generator[None]:
    """Let services draw by it: to start a worker anew takes longer than most pictures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardgate.main.worker_command", lambda: drawing_worker)
        yield
