"""Long runs of the resolver while everything changes."""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Final

import pytest

from shardgate.errors import ShardgateError, StorageUnavailableError
from shardgate.model import EVERYTHING, VirtualKey
from tests.support.formats.zarr.building import array_metadata, encode_shard, sharding
from tests.support.read.stores import WatchedStore
from tests.support.resolving import ROOT, Reading, everything, gather, reading

_CHUNKS: Final = 16
_READERS: Final = 40
_TTL_S: Final = 0.05
_SLACK_S: Final = 0.2
"""Longest delay with which a busy machine records a new version."""


class _MoodyStore(WatchedStore):
    """A store that takes a random time, and sometimes fails."""

    def __init__(self, moods: random.Random) -> None:
        super().__init__()
        self._moods = moods

    async def pause(self) -> None:
        """Wait, fail, or do neither."""
        mood = self._moods.random()
        if mood < 0.5:
            await asyncio.sleep(self._moods.random() * 0.003)
        elif mood < 0.52:
            raise StorageUnavailableError(ROOT, "a mood")


@dataclass
class _World:
    """A shard and an object that are overwritten, and the times of their versions."""

    store: _MoodyStore
    written: list[float] = field(default_factory=list)
    """Times at which the versions were written."""
    answered: int = 0
    wrong: list[str] = field(default_factory=list)

    def write(self) -> None:
        """Replace both by the next version."""
        version = len(self.written)
        chunks = [_content(version, number) for number in range(_CHUNKS)]
        self.store.place(ROOT.join("c/0"), encode_shard(chunks, gap=b""))
        self.store.place(ROOT.join("whole"), _content(version, _CHUNKS) or b"")
        self.written.append(time.monotonic())

    def check(self, number: int, got: bytes | None, began_at: float) -> None:
        """Record *got* if it is of no version that was current since *began_at*, or just before."""
        self.answered += 1
        oldest = began_at - _TTL_S - _SLACK_S
        first = max([v for v, at in enumerate(self.written) if at <= oldest], default=0)
        versions = range(first, len(self.written))
        if got not in [_content(version, number) for version in versions]:
            self.wrong.append(f"{number}: {got and got[:20]!r}, versions {versions}")


def _content(version: int, number: int) -> bytes | None:
    """Return a chunk of a version; the number behind the last is the whole object."""
    if number < _CHUNKS and (version + number) % 7 == 0:
        return None
    times = random.Random(version * 100 + number).choice([1, 3, 50, 3000])
    return b"%d:%d|" % (version, number) * times


async def _read_on(world: _World, read: Reading, choices: random.Random) -> None:
    """Read random keys without end."""
    while True:
        number = choices.randrange(_CHUNKS + 1)
        key = VirtualKey(f"c/{number}" if number < _CHUNKS else "whole")
        request = choices.choice([EVERYTHING, None])
        began_at = time.monotonic()
        try:
            async with read.resolver.open(read.dataset, key, everything, request) as opened:
                got = None if opened is None else await gather(opened.body)
        except ShardgateError:
            continue
        world.check(number, got, began_at)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(8))
async def test_reads_under_changes_are_current(seed: int) -> None:
    """While shards change, stores fail and readers leave, no byte is of an outdated version.

    Afterwards no bytes are held and no tasks left.
    """
    choices = random.Random(seed)
    store = _MoodyStore(random.Random(seed))
    metadata = array_metadata([_CHUNKS], [_CHUNKS], [sharding([1])])
    store.place(ROOT.join("zarr.json"), json.dumps(metadata).encode())
    world = _World(store)
    world.write()
    read = reading(
        store,
        ttl_s=_TTL_S,
        chunk_bytes=choices.choice([0, 2**20, 2**26]),
        stream_bytes=choices.choice([2000, 2**20]),
        in_flight_bytes=choices.choice([20_000, 2**20]),
        gap_bytes=choices.choice([0, 4096, 2**20]),
    )
    readers = [asyncio.create_task(_read_on(world, read, choices)) for _ in range(_READERS)]
    ends_at = time.monotonic() + 5
    while time.monotonic() < ends_at:
        await asyncio.sleep(choices.choice([0.001, 0.01, 0.1]))
        world.write()
        left = choices.randrange(_READERS)
        readers[left].cancel()
        readers[left] = asyncio.create_task(_read_on(world, read, choices))
    for each in readers:
        each.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    await asyncio.sleep(0.1)

    assert world.answered > 100
    assert world.wrong == []
    assert read.budget.held_bytes == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}
