"""How much memory this process has come to hold."""

import resource
from collections.abc import Callable, Generator
from contextlib import contextmanager

_KIB = 1024


@contextmanager
def peak_growth() -> Generator[Callable[[], int]]:
    """Give a function that tells by how many bytes the highest mark has risen since."""
    before = _peak()
    yield lambda: _peak() - before


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
