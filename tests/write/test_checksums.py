"""`shardgate.write.rewrite`: checksums over old and new bytes."""

import random
from collections.abc import Sequence

import crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardgate.errors import DamagedError, VersionChangedError
from shardgate.formats.contract import Checksummed
from shardgate.model import ByteRange, ETag, Piece
from shardgate.storage.memory import MemoryStore
from shardgate.write.rewrite import length_of, write_checksums
from tests.support.read.stores import WatchedStore
from tests.support.resolving import ROOT
from tests.support.write.writers import Between

REF = ROOT.join("shard")
MIB = 1024**2


def sealed(body: bytes) -> bytes:
    """Append the checksum of *body*."""
    return body + crc32c.crc32c(body).to_bytes(4, "little")


def joined(pieces: Sequence[Piece | Checksummed], old: bytes = b"") -> bytes:
    """Join pieces, of bytes and of ranges of *old*, with checksums."""
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


@settings(max_examples=50)
@given(st.lists(PIECES | SHARDS, max_size=4))
async def test_checksums_cover_old_and_new_bytes(pieces: list[Piece | Checksummed]) -> None:
    """Checksums cover old ranges, new bytes and each other.

    Old ranges stay ranges, and are verified by one read.
    """
    memory = MemoryStore()
    etag = memory.place(REF, OLD)
    store = Between(memory)

    found = await write_checksums(store, REF, etag, pieces)

    assert joined(found, OLD) == joined(pieces, OLD)
    assert len(joined(found, OLD)) == length_of(pieces)
    assert store.calls in ([], [("get", "shard")])


async def test_only_ranges_under_a_checksum_are_read() -> None:
    """Old ranges are read if a checksum covers them; a replaced object raises an error."""
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
    """A flipped bit below an old checksum raises DamagedError, also if the outer one is right."""
    memory = MemoryStore()
    etag = memory.place(REF, old)

    with pytest.raises(DamagedError, match=rf"shard: the checksum at the end of \[0, {stop}\)"):
        await write_checksums(memory, REF, etag, REWRITTEN)


LARGE = sealed(sealed(random.Random(6).randbytes(2**20) * 36) + b"some, and an index")
LARGE_INNER = ByteRange(0, 36 * MIB + 4)
"""The place in `LARGE` of the first part, with its checksum."""
NEW: list[Piece | Checksummed] = [
    ByteRange(0, 9),
    Checksummed(
        [
            Checksummed(
                [ByteRange(22 * MIB + 3, 33 * MIB), b"new", ByteRange(7, 11 * MIB)], LARGE_INNER
            ),
            ByteRange(LARGE_INNER.stop, LARGE_INNER.stop + 4),
            b"index",
        ],
        ByteRange(0, len(LARGE)),
    ),
]


async def test_large_shard_is_read_once_in_parts() -> None:
    """A large shard is read once, in parts of at most 16 MiB."""
    store = WatchedStore()
    etag = store.place(REF, LARGE)

    found = await write_checksums(store, REF, etag, NEW)

    assert joined(found, LARGE) == joined(NEW, LARGE)
    read = [call.request for call in store.calls if isinstance(call.request, ByteRange)]
    assert sum(each.length for each in read) == len(LARGE)
    assert max(each.length for each in read) <= 16 * MIB


@pytest.mark.parametrize("at", [0, 9, 16 * MIB, 25 * MIB, 36 * MIB - 1, 36 * MIB + 5, -9, -1])
async def test_damage_in_a_large_shard_is_refused(at: int) -> None:
    """Damage in a large shard, in dropped bytes and the old checksum too, raises DamagedError."""
    old = bytearray(LARGE)
    old[at] ^= 1
    memory = MemoryStore()
    etag: ETag = memory.place(REF, bytes(old))

    with pytest.raises(DamagedError, match=rf"shard: .* end of \[0, {len(LARGE)}\)"):
        await write_checksums(memory, REF, etag, NEW)
