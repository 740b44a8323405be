"""Minishard indexes as they are stored, many at once."""

import struct
import sys
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.formats.neuroglancer_precomputed.encoded import Minishard, Minishards, Places
from app.formats.neuroglancer_precomputed.survey import coalesce
from app.model import ByteRange
from app.resolve.perform import DirectFetch
from app.storage.memory import MemoryStore
from tests.formats.neuroglancer_precomputed.case import skeleton_info
from tests.formats.neuroglancer_precomputed.rewritten import slot
from tests.formats.neuroglancer_precomputed.shards import RAW_SHARDING, encode_minishard

_GAP = 64 * 1024
_SPAN = 8 * 1024**2

_steps = st.lists(
    st.tuples(st.sampled_from([0, 0, 1, _GAP, _GAP + 1]), st.sampled_from([1, 9, _SPAN // 3])),
    max_size=12,
)


def places(steps: list[tuple[int, int]]) -> list[ByteRange]:
    """Lay places behind one another, each of a gap and a length."""
    edges = [0, *accumulate(each for step in steps for each in step)]
    return [ByteRange(*edges[at : at + 2]) for at in range(1, len(edges), 2)]


@given(_steps)
def test_what_is_read_is_what_is_stored(steps: list[tuple[int, int]]) -> None:
    """Each minishard index comes with its number and bytes, in turn or asked for by itself."""
    given_places = places(steps)
    data = np.random.default_rng(1).bytes(given_places[-1].stop if steps else 0)
    numbers = [7 * at + 3 for at in reversed(range(len(steps)))]
    columns = zip(*given_places, strict=True) if steps else ([], [])
    found = Places(*(np.array(column, np.int64) for column in (numbers, *columns)))
    runs = [found.among(at) for at in coalesce(found.starts, found.stops)]

    minishards = Minishards(found, [run.pick(data[run.span.start : run.span.stop]) for run in runs])

    wanted = [
        Minishard(number, place, data[place.start : place.stop])
        for number, place in zip(numbers, given_places, strict=True)
    ]
    assert list(minishards) == wanted
    assert [minishards.find(number) for number in numbers] == wanted
    assert minishards.find(4) is None
    assert minishards.nbytes == sum(place.length for place in given_places)


@given(_steps)
def test_neighbours_are_read_together(steps: list[tuple[int, int]]) -> None:
    """Across small gaps, while the read is short, and never across large ones."""
    found = places(steps)
    starts, stops = (np.array([each[at] for each in found], np.int64) for at in (0, 1))

    runs = [found[run] for run in coalesce(starts, stops)]

    assert [each for run in runs for each in run] == found
    for run in runs:
        assert len(run) == 1 or run[-1].stop - run[0].start <= _SPAN
        assert all(b.start - a.stop <= _GAP for a, b in pairwise(run))
    for run, after in pairwise(runs):
        is_far = after[0].start - run[-1].stop > _GAP
        assert is_far or after[0].stop - run[0].start > _SPAN


def shard(bits: int) -> bytes:
    """Write a shard of 2 ** *bits* minishards with a chunk each."""
    count = 1 << bits
    indexes = [encode_minishard([(number, 4 * number, 4)]) for number in range(count)]
    edges = list(accumulate(map(len, indexes), initial=4 * count))
    entries = [edge for at in range(count) for edge in edges[at : at + 2]]
    index: bytes = struct.pack(f"<{len(entries)}Q", *entries)
    return index + b"data" * count + b"".join(indexes)


@pytest.mark.parametrize("bits", [3, 12])
async def test_opening_takes_no_step_for_each_minishard(bits: int) -> None:
    """It is done on the event loop, and shards may have 2^16 minishards, or more."""
    sharding = {**RAW_SHARDING, "preshift_bits": 0, "minishard_bits": bits, "shard_bits": 0}
    target, entry = await slot(skeleton_info(sharding), "5")
    store = MemoryStore()
    store.place(target.ref, shard(bits))
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    opened = await target.open([entry], DirectFetch(store))
    sys.setprofile(None)

    assert opened is not None
    assert opened.lookup(entry) == ByteRange(16 * 2**bits + 20, 16 * 2**bits + 24)
    assert calls < 2000
