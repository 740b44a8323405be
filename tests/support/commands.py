"""The command, in processes forked from one that has imported everything."""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cache
from io import RawIOBase
from typing import IO, Final

from tests.support.processes import environ

AHEAD_S: Final = "AHEAD_S"
"""Tells a command how far its clock is ahead."""
JUMPS_S: Final = "JUMPS_S"
"""Tells a command where its clock jumps with each `SIGUSR1`, by turns."""
_DEADLINE_S: Final = 180
_FORKING: Final = """
import atexit, gc, json, os, signal, socket, sys, time
from contextlib import suppress

status = 0

@atexit.register  # the first, so that it is called last
def leave():
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # to free all modules takes longer than most commands

import fastapi._compat.v2, pydantic.v1, uvicorn.lifespan.on, uvicorn.loops.uvloop, uvloop

tell_time, ahead_s = time.time, 0.0
time.time = lambda: tell_time() + ahead_s

from shardgate import demo, processes
from shardgate.cli import main
from shardgate.main import create_app
from shardgate.settings import Settings
from shardgate.survey import display, inspect, verify
from tests.support.adapters import adapt

fastapi._compat.v2.TypeAdapter = adapt
create_app(Settings())  # fills caches
gc.collect()
gc.freeze()
orders = socket.socket(fileno=int(sys.argv[1]))
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    told, files, _, _ = socket.recv_fds(orders, 2**20, 3)
    if not told:
        sys.exit()
    if not os.fork():
        break
    for each in files:
        os.close(each)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
orders.close()
*outputs, ended = files
if pid := os.fork():
    for each in outputs:
        os.close(each)
    os.write(ended, b"%d\\n" % pid)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(BrokenPipeError):
        os.write(ended, b"%d\\n" % code)
    os._exit(0)
os.close(ended)
os.setsid()
for number, each in enumerate(outputs, 1):
    os.dup2(each, number)
    os.close(each)
environ, arguments = json.loads(told)
os.environ.clear()
os.environ.update(environ)
ahead_s = float(os.environ.pop("AHEAD_S", 0))
jumps_s = [float(each) for each in os.environ.pop("JUMPS_S", "0").split()]

def jump(*_):
    global ahead_s
    ahead_s = jumps_s.pop(0)

signal.signal(signal.SIGUSR1, jump)
sys.argv = ["shardgate", *arguments]
status = 1
try:
    main()
except SystemExit as ended:
    status = ended.code
    raise
"""


def start(
    arguments: Sequence[str], told: Mapping[str, str], out: int, err: int
) -> tuple[int, IO[str]]:
    """Start the command as the first of a group of processes, with the environment *told*.

    Returns its id, and a file that has its exit code once it has ended.
    """
    read, write = os.pipe()
    ended = os.fdopen(read)
    order = json.dumps([dict(told), arguments]).encode()
    socket.send_fds(_ready(), [order], [out, err, write])
    os.close(write)
    return int(ended.readline()), ended


class Running:
    """A command that runs, and the file *err* for what it says on standard error."""

    def __init__(
        self, arguments: Sequence[str], told: Mapping[str, str], out: int, err: IO[str]
    ) -> None:
        self._err = err
        self.pid, self._ended = start(arguments, told, out, err.fileno())

    def wait(self) -> tuple[int, str]:
        """Return its exit code, once it has ended, and what it said."""
        assert select.select([self._ended], [], [], _DEADLINE_S)[0]
        self._err.seek(0)
        return int(self._ended.readline()), self._err.read()

    def said(self) -> str:
        """Return what it has said until now."""
        return os.pread(self._err.fileno(), 2**20, 0).decode()

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send it a signal, which goes to the whole group where it is Ctrl+C, and wait."""
        (os.killpg if number == signal.SIGINT else os.kill)(self.pid, number)
        return self.wait()

    def close(self) -> None:
        """Make sure that it is gone."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._ended.close()


def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    told = environ(COLUMNS="200", **more)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with closing(Running(arguments, told, out.fileno(), err)) as command:
            code, said = command.wait()
        out.seek(0)
        return subprocess.CompletedProcess(arguments, code, out.read(), said)


@contextmanager
def running(*arguments: str, lines: int = 1, **more: str) -> Generator[tuple[Running, list[str]]]:
    """Run the command, and give it with its first *lines* once they are printed."""
    read, write = os.pipe()
    with (
        os.fdopen(read, "rb", buffering=0) as out,
        tempfile.TemporaryFile("w+") as err,
        closing(Running(arguments, environ(**more), write, err)) as command,
    ):
        os.close(write)
        yield command, [_read_line(out, command) for _ in range(lines)]


def _read_line(out: RawIOBase, command: Running) -> str:
    """Read a line; *out* keeps nothing of the next one, which `select` would not see."""
    assert select.select([out], [], [], _DEADLINE_S)[0], command.said()
    return out.readline().decode().strip()


@cache
def _ready() -> socket.socket:
    """Start the process from which all others are forked; it ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-c", _FORKING, str(theirs.fileno())]
    process = subprocess.Popen(command, env=environ(), pass_fds=[theirs.fileno()])
    theirs.close()
    atexit.register(_end, ours, process)
    return ours


def _end(ours: socket.socket, process: subprocess.Popen[bytes]) -> None:
    ours.close()
    process.wait(_DEADLINE_S)
