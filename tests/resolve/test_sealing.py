"""Checksums over old and new bytes."""

import crc32c
import pytest

from app.errors import VersionChangedError
from app.formats.writing import Sealed
from app.model import ByteRange, ETag, Piece
from app.resolve.sealing import seal
from app.storage.memory import MemoryStore
from tests.resolve.writers import Between
from tests.resolving import ROOT

REF = ROOT.join("shard")


def sealed(body: bytes) -> bytes:
    """Put the checksum behind *body*."""
    return body + crc32c.crc32c(body).to_bytes(4, "little")


async def test_checksums_are_over_old_and_new_bytes_and_over_each_other() -> None:
    """What is not sealed stays as it is; all that is read comes in one read."""
    memory = MemoryStore()
    etag = memory.place(REF, b"0123456789")
    store = Between(memory)
    inner = Sealed([ByteRange(2, 4), b"new", ByteRange(0, 1)])
    pieces: list[Piece | Sealed] = [b"head", Sealed([ByteRange(7, 9), inner]), ByteRange(5, 6)]

    found = await seal(store, REF, etag, pieces)

    assert found == [b"head", sealed(b"78" + sealed(b"23new0")), ByteRange(5, 6)]
    assert store.calls == [("get", "shard")]


async def test_nothing_is_read_where_all_is_new() -> None:
    """Nor where nothing is sealed."""
    store = Between(MemoryStore())

    assert await seal(store, REF, None, [b"a", Sealed([b"b"])]) == [b"a", sealed(b"b")]
    assert await seal(store, REF, ETag('"e"'), [ByteRange(0, 5)]) == [ByteRange(0, 5)]
    assert store.calls == []


async def test_another_version_is_never_sealed() -> None:
    """Whoever rewrites then begins anew."""
    memory = MemoryStore()
    etag = memory.place(REF, b"0123456789")
    memory.place(REF, b"9876543210")

    with pytest.raises(VersionChangedError):
        await seal(memory, REF, etag, [Sealed([ByteRange(0, 5)])])
