"""Part l: how long the service takes to start, and what it holds when nobody asks."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.request import urlopen

from .figures import Figure, Goal
from .machine import resident_bytes
from .servers import Server, shardgate

_ROUNDS: Final = 5
_MIB: Final = 1 << 20


def measure(home: Path, store: Server) -> Iterator[Figure]:
    """Start it a few times, with a dataset in S3."""
    home.mkdir()
    seconds, held = [], []
    for number in range(_ROUNDS):
        began = time.perf_counter()
        with shardgate(home / str(number), store) as ours:
            urlopen(f"http://127.0.0.1:{ours.port}/healthz").read()
            seconds.append(time.perf_counter() - began)
            held.append(resident_bytes(ours.pid) / _MIB)
    yield Figure.over("l", "start to first answer", "s", seconds, Goal("at most", 1.5))
    yield Figure.over("l", "resident when idle", "MiB", held, Goal("at most", 120))
