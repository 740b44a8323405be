"""The command, in processes forked from one that has imported everything."""

import atexit
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final

from tests.support.processes import environ

_DEADLINE_S: Final = 60
_FORKING: Final = """
import json, os, socket, sys

import pydantic.v1
from shardgate.cli import main

orders = socket.socket(fileno=int(sys.argv[1]))
while True:
    told, outputs, _, _ = socket.recv_fds(orders, 2**20, 2)
    if not told:
        sys.exit()
    pid = os.fork()
    if not pid:
        break
    for each in outputs:
        os.close(each)
    orders.sendall(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
orders.close()
for number, each in enumerate(outputs, 1):
    os.dup2(each, number)
    os.close(each)
environ, arguments = json.loads(told)
os.environ.clear()
os.environ.update(environ)
sys.argv = ["shardgate", *arguments]
main()
"""


def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return _forked(arguments, environ(COLUMNS="200", **more))


def _forked(arguments: Sequence[str], told: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        orders = _ready()
        order = json.dumps([dict(told), arguments]).encode()
        socket.send_fds(orders, [order], [out.fileno(), err.fileno()])
        code = int(orders.recv(32))
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, code, out.read(), err.read())


@cache
def _ready() -> socket.socket:
    """Start the process from which all others are forked; it ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(_DEADLINE_S)
    command = [sys.executable, "-c", _FORKING, str(theirs.fileno())]
    process = subprocess.Popen(command, env=environ(), pass_fds=[theirs.fileno()])
    theirs.close()
    atexit.register(_end, ours, process)
    return ours


def _end(ours: socket.socket, process: subprocess.Popen[bytes]) -> None:
    ours.close()
    process.wait(_DEADLINE_S)
