"""Rewrites of shards, compared with those of an independent encoder."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardgate.errors import ConflictError, DamagedError
from shardgate.formats.contract import Slot
from shardgate.model import ByteRange, VirtualKey
from tests.support.formats.case import Container, filled, render
from tests.support.formats.zarr.building import (
    CRC,
    EMPTY,
    GIB,
    Coords,
    WrittenArray,
    array_metadata,
    checksum,
    encode_index,
    encode_shard,
    one_dimension,
    opened,
    sharding,
    two_levels,
)
from tests.support.formats.zarr.nesting import Nesting, nestings
from tests.support.resolving import reading


def _histories(coords: Sequence[Coords]) -> st.SearchStrategy[list[dict[Coords, bytes | None]]]:
    bodies = st.one_of(st.none(), st.binary(min_size=1, max_size=9))
    changes = st.dictionaries(st.sampled_from(coords), bodies, min_size=1, max_size=5)
    return st.lists(changes, min_size=1, max_size=4)


@settings(max_examples=60)
@given(nestings(), st.sampled_from([b"", b"gap"]), st.data())
async def test_random_rewrites_agree_with_a_dict(
    nesting: Nesting, gap: bytes, data: st.DataObject
) -> None:
    """After random rewrites of any nesting, all chunks are those of a dictionary; shards without
    gaps depend on their content only, with chunks in index order and no gaps.
    """
    coords = list(nesting.coords())[:100]
    bodies = st.binary(min_size=1, max_size=9)
    chunks = data.draw(st.dictionaries(st.sampled_from(coords), bodies, max_size=5))
    document = {**nesting.document, "data_type": "string"}
    array = WrittenArray(document, nesting.build(chunks, gap))
    model: dict[Coords, bytes | None] = {**chunks}
    for changes in data.draw(_histories(coords)):
        await array.write(changes)
        model |= changes
    served = reading(filled(array.stored))
    expected = nesting.build({at: body for at, body in model.items() if body is not None}, b"")

    assert {at: await served.read("/".join(["c", *map(str, at)])) for at in model} == model
    assert gap or array.objects == {key: expected[key] for key in expected if key != "zarr.json"}


@pytest.mark.parametrize("codecs", [[], [CRC], [CRC, CRC]])
@pytest.mark.parametrize("location", ["start", "end"])
async def test_empty_shard_is_an_index_of_empty_entries(location: str, codecs: list[Any]) -> None:
    """An empty shard is an index of empty entries, with its trailing checksums."""
    codec = sharding([1], index_location=location)
    array = WrittenArray(array_metadata([3], [3], [codec, *codecs]))
    rewriter = (await array.slot("c/0")).shard

    expected = encode_shard([None] * 3, location=location)
    for _ in codecs:
        expected += checksum(expected)

    plan = rewriter.plan_empty()
    assert (render(plan.pieces), plan.places) == (expected, {})


async def test_adjacent_kept_chunks_are_one_range() -> None:
    """Kept chunks that are adjacent before and after are one range of the plan."""
    array = one_dimension(6)
    await array.write({(n,): bytes([n]) * 10 for n in (0, 1, 3, 4, 5)})
    old = array.objects["c/0"]

    plan = (await array.write({(2,): b"new", (3,): None}))["c/0"]

    assert plan is not None
    index = render(plan.pieces, old)[-100:]
    assert plan.pieces == [ByteRange(0, 20), b"new", ByteRange(30, 50), index]


async def test_chunks_that_share_bytes_are_separated() -> None:
    """Chunks that share bytes are written separately, unchanged."""
    array = one_dimension(3)
    array.objects["c/0"] = b"shared" + encode_index([(0, 6), (3, 3), (0, 4)])

    await array.write({(2,): b"z"})

    assert array.objects["c/0"][:-52] == b"sharedred" + b"z"


async def test_large_shard_keeps_its_order_and_appends_new_chunks() -> None:
    """A large shard keeps the order of its chunks, closes gaps, and appends new chunks."""
    array = one_dimension(6)
    entries = [(5 * GIB, GIB), (0, GIB), EMPTY, (GIB, GIB), (3 * GIB, GIB), (4 * GIB, GIB)]
    old = opened(array, entries, 6 * GIB + 100)
    rewriter = (await array.slot("c/0")).shard

    plan = rewriter.plan(old, {(3,): b"three", (2,): b"two"})

    assert plan is not None
    assert plan.pieces[:-1] == [ByteRange(0, GIB), ByteRange(3 * GIB, 6 * GIB), b"two", b"three"]
    assert plan.places == {
        (2,): ByteRange(4 * GIB, 4 * GIB + 3),
        (3,): ByteRange(4 * GIB + 3, 4 * GIB + 8),
    }
    _, index = plan.index
    assert [index.lookup(n).start for n in (1, 4, 5, 0)] == [0, GIB, 2 * GIB, 3 * GIB]


async def test_large_shard_of_shared_bytes_is_not_rewritten() -> None:
    """A rewrite that would multiply shared bytes of a large shard raises ConflictError."""
    array = one_dimension(1000)
    old = opened(array, [(0, GIB)] * 1000, GIB + 16004)
    rewriter = (await array.slot("c/0")).shard

    with pytest.raises(ConflictError, match=r"c/0: its chunks share bytes, and would take 1\.07e"):
        rewriter.plan(old, {(0,): b"new"})


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ((2**64 - 1, 3), "index entry 1 is half an empty marker"),
        ((0, 63), "ends past 62 bytes"),
        ((9, 2), "overlaps the shard index"),
    ],
)
async def test_rewrite_of_a_damaged_shard_is_refused(entry: tuple[int, int], reason: str) -> None:
    """A rewrite of a shard with any damaged entry, or a truncated index, raises DamagedError."""
    array, short = one_dimension(3), one_dimension(3, index_location="start")
    array.objects["c/0"] = b"0123456789" + encode_index([(0, 4), entry, EMPTY])
    short.objects["c/0"] = b"short"

    with pytest.raises(DamagedError, match=rf"data/c/0: .*{reason}"):
        await array.write({(2,): b"new"})
    with pytest.raises(DamagedError, match="data/c/0"):
        await short.write({(2,): b"new"})


async def test_rewrite_of_a_damaged_inner_shard_is_refused() -> None:
    """A rewrite of an inner shard with a damaged entry raises DamagedError."""
    array = two_levels(4, 2)
    inner = b"abc" + encode_index([(0, 3), (1, 3)])
    array.objects["c/0"] = encode_shard([None, inner])

    with pytest.raises(DamagedError, match=r"data/c/0: inner chunk 1 at .* overlaps the shard"):
        await array.write({(2,): b"new"})
    with pytest.raises(DamagedError, match=r"data/c/0: inner chunk 1 at .* overlaps the shard"):
        (await array.open("c/2", (1, 1))).lookup((1, 1))


async def test_rewrite_reads_only_the_indexes_of_changed_chunks() -> None:
    """A rewrite uses cached indexes and reads only inner indexes of changed chunks."""
    array = two_levels(9, 3)
    await array.write({(n,): b"x" for n in range(9)})
    container = Container(array.stored)
    layout, fetch, calls = await container.open(), container.fetch, container.store.calls
    await layout.locate(VirtualKey("c/4"), fetch)
    calls.clear()
    slot, other = [await layout.target(VirtualKey(key), fetch) for key in ("c/4", "c/8")]
    assert isinstance(slot, Slot)
    assert isinstance(other, Slot)

    old = await slot.shard.open([slot.entry], fetch)
    assert calls == []
    await slot.shard.open([slot.entry, other.entry], fetch)

    assert old is not None
    assert [call.request for call in calls] == [ByteRange(113, 165)]
    assert [call.if_match for call in calls] == [old.etag]
    assert slot.shard == other.shard
