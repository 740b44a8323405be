"""One reference of a manifest: where the bytes of a chunk are ("ChunkRef")."""

import re
from threading import Lock
from typing import Final, NamedTuple

import zstandard

from app.formats.compression import decompress_frame, zstd_decompressor
from app.formats.icechunk.flatbuffer import I32, U16, U32, U64
from app.formats.icechunk.ids import OBJECT_ID_NBYTES
from app.formats.reading import DecodeError
from app.model import ByteRange, Condition, ETag, UnmodifiedSince

_KINDS: Final = ("inline", "chunk_id", "location", "compressed_location")
_FIELD_NBYTES: Final = (4, 8, 8, OBJECT_ID_NBYTES, 4, 4, 4, 4)
"""What each field takes in its table: an offset, a number, an id."""
_ZSTD: Final = 1
_MAX_COMPRESSED_LOCATION_NBYTES: Final = 1024
"""Decompressed; the library has the same limit."""
_MAX_WINDOW_NBYTES: Final = 2**23
_MAX_TEXT_NBYTES: Final = 8192
_MAX_LAYOUTS: Final = 64
_MAX_KNOWN: Final = 4096
"""So many locations at most are kept inflated: many chunks lie in one file."""
_BYTES_PER_KNOWN: Final = 1024
"""Of a payload, for each that is."""
_KNOWN_NBYTES: Final = 256
_STRONG: Final = re.compile(r"[\x21\x23-\x7e\x80-\xff]*")
_END: Final = 2**63 - 1
_OUTSIDE: Final = "it reaches out of the manifest"


class Native(NamedTuple):
    """A part of a chunk file of the repository."""

    chunk_id: bytes
    byte_range: ByteRange


class Inlined(NamedTuple):
    """Bytes in the manifest itself."""

    place: ByteRange
    """In the payload of the manifest."""


class Virtual(NamedTuple):
    """A part of an object that is none of the repository's."""

    location: str
    """A URL, which may begin with the name of a virtual chunk container."""
    byte_range: ByteRange
    checksum: Condition | None
    """What has to hold of the object."""


type Reference = Native | Inlined | Virtual


class _Layout(NamedTuple):
    """Where the fields after the index lie in the tables of one vtable; 0 if they are absent."""

    inline: int
    offset: int
    length: int
    chunk_id: int
    location: int
    etag: int
    last_modified: int
    compressed_location: int

    @property
    def nbytes(self) -> int:
        """How far the fields reach into a table."""
        return max(at + nbytes for at, nbytes in zip(self, _FIELD_NBYTES, strict=True) if at)

    @property
    def fault(self) -> str | None:
        """Tell why no table is a reference: it has to be of one kind, with one location or two."""
        found = [name for name in _KINDS if getattr(self, name)]
        if not found:
            return "it has neither inline nor chunk_id nor location"
        if len(found) == 1 or found == ["location", "compressed_location"]:
            return None
        return f"it has both {' and '.join(found)}"


class LocationCodec:
    """Inflates the locations of a manifest, each by itself; any thread may."""

    __slots__ = (
        "_decompressor",
        "_known",
        "_lock",
        "_max_known",
        "algorithm",
        "dictionary",
        "nbytes",
    )

    def __init__(self, algorithm: int, dictionary: bytes | None, payload_nbytes: int = 0) -> None:
        """Get ready for locations in a payload that *algorithm* compressed with *dictionary*.

        Raises: `DecodeError` where that is none.
        """
        self.algorithm = algorithm
        self.dictionary = dictionary if algorithm == _ZSTD else None
        self._lock = Lock()
        self._decompressor = None
        self._known: dict[bytes, str] = {}
        self._max_known = 0
        self.nbytes = 0
        if dictionary and algorithm == _ZSTD:
            self._decompressor = zstd_decompressor(dictionary, _MAX_WINDOW_NBYTES)
            self._max_known = min(_MAX_KNOWN, payload_nbytes // _BYTES_PER_KNOWN)
            self.nbytes = self._decompressor.memory_size() + 3 * len(dictionary)
            self.nbytes += self._max_known * _KNOWN_NBYTES

    def decode(self, data: bytes) -> str:
        """Inflate *data*; algorithm 0 has left it as it was.

        Raises: `DecodeError`.
        """
        if (known := self._known.get(data)) is not None:
            return known
        if self._decompressor is None:
            return _decode(self._refuse_or_copy(data))
        location = _decode(self._inflate(self._decompressor, data))
        if len(self._known) >= self._max_known:
            self._known = {}
        self._known[data] = location
        return location

    def _inflate(self, decompressor: zstandard.ZstdDecompressor, data: bytes) -> bytes:
        try:
            with self._lock:
                return decompress_frame(decompressor, data, _MAX_COMPRESSED_LOCATION_NBYTES)
        except DecodeError as error:
            raise DecodeError(f"its location cannot be decompressed: {error}") from None

    def _refuse_or_copy(self, data: bytes) -> bytes:
        if self.algorithm == 0:
            return data
        if self.algorithm == _ZSTD:
            raise DecodeError("its location is compressed, and there is no location_dictionary")
        raise DecodeError(f"its location is compressed by unknown algorithm {self.algorithm}")


class References:
    """Reads the references of a manifest; any thread may."""

    __slots__ = ("_layouts", "codec", "data")

    def __init__(self, data: bytes, codec: LocationCodec) -> None:
        """Get ready to read from *data*, a payload."""
        self.data = data
        self.codec = codec
        self._layouts: dict[int, tuple[int, _Layout]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of memory that payload and codec hold."""
        return len(self.data) + self.codec.nbytes

    def read(self, table: int) -> Reference:
        """Read the reference at *table*, whose vtable lies in the payload.

        Raises: `DecodeError` where it contradicts itself.
        """
        data = self.data
        vtable = table - I32.unpack_from(data, table)[0]
        last, layout = self._layouts.get(vtable) or self._lay_out(vtable)
        inline, offset, length, chunk_id, _, _, _, _ = layout
        if table > last:
            raise DecodeError(_OUTSIDE)
        if inline:
            return Inlined(ByteRange(*self._vector(table + inline)))
        start = U64.unpack_from(data, table + offset)[0] if offset else 0
        stop = start + U64.unpack_from(data, table + length)[0] if length else start
        if stop > _END:
            raise DecodeError("it ends past 2^63")
        if chunk_id:
            at = table + chunk_id
            return Native(data[at : at + OBJECT_ID_NBYTES], ByteRange(start, stop))
        return self._read_virtual(table, layout, ByteRange(start, stop))

    def _lay_out(self, vtable: int) -> tuple[int, _Layout]:
        """Give the last position of a table of *vtable* too: many have one vtable in common."""
        stop = vtable + U16.unpack_from(self.data, vtable)[0]
        slots = range(vtable + 6, vtable + 6 + 2 * len(_FIELD_NBYTES), 2)
        layout = _Layout(
            *(U16.unpack_from(self.data, at)[0] if at + 2 <= stop else 0 for at in slots)
        )
        if layout.fault:
            raise DecodeError(layout.fault)
        if len(self._layouts) == _MAX_LAYOUTS:
            self._layouts = {}
        found = self._layouts[vtable] = len(self.data) - layout.nbytes, layout
        return found

    def _read_virtual(self, table: int, layout: _Layout, byte_range: ByteRange) -> Virtual:
        if at := layout.compressed_location:
            location = self.codec.decode(self._bytes(table + at))
        else:
            location = _decode(self._bytes(table + layout.location))
        checksum: Condition | None = None
        if at := layout.etag:
            checksum = _parse_etag(_decode(self._bytes(table + at)))
        elif at := layout.last_modified:
            (epoch_s,) = U32.unpack_from(self.data, table + at)
            checksum = UnmodifiedSince(epoch_s) if epoch_s else None
        return Virtual(location, byte_range, checksum)

    def _bytes(self, at: int) -> bytes:
        """Copy the short vector of bytes that the offset at *at* leads to."""
        data = self.data
        start = at + U32.unpack_from(data, at)[0] + 4
        if start > len(data):
            raise DecodeError(_OUTSIDE)
        stop = start + U32.unpack_from(data, start - 4)[0]
        if stop - start > _MAX_TEXT_NBYTES:
            raise DecodeError("a string of it is too long")
        if stop > len(data):
            raise DecodeError(_OUTSIDE)
        return data[start:stop]

    def _vector(self, at: int) -> tuple[int, int]:
        data = self.data
        start = at + U32.unpack_from(data, at)[0] + 4
        if start <= len(data):
            stop: int = start + U32.unpack_from(data, start - 4)[0]
            if stop <= len(data):
                return start, stop
        raise DecodeError(_OUTSIDE)


def _decode(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise DecodeError("a string of it is no UTF-8") from None


def _parse_etag(text: str) -> ETag | None:
    """Read an entity tag, which writers store with its quotes or without; ``*`` demands nothing.

    It goes into a header, and has to be strong there.
    """
    if text == "*":
        return None
    opaque = text.strip('"')
    if opaque.startswith("W/") or not _STRONG.fullmatch(opaque):
        raise DecodeError("its checksum_etag is no strong entity tag")
    return ETag(f'"{opaque}"')
