"""`shardgate.formats.zip.layout`: entries are found in their archive by few reads."""

import asyncio
import struct
import subprocess
import zipfile
import zlib
from pathlib import Path
from typing import Any, Final

import pytest

from shardgate.errors import DamagedError, MetadataMissingError
from shardgate.formats.compression import raw_deflate
from shardgate.formats.zip.directory import TAIL_NBYTES
from shardgate.formats.zip.layout import Zip
from shardgate.model import MISSING, ByteRange, Coded, Inline, ObjectRef, Stored, SuffixRange
from shardgate.read.metadata_cache import MetadataCache, ReadCache
from tests.support.formats.zip.archives import (
    MOST,
    REF,
    Entry,
    archive,
    check_equal,
    deflated,
    opened,
)
from tests.support.lacking import need
from tests.support.read.stores import WatchedStore

GOOD: Final = Entry(b"good")


class Kept:
    """An archive in a watched store, read through a cache."""

    def __init__(self, data: bytes) -> None:
        self.store = WatchedStore()
        self.etag = self.store.place(REF, data)
        self.fetch = ReadCache(self.store, MetadataCache(2**24), ttl_s=60)

    async def layout(self) -> Any:
        """Open the archive."""
        layout = await Zip(MOST, MOST).open(REF, self.fetch)
        assert layout is not None
        return layout

    @property
    def reads(self) -> list[Any]:
        """What was read since the last call, and by which condition."""
        made = [(call.request, call.if_match) for call in self.store.calls]
        self.store.calls.clear()
        return made


async def test_entry_is_a_range_of_the_version_of_its_directory() -> None:
    """A stored entry is a range of the archive, a deflated one too, with a coding of its own."""
    stored, other = Entry(b"a", local_extra=b"x" * 9), Entry(b"b", b"abc" * 99, method=8)
    data = archive(stored, other, Entry(b"empty", b"", method=8))
    kept = Kept(data)
    layout = await kept.layout()
    at, size = data.index(b"content"), len(deflated(other.data))
    place = Stored(REF, ByteRange(at, at + 7), kept.etag)
    start = data.index(deflated(other.data))
    coded = Stored(REF, ByteRange(start, start + size), kept.etag)
    coding = raw_deflate(len(other.data), zlib.crc32(other.data))

    assert await layout.find("a", kept.fetch) == place
    assert await layout.find("b", kept.fetch) == Coded(coded, coding)
    empty = await layout.find("empty", kept.fetch)
    assert isinstance(empty, Inline)
    assert empty.data == b""
    assert await layout.find("c", kept.fetch) == MISSING


async def test_archive_is_opened_by_one_read_and_an_entry_by_another() -> None:
    """A small archive is opened by one read; each entry costs one more, once."""
    data = archive(GOOD, Entry(b"other"))
    kept = Kept(data)

    for _ in range(2):
        await (await kept.layout()).find("good", kept.fetch)
    assert kept.reads == [
        (SuffixRange(TAIL_NBYTES), None),
        (ByteRange(0, 34), kept.etag),
    ]


async def test_long_directory_is_read_exactly_in_the_same_version() -> None:
    """A directory that begins before the last 64 KiB is read by one more read, of that version."""
    count = 2000
    data = archive(*(Entry(b"0/c/%d" % number, b"%d" % number) for number in range(count)))
    kept = Kept(data)
    for _ in range(2):
        layout = await kept.layout()
    start, stop = data.index(b"PK\1\2"), data.index(b"PK\5\6")

    assert kept.reads == [
        (SuffixRange(TAIL_NBYTES), None),
        (ByteRange(start, stop), kept.etag),
    ]
    place = await layout.find("0/c/1999", kept.fetch)
    assert data[slice(*place.byte_range)] == b"1999"
    assert len([name async for name in layout.below("", "", "", kept.fetch)]) == count


async def test_long_directory_is_in_memory_only_while_it_is_in_the_cache() -> None:
    """A layout holds no long directory: once the cache has dropped it, it is read again."""
    kept = Kept(archive(*(Entry(b"0/c/%d" % number) for number in range(2000))))
    layout = await kept.layout()
    await layout.find("0/c/7", kept.fetch)
    kept.store.calls.clear()
    await layout.find("0/c/7", kept.fetch)
    assert kept.reads == []
    kept.fetch = ReadCache(kept.store, MetadataCache(2**24), ttl_s=60)

    await layout.find("0/c/8", kept.fetch)
    assert [condition for _, condition in kept.reads] == [kept.etag] * 2


UNREADABLE: Final = {
    "encrypted": (Entry(b"bad", flags=1), "is encrypted"),
    "strongly encrypted": (Entry(b"bad", flags=0x41), "is encrypted"),
    "bzip2": (Entry(b"bad", method=12), r"compression method is 12 \(bzip2\)"),
    "unknown method": (Entry(b"bad", method=77), r"compression method is 77 \(unknown\)"),
    "stored with two sizes": (Entry(b"bad", central={"size": 6}), "its 6 bytes are stored as 7"),
    "deflated to nothing": (
        Entry(b"bad", method=8, central={"nbytes": 0}),
        "its 7 bytes are stored as 0",
    ),
    "empty with a checksum": (Entry(b"bad", b"", central={"crc": 5}), "its CRC-32 is not"),
    "no local header": (
        Entry(b"bad", local_extra=bytes(9), central={"start": 1}),
        "no local header begins",
    ),
    "local header of another name": (Entry(b"bad", local={"name": 2}), "not as in the directory"),
    "another local method": (Entry(b"bad", local={"method": 8}), "not as in the directory"),
    "locally encrypted": (Entry(b"bad", local={"flags": 1}), "not as in the directory"),
    "endless": (
        Entry(b"bad", central={"size": 2**32 - 1}, extra=struct.pack("<2HQ", 1, 8, 2**64 - 1)),
        "2\\^63-1 bytes or more",
    ),
    "quoted header": (Entry(b"bad", local={"extra": 1}), "overlaps the next entry"),
}


@pytest.mark.parametrize("name", UNREADABLE)
async def test_unreadable_entry_is_damage_and_others_are_read(name: str) -> None:
    """An entry that cannot be read is damage with the reason; others are found, and all listed."""
    bad, reason = UNREADABLE[name]
    found = await opened(archive(bad, GOOD))

    with pytest.raises(DamagedError, match=reason):
        await found.find("bad")
    assert await found.read("good") == b"content"
    assert {"bad", "good"} <= {*await found.names()}


@pytest.mark.parametrize("size", [0, 6, 8, 2**63 - 1])
async def test_wrong_size_of_a_deflated_entry_is_damage(size: int) -> None:
    """A deflated entry whose directory has another size or checksum is no content."""
    narrow = {"size": size} if size < 2**32 else {"size": 2**32 - 1}
    extra = struct.pack("<2HQ", 1, 8, size) if size >= 2**32 else b""
    bad = Entry(b"bad", method=8, central=narrow, extra=extra)
    found = await opened(archive(bad, Entry(b"worse", method=8, central={"crc": 1})))

    with pytest.raises((DamagedError, ValueError), match=r"inflated|CRC-32"):
        await found.read("bad")
    with pytest.raises(ValueError, match="with the CRC-32 00000001"):
        await found.read("worse")


@pytest.mark.parametrize(
    ("name", "is_container"),
    [
        ("a.zip", True),
        ("A.ZARR.ZIP", True),
        ("a/b.ozx", True),
        ("a.zip/b", False),
        ("zip", False),
        ("a.data", False),
        ("", False),
    ],
)
async def test_archives_are_known_by_their_names(name: str, *, is_container: bool) -> None:
    """Objects named `.zip` or `.ozx` may be archives, and a root of any name."""
    ref = ObjectRef(REF.bucket, name)
    kept = Kept(b"")
    kept.store.place(ref, archive(GOOD))

    assert Zip(MOST, MOST).is_container(name) is is_container
    assert (await Zip(MOST, MOST).open(ref, kept.fetch) is not None) is is_container
    assert await Zip(MOST, MOST, root=ref).open(ref, kept.fetch) is not None


async def test_absent_archive_is_no_container() -> None:
    """A directory named like an archive, without an object of that name, is no container."""
    assert await Zip(MOST, MOST).open(ObjectRef(REF.bucket, "b.zip"), Kept(b"").fetch) is None


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", DamagedError),
        (b"a text", DamagedError),
        (bytes(99), DamagedError),
        (b"<html>Bad gateway</html>", MetadataMissingError),
    ],
)
async def test_other_file_named_like_an_archive_is_an_error(
    data: bytes, error: type[Exception]
) -> None:
    """A file that is named like an archive and is none is damage; an error page may pass."""
    with pytest.raises(error):
        await Kept(data).layout()


PROGRAMS: Final = {
    "zip": ["zip", "-q", "-r", "{0}", "."],
    "zip -0": ["zip", "-q", "-0", "-r", "{0}", "."],
    "zip64": ["zip", "-q", "-fz", "-r", "{0}", "."],
    "7zz": ["7zz", "a", "-bso0", "-tzip", "{0}", "."],
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_archive_of_another_program_is_read(tmp_path: Path, program: str) -> None:
    """Archives of Info-ZIP and 7-Zip, which have extra fields, are read as by `zipfile`."""
    name, *options = [part.format(tmp_path / "a.zip") for part in PROGRAMS[program]]
    files = {"zarr.json": b"{}", "0/c/0": b"chunk" * 999, "0/empty": b""}
    for key, data in files.items():
        (tmp_path / "in" / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / key).write_bytes(data)
    subprocess.run([need(name), *options], cwd=tmp_path / "in", check=True)
    data = (tmp_path / "a.zip").read_bytes()

    asyncio.run(check_equal(data))
    with zipfile.ZipFile(tmp_path / "a.zip") as peer:
        assert {*files} <= {*peer.namelist()}
