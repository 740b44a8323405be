"""Random changes to documents and binary files, and a measure of peak memory."""

import gzip
import json
import resource
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import zstandard
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from shardgate.formats.icechunk.flatbuffers import HEADER_NBYTES, MAGIC
from tests.support.zipped import zipped

type Change = Callable[[bytes], bytes]

_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_GZIP: Final = b"\x1f\x8b"
_EXTREMES: Final = [0, 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1]
_ODD: Final[list[Any]] = [
    None, True, False, -1, 0, 0.5, 2**31, 2**63, 2**64, 10**30, float("nan"), "", "..", "/x",
    "a\r\nb", "\ud800", "é" * 600, [], {}, [[]], [None], [1, 1], ["gzip"], {"name": "gzip"},
    [[[1, 1, 1]]], "0.0.0", [0, 0, 0], [2**63, 1, 1], {"@type": "x"},
]  # fmt: skip
"""Replacements for values of a document."""


def at_random(examples: int) -> settings:
    """Return settings of hypothesis that choose the same *examples* in each run."""
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def changes() -> st.SearchStrategy[Change]:
    """Strategy of changes to a JSON document or a binary table."""
    at = st.floats(0, 1, exclude_max=True)
    bytewise = st.one_of(
        st.builds(partial, st.just(_flip), at, st.integers(0, 7)),
        st.builds(partial, st.just(_write), at, st.sampled_from(_EXTREMES), _widths),
        st.builds(partial, st.just(_splice), at, at | st.just(1.0), st.sampled_from(_PARTS)),
    )
    document = st.builds(partial, st.just(_put), st.integers(0), st.sampled_from(_ODD))
    change = st.one_of(bytewise, bytewise, document)
    return st.one_of(change, st.builds(partial, st.just(_inside), change))


_widths = st.sampled_from([1, 2, 4, 8])
_PARTS: Final[list[Change]] = [
    lambda _: b"",
    lambda part: part * 2,
    lambda part: b"\xff" * len(part),
]
"""Remove a part, double it, or overwrite it with 0xff."""


def _inside(change: Change, data: bytes) -> bytes:
    """Apply *change* to the decompressed content of *data* if it is zstd or gzip."""
    try:
        if data.startswith(MAGIC):
            return data[:HEADER_NBYTES] + _inside(change, data[HEADER_NBYTES:])
        if data.startswith(_ZSTD):
            return zstandard.compress(change(zstandard.decompress(data, max_output_size=2**24)))
        if data.startswith(_GZIP):
            return zipped(change(gzip.decompress(data)))
    except (zstandard.ZstdError, OSError, EOFError, zlib.error, MemoryError):  # changed before
        return data
    return change(data)


def _flip(at: float, bit: int, data: bytes) -> bytes:
    changed = bytearray(data)
    if changed:
        changed[int(at * len(data))] ^= 1 << bit
    return bytes(changed)


def _write(at: float, number: int, nbytes: int, data: bytes) -> bytes:
    start = int(at * len(data))
    written = (number % (1 << 8 * nbytes)).to_bytes(nbytes, "little")
    return data[:start] + written + data[start + nbytes :]


def _splice(first: float, second: float, change: Change, data: bytes) -> bytes:
    start, stop = sorted((int(first * len(data)), int(second * len(data))))
    return data[:start] + change(data[start:stop]) + data[stop:]


def _put(number: int, value: Any, data: bytes) -> bytes:
    """Replace one value of a JSON document by *value*."""
    try:
        document = json.loads(data)
    except ValueError:
        return data
    places = list(walk(document))
    if not places:
        return json.dumps(value).encode()
    holder, key = places[number % len(places)]
    holder[key] = value
    return json.dumps(document).encode()


def walk(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the container and the key of each value in a JSON document."""
    if not isinstance(value, dict | list):
        return
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        yield value, key
        yield from walk(inner)


@contextmanager
def peak_growth() -> Generator[Callable[[], int]]:
    """Yield a function that returns by how many bytes the process's peak memory has grown."""

    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    before = peak()
    yield lambda: peak() - before
