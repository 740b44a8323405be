"""The central directory of an archive, and the records at its end, decoded into a table of entries.

Sections are those of APPNOTE 6.3.10. Offsets count from the beginning of the archive; other bytes
may lie in front of it, such as a program that extracts it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from zlib_ng import zlib_ng

from shardgate.formats.documents import Marked, begins_like_page
from shardgate.formats.members import NO_KEY, LeftOut, SortedNames
from shardgate.formats.reading import DecodeError
from shardgate.model import check_integer

_END: Final = Struct("<4s4H2LH")
"""§4.3.16: signature, this disk and the directory's first, entries on this disk and on all, bytes
and offset of the directory, bytes of the comment."""
_END_SIGNATURE: Final = b"PK\5\6"
_LOCATOR: Final = Struct("<4sLQL")
"""§4.3.15: signature, disk and offset of the zip64 end record, number of disks."""
_END64: Final = Struct("<4sQ2H2L4Q")
"""§4.3.14: signature, bytes that follow, two versions, then as in `_END`."""
_MOST: Final = (0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
"""Values of the fields of `_END` that stand for those of `_END64`."""
_MOST_COMMENT_NBYTES: Final = 0xFFFF
TAIL_NBYTES: Final = _MOST_COMMENT_NBYTES + _END.size + _LOCATOR.size + _END64.size
"""Holds all records at the end, and in most archives a directory of some hundred entries."""

_RECORD: Final = Struct("<4sxB2x2H4x3L4H6xL")
"""§4.3.12, up to the name: signature, host system, flags, method, CRC-32, bytes as stored and of
the content, bytes of name, extra fields and comment, disk, offset of the local header."""
_UNIX_HOSTS: Final = (3, 19)
"""Unix and macOS: their programs write names in UTF-8, often without the flag."""
_COUNTED: Final = 2**16
_NARROW: Final = 2**32
"""Entries, and bytes, at which some programs begin again at 0 instead of writing zip64 records."""
_EXTRA: Final = Struct("<2H")
_WIDE: Final = 0xFFFFFFFF
_MOST_WIDE: Final = 2**63 - 1
_WIDENED: Final = (("size", _WIDE), ("nbytes", _WIDE), ("start", _WIDE), ("disk", 0xFFFF))
"""Values of fields of a record that stand for one of the zip64 extra field, in its order."""

LOCAL_HEADER: Final = Struct("<4s2xHH16xHH")
"""§4.3.7: signature, flags, method, lengths of name and extra fields."""
STORED: Final = 0
DEFLATED: Final = 8
_METHODS: Final = {9: "Deflate64", 12: "bzip2", 14: "LZMA", 93: "Zstandard", 95: "XZ"}
_UTF8: Final = 0x800
UNREADABLE: Final = 0x2061
"""Flags (§4.4.4) of data that are encrypted, or a patch of other data."""

_ROW: Final = Struct("<4Q2L3H")  # an element of `_ROWS`
_ROWS: Final = np.dtype(
    [("start", "<u8"), ("stop", "<u8"), ("nbytes", "<u8"), ("size", "<u8"), ("crc", "<u4"),
     ("name_crc", "<u4"), ("name_nbytes", "<u2"), ("method", "<u2"), ("flags", "<u2")]
)  # fmt: skip
_SEVERAL: Final = "it is a part of an archive on several disks"


class ZipEntry(NamedTuple):
    """One row of a `CentralDirectory`."""

    start: int
    """Offset of the local header."""
    stop: int
    """Offset of the next local header, or of the directory."""
    nbytes: int
    """Length as stored."""
    size: int
    """Length of the content."""
    crc: int
    """CRC-32 of the content."""
    name_crc: int
    """CRC-32 of the name as the archive spells it."""
    name_nbytes: int
    method: int
    flags: int

    @property
    def fault(self) -> str:
        """Reason why the entry cannot be read; empty for none."""
        if self.size == _MOST_WIDE:
            return "it would have 2^63-1 bytes or more once inflated"
        if self.flags & UNREADABLE:
            return "it is encrypted, or a patch"
        if self.method not in (STORED, DEFLATED):
            name = _METHODS.get(self.method, "unknown")
            return f"its compression method is {self.method} ({name}), neither stored nor deflated"
        if self.nbytes != self.size and (self.method == STORED or not self.nbytes):
            return f"its {self.size} bytes are stored as {self.nbytes} bytes"
        if self.crc and not self.size:
            return "it is empty, and its CRC-32 is not"
        return ""


@dataclass(frozen=True, slots=True, eq=False)
class CentralDirectory:
    """Entries whose names are keys, in the order of these; of equal names the last one counts."""

    names: SortedNames
    rows: NDArray[Any]
    left_out: LeftOut
    """Entries whose names are no keys, without directories."""

    @property
    def nbytes(self) -> int:
        return self.names.nbytes + self.rows.nbytes

    def lookup(self, name: str) -> ZipEntry | None:
        at = self.names.position(name)
        return None if at is None else ZipEntry(*self.rows[at].item())


class EndRecord(NamedTuple):
    """The records at the end of an archive."""

    directory_start: int
    """Offset of the directory in the archive."""
    directory_nbytes: int
    entry_count: int
    directory_from_end: int
    """Bytes of the object from the beginning of the directory on."""
    directory: CentralDirectory | None = None
    """The directory, if it was read along."""
    is_narrow: bool = False
    """True without zip64 records."""

    @property
    def nbytes(self) -> int:
        return 0 if self.directory is None else self.directory.nbytes


def decode_tail(tail: bytes, limit_nbytes: int) -> Marked[EndRecord]:
    """Decode the last `TAIL_NBYTES` of an archive, whose directory may have *limit_nbytes*."""
    if (end := parse_end(tail)) is None:
        if begins_like_page(tail):
            return Marked(is_page=True)
        raise DecodeError("it has no end record: it is truncated, or no zip archive")
    nbytes = end.directory_nbytes
    if nbytes > limit_nbytes:
        reason = f"its central directory has {nbytes} bytes, over {limit_nbytes}"
        raise DecodeError(f"{reason}: limits.repository_file_bytes")
    start = len(tail) - end.directory_from_end
    if start < 0:  # the tail has no more than a part of it
        return Marked(end)
    try:
        directory = decode_directory(tail[start : start + nbytes], end)
    except DecodeError:
        return Marked(end)  # its offsets may be those of a longer archive; see `unwrap`
    return Marked(end._replace(directory=directory))


def unwrap(end: EndRecord, start: int) -> EndRecord:
    """Return *end* for a directory that begins at *start* bytes, if the offsets of its archive are
    narrow and began again at 0.
    """
    shift = start - end.directory_start
    is_wrapped = end.is_narrow and shift > 0 and shift % _NARROW == 0
    return end._replace(directory_start=start) if is_wrapped else end


def parse_end(tail: bytes) -> EndRecord | None:
    """Parse the records at the end of an archive; `None` without one. Bytes may follow the comment.
    The last end record with all of its comment counts: texts in comments can have its signature.
    """
    if (at := _find_end(tail)) is None:
        return None
    _, *fields, _ = _END.unpack_from(tail, at)
    locator_at = at - _LOCATOR.size
    is_narrow = locator_at < 0 or not tail.startswith(b"PK\6\7", locator_at)
    if not is_narrow:
        at = _find_end64(tail, locator_at)
        fields = _parse_end64(tail, at, locator_at, fields)
    disk, first, here, count, nbytes, start = fields
    if disk or first or here != count:
        raise DecodeError(_SEVERAL)
    if nbytes < count * _RECORD.size:
        raise DecodeError(f"its central directory of {nbytes} bytes cannot have {count} entries")
    return EndRecord(start, nbytes, count, len(tail) - at + nbytes, is_narrow=is_narrow)


def _find_end(tail: bytes) -> int | None:
    """Return where the last end record with all of its comment begins; `None` without any."""
    first = max(0, len(tail) - _END.size - _MOST_COMMENT_NBYTES)
    stop = max(0, len(tail) - _END.size + len(_END_SIGNATURE))
    is_cut = False
    while (at := tail.rfind(_END_SIGNATURE, first, stop)) >= 0:
        comment_nbytes = _END.unpack_from(tail, at)[-1]
        if at + _END.size + comment_nbytes <= len(tail):
            return at
        is_cut = True
        stop = at
    if is_cut:
        raise DecodeError("it ends within its comment")
    return None


def _find_end64(tail: bytes, locator_at: int) -> int:
    """Find the zip64 end record, perhaps with extensible data, that ends at *locator_at*."""
    head_nbytes = 12  # signature, and number of the bytes that follow
    at = tail.rfind(b"PK\6\6", 0, locator_at)
    while at >= 0:
        nbytes = head_nbytes + int.from_bytes(tail[at + 4 : at + head_nbytes], "little")
        if nbytes >= _END64.size and at + nbytes == locator_at:
            return at
        at = tail.rfind(b"PK\6\6", 0, at)
    raise DecodeError("its zip64 end record is not right before the locator")


def _parse_end64(tail: bytes, at: int, locator_at: int, narrow: Sequence[int]) -> list[int]:
    """Parse the zip64 end record at *at*, and its locator; *narrow* are the fields of `_END`."""
    _, _, _, _, *fields = _END64.unpack_from(tail, at)
    _, disk, start, disks = _LOCATOR.unpack_from(tail, locator_at)
    agree = all(old in (new, most) for old, new, most in zip(narrow, fields, _MOST, strict=True))
    is_behind_directory = start == fields[-1] + fields[-2]
    if disk or disks > 1 or not agree or not is_behind_directory:
        raise DecodeError("its zip64 end record contradicts the end record or the locator")
    return fields


def decode_directory(data: bytes, end: EndRecord) -> CentralDirectory:
    """Decode the central directory that *end* describes."""
    packed = bytearray()
    texts = list[bytes]()
    at = 0
    while at < len(data):
        number = len(texts)
        name_at = at + _RECORD.size
        if name_at > len(data) or not data.startswith(b"PK\1\2", at):
            raise DecodeError(f"its central directory has no entry {number} at {at}")
        record = _RECORD.unpack_from(data, at)
        _, host, flags, method, crc, nbytes, size, *lengths, disk, start = record
        name_nbytes, extra_nbytes, comment_nbytes = lengths
        extra_at = name_at + name_nbytes
        comment_at = extra_at + extra_nbytes
        at = comment_at + comment_nbytes
        name = data[name_at:extra_at]
        extra = data[extra_at:comment_at]
        if _WIDE in (size, nbytes, start) or disk:
            size, nbytes, start, disk = _widen(number, extra, (size, nbytes, start, disk))
        if disk:
            raise DecodeError(_SEVERAL)
        name_crc = zlib_ng.crc32(name)
        packed += _ROW.pack(start, 0, nbytes, size, crc, name_crc, name_nbytes, method, flags)
        texts.append(_text(name, host, flags, extra, name_crc))
    if at != len(data):
        raise DecodeError(f"its central directory has {len(data)} bytes, its entries {at}")
    if (len(texts) - end.entry_count) % _COUNTED:
        raise DecodeError(f"its end record counts {end.entry_count} entries, not {len(texts)}")
    rows = np.frombuffer(packed, _ROWS)
    _find_stops(rows, end)
    numbers, left_out = _find_keys(texts, rows["size"])
    names, order = SortedNames.of(list(numbers))
    chosen = np.fromiter(numbers.values(), np.intp, len(numbers))[order]
    return CentralDirectory(names, rows[chosen], left_out)


def _find_keys(
    texts: Sequence[bytes], sizes: NDArray[np.uint64]
) -> tuple[dict[bytes, int], LeftOut]:
    """Return the entries whose names are keys, and those left out. In an archive without any
    slash backslashes are separators, as for Info-ZIP: programs of Windows write them.
    """
    numbers = dict[bytes, int]()
    left_out = LeftOut()
    is_windows = not any(b"/" in text for text in texts)
    for number, text in enumerate(texts):
        key = text.replace(b"\\", b"/") if is_windows else text
        if NO_KEY.search(key) is None:
            numbers[key] = number
        elif sizes[number] or not key.endswith(b"/"):
            left_out = left_out.add(text.decode())
    return numbers, left_out


def memory_nbytes(_: bytes | None, nbytes: int) -> int:
    """Return the memory that decoding a directory of *nbytes* takes at most; see `Read`."""
    # For entries with short names; a byte in code page 437 may take three in UTF-8, twice.
    return 10 * nbytes


def _text(name: bytes, host: int, flags: int, extra: bytes, crc: int) -> bytes:
    """Return the name of an entry in UTF-8: of the first Unicode path field for the *crc* of its
    *name*, else that itself; with a zero byte, which is in no key, if it cannot be decoded.
    """
    if b"up" in extra:  # §4.6.9: version 1, the CRC-32 of the name that it replaces, a name
        head = b"\1" + crc.to_bytes(4, "little")
        for field in _extra_fields(extra, 0x7075):
            if field.startswith(head) and len(field) > len(head):
                name = field.removeprefix(head)
                flags = _UTF8
                break
    if name.isascii():
        return name
    try:
        name.decode()
    except UnicodeDecodeError:
        if flags & _UTF8:
            return name.decode(errors="replace").encode() + b"\0"
        return name.decode("cp437").encode()
    is_utf8 = flags & _UTF8 or host in _UNIX_HOSTS
    return name if is_utf8 else name.decode("cp437").encode()


def _extra_fields(fields: bytes, header_id: int) -> Iterator[bytes]:
    """Yield the extra fields (§4.5.1) with an id, up to one that ends past the others."""
    at = 0
    while at + _EXTRA.size <= len(fields):
        found, nbytes = _EXTRA.unpack_from(fields, at)
        at += _EXTRA.size
        if found == header_id and at + nbytes <= len(fields):
            yield fields[at : at + nbytes]
        at += nbytes


def _widen(entry: int, extra: bytes, narrow: Sequence[int]) -> list[int]:
    """Return *narrow* numbers, those replaced that the zip64 extra field holds (§4.5.3)."""
    field = next(_extra_fields(extra, 0x0001), b"")
    numbers = list[int]()
    for number, (name, stand_in) in zip(narrow, _WIDENED, strict=True):
        if number != stand_in:
            numbers.append(number)
            continue
        nbytes = 4 if name == "disk" else 8
        if nbytes > len(field):
            raise DecodeError(f"entry {entry} has no zip64 {name}")
        wide = int.from_bytes(field[:nbytes], "little")
        field = field[nbytes:]
        if name == "size":
            wide = min(wide, _MOST_WIDE)  # fails this entry only, as its `fault`
        numbers.append(
            check_integer(wide, f"zip64 {name} of entry {entry}", _MOST_WIDE, DecodeError)
        )
    return numbers


def _find_stops(rows: NDArray[Any], end: EndRecord) -> None:
    """Set where the next entry, or the directory, begins; refuse entries that overlap."""
    if end.is_narrow and end.directory_start >= _NARROW:  # offsets began again at 0
        needed = rows["start"] + rows["nbytes"] + LOCAL_HEADER.size
        is_lower = rows["start"][1:] < needed[:-1]
        rows["start"][1:] += np.uint64(_NARROW) * np.cumsum(is_lower, dtype=np.uint64)
    order = np.argsort(rows["start"], kind="stable")
    starts = rows["start"][order]
    stops = np.append(starts[1:], np.array([end.directory_start], np.uint64))
    room = stops - starts
    header = LOCAL_HEADER.size + rows["name_nbytes"][order].astype(np.uint64)
    is_bad = (stops < starts) | (room < header) | (rows["nbytes"][order] > room - header)
    if np.any(is_bad):
        start = starts[np.flatnonzero(is_bad)[0]]
        raise DecodeError(f"its entry at {start} overlaps the next one, or the central directory")
    rows["stop"][order] = stops
