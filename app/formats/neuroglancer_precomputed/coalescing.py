"""Which neighbours in a shard are read at once."""

from collections.abc import Iterable, Iterator
from typing import Final

from app.model import ByteRange

_GAP_NBYTES: Final = 64 * 1024
_SPAN_NBYTES: Final = 8 * 1024**2
"""What is wanted is read together across such gaps, up to such a length."""

type Numbered = tuple[int, ByteRange]


def coalesce(places: Iterable[Numbered]) -> Iterator[list[Numbered]]:
    """Put *places*, which begin one after the other, together that are read at once."""
    run: list[Numbered] = []
    reached = 0
    for number, place in places:
        if run and (
            place.start - reached > _GAP_NBYTES or place.stop - run[0][1].start > _SPAN_NBYTES
        ):
            yield run
            run, reached = [], 0
        run.append((number, place))
        reached = max(reached, place.stop)
    if run:
        yield run
