"""Covers ranges of an object with few reads; nothing here waits."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Final

from app.model import ByteRange, Piece

_GAP_NBYTES: Final = 1024**2
_SPAN_NBYTES: Final = 16 * 1024**2


def plan_spans(ranges: Iterable[ByteRange]) -> list[ByteRange]:
    """Join ranges across gaps that cost less than a request, as long as the reads stay short."""
    spans: list[ByteRange] = []
    for each in sorted(ranges):
        if spans and each.start - spans[-1].stop <= _GAP_NBYTES:
            joined = ByteRange(spans[-1].start, max(each.stop, spans[-1].stop))
            if joined.length <= max(_SPAN_NBYTES, spans[-1].length):
                spans[-1] = joined
                continue
        spans.append(each)
    return spans


def assemble(pieces: Sequence[Piece], spans: Sequence[ByteRange], read: Sequence[bytes]) -> bytes:
    """Join *pieces*, whose ranges lie in *spans*, which hold what was *read*."""
    starts = [span.start for span in spans]

    def taken(piece: ByteRange) -> bytes:
        at = bisect_right(starts, piece.start) - 1
        return read[at][piece.start - starts[at] : piece.stop - starts[at]]

    return b"".join(piece if isinstance(piece, bytes) else taken(piece) for piece in pieces)
