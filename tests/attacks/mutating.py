"""Bytes that somebody has changed, and how much memory it takes to understand them."""

import gzip
import json
import resource
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final

import zstandard
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from app.formats.icechunk.flatbuffers import HEADER_NBYTES, MAGIC

type Change = Callable[[bytes], bytes]

_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_GZIP: Final = b"\x1f\x8b"
_EXTREMES: Final = [0, 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1]
_ODD: Final[list[Any]] = [
    None, True, False, -1, 0, 0.5, 2**31, 2**63, 2**64, 10**30, float("nan"), "", "..", "/x",
    "a\r\nb", "\ud800", "é" * 600, [], {}, [[]], [None], [1, 1], ["gzip"], {"name": "gzip"},
    [[[1, 1, 1]]], "0.0.0", [0, 0, 0], [2**63, 1, 1], {"@type": "x"},
]  # fmt: skip
"""In place of any value of a document."""


def at_random(examples: int) -> settings:
    """Return settings of hypothesis that choose the same *examples* in each run."""
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def changes() -> st.SearchStrategy[Change]:
    """Choose what is done to a document or a table."""
    document = st.builds(_document_change, st.integers(0), _odd())
    change = st.one_of(_bytewise(), _bytewise(), document)
    return st.one_of(change, st.builds(_inside, change))


def _inside(change: Change) -> Change:
    """Make *change* to what is compressed, if it is."""

    def change_inside(data: bytes) -> bytes:
        if data.startswith(MAGIC):
            head, body = data[:HEADER_NBYTES], data[HEADER_NBYTES:]
            return head + change_inside(body)
        if data.startswith(_ZSTD):
            inner = zstandard.decompress(data, max_output_size=2**24)
            return zstandard.compress(change(inner))
        if data.startswith(_GZIP):
            return gzip.compress(change(gzip.decompress(data)), mtime=0)
        return change(data)

    def attempt(data: bytes) -> bytes:
        try:
            return change_inside(data)
        except (zstandard.ZstdError, OSError, EOFError, zlib.error):  # it was changed before
            return data

    return attempt


def _odd() -> st.SearchStrategy[Any]:
    return st.sampled_from(_ODD)


def _bytewise() -> st.SearchStrategy[Change]:
    at = st.floats(0, 1, exclude_max=True)
    return st.one_of(
        st.builds(_flip, at, st.integers(0, 7)),
        st.builds(_cut, at),
        st.builds(_number, at, st.sampled_from(_EXTREMES), st.sampled_from([1, 2, 4, 8])),
        st.builds(_doubled, at, at),
        st.builds(_without, at, at),
        st.builds(_filled, at, at),
    )


def _flip(at: float, bit: int) -> Change:
    def flip(data: bytes) -> bytes:
        changed = bytearray(data)
        if changed:
            changed[int(at * len(data))] ^= 1 << bit
        return bytes(changed)

    return flip


def _cut(at: float) -> Change:
    return lambda data: data[: int(at * len(data))]


def _number(at: float, number: int, nbytes: int) -> Change:
    most: int = 256**nbytes
    written = (number % most).to_bytes(nbytes, "little")

    def write(data: bytes) -> bytes:
        start = int(at * len(data))
        return data[:start] + written + data[start + nbytes :]

    return write


def _places(first: float, second: float, data: bytes) -> tuple[int, int]:
    start, stop = sorted((int(first * len(data)), int(second * len(data))))
    return start, stop


def _doubled(first: float, second: float) -> Change:
    def double(data: bytes) -> bytes:
        start, stop = _places(first, second, data)
        return data[:stop] + data[start:]

    return double


def _without(first: float, second: float) -> Change:
    def leave_out(data: bytes) -> bytes:
        start, stop = _places(first, second, data)
        return data[:start] + data[stop:]

    return leave_out


def _filled(first: float, second: float) -> Change:
    def fill(data: bytes) -> bytes:
        start, stop = _places(first, second, data)
        return data[:start] + b"\xff" * (stop - start) + data[stop:]

    return fill


def _document_change(number: int, value: Any) -> Change:
    """Put *value* in some place of a JSON document; leave all else as it is."""

    def change(data: bytes) -> bytes:
        try:
            document = json.loads(data)
        except ValueError:
            return data
        places = list(_walk(document))
        if not places:
            return json.dumps(value).encode()
        holder, key = places[number % len(places)]
        holder[key] = value
        return json.dumps(document).encode()

    return change


def _walk(value: Any) -> Any:
    if not isinstance(value, dict | list):
        return
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        yield value, key
        yield from _walk(inner)


_KIB = 1024


@contextmanager
def peak_growth() -> Generator[Callable[[], int]]:
    """Give a function that tells by how many bytes the highest mark has risen since."""
    before = _peak()
    yield lambda: _peak() - before


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
