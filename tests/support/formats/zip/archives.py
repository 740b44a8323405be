"""Zip archives built record by record, true or not, and archives of other programs."""

import io
import struct
import warnings
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from shardgate.formats.zip.layout import Zip
from shardgate.model import ObjectRef
from shardgate.read.metadata_cache import uncached_reads
from shardgate.storage.memory import MemoryStore
from tests.support.formats.members import Opened

type Fields = dict[str, int]

REF: Final = ObjectRef("memory://bucket", "scans/a.zip")
MOST: Final = 2**20
WIDE: Final = 2**32 - 1


def deflated(data: bytes) -> bytes:
    """Compress without a frame."""
    compressor = zlib.compressobj(wbits=-15)
    return compressor.compress(data) + compressor.flush()


@dataclass(frozen=True)
class Entry:
    """An entry, and fields of its records that are not as they should be."""

    name: bytes
    data: bytes = b"content"
    method: int = 0
    flags: int = 0
    extra: bytes = b""
    local_extra: bytes = b""
    local: Fields = field(default_factory=dict)
    central: Fields = field(default_factory=dict)
    host: int = 0
    """System of the program that wrote the entry."""

    @property
    def stored(self) -> bytes:
        """The data as the archive has them."""
        return deflated(self.data) if self.method == 8 else self.data

    def header(self) -> bytes:
        """Return the local header and the data."""
        fields = self._fields() | {"extra": len(self.local_extra)} | self.local
        head = struct.pack("<4s5H3L2H", b"PK\3\4", *fields.values())
        return head + self.name + self.local_extra + self.stored

    def record(self, start: int) -> bytes:
        """Return the record of the directory for an entry at *start*."""
        more = {"comment": 0, "disk": 0, "internal": 0, "external": 0, "start": start}
        fields = self._fields() | {"extra": len(self.extra)} | more | self.central
        head = struct.pack("<4s6H3L5H2L", b"PK\1\2", 20 | self.host << 8, *fields.values())
        return head + self.name + self.extra

    def _fields(self) -> dict[str, int]:
        sizes = {"nbytes": len(self.stored), "size": len(self.data), "name": len(self.name)}
        kind = {"version": 20, "flags": self.flags, "method": self.method, "time": 0, "date": 33}
        return kind | {"crc": zlib.crc32(self.data)} | sizes


def archive(
    *entries: Entry,
    comment: bytes = b"",
    end: Fields | None = None,
    end64: Fields | None = None,
    locator: Fields | None = None,
    gap: bytes = b"",
) -> bytes:
    """Return an archive with fields of *end* that are not as they should be; with *end64* or
    *locator* it has zip64 records, and *gap* lies between the entries and the directory.
    """
    body = bytearray()
    records = bytearray()
    for entry in entries:
        records += entry.record(len(body))
        body += entry.header()
    body += gap
    counts = {"disk": 0, "first": 0, "here": len(entries), "count": len(entries)}
    places = {"nbytes": len(records), "start": len(body)}
    tail = b""
    if end64 is not None or locator is not None:
        wide = {"record": 44, "made": 45, "needed": 45} | counts | places | (end64 or {})
        at = {"disk": 0, "at": len(body) + len(records), "disks": 1} | (locator or {})
        tail = struct.pack("<4sQ2H2L4Q", b"PK\6\6", *wide.values())
        tail += struct.pack("<4sLQL", b"PK\6\7", *at.values())
    last = counts | places | {"comment": len(comment)} | (end or {})
    end_record = struct.pack("<4s4H2LH", b"PK\5\6", *last.values())
    return b"".join([body, records, tail, end_record, comment])


def zipped(
    contents: Sequence[tuple[str, bytes, int]], comment: bytes = b"", *, zip64: bool = False
) -> bytes:
    """Let `zipfile` write (name, data, method) of each entry."""
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w") as written:
        warnings.simplefilter("ignore")  # of names that occur twice
        for name, data, method in contents:
            info = zipfile.ZipInfo(name)
            info.compress_type = method
            with written.open(info, "w", force_zip64=zip64) as entry:
                entry.write(data)
        written.comment = comment
    return file.getvalue()


class Unseekable(io.RawIOBase):
    """A pipe: `zipfile` puts sizes behind the data."""

    def __init__(self) -> None:
        self.data = b""

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        """Append *data*."""
        self.data += data
        return len(data)


async def opened(data: bytes, limit_nbytes: int = MOST) -> Opened:
    """Open the archive *data*."""
    store = MemoryStore()
    store.place(REF, data)
    fetch = uncached_reads(store)
    layout = await Zip(limit_nbytes, MOST).open(REF, fetch)
    assert layout is not None
    return Opened(layout, store, fetch)


def is_key(name: str) -> bool:
    """Return whether a client can ask for *name*."""
    segments = name.split("/")
    return not {"", ".", ".."} & {*segments} and all(c >= " " and c not in "\\\x7f" for c in name)


async def check_equal(data: bytes) -> None:
    """Assert that all keys of the archive have the contents that `zipfile` reads."""
    with zipfile.ZipFile(io.BytesIO(data)) as peer:
        is_windows = not any("/" in name for name in peer.namelist())
        separator = "\\" if is_windows else "/"
        expected = {name.replace(separator, "/"): peer.read(name) for name in peer.namelist()}
    found = await opened(data)

    keys = {name for name in expected if is_key(name)}
    assert [*await found.names()] == sorted(keys, key=str.encode)
    for name, content in expected.items():
        assert await found.read(name) == (content if name in keys else None)
