"""Plans what of an object the server copies itself, and what is sent; nothing here waits.

All parts of an object but the last have a least length (S3: 5 MiB), so that around what is new
some of what is old is fetched and sent again.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from app.model import ByteRange, Piece

MIN_NBYTES: Final = 5 * 1024**2
_COPIED_NBYTES: Final = 256 * 1024**2
_SENT_NBYTES: Final = 16 * 1024**2
_PARTS: Final = 10_000

type Part = ByteRange | list[Piece]
"""A range to be copied by the server, or pieces that are sent together."""


def plan_parts(
    pieces: Sequence[Piece], *, copies: bool = True, min_nbytes: int = MIN_NBYTES
) -> list[Part]:
    """Divide *pieces* into parts, of which the server copies none unless *copies*."""
    joined = list(_joined(pieces))
    while True:
        plan = _Plan(min_nbytes, copies=copies)
        for nth, piece in enumerate(joined, 1):
            plan.take(piece, is_last=nth == len(joined))
        plan.send()
        if len(plan.parts) <= _PARTS:
            return plan.parts
        min_nbytes *= 2


def nbytes_of(piece: Piece) -> int:
    """Count the bytes of *piece*."""
    return piece.length if isinstance(piece, ByteRange) else len(piece)


class _Plan:
    """Parts so far, and the pieces that are to be sent behind them."""

    def __init__(self, min_nbytes: int, *, copies: bool) -> None:
        self.parts: list[Part] = []
        self._min = min_nbytes
        self._copied = max(_COPIED_NBYTES, 2 * min_nbytes)
        self._sent = max(_SENT_NBYTES, min_nbytes)
        self._copies = copies
        self._waiting: list[Piece] = []
        self._nbytes = 0

    def take(self, piece: Piece, *, is_last: bool) -> None:
        if isinstance(piece, bytes) or not self._copies:
            for some in _cut(piece, self._sent):
                self._wait(some)
            return
        missing = max(0, self._min - self._nbytes) if self._waiting else 0
        least = 1 if is_last else self._min
        if piece.length - missing < least:
            self._wait(piece)
            return
        middle = piece.start + missing
        self._wait(ByteRange(piece.start, middle))
        self.send()
        self.parts += _split(ByteRange(middle, piece.stop), self._copied)

    def send(self) -> None:
        """Make a part of what waits."""
        if self._waiting:
            self.parts.append(self._waiting)
            self._waiting, self._nbytes = [], 0

    def _wait(self, piece: Piece) -> None:
        if nbytes := nbytes_of(piece):
            self._waiting.append(piece)
            self._nbytes += nbytes
        if self._nbytes >= self._sent:
            self.send()


def _joined(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Join ranges that lie side by side, and leave out what is empty."""
    last: ByteRange | None = None
    for piece in pieces:
        if not nbytes_of(piece):
            continue
        if isinstance(piece, ByteRange) and last is not None and last.stop == piece.start:
            last = ByteRange(last.start, piece.stop)
            continue
        if last is not None:
            yield last
        last = piece if isinstance(piece, ByteRange) else None
        if isinstance(piece, bytes):
            yield piece
    if last is not None:
        yield last


def _cut(piece: Piece, nbytes: int) -> Iterator[Piece]:
    for at in range(0, nbytes_of(piece), nbytes):
        if isinstance(piece, bytes):
            yield piece[at : at + nbytes]
        else:
            yield ByteRange(piece.start + at, min(piece.start + at + nbytes, piece.stop))


def _split(whole: ByteRange, most: int) -> list[ByteRange]:
    """Divide *whole* evenly, so that no part is longer than *most*."""
    count = -(-whole.length // most)
    edges = [whole.start + whole.length * nth // count for nth in range(count + 1)]
    return [ByteRange(start, stop) for start, stop in pairwise(edges)]
