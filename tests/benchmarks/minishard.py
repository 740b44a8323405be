"""Part f: how long a large minishard index takes to decode and to look up in."""

import random
from collections.abc import Callable
from time import perf_counter
from typing import Final

import numpy as np

from app.formats.neuroglancer_precomputed.index import MinishardIndexDecoder
from tests.zipped import zipped

from .figures import Figure, Goal

_COUNT: Final = 100_000
_ROUNDS: Final = 15
_LOOKUPS: Final = 10_000
_MOST_NBYTES: Final = 64 * 1024**2


def measure() -> list[Figure]:
    """Decode 100,000 ids as segments have them, and look some of them up."""
    rng = np.random.default_rng(0)
    gaps = rng.integers(1, 5000, _COUNT, dtype="<u8")
    sizes = rng.integers(100, 60_000, _COUNT, dtype="<u8")
    raw = np.concatenate([gaps, np.zeros(_COUNT, "<u8"), sizes]).tobytes()
    encoded = zipped(raw)
    index = MinishardIndexDecoder(is_gzip=False, most_nbytes=_MOST_NBYTES)(raw)
    ids = random.Random(0).sample(list(map(int, np.cumsum(gaps))), _LOOKUPS)

    def decode(data: bytes, *, is_gzip: bool) -> None:
        MinishardIndexDecoder(is_gzip, _MOST_NBYTES)(data)

    def look_up() -> None:
        for chunk_id in ids:
            index.lookup(chunk_id)

    per_lookup = [seconds / _LOOKUPS * 1e6 for seconds in _time(look_up)]
    return [
        _decoding("100,000 ids decoded", lambda: decode(raw, is_gzip=False)),
        _decoding("100,000 ids decoded, gzip", lambda: decode(encoded, is_gzip=True)),
        Figure.over("f", "look-up among them", "µs", per_lookup, Goal("at most", 5.0)),
        Figure.over("f", "an id held", "bytes", [index.nbytes / _COUNT], Goal("at most", 24.0)),
    ]


def _decoding(what: str, call: Callable[[], None]) -> Figure:
    return Figure.over("f", what, "ms", [s * 1e3 for s in _time(call)], Goal("at most", 5.0))


def _time(call: Callable[[], None]) -> list[float]:
    """Time *call* some times, in seconds."""
    times = []
    for _ in range(_ROUNDS):
        began = perf_counter()
        call()
        times.append(perf_counter() - began)
    return times
