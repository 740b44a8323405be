"""Part d: upstream reads of a block of 4x4x4 neighbouring chunks."""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from .client import Client, connected
from .data import INNER_BYTES, PER_SHARD, Coords, chunk_key, read_offsets
from .figures import Figure, Goal
from .servers import DATASET, Server, requests_served, shardgate

_EDGE: Final = 4
_BLOCKS: Final = 20
_GOAL: Final = Goal("at most", 16)
_ANYWHERE: Final = [range(n - _EDGE + 1) for n in PER_SHARD]
_ALIGNED: Final = [range(0, n, _EDGE) for n in PER_SHARD]


def measure(home: Path, root: Path, store: Server) -> list[Figure]:
    """Request blocks of arrays in both orders, with warm indexes and no chunk cache."""
    with shardgate(home, store) as ours:
        return [
            *_compare(root / "corder", "C order", _ANYWHERE, store, ours),
            *_compare(root / "morton", "Morton order, aligned", _ALIGNED, store, ours),
            *_compare(root / "morton", "Morton order, anywhere", _ANYWHERE, store, ours),
        ]


def _compare(
    array: Path, label: str, starts: Sequence[range], store: Server, ours: Server
) -> list[Figure]:
    """Count reads, and the runs of the blocks' chunks in the written shard."""
    blocks = _choose(list(itertools.product(*starts)))
    reads = _count_reads(array, blocks, store, ours)
    runs = _count_runs(array, blocks)
    goal = _GOAL if max(runs) <= _GOAL.bound else None
    return [
        Figure.over("d", f"4x4x4 block in {label}", "reads", reads, goal),
        Figure.over("d", "  runs of touching chunks in the shard", "runs", runs),
    ]


def _choose(starts: Sequence[Coords]) -> list[list[Coords]]:
    """Return some of the blocks in the first shard that begin at *starts*."""
    chosen = random.Random(0).sample(starts, min(_BLOCKS, len(starts)))
    steps = list(itertools.product(range(_EDGE), repeat=len(PER_SHARD)))
    return [[tuple(map(sum, zip(start, step, strict=True))) for step in steps] for start in chosen]


def _count_runs(array: Path, blocks: Sequence[Sequence[Coords]]) -> list[int]:
    offsets = read_offsets(array)
    starts = [{offsets[coords][1] for coords in block} for block in blocks]
    return [sum(start - INNER_BYTES not in block for start in block) for block in starts]


def _count_reads(
    array: Path, blocks: Sequence[Sequence[Coords]], store: Server, ours: Server
) -> list[int]:
    with (
        connected(ours.port, _EDGE ** len(PER_SHARD)) as client,
        connected(store.port, 1) as counter,
    ):
        _get(client, array, [(0, 0, 0)])
        reads = []
        for block in blocks:
            before = requests_served(counter)
            _get(client, array, block)
            reads.append(requests_served(counter) - before - 1)
        return reads


def _get(client: Client, array: Path, block: Sequence[Coords]) -> None:
    """Request the chunks concurrently, and compare them with those of the unsharded array."""
    plain, lead = array.parent / "plain", f"/{DATASET}/{array.name}"
    client.read_all({f"{lead}/{key}": (plain / key).read_bytes() for key in map(chunk_key, block)})
