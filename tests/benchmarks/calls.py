"""Part o: functions and files of `app/` that a request for a chunk in a local folder enters."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.support.processes import environ, free_ports

from .figures import Figure, Goal
from .servers import DATASET

_CHUNKS: Final = tuple(f"/{DATASET}/morton/c/0/0/{at}" for at in (0, 1, 0, 0))
_TRACES: Final = (
    (0, "first chunk of an array", 0, None, None),
    (0, "another chunk, index in the cache", 1, 125, 25),
    (64 << 20, "a chunk in the cache", 3, 23, 12),
)
"""Bytes of the chunk cache, label, number of the request, and most calls and files."""


def measure(root: Path) -> list[Figure]:
    """Trace a request of each kind."""
    counts = {nbytes: _count(root, nbytes) for nbytes in {each[0] for each in _TRACES}}
    figures = []
    for nbytes, what, at, calls, files in _TRACES:
        for unit, most in ("calls", calls), ("files", files):
            goal = None if most is None else Goal("at most", most)
            name = what if unit == "calls" else "  the same"
            figures.append(Figure.over("o", name, unit, [counts[nbytes][at][unit]], goal))
    return figures


def _count(root: Path, chunk_bytes: int) -> list[dict[str, int]]:
    (port,) = free_ports(1)
    program = f"from tests.benchmarks.counted import serve; serve({port}, *{_CHUNKS!r})"
    arguments = ["serve", f"{DATASET}={root}", "--port", str(port)]
    run = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=environ(SHARDGATE_CACHE__CHUNK_BYTES=str(chunk_bytes)),
        timeout=60,
    )
    *_, last = run.stdout.splitlines()
    if not last.startswith("["):
        raise RuntimeError(run.stderr)
    counts: list[dict[str, int]] = json.loads(last)
    return counts
