"""Checksums over old and new bytes."""

import random
from collections.abc import Sequence

import crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgate.errors import DamagedError, VersionChangedError
from shardgate.formats.contract import Checksummed
from shardgate.model import ByteRange, ETag, Piece
from shardgate.storage.memory import MemoryStore
from shardgate.write.checksums import length_of, write_checksums
from tests.read.stores import WatchedStore
from tests.support.resolving import ROOT
from tests.write.writers import Between

REF = ROOT.join("shard")
MIB = 1024**2


def sealed(body: bytes) -> bytes:
    """Append the checksum of *body*."""
    return body + crc32c.crc32c(body).to_bytes(4, "little")


def joined(pieces: Sequence[Piece | Checksummed], old: bytes = b"") -> bytes:
    """Put pieces together, of bytes and of ranges of *old*, with checksums."""
    return b"".join(
        sealed(joined(each.pieces, old))
        if isinstance(each, Checksummed)
        else old[each.start : each.stop]
        if isinstance(each, ByteRange)
        else each
        for each in pieces
    )


OLD = sealed(sealed(b"01234") + b"5678")
INNER, OUTER = ByteRange(0, 9), ByteRange(0, len(OLD))
RANGES = st.tuples(st.integers(0, 17), st.integers(0, 17)).map(
    lambda ends: ByteRange(*sorted(ends))
)
PIECES = st.binary(max_size=3) | RANGES
INSIDE = st.builds(
    Checksummed,
    st.lists(st.binary(max_size=3) | RANGES.filter(lambda each: each.stop <= 9), max_size=4),
    st.just(INNER),
)
SHARDS = st.builds(Checksummed, st.lists(PIECES | INSIDE, max_size=4), st.just(OUTER))


@given(st.lists(PIECES | SHARDS, max_size=4))
async def test_checksums_are_over_old_and_new_bytes_and_over_each_other(
    pieces: list[Piece | Checksummed],
) -> None:
    """Old ranges stay ranges, whatever the order; all that is verified comes in one read."""
    memory = MemoryStore()
    etag = memory.place(REF, OLD)
    store = Between(memory)

    found = await write_checksums(store, REF, etag, pieces)

    assert joined(found, OLD) == joined(pieces, OLD)
    assert len(joined(found, OLD)) == length_of(pieces)
    assert store.calls in ([], [("get", "shard")])


async def test_only_what_is_kept_under_a_checksum_is_read() -> None:
    """A replaced object raises, and the rewrite starts anew; unsealed ranges are not read."""
    memory = MemoryStore()
    etag = memory.place(REF, OLD)
    memory.place(REF, OLD[::-1])
    with pytest.raises(VersionChangedError):
        await write_checksums(memory, REF, etag, [Checksummed([ByteRange(0, 5)], OUTER)])

    mended: list[Piece | Checksummed] = [
        Checksummed([Checksummed([b"new"], INNER)], OUTER),
        ByteRange(0, 5),
    ]
    store = Between(memory)
    assert await write_checksums(store, REF, etag, mended) == [
        b"new",
        sealed(b"new")[3:],
        sealed(sealed(b"new"))[7:],
        ByteRange(0, 5),
    ]
    assert store.calls == []


REWRITTEN = [Checksummed([Checksummed([ByteRange(2, 4), b"new"], INNER), ByteRange(9, 13)], OUTER)]


@pytest.mark.parametrize(
    ("old", "stop"),
    [
        *((OLD[:at] + bytes([OLD[at] ^ 1]) + OLD[at + 1 :], 17) for at in range(17)),
        (sealed(b"01234" + bytes(4) + b"5678"), 9),
    ],
)
async def test_damage_gets_no_new_checksum(old: bytes, stop: int) -> None:
    """A flipped bit anywhere raises, under a right outer checksum too: a new one would hide it."""
    memory = MemoryStore()
    etag = memory.place(REF, old)

    with pytest.raises(DamagedError, match=rf"shard: the checksum at the end of \[0, {stop}\)"):
        await write_checksums(memory, REF, etag, REWRITTEN)


LARGE = sealed(sealed(random.Random(6).randbytes(2**20) * 66) + b"some, and an index")
LARGE_INNER = ByteRange(0, 66 * MIB + 4)
"""The place in `LARGE` of the first part, with its checksum."""
NEW: list[Piece | Checksummed] = [
    ByteRange(0, 9),
    Checksummed(
        [
            Checksummed(
                [ByteRange(40 * MIB + 3, 60 * MIB), b"new", ByteRange(7, 20 * MIB)], LARGE_INNER
            ),
            ByteRange(LARGE_INNER.stop, LARGE_INNER.stop + 4),
            b"index",
        ],
        ByteRange(0, len(LARGE)),
    ),
]


async def test_what_is_large_is_read_once_and_bit_by_bit() -> None:
    """The order of the kept ranges does not matter, and memory stays bounded."""
    store = WatchedStore()
    etag = store.place(REF, LARGE)

    found = await write_checksums(store, REF, etag, NEW)

    assert joined(found, LARGE) == joined(NEW, LARGE)
    read = [call.request for call in store.calls if isinstance(call.request, ByteRange)]
    assert sum(each.length for each in read) == len(LARGE)
    assert max(each.length for each in read) <= 16 * MIB


@pytest.mark.parametrize("at", [0, 9, 30 * MIB, 50 * MIB, 66 * MIB - 1, 66 * MIB + 5, -9, -1])
async def test_damage_in_what_is_large_gets_no_new_checksum(at: int) -> None:
    """Damage in dropped bytes and in the old checksum is found too."""
    old = bytearray(LARGE)
    old[at] ^= 1
    memory = MemoryStore()
    etag: ETag = memory.place(REF, bytes(old))

    with pytest.raises(DamagedError, match=rf"shard: .* end of \[0, {len(LARGE)}\)"):
        await write_checksums(memory, REF, etag, NEW)
