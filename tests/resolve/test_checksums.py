"""Checksums over old and new bytes."""

import random
from collections.abc import Sequence
from typing import Any

import crc32c
import pytest

from app.errors import DamagedError, VersionChangedError
from app.formats.contract import Checksummed
from app.model import ByteRange, ETag, Piece
from app.resolve.checksums import ChecksumWriter
from app.storage.memory import MemoryStore
from tests.resolve.writers import Between
from tests.support.resolving import ROOT

REF = ROOT.join("shard")
MIB = 1024**2


def sealed(body: bytes) -> bytes:
    """Append the checksum of *body*."""
    return body + crc32c.crc32c(body).to_bytes(4, "little")


def joined(pieces: Sequence[Piece], old: bytes = b"") -> bytes:
    """Put pieces together, of bytes and of ranges of *old*."""
    return b"".join(
        old[each.start : each.stop] if isinstance(each, ByteRange) else each for each in pieces
    )


async def seal(store: Any, etag: ETag | None, pieces: Sequence[Piece | Checksummed]) -> list[Piece]:
    """Plan the checksums and write them."""
    return await ChecksumWriter.plan(pieces).run(store, REF, etag)


async def test_checksums_are_over_old_and_new_bytes_and_over_each_other() -> None:
    """Unsealed pieces are unchanged; all old ranges come in one read."""
    memory = MemoryStore()
    etag = memory.place(REF, b"0123456789")
    store = Between(memory)
    inner = Checksummed([ByteRange(2, 4), b"new", ByteRange(0, 1)])
    pieces: list[Piece | Checksummed] = [
        b"head",
        Checksummed([ByteRange(7, 9), inner]),
        ByteRange(5, 6),
    ]

    found = await seal(store, etag, pieces)

    first, *between, last = found
    assert (first, last) == (b"head", ByteRange(5, 6))
    assert joined(between) == sealed(b"78" + sealed(b"23new0"))
    assert store.calls == [("get", "shard")]


async def test_another_version_is_never_sealed() -> None:
    """A replaced object raises, and the rewrite starts anew; unsealed ranges are not read."""
    memory = MemoryStore()
    etag = memory.place(REF, b"0123456789")
    memory.place(REF, b"9876543210")
    with pytest.raises(VersionChangedError):
        await seal(memory, etag, [Checksummed([ByteRange(0, 5)])])

    store = Between(memory)
    mended = [Checksummed([Checksummed([b"new"], ByteRange(0, 9))], ByteRange(0, 13))]
    assert joined(await seal(store, None, [b"a", Checksummed([b"b"])])) == b"a" + sealed(b"b")
    assert await seal(store, ETag('"e"'), [ByteRange(0, 5)]) == [ByteRange(0, 5)]
    assert joined(await seal(store, ETag('"e"'), mended)) == sealed(sealed(b"new"))
    assert store.calls == []


async def test_what_is_large_goes_through_memory_bit_by_bit() -> None:
    """Large ranges stay ranges, and nested checksums are right."""
    old = random.Random(5).randbytes(2**20) * 70
    memory = MemoryStore()
    etag = memory.place(REF, old)
    inner: list[Piece] = [ByteRange(40 * MIB + 3, 66 * MIB), b"new", ByteRange(10, 20 * MIB)]
    pieces: list[Piece | Checksummed] = [
        ByteRange(0, 9),
        Checksummed([Checksummed([Checksummed(inner)]), ByteRange(20 * MIB, 40 * MIB), b"index"]),
        Checksummed([b"", ByteRange(66 * MIB, 70 * MIB)]),
    ]
    sealing = ChecksumWriter.plan(pieces)

    found = await sealing.run(memory, REF, etag)

    body = sealed(sealed(joined(inner, old))) + old[20 * MIB : 40 * MIB] + b"index"
    assert joined(found, old) == old[:9] + sealed(body) + sealed(old[66 * MIB :])
    assert sum(len(each) for each in found if isinstance(each, bytes)) == len(b"newindex") + 16
    assert sealing.kept_nbytes == 0
    assert sealing.read_nbytes <= 32 * MIB


@pytest.mark.parametrize("step", [MIB // 2, 2 * MIB])
async def test_gaps_are_never_read_in_masses(step: int) -> None:
    """Short ranges of a long object are read in bounded windows."""
    ranges = [ByteRange(at, at + 4096) for at in range(0, 2**30, step)]
    sealing = ChecksumWriter.plan([Checksummed(ranges)])

    assert sealing.read_nbytes <= 64 * MIB


async def test_the_old_checksum_is_compared_first() -> None:
    """The old checksum is verified over kept and dropped bytes, in one read."""
    memory = MemoryStore()
    etag = memory.place(REF, SMALL)
    store = Between(memory)

    assert joined(await seal(store, etag, REWRITTEN)) == sealed(sealed(b"23new") + b"56")
    assert store.calls == [("get", "shard")]


SMALL = sealed(sealed(b"01234") + b"56")
REWRITTEN = [
    Checksummed(
        [Checksummed([ByteRange(2, 4), b"new"], ByteRange(0, 9)), ByteRange(9, 11)],
        ByteRange(0, 15),
    )
]


@pytest.mark.parametrize(
    ("old", "stop"),
    [
        *((SMALL[:at] + bytes([SMALL[at] ^ 1]) + SMALL[at + 1 :], 15) for at in range(15)),
        (sealed(b"01234" + bytes(4) + b"56"), 9),
    ],
)
async def test_damage_gets_no_new_checksum(old: bytes, stop: int) -> None:
    """A flipped bit anywhere raises, under a right outer checksum too: a new one would hide it."""
    memory = MemoryStore()
    etag = memory.place(REF, old)

    with pytest.raises(DamagedError, match=rf"shard: the checksum at the end of \[0, {stop}\)"):
        await seal(memory, etag, REWRITTEN)


LARGE = sealed(sealed(random.Random(6).randbytes(2**20) * 66) + b"some, and an index")
INNER = ByteRange(0, 66 * MIB + 4)
"""What is in `LARGE`, with its checksum."""
NEW = Checksummed(
    [
        Checksummed([ByteRange(40 * MIB, 60 * MIB), b"new", ByteRange(7, 20 * MIB)], INNER),
        ByteRange(INNER.stop, INNER.stop + 4),
        b"index",
    ],
    ByteRange(0, len(LARGE)),
)


async def test_the_old_checksum_of_what_is_large_is_compared_too() -> None:
    """The order of the kept ranges does not matter, and memory stays bounded."""
    memory = MemoryStore()
    etag = memory.place(REF, LARGE)
    sealing = ChecksumWriter.plan([NEW])

    found = await sealing.run(memory, REF, etag)

    inner = sealed(LARGE[40 * MIB : 60 * MIB] + b"new" + LARGE[7 : 20 * MIB])
    assert joined(found, LARGE) == sealed(inner + b"someindex")
    assert sealing.kept_nbytes == 0
    assert sealing.read_nbytes <= 32 * MIB


@pytest.mark.parametrize("at", [0, 9, 30 * MIB, 50 * MIB, 66 * MIB - 1, 66 * MIB + 5, -9, -1])
async def test_damage_in_what_is_large_gets_no_new_checksum(at: int) -> None:
    """Damage in dropped bytes and in the old checksum is found too."""
    old = bytearray(LARGE)
    old[at] ^= 1
    memory = MemoryStore()
    etag = memory.place(REF, bytes(old))

    with pytest.raises(DamagedError, match=rf"shard: .* end of \[0, {len(LARGE)}\)"):
        await seal(memory, etag, [NEW])


def test_what_is_kept_in_its_order_is_read_once() -> None:
    """Windows of a large shard do not overlap."""
    kept = [ByteRange(at, at + MIB) for at in range(MIB, 200 * MIB, 2 * MIB)]
    whole = ByteRange(0, 201 * MIB)

    windows = ChecksumWriter.plan([Checksummed([*kept, b"index"], whole)]).windows

    spans = [span for _, spans in windows for span in spans]
    assert sum(span.length for span in spans) == whole.length
    assert max(span.length for span in spans) <= 16 * MIB + 2 * MIB
