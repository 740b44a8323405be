"""Bounds of processor time that hold on a slow or busy machine too."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

_STEPS: Final = 1_000_000
_USUAL_S: Final = 0.04
"""Processor time of the steps on a machine of usual speed."""


@contextmanager
def processor_time_below(
    most_s: float, clock: Callable[[], float] = time.thread_time
) -> Generator[None]:
    """Assert that the block takes less than *most_s* on a machine of usual speed.

    Where it takes longer, the speed that this machine has at the moment is measured.
    """
    began_at = clock()
    yield
    spent_s = clock() - began_at
    assert spent_s < most_s or spent_s < most_s * _slowness()


def _slowness() -> float:
    began_at, total = time.thread_time(), 0
    for number in range(_STEPS):
        total += number
    return (time.thread_time() - began_at) / _USUAL_S
