"""What the journal of a session tells of a chunk: one small object for each that was changed."""

import re
import struct
from typing import Final

from app.formats.icechunk.ids import OBJECT_ID_NBYTES
from app.formats.icechunk.payloads import Inlaid
from app.formats.icechunk.references import Native
from app.formats.reading import DecodeError
from app.model import ByteRange

type Entry = Native | Inlaid | None
"""Where the bytes of a chunk are from now on; `None` is nowhere."""

_GONE: Final = b"-"
_INLINE: Final = b"i"
_NATIVE: Final = b"n"
_REFERENCE: Final = struct.Struct(f"<{OBJECT_ID_NBYTES}sQQ")
_SCALAR: Final = "scalar"
"""Names the only chunk of an array without dimensions."""
_COORDS: Final = re.compile(r"(?:0|[1-9][0-9]*)(?:\.(?:0|[1-9][0-9]*))*", re.ASCII)

GONE_NBYTES: Final = len(_GONE)
"""Only an entry of a chunk that is gone is so short: no chunk is empty."""


def encode_entry(entry: Entry) -> bytes:
    """Spell *entry*."""
    match entry:
        case None:
            return _GONE
        case Inlaid(data):
            return _INLINE + data
        case Native(chunk_id, (start, stop)):
            return _NATIVE + _REFERENCE.pack(chunk_id, start, stop)


def decode_entry(data: bytes) -> Entry:
    """Read an entry.

    Raises: `DecodeError`.
    """
    kind, rest = data[:1], data[1:]
    if data == _GONE:
        return None
    if kind == _INLINE:
        return Inlaid(rest)
    if kind == _NATIVE and len(rest) == _REFERENCE.size:
        chunk_id, start, stop = _REFERENCE.unpack(rest)
        if start <= stop:
            return Native(chunk_id, ByteRange(start, stop))
    raise DecodeError("no entry of a session's journal")


def spell_coords(coords: tuple[int, ...]) -> str:
    """Name the entry of the chunk at *coords*."""
    return ".".join(map(str, coords)) or _SCALAR


def parse_coords(name: str) -> tuple[int, ...] | None:
    """Read such a name; `None` for any other."""
    if name == _SCALAR:
        return ()
    return tuple(map(int, name.split("."))) if _COORDS.fullmatch(name) else None
