"""Checksums over old and new bytes."""

import random
from collections.abc import Sequence

import crc32c
import pytest

from app.errors import DamagedError, VersionChangedError
from app.formats.contract import Sealed
from app.model import ByteRange, ETag, Piece
from app.resolve.sealing import Sealing
from app.storage.contract import ObjectReader
from app.storage.memory import MemoryStore
from tests.resolve.writers import Between
from tests.resolving import ROOT

REF = ROOT.join("shard")
MIB = 1024**2


def sealed(body: bytes) -> bytes:
    """Put the checksum behind *body*."""
    return body + crc32c.crc32c(body).to_bytes(4, "little")


def joined(pieces: Sequence[Piece], old: bytes = b"") -> bytes:
    """Put pieces together, of bytes and of ranges of *old*."""
    return b"".join(
        old[each.start : each.stop] if isinstance(each, ByteRange) else each for each in pieces
    )


async def seal(
    store: ObjectReader, etag: ETag | None, pieces: Sequence[Piece | Sealed]
) -> list[Piece]:
    """Plan, and do it."""
    return await Sealing.of(pieces).seal(store, REF, etag)


async def test_checksums_are_over_old_and_new_bytes_and_over_each_other() -> None:
    """What is not sealed stays as it is; all that is read comes in one read."""
    memory = MemoryStore()
    etag = memory.place(REF, b"0123456789")
    store = Between(memory)
    inner = Sealed([ByteRange(2, 4), b"new", ByteRange(0, 1)])
    pieces: list[Piece | Sealed] = [b"head", Sealed([ByteRange(7, 9), inner]), ByteRange(5, 6)]

    found = await seal(store, etag, pieces)

    first, *between, last = found
    assert (first, last) == (b"head", ByteRange(5, 6))
    assert joined(between) == sealed(b"78" + sealed(b"23new0"))
    assert store.calls == [("get", "shard")]


async def test_nothing_is_read_where_all_is_new() -> None:
    """Nor where nothing is sealed."""
    store = Between(MemoryStore())

    assert joined(await seal(store, None, [b"a", Sealed([b"b"])])) == b"a" + sealed(b"b")
    assert await seal(store, ETag('"e"'), [ByteRange(0, 5)]) == [ByteRange(0, 5)]
    assert store.calls == []


async def test_another_version_is_never_sealed() -> None:
    """Whoever rewrites then begins anew."""
    memory = MemoryStore()
    etag = memory.place(REF, b"0123456789")
    memory.place(REF, b"9876543210")

    with pytest.raises(VersionChangedError):
        await seal(memory, etag, [Sealed([ByteRange(0, 5)])])


async def test_what_is_large_goes_through_memory_bit_by_bit() -> None:
    """Its ranges stay ranges, and the checksums are right, also of what is in one another."""
    old = random.Random(5).randbytes(2**20) * 70
    memory = MemoryStore()
    etag = memory.place(REF, old)
    inner: list[Piece] = [ByteRange(40 * MIB + 3, 66 * MIB), b"new", ByteRange(10, 20 * MIB)]
    pieces: list[Piece | Sealed] = [
        ByteRange(0, 9),
        Sealed([Sealed([Sealed(inner)]), ByteRange(20 * MIB, 40 * MIB), b"index"]),
        Sealed([b"", ByteRange(66 * MIB, 70 * MIB)]),
    ]
    sealing = Sealing.of(pieces)

    found = await sealing.seal(memory, REF, etag)

    body = sealed(sealed(joined(inner, old))) + old[20 * MIB : 40 * MIB] + b"index"
    assert joined(found, old) == old[:9] + sealed(body) + sealed(old[66 * MIB :])
    assert sum(len(each) for each in found if isinstance(each, bytes)) == len(b"newindex") + 16
    assert sealing.kept_nbytes == 0
    assert sealing.read_nbytes <= 32 * MIB


async def test_it_is_known_before_how_much_is_held() -> None:
    """What is read at once, gaps too, and what of that is written."""
    sealing = Sealing.of(
        [ByteRange(0, 50), Sealed([ByteRange(100, 160), b"new", ByteRange(0, 40)])]
    )

    assert sealing.read_nbytes == 160
    assert sealing.kept_nbytes == 100


@pytest.mark.parametrize("step", [MIB // 2, 2 * MIB])
async def test_gaps_are_never_read_in_masses(step: int) -> None:
    """However little is wanted of a long object."""
    ranges = [ByteRange(at, at + 4096) for at in range(0, 2**30, step)]
    sealing = Sealing.of([Sealed(ranges)])

    assert sealing.read_nbytes <= 64 * MIB


async def test_the_old_checksum_is_compared_first() -> None:
    """With everything that it was over, also what is not kept; that takes no further read."""
    memory = MemoryStore()
    etag = memory.place(REF, sealed(sealed(b"01234") + b"56"))
    store = Between(memory)
    inner = Sealed([ByteRange(2, 4), b"new"], ByteRange(0, 9))
    pieces = [Sealed([inner, ByteRange(9, 11)], ByteRange(0, 15))]

    assert joined(await seal(store, etag, pieces)) == sealed(sealed(b"23new") + b"56")
    assert store.calls == [("get", "shard")]


@pytest.mark.parametrize("at", range(15))
async def test_damage_gets_no_new_checksum(at: int) -> None:
    """Wherever it is: nobody would notice it any more."""
    old = bytearray(sealed(sealed(b"01234") + b"56"))
    old[at] ^= 1
    memory = MemoryStore()
    etag = memory.place(REF, bytes(old))
    inner = Sealed([ByteRange(2, 4), b"new"], ByteRange(0, 9))

    with pytest.raises(DamagedError, match=r"shard: the checksum at the end of \[0, 15\)"):
        await seal(memory, etag, [Sealed([inner, ByteRange(9, 11)], ByteRange(0, 15))])


async def test_damage_that_goes_need_not_be_looked_for() -> None:
    """So that a shard can be mended by writing all of it."""
    store = Between(MemoryStore())
    pieces = [Sealed([Sealed([b"new"], ByteRange(0, 9))], ByteRange(0, 13))]

    assert joined(await seal(store, ETag('"e"'), pieces)) == sealed(sealed(b"new"))
    assert store.calls == []


LARGE = sealed(sealed(random.Random(6).randbytes(2**20) * 66) + b"some, and an index")
INNER = ByteRange(0, 66 * MIB + 4)
"""What is in `LARGE`, with its checksum."""
NEW = Sealed(
    [
        Sealed([ByteRange(40 * MIB, 60 * MIB), b"new", ByteRange(7, 20 * MIB)], INNER),
        ByteRange(INNER.stop, INNER.stop + 4),
        b"index",
    ],
    ByteRange(0, len(LARGE)),
)


async def test_the_old_checksum_of_what_is_large_is_compared_too() -> None:
    """Whatever the order in which it is kept; still no more than windows are held."""
    memory = MemoryStore()
    etag = memory.place(REF, LARGE)
    sealing = Sealing.of([NEW])

    found = await sealing.seal(memory, REF, etag)

    inner = sealed(LARGE[40 * MIB : 60 * MIB] + b"new" + LARGE[7 : 20 * MIB])
    assert joined(found, LARGE) == sealed(inner + b"someindex")
    assert sealing.kept_nbytes == 0
    assert sealing.read_nbytes <= 32 * MIB


@pytest.mark.parametrize("at", [0, 9, 30 * MIB, 50 * MIB, 66 * MIB - 1, 66 * MIB + 5, -9, -1])
async def test_damage_in_what_is_large_gets_no_new_checksum(at: int) -> None:
    """Also where it is in what is not kept, and in the old checksum."""
    old = bytearray(LARGE)
    old[at] ^= 1
    memory = MemoryStore()
    etag = memory.place(REF, bytes(old))

    with pytest.raises(DamagedError, match=rf"shard: .* end of \[0, {len(LARGE)}\)"):
        await seal(memory, etag, [NEW])


async def test_damage_under_a_right_checksum_is_found() -> None:
    """Each old checksum is compared, also in one another."""
    memory = MemoryStore()
    etag = memory.place(REF, sealed(b"01234" + bytes(4) + b"56"))
    inner = Sealed([ByteRange(2, 4), b"new"], ByteRange(0, 9))

    with pytest.raises(DamagedError, match=r"shard: the checksum at the end of \[0, 9\)"):
        await seal(memory, etag, [Sealed([inner, ByteRange(9, 11)], ByteRange(0, 15))])


def test_what_is_kept_in_its_order_is_read_once() -> None:
    """However much it is."""
    kept = [ByteRange(at, at + MIB) for at in range(MIB, 200 * MIB, 2 * MIB)]
    whole = ByteRange(0, 201 * MIB)

    windows = Sealing.of([Sealed([*kept, b"index"], whole)]).windows

    spans = [span for _, spans in windows for span in spans]
    assert sum(span.length for span in spans) == whole.length
    assert max(span.length for span in spans) <= 16 * MIB + 2 * MIB
