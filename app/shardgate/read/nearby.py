"""Bytes near chunks: what it costs to read them along, and those that were read."""

from math import inf
from typing import Final, NamedTuple

from shardgate.model import ByteRange

_ALWAYS_NBYTES: Final = 4 * 1024
"""Gaps that are read whatever a request costs."""
_LARGE_NBYTES: Final = 256 * 1024
"""Longer reads show the rate of a store, shorter ones its latency."""


class StoreCost:
    """Latency in seconds and rate in bytes a second of a store's reads.

    Both follow the reads exponentially. The latency falls at once and rises slowly, so that the
    wait of many reads for one another does not count as the store's.
    """

    __slots__ = ("gap_nbytes", "latency_s", "overfetched_nbytes", "rate")

    def __init__(self) -> None:
        self.latency_s = inf
        self.rate = 50e6  # until a long read shows it
        self.gap_nbytes = _ALWAYS_NBYTES
        """Bandwidth-delay product, at least `_ALWAYS_NBYTES`: gaps up to it are cheap to read."""
        self.overfetched_nbytes = 0
        """Bytes of the reads under way that no request asked for."""

    def note(self, nbytes: int, seconds: float) -> None:
        is_short = nbytes < _LARGE_NBYTES
        latency_s = max(0.0, seconds - nbytes / self.rate) if is_short else seconds
        if latency_s < self.latency_s:
            self.latency_s = latency_s
        elif is_short:
            self.latency_s += (latency_s - self.latency_s) / 64
        elif seconds > self.latency_s:
            self.rate += (nbytes / (seconds - self.latency_s) - self.rate) / 8
        self.gap_nbytes = max(_ALWAYS_NBYTES, int(self.latency_s * self.rate))


class RecentRead(NamedTuple):
    """A read of a part of an object."""

    size: int
    """Of the object."""
    start: int = 0
    data: bytes = b""
    """Read at *start*; nothing if only a chunk was read, which is cached itself."""

    def cut(self, wanted: ByteRange) -> bytes | None:
        """Return the bytes *wanted* if all of them were read."""
        first = wanted.start - self.start
        last = wanted.stop - self.start
        return self.data[first:last] if first >= 0 and last <= len(self.data) else None
