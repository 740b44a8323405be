"""Covers ranges of an object with few reads; nothing here waits."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from app.model import ByteRange, Piece

GAP_NBYTES: Final = 1024**2
SPAN_NBYTES: Final = 16 * 1024**2
_COPIED_NBYTES: Final = 1024**2


def plan_spans(ranges: Iterable[ByteRange]) -> list[ByteRange]:
    """Join ranges across gaps that cost less than a request, as long as the reads stay short."""
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
    """What was *read* of *spans*, which do not overlap and lie in order."""

    def __init__(self, spans: Sequence[ByteRange], read: Sequence[bytes]) -> None:
        self._starts = [span.start for span in spans]
        self._read = read

    def take(self, piece: Piece) -> Iterator[bytes]:
        """Give the bytes of *piece*, whose range lies in a span.

        They come bit by bit: who copies in a thread holds all others up meanwhile.
        """
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
    """Join *pieces*, whose ranges lie in *spans*, which hold what was *read*."""
    known = Spans(spans, read)
    return b"".join(bit for piece in pieces for bit in known.take(piece))
