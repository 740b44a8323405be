"""What must be known of a shard to write it."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import (
    DamagedError,
)
from app.formats.writing import Slot
from app.formats.zarr_sharding_indexed.index import ShardIndex
from app.model import ByteRange, VirtualKey
from app.resolve.fetch import Memory, ReadCache
from tests.formats.zarr_sharding_indexed.case import (
    BIG,
    CRC,
    EMPTY,
    LITTLE,
    encode_index,
    encode_shard,
)
from tests.formats.zarr_sharding_indexed.writing import one_dimension, opened, two_levels
from tests.resolve.stores import WatchedStore
from tests.resolving import ROOT, known_formats

HALF = 2**64 - 1


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ((HALF, 3), "index entry 1 is half an empty marker"),
        ((3, HALF), "index entry 1 is half an empty marker"),
        ((2**64 - 9, 20), r"index entry 1 ends past 2\^64"),
        ((2**63, 1), "ends past 62 bytes"),
        ((0, 63), "ends past 62 bytes"),
        ((63, 0), "ends past 62 bytes"),
        ((9, 2), "overlaps the shard index"),
    ],
)
async def test_nothing_is_written_into_a_damaged_shard(entry: tuple[int, int], reason: str) -> None:
    """Any entry that cannot be right stops all changes, whichever they are of."""
    array = one_dimension(3)
    array.objects["c/0"] = b"0123456789" + encode_index([(0, 4), entry, EMPTY])

    with pytest.raises(DamagedError, match=rf"data/c/0: .*{reason}"):
        await array.write({(2,): b"new"})


async def test_nothing_is_written_into_a_damaged_shard_inside() -> None:
    """Its own entries are counted from where it begins."""
    array = two_levels(4, 2)
    inner = b"abc" + encode_index([(0, 3), (1, 3)])
    array.objects["c/0"] = encode_shard([None, inner])

    with pytest.raises(DamagedError, match=r"data/c/0: inner chunk 1 at .* overlaps the shard"):
        await array.write({(2,): b"new"})
    with pytest.raises(DamagedError, match=r"data/c/0: inner chunk 1 at .* overlaps the shard"):
        (await array.open("c/2", (1, 1))).lookup((1, 1))


async def test_a_truncated_shard_is_damaged() -> None:
    """Too short for its index."""
    array = one_dimension(3, index_location="start")
    array.objects["c/0"] = b"short"

    with pytest.raises(DamagedError, match="data/c/0"):
        await array.write({(2,): b"new"})


EDGES = st.sampled_from([0, 1, 9, 10, 11, 61, 62, 63, 2**63 - 1, 2**63, HALF - 1, HALF])


@given(
    st.lists(st.tuples(EDGES, EDGES), min_size=3, max_size=3),
    st.sampled_from(["start", "end"]),
    st.sampled_from("<>"),
    st.sampled_from([0, 7, 2**40]),
)
def test_all_entries_are_judged_as_each_is(
    entries: list[tuple[int, int]], location: str, endian: str, start: int
) -> None:
    """The table of a shard tells what its entries do, one after the other."""
    codecs = [BIG if endian == ">" else LITTLE, CRC]
    array = one_dimension(3, index_location=location, index_codecs=codecs)
    encoded = encode_index(entries, endian=endian, crc=False)
    shard = replace(
        opened(array, entries, start + 62, ByteRange(start, start + 62)),
        index=ShardIndex(encoded, endian == ">"),
    )

    def one_by_one() -> list[ByteRange | None]:
        return [shard.find(number) for number in range(3)]

    def at_once() -> list[ByteRange | None]:
        pairs = zip(*(numbers.tolist() for numbers in shard.table()), strict=True)
        return [None if nbytes == -1 else ByteRange(at, at + nbytes) for at, nbytes in pairs]

    assert _outcome(at_once) == _outcome(one_by_one)


def _outcome(call: Callable[[], object]) -> object:
    try:
        return call()
    except DamagedError as error:
        return str(error)


async def test_only_what_is_to_be_changed_is_read() -> None:
    """The index of the object, which a reader has brought into the cache, and one inside."""
    array = two_levels(9, 3)
    await array.write({(n,): b"x" for n in range(9)})
    store = WatchedStore()
    for key, data in {**array.objects, "zarr.json": json.dumps(array.document).encode()}.items():
        store.place(ROOT.join(key), data)
    fetch = ReadCache(store, Memory(2**20), ttl_s=60)
    layout = await known_formats()[0].open(ROOT, fetch)
    assert layout is not None
    await layout.locate(VirtualKey("c/4"), fetch)
    store.calls.clear()
    slot = await layout.target(VirtualKey("c/4"), fetch)
    other = await layout.target(VirtualKey("c/8"), fetch)
    assert isinstance(slot, Slot)
    assert isinstance(other, Slot)

    old = await slot.shard.open([slot.entry], fetch)
    assert store.calls == []
    await slot.shard.open([slot.entry, other.entry], fetch)

    assert old is not None
    assert [call.request for call in store.calls] == [ByteRange(113, 165)]
    assert [call.if_match for call in store.calls] == [old.etag]
    assert slot.shard == other.shard


async def test_a_shard_tells_where_its_chunks_are() -> None:
    """Those that it was opened for, whatever else there is."""
    array = two_levels(6, 2)
    await array.write({(0,): b"abc", (2,): b"defg"})
    old = await array.open("c/0", (0, 0), (0, 1), (1, 0), (2, 1))

    found = {entry: old.lookup(entry) for entry in [(0, 0), (0, 1), (1, 0), (2, 1)]}
    assert found == {
        (0, 0): ByteRange(0, 3),
        (0, 1): None,
        (1, 0): ByteRange(39, 43),
        (2, 1): None,
    }
    assert old.size == len(array.objects["c/0"])
