"""Coalesced reads of byte ranges, and assembly of objects from them."""

from bisect import bisect_right
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Final

from app.model import ByteRange, Piece

GAP_NBYTES: Final = 1024**2
SPAN_NBYTES: Final = 16 * 1024**2
_COPIED_NBYTES: Final = 1024**2


def plan_spans(ranges: Iterable[ByteRange]) -> list[ByteRange]:
    """Coalesce *ranges* across gaps of up to 1 MiB into reads of up to 16 MiB."""
    spans: list[ByteRange] = []
    for each in sorted(ranges):
        if spans and each.start - spans[-1].stop <= GAP_NBYTES:
            joined = ByteRange(spans[-1].start, max(each.stop, spans[-1].stop))
            if joined.length <= max(SPAN_NBYTES, spans[-1].length):
                spans[-1] = joined
                continue
        spans.append(each)
    return spans


class Spans:
    """The bytes *read* of sorted *spans* that do not overlap."""

    def __init__(self, spans: Sequence[ByteRange], read: Sequence[bytes]) -> None:
        self._starts = [span.start for span in spans]
        self._read = read

    def take(self, piece: Piece) -> Iterator[bytes]:
        """Yield the bytes of *piece* in copies of 1 MiB, to hold the interpreter lock briefly."""
        if isinstance(piece, bytes):
            yield piece
            return
        at = bisect_right(self._starts, piece.start) - 1
        start, read = self._starts[at], self._read[at]
        if piece.length == len(read):
            yield read
            return
        for begin in range(piece.start - start, piece.stop - start, _COPIED_NBYTES):
            yield read[begin : min(begin + _COPIED_NBYTES, piece.stop - start)]


def assemble(pieces: Sequence[Piece], spans: Sequence[ByteRange], read: Sequence[bytes]) -> bytes:
    """Concatenate *pieces*, whose ranges lie in *spans*, of which *read* holds the bytes."""
    known = Spans(spans, read)
    return b"".join(bit for piece in pieces for bit in known.take(piece))


async def stream_of(data: bytes) -> AsyncIterator[bytes]:
    """Yield *data* unless it is empty."""
    if data:
        yield data


def nbytes_of(piece: Piece) -> int:
    """Return the length of *piece*."""
    return piece.length if isinstance(piece, ByteRange) else len(piece)


def new_nbytes(pieces: Sequence[Piece]) -> int:
    """Return the total length of those *pieces* that are not ranges of the old object."""
    return sum(len(piece) for piece in pieces if isinstance(piece, bytes))
