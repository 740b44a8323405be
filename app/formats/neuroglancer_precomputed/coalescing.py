"""Which neighbours in a shard are read at once."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from app.formats.neuroglancer_precomputed.minishards import Numbers

_GAP_NBYTES: Final = 64 * 1024
_SPAN_NBYTES: Final = 8 * 1024**2
"""What is wanted is read together across such gaps, up to such a length."""


def coalesce(starts: Numbers, stops: Numbers) -> Iterator[slice]:
    """Tell which places, from *starts*, which rise, to *stops*, are read at once."""
    reached = np.maximum.accumulate(stops)
    gaps = np.flatnonzero(starts[1:] - reached[:-1] > _GAP_NBYTES) + 1
    first = 0
    for end in [*gaps.tolist(), len(starts)]:
        while first < end:
            most = int(np.searchsorted(reached, starts[first] + _SPAN_NBYTES, side="right"))
            run = slice(first, max(first + 1, min(most, end)))
            yield run
            first = run.stop
