"""Compressed data that are the same at each run, as they are in the names of tests."""

import gzip
import zlib
from collections.abc import Callable
from typing import Final

import brotli
import zstandard


def zipped(data: bytes) -> bytes:
    """Compress *data* without a time stamp."""
    return gzip.compress(data, mtime=0)


ENCODERS: Final[dict[str, Callable[[bytes], bytes]]] = {
    "gzip": zipped,
    "deflate": zlib.compress,
    "br": brotli.compress,
    "zstd": zstandard.compress,
}
"""Encoders by content coding."""


def encoded(coding: str, data: bytes) -> bytes:
    """Apply the content *coding* to *data*."""
    return ENCODERS[coding](data)
