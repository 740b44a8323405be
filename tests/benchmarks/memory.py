"""Part e: what indexes cost in resident memory."""

import asyncio
from pathlib import Path
from typing import Final

from .client import Answer, at_once, connected, in_batches
from .data import MANY_CHUNK, MANY_ENTRIES, many_keys
from .figures import Figure, Goal
from .load import CONNECTIONS
from .machine import resident_bytes
from .servers import DATASET, Server, shardgate

_MIB: Final = 1 << 20
_LIMIT: Final = 64 * _MIB
_ENOUGH: Final = 1024 * _MIB
_HELD: Final = 300


def measure(home: Path, store: Server) -> list[Figure]:
    """Let a small cache overflow, and a large one fill."""
    home.mkdir()
    with shardgate(home / "small", store, index_bytes=_LIMIT) as ours:
        growth = [value / _MIB for value in asyncio.run(_growth(ours, many_keys()))]
    with shardgate(home / "large", store, index_bytes=_ENOUGH) as ours:
        held = asyncio.run(_growth(ours, many_keys()[: _HELD + 1]))[-1]
    within = Goal("at most", _LIMIT / _MIB * 1.25)
    what = "growth over 1,000 indexes, index_bytes = 64 MiB"
    small = Figure("e", what, "MiB", max(growth), min(growth), max(growth), goal=within)
    entry = [held / _HELD / MANY_ENTRIES]
    return [small, Figure.over("e", "an index entry held", "bytes", entry, Goal("at most", 20))]


async def _growth(ours: Server, keys: list[str]) -> list[int]:
    """Touch a chunk of one shard and then of the others; tell what memory grew by, as it went."""
    paths = [f"/{DATASET}/many/{key}" for key in keys]
    growth = []
    async with connected(ours.port, CONNECTIONS) as connections:
        _refuse_errors(await at_once(connections, paths[:1]))
        before = resident_bytes(ours.pid)
        async for batch in in_batches(connections, paths[1:]):
            _refuse_errors(batch)
            growth.append(resident_bytes(ours.pid) - before)
    return growth


def _refuse_errors(answers: list[Answer]) -> None:
    for answer in answers:
        if answer.status != 200 or answer.body != MANY_CHUNK:
            raise RuntimeError(f"{answer.status}: {answer.body[:300]!r}")
