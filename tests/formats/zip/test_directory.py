"""`shardgate.formats.zip.directory`: archives are decoded as by `zipfile`, or refused."""

import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgate.concurrency import run_in_thread
from shardgate.errors import DamagedError
from shardgate.formats.reading import DecodeError
from shardgate.formats.surveying import ChunkCollection
from shardgate.formats.zip.directory import (
    TAIL_NBYTES,
    decode_directory,
    decode_tail,
    memory_nbytes,
    parse_end,
)
from shardgate.formats.zip.layout import Zip
from shardgate.model import Coded, Inline, Stored
from shardgate.read.metadata_cache import uncached_reads
from shardgate.settings import LimitSettings
from shardgate.storage.stores import Stores
from tests.support.attacks.mutating import Change, at_random, changes
from tests.support.formats.members import Opened
from tests.support.formats.zip.archives import (
    MOST,
    WIDE,
    Entry,
    Unseekable,
    archive,
    check_equal,
    opened,
    zipped,
)

NO_KEYS: Final = ["", "a/", "/a", "a//b", ".", "..", "a/../b", "./a", "a/.", "a\\b", "a\nb", "\x7f"]
_names = st.sampled_from(["zarr.json", "0/c/0/0", "é/ü", "a", "a.b", "...", "名前", *NO_KEYS])
_contents = st.lists(
    st.tuples(
        _names | st.text("abé/.", min_size=1, max_size=6),
        st.binary(max_size=40) | st.integers(0, 3000).map(bytes),
        st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]),
    ),
    max_size=6,
)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@given(
    _contents,
    st.binary(max_size=9).filter(lambda text: b"PK" not in text),  # no part of an end for zipfile
    st.binary(max_size=20).filter(lambda text: b"PK" not in text),
    st.booleans(),
    st.binary(max_size=3).filter(lambda text: not text.startswith(b"P")),
)
async def test_entries_are_those_of_zipfile(
    contents: Sequence[tuple[str, bytes, int]],
    before: bytes,
    comment: bytes,
    zip64: bool,  # noqa: FBT001 - drawn
    behind: bytes,
) -> None:
    """Each key of an archive, with bytes before and behind it, has the content of `zipfile`."""
    await check_equal(before + zipped(contents, comment, zip64=zip64) + behind)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
async def test_archive_written_to_a_pipe_is_read(method: int) -> None:
    """An archive whose local headers have no sizes, which follow the data, is read."""
    pipe = Unseekable()
    with zipfile.ZipFile(pipe, "w", method) as written:
        written.writestr("zarr.json", b"{}")
        written.writestr("c/0", b"chunk" * 100)

    await check_equal(pipe.data)


@pytest.mark.parametrize("comment", [b"x" * 65535, b"\0\0", archive(), b"<html>"])
async def test_comment_may_hold_anything(comment: bytes) -> None:
    """The last end record counts, as in `zipfile`, also if it is a part of the comment."""
    await check_equal(archive(Entry(b"a"), Entry(b"b", method=8), comment=comment))


@pytest.mark.parametrize("behind", [b"", b" in it", b" in it, and twenty-two letters behind"])
async def test_signature_in_a_comment_is_no_end_record(behind: bytes) -> None:
    """A signature in a comment that no complete end record follows is text, as for 7-Zip."""
    found = await opened(archive(Entry(b"a"), comment=b"see PK\5\6" + behind))

    assert await found.read("a") == b"content"


async def test_truncated_archive_is_damaged() -> None:
    """An archive without its last bytes is damaged, however many these are."""
    data = archive(Entry(b"a"), Entry(b"b"), comment=b"PK\5\6 and more", end64={})
    reason = r"no end record|within its comment|too few|contradict"
    for length in range(len(data) - 200, len(data)):
        with pytest.raises(DamagedError, match=reason):
            await opened(data[:length])


FIRST: Final = Entry(b"a")
SECOND: Final = Entry(b"b", method=8)
BOTH: Final = archive(FIRST, SECOND)
REFUSED: Final = {
    "no archive": (b"text" * 99, "no end record"),
    "entry in the place of another": (archive(FIRST, Entry(b"a", central={"start": 0})), "overlap"),
    "entry that ends in another": (archive(Entry(b"a", central={"nbytes": 8}), SECOND), "overlap"),
    "entry that ends in the directory": (archive(Entry(b"a", central={"nbytes": 8})), "overlap"),
    "entry behind the directory": (archive(Entry(b"a", central={"start": 99})), "overlap"),
    "fewer entries than there are": (
        archive(FIRST, SECOND, end={"here": 1, "count": 1}),
        "counts 1 ",
    ),
    "more entries than there are": (archive(FIRST, SECOND, end={"here": 3, "count": 3}), "cannot"),
    "more entries, with long names": (
        archive(Entry(b"a" * 99), end={"here": 2, "count": 2}),
        "counts 2 entries, not 1",
    ),
    "65,536 entries more": (
        archive(
            FIRST,
            SECOND,
            end={"here": 65_535, "count": 65_535},
            end64={"here": 65_536 + 1, "count": 65_536 + 1},
        ),
        "entries",
    ),
    "comment past the directory": (archive(Entry(b"a", central={"comment": 5})), "its entries 52"),
    "short directory": (archive(FIRST, SECOND, end={"nbytes": 93}), "no entry 0"),
    "directory before the archive": (archive(FIRST, end={"start": 99}), "places the central"),
    "directory larger than the file": (archive(FIRST, end={"nbytes": 9999}), "places the central"),
    "last of two disks": (archive(FIRST, end={"disk": 1, "first": 1}), "several disks"),
    "entries on two disks": (archive(FIRST, end={"here": 0}), "several disks"),
    "entry on another disk": (archive(Entry(b"a", central={"disk": 1})), "several disks"),
    "size without a zip64 field": (archive(Entry(b"a", central={"size": WIDE})), "no zip64 size"),
    "short zip64 field": (
        archive(Entry(b"a", central={"size": WIDE}, extra=struct.pack("<2HL", 1, 4, 7))),
        "no zip64 size",
    ),
    "zip64 field that ends too late": (
        archive(Entry(b"a", central={"size": WIDE}, extra=struct.pack("<2HL", 1, 8, 7))),
        "no zip64 size",
    ),
    "zip64 records that differ": (archive(FIRST, end64={"here": 2, "count": 2}), "contradicts"),
    "zip64 directory of another size": (archive(FIRST, end64={"nbytes": 9}), "contradicts"),
    "zip64 record of unknown length": (archive(FIRST, end64={"record": 45}), "right before"),
    "zip64 record elsewhere": (archive(FIRST, locator={"at": 0}), "contradicts"),
    "zip64 of two disks": (archive(FIRST, locator={"disks": 2}), "contradicts"),
    "zip64 on another disk": (archive(FIRST, locator={"disk": 1}), "contradicts"),
    "locator of no record": (
        BOTH[:-22] + struct.pack("<4sLQL", b"PK\6\7", 0, 0, 1) + BOTH[-22:],
        "right before the locator",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_hostile_archive_is_refused(name: str) -> None:
    """An archive whose records contradict one another is damaged, with the reason."""
    data, reason = REFUSED[name]
    with pytest.raises(DamagedError, match=reason):
        await opened(data)


async def test_zip64_values_replace_those_of_narrow_records() -> None:
    """Numbers of the zip64 end record and extra fields replace those that are all ones."""
    start = len(FIRST.header())
    values = struct.pack("<2H3QL", 1, 28, len(SECOND.data), len(SECOND.stored), start, 0)
    central = {"size": WIDE, "nbytes": WIDE, "start": WIDE, "disk": 0xFFFF}
    wide = Entry(SECOND.name, method=8, extra=b"\x99\x99\0\0" + values, central=central)
    end = {"here": 0xFFFF, "count": 0xFFFF, "nbytes": WIDE, "start": WIDE, "disk": 0xFFFF}

    found = await opened(b"before" + archive(FIRST, wide, end=end, end64={}))
    assert [await found.read(name) for name in "ab"] == [b"content", b"content"]


async def test_directory_over_a_limit_is_refused() -> None:
    """A directory of more bytes than the limit is refused before it is read."""
    nbytes = len(FIRST.record(0) + SECOND.record(0))
    await opened(BOTH, nbytes)
    with pytest.raises(DamagedError, match=f"directory has {nbytes} bytes, over {nbytes - 1}"):
        await opened(BOTH, nbytes - 1)


def unicode_path(name: bytes, of: bytes, version: int = 1) -> bytes:
    """Return the extra field with a name in UTF-8 in place of the name *of*."""
    return struct.pack("<2HBL", 0x7075, 5 + len(name), version, zlib.crc32(of)) + name


@pytest.mark.parametrize(
    ("entry", "names"),
    [
        (Entry("é".encode(), flags=0x800), ["é"]),
        (Entry("é".encode("cp437")), ["é"]),
        (Entry(b"\xff\xfe", flags=0x800), []),
        (Entry(b"a", extra=unicode_path("é".encode(), b"a")), ["é"]),
        (Entry(b"a", extra=b"up\0\0"), ["a"]),
        (Entry(b"a", extra=b"up\x09\0"), ["a"]),
        (Entry("é".encode(), host=3), ["é"]),
        (Entry("é".encode(), host=19), ["é"]),
        (Entry("é".encode("cp437"), host=3), ["é"]),
        (Entry("é".encode()), ["\u251c\u2310"]),
        (Entry(b"a", extra=unicode_path("é".encode(), b"b")), ["a"]),
        (Entry(b"a", extra=unicode_path("é".encode(), b"a", version=2)), ["a"]),
        (Entry(b"a", extra=unicode_path(b"../a", b"a")), []),
        (Entry(b"a", extra=unicode_path(b"\xff", b"a")), []),
        (Entry(b"a\0b"), []),
        *[(Entry(name.encode()), []) for name in NO_KEYS if "\\" not in name],
    ],
)
async def test_name_is_a_key_if_it_is_canonical(entry: Entry, names: list[str]) -> None:
    """A name in UTF-8, in code page 437 or of a Unicode path field is a key if it is canonical."""
    found = await opened(archive(entry))

    assert [*await found.names()] == names
    assert [await found.read(name) for name in names] == [b"content"] * len(names)


@pytest.mark.parametrize(
    "void",
    [
        unicode_path("é".encode(), b"b"),
        unicode_path("é".encode(), b"a", version=2),
        unicode_path(b"", b"a"),
        b"up\0\0",
    ],
)
async def test_void_unicode_path_hides_no_valid_one(void: bytes) -> None:
    """The first Unicode path field that is valid for the name of its entry counts."""
    found = await opened(archive(Entry(b"a", extra=void + unicode_path(b"new", b"a"))))

    assert [*await found.names()] == ["new"]


async def test_backslashes_separate_where_no_name_has_a_slash() -> None:
    """Backslashes are separators in an archive without slashes, as for Info-ZIP."""
    found = await opened(archive(Entry(b"a\\b"), Entry(b"c"), Entry(b"a\\", b"")))

    assert [*await found.names()] == ["a/b", "c"]
    assert await found.read("a/b") == b"content"
    assert await _left_out(found) == []


async def _left_out(found: Opened) -> list[str]:
    described = await found.members.collections(
        found.fetch, lambda _: pytest.fail("lists"), run_in_thread
    )
    return [each.description.why_sharded for each in described if isinstance(each, ChunkCollection)]


@pytest.mark.parametrize(
    "name", [b"a\\b", b"./a", b"/a", b"../a", b"a//b", b"a\0b", b"a/../b", b"\\", b"a/"]
)
async def test_entries_that_are_no_keys_are_counted(name: bytes) -> None:
    """Entries with data whose names are no keys are described by their number and an example."""
    found = await opened(archive(Entry(b"x/y"), Entry(name), Entry(b"/z"), Entry(b"d/", b"")))

    assert [*await found.names()] == ["x/y"]
    (reason,) = await _left_out(found)
    assert reason == f"2 names are no keys, such as {name.decode()!r}"


async def test_entries_are_counted_modulo_65536() -> None:
    """An archive without zip64 records may count its entries modulo 65,536: all are read."""
    number = 65_536 + 7
    entry = Entry(b"00000", b"")
    nbytes = len(entry.header())
    head = entry.record(0)[:-9]  # without the offset and the name
    records = b"".join(
        head + struct.pack("<L5s", at * nbytes, b"%05d" % at) for at in range(number)
    )
    end = (0, 0, number % 65_536, number % 65_536, len(records), nbytes * number, 0)
    data = bytes(nbytes * number) + records + struct.pack("<4s4H2LH", b"PK\5\6", *end)
    found = await opened(data, 2**23)

    assert len(await found.names()) == number


async def test_zip64_record_may_have_extensible_data() -> None:
    """Data behind the fields of the zip64 end record, which it counts, are passed over."""
    data = archive(FIRST, end64={"record": 44 + 9})
    at = data.rfind(b"PK\6\7")
    found = await opened(data[:at] + b"extension" + data[at:])

    assert await found.read("a") == b"content"


async def test_offsets_modulo_four_gigabytes_are_unwrapped(tmp_path: Path) -> None:
    """Entries behind 4 GiB are read by offsets modulo 2^32 where there are no zip64 records."""
    hole = 2**32 - 20
    first = Entry(b"hole", bytes(8), central={"size": hole, "nbytes": hole})
    behind = Entry(b"behind", b"far")
    start = len(first.header()) - 8 + hole
    path = tmp_path / "a.zip"
    with path.open("wb") as file:
        file.write(first.header())
        file.seek(start)
        file.write(behind.header())
        directory = file.tell()
        records = first.record(0) + behind.record(start - 2**32)
        file.write(records)
        fields = (0, 0, 2, 2, len(records), directory - 2**32, 0)
        file.write(struct.pack("<4s4H2LH", b"PK\5\6", *fields))

    async with Stores(LimitSettings()) as stores:
        ref = stores.open_root(f"file://{tmp_path}").join("a.zip")
        layout = await Zip(MOST, MOST).open(ref, uncached_reads(stores))
        assert layout is not None
        assert await Opened(layout, stores, uncached_reads(stores)).read("behind") == b"far"


async def test_last_of_equal_names_counts() -> None:
    """The last one of entries with equal names, also in different spellings, is read."""
    entries = [
        Entry("é".encode(), b"first", flags=0x800),
        Entry(b"a", b"between"),
        Entry("é".encode("cp437"), b"last", method=8),
    ]
    found = await opened(archive(*entries))

    assert [*await found.names()] == ["a", "é"]
    assert await found.read("é") == b"last"


@pytest.mark.parametrize(
    "name", [b"%d", b"0/c/%06d/0", b"%06d" + b"\xb0" * 90, b"%06d" + b"a" * 990]
)
def test_memory_of_a_directory_is_as_announced(name: bytes) -> None:
    """Decoding takes no more memory than announced; an entry keeps 64 bytes and its name."""
    count = 1000
    data = archive(*(Entry(name % number, b"") for number in range(count)))
    end = parse_end(data)
    assert end is not None
    tracemalloc.start()
    try:
        start = len(data) - end.directory_from_end
        directory = decode_directory(data[start : start + end.directory_nbytes], end)
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_nbytes < memory_nbytes(None, end.directory_nbytes)
    assert directory.nbytes <= sum(
        len(name.encode()) + 64 for name, _ in directory.names.below("", "", "")
    )


@given(
    st.sampled_from([BOTH, archive(FIRST, SECOND, end64={}, comment=b"note"), zipped([])]),
    st.lists(changes(), min_size=1, max_size=3),
)
@at_random(60)
async def test_changed_archive_is_damaged_or_located_within_itself(
    data: bytes, made: list[Change]
) -> None:
    """A changed archive raises DamagedError, or its entries lie within it."""
    for change in made:
        data = change(data)
    with suppress(DamagedError):
        found = await opened(data)
        for name in await found.names():
            match await found.find(name):
                case Stored(_, place) | Coded(Stored(_, place)):
                    assert place.stop <= len(data)
                case found_data:
                    assert isinstance(found_data, Inline)
                    assert found_data.data == b""


@pytest.mark.parametrize("data", [bytes(TAIL_NBYTES), b"PK\5\6" * (TAIL_NBYTES // 4)])
def test_tail_without_records_is_refused(data: bytes) -> None:
    """The end of another file is refused, also if it is full of signatures."""
    with pytest.raises(DecodeError):
        decode_tail(data, MOST)
