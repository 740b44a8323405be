"""A program that commits chunks of the array ``a``, one at a time, and prints each one's number.

It is run as ``python -m tests.support.icechunk.committer ROAD URL FIRST STOP``, waits for a line on
standard input, and begins anew after an error, as the service may be killed meanwhile.
"""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import icechunk
import numpy as np
import zarr

from shardgate import open_session

REPOSITORY: Final = "repository"
_PAUSE_S: Final = 0.2


def library_storage(url: str) -> icechunk.Storage:
    """Return the storage of the repository in the dataset ``raw`` of the service at *url*."""
    return icechunk.s3_storage(
        bucket="raw",
        prefix=REPOSITORY,
        endpoint_url=url,
        region="us-east-1",
        access_key_id="-",
        secret_access_key="-",
        allow_http=True,
        force_path_style=True,
    )


def value_of(chunk: int) -> int:
    """Return the value of a chunk, which is never the fill value."""
    return chunk % 255 + 1


def by_library(url: str, chunk: int) -> None:
    """Commit a chunk by the library, whose storage is the service."""
    repository = icechunk.Repository.open(library_storage(url))
    session = repository.writable_session("main")
    _write(session.store, chunk)
    session.commit(f"chunk {chunk}", rebase_with=icechunk.ConflictDetector(), rebase_tries=1000)


def by_session(url: str, chunk: int) -> None:
    """Commit a chunk by a session of the service."""
    with open_session(f"{url}/data", path=REPOSITORY) as session:
        _write(session.store, chunk)
        session.commit(f"chunk {chunk}")


def _write(store: Any, chunk: int) -> None:
    zarr.open_array(store, path="a")[chunk] = np.uint8(value_of(chunk))


ROADS: Final[dict[str, Callable[[str, int], None]]] = {
    "library": by_library,
    "session": by_session,
}

if __name__ == "__main__":
    road, url, first, stop = sys.argv[1:]
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(int(first), int(stop)):
        is_committed = False
        while not is_committed:
            with suppress(Exception):
                ROADS[road](url, number)
                is_committed = True
                print(number, flush=True)
            time.sleep(0 if is_committed else _PAUSE_S)
