"""What goes by where checksums are put behind pieces: what is kept, and what else is looked at."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from app.formats.contract import Sealed
from app.model import ByteRange, Piece
from app.storage.spans import GAP_NBYTES, SPAN_NBYTES


class Begin(NamedTuple):
    """From here on bytes are under a checksum."""

    replaces: ByteRange | None
    """Where the old checksum is at the end; `None` where it is not compared."""


class End(NamedTuple):
    """Here is the checksum of what began last."""


class Outside(NamedTuple):
    """What no checksum is over."""

    piece: Piece


class Old(NamedTuple):
    """A range of the old object that is read."""

    place: ByteRange
    is_kept: bool
    """Or else only the old checksum is over it."""


type Step = Begin | End | Outside | Old | bytes


def steps_of(pieces: Sequence[Piece | Sealed], *, is_inside: bool = False) -> Iterator[Step]:
    """Go through *pieces*, and those in them."""
    for piece in pieces:
        match piece:
            case Sealed(inner, replaces):
                steps = steps_of(inner, is_inside=True)
                is_compared = replaces is not None and _keeps(piece)
                yield Begin(replaces if is_compared else None)
                yield from _with_rest(steps, replaces) if replaces and is_compared else steps
                yield End()
            case _ if not is_inside:
                yield Outside(piece)
            case ByteRange():
                yield Old(piece, is_kept=True)
            case _:
                yield piece


def places_in(steps: Iterable[Step]) -> Iterator[ByteRange]:
    """Give all ranges that are to be read."""
    return (step.place for step in steps if isinstance(step, Old))


def windows_of(steps: Iterable[Step]) -> Iterator[list[Step]]:
    """Divide *steps* where a read is long enough, and ranges that are longer."""
    window: list[Step] = []
    nbytes = end = 0
    for step in steps:
        for part in _cut(step) if isinstance(step, Old) else (step,):
            window.append(part)
            if isinstance(part, Old):
                nbytes += part.place.length + min(abs(part.place.start - end), GAP_NBYTES)
                end = part.place.stop
            if nbytes >= SPAN_NBYTES:
                yield window
                window, nbytes = [], 0
    yield window


def _with_rest(steps: Iterator[Step], whole: ByteRange) -> Iterator[Step]:
    """Put in what else is to be looked at, so that all of *whole* goes by in the order it has.

    What is kept in another order goes by twice.
    """
    at = whole.start
    for step in steps:
        if isinstance(step, Old):
            if step.place.start > at:
                yield Old(ByteRange(at, step.place.start), is_kept=False)
            if step.place.start >= at:
                at = step.place.stop
        yield step
    if at < whole.stop:
        yield Old(ByteRange(at, whole.stop), is_kept=False)


def _keeps(sealed: Sealed) -> bool:
    """Tell whether anything in *sealed* is still where it was."""
    return any(
        _keeps(piece) if isinstance(piece, Sealed) else isinstance(piece, ByteRange)
        for piece in sealed.pieces
    )


def _cut(old: Old) -> Iterator[Old]:
    for start in range(old.place.start, old.place.stop, SPAN_NBYTES):
        stop = min(start + SPAN_NBYTES, old.place.stop)
        yield Old(ByteRange(start, stop), old.is_kept)
