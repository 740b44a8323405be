"""Entries of a session's journal: where the bytes of each changed chunk are.

A write of an inner chunk stores new bytes only. The shard is then a list of fragments, which lie in
files of the session; the commit joins them in one chunk file.
"""

import re
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

from shardgate.formats.icechunk.ids import OBJECT_ID_NBYTES
from shardgate.formats.icechunk.manifest import InlineChunk, Native
from shardgate.formats.reading import DecodeError
from shardgate.model import ByteRange, Piece

MAX_FRAGMENTS: Final = 1024
"""A shard of more is written as a whole: its entry is written, and decoded, with each change."""


class Fragment(NamedTuple):
    """Part of a file of the session, or of a chunk file."""

    file_id: bytes
    byte_range: ByteRange
    is_chunk_file: bool


@dataclass(frozen=True, slots=True)
class Fragmented:
    """A shard whose bytes lie in several files, and the id of the chunk file that will have them.

    Readers and commits of any replica know the shard by this id, whether it is joined or not.
    """

    chunk_id: bytes
    fragments: tuple[Fragment, ...]

    @property
    def joined(self) -> Native:
        nbytes = sum(fragment.byte_range.length for fragment in self.fragments)
        return Native(self.chunk_id, ByteRange(0, nbytes))


type JournalEntry = Native | InlineChunk | Fragmented | None
"""Payload of a changed chunk; `None` for a deleted one."""


def cut(fragments: Sequence[Fragment], *ranges: ByteRange) -> Iterator[list[Fragment]]:
    """Yield for each of *ranges* what it has of *fragments*, of which a shard consists."""
    stops = list(accumulate(fragment.byte_range.length for fragment in fragments))
    for start, stop in ranges:
        found = []
        while start < stop:
            number = bisect_right(stops, start)
            fragment = fragments[number]
            before = stops[number] - fragment.byte_range.length
            inner = ByteRange(start - before, min(stop, stops[number]) - before)
            found.append(fragment._replace(byte_range=fragment.byte_range.narrow(inner)))
            start = stops[number]  # noqa: PLW2901 - the rest of the range
        yield found


def rearrange(
    fragments: Sequence[Fragment], pieces: Sequence[Piece], new_file_id: bytes
) -> list[Fragment]:
    """Return the fragments of *pieces*: ranges of the shard that consists of *fragments*, and new
    bytes, which a file of the session holds one after the other.
    """
    kept = cut(fragments, *(piece for piece in pieces if isinstance(piece, ByteRange)))
    arranged: list[Fragment] = []
    new_nbytes = 0
    for piece in pieces:
        if isinstance(piece, ByteRange):
            arranged += next(kept)
        elif piece:
            place = ByteRange(new_nbytes, new_nbytes + len(piece))
            arranged.append(Fragment(new_file_id, place, is_chunk_file=False))
            new_nbytes = place.stop
    return arranged


_GONE: Final = b"-"
_INLINE: Final = b"i"
_NATIVE: Final = b"n"
_FRAGMENTED: Final = b"f"
_REFERENCE: Final = struct.Struct(f"<{OBJECT_ID_NBYTES}sQQ")
_FRAGMENT: Final = struct.Struct(f"<{OBJECT_ID_NBYTES}sQQ?")
_SCALAR: Final = "scalar"
_COORDS: Final = re.compile(r"(?:0|[1-9][0-9]{0,9})(?:\.(?:0|[1-9][0-9]{0,9}))*", re.ASCII)

GONE_NBYTES: Final = len(_GONE)
"""Size of an entry of a deleted chunk; all others are longer, since no chunk is empty."""


def encode_entry(entry: JournalEntry) -> bytes:
    """Encode the journal entry of a chunk."""
    match entry:
        case None:
            return _GONE
        case InlineChunk(data):
            return _INLINE + data
        case Native(chunk_id, (start, stop)):
            return _NATIVE + _REFERENCE.pack(chunk_id, start, stop)
        case Fragmented(chunk_id, fragments):
            packed = (_FRAGMENT.pack(each[0], *each[1], each[2]) for each in fragments)
            return b"".join([_FRAGMENTED, chunk_id, *packed])


def decode_entry(data: bytes) -> JournalEntry:
    """Decode the journal entry of a chunk. Raises: `DecodeError`."""
    kind, rest = data[:1], data[1:]
    if data == _GONE:
        return None
    if kind == _INLINE:
        return InlineChunk(rest)
    if kind == _NATIVE and len(rest) == _REFERENCE.size:
        chunk_id, start, stop = _REFERENCE.unpack(rest)
        if start <= stop:
            return Native(chunk_id, ByteRange(start, stop))
    if kind == _FRAGMENTED and (fragments := _decode_fragments(rest[OBJECT_ID_NBYTES:])):
        return Fragmented(rest[:OBJECT_ID_NBYTES], fragments)
    reason = "damaged, or of a kind that this version of Shardgate does not know"
    raise DecodeError(f"an entry of a journal that begins with {kind!r} is {reason}")


def _decode_fragments(data: bytes) -> tuple[Fragment, ...]:
    """Decode the fragments of a shard; return none if one is not valid."""
    count, left = divmod(len(data), _FRAGMENT.size)
    if left or count > MAX_FRAGMENTS:
        return ()
    unpacked = list(_FRAGMENT.iter_unpack(data))
    if any(start >= stop for _, start, stop, _ in unpacked):
        return ()
    return tuple(
        Fragment(file_id, ByteRange(start, stop), is_chunk_file)
        for file_id, start, stop, is_chunk_file in unpacked
    )


def spell_coords(coords: tuple[int, ...]) -> str:
    """Return the name of the journal entry of the chunk at *coords*."""
    return ".".join(map(str, coords)) or _SCALAR


def parse_coords(name: str) -> tuple[int, ...] | None:
    """Parse the name of a journal entry; `None` for any other name."""
    if name == _SCALAR:
        return ()
    if not _COORDS.fullmatch(name):
        return None
    coords = tuple(map(int, name.split(".")))
    # Coordinates are stored in 4 bytes.
    return coords if max(coords) < 2**32 else None
