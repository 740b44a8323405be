"""A pipe that something is written to, and what has come out of it."""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress


@contextmanager
def piped() -> Generator[tuple[int, Callable[[], str]]]:
    """Give where to write, and what has been written since that was asked for before."""
    read, write = os.pipe()
    os.set_blocking(read, False)

    def written() -> str:
        with suppress(BlockingIOError):
            return os.read(read, 2**20).decode()
        return ""

    try:
        yield write, written
    finally:
        os.close(read)
        os.close(write)
