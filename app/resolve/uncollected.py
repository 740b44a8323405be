"""Work that makes very many small objects, none of them garbage."""

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Generator[None]:
    """Let nobody look for garbage meanwhile, for that would take longer than the work itself.

    It is of the whole process, so the block waits for nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
