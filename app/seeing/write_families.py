"""Counts of what was written, as Prometheus reads them."""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from prometheus_client import Metric
from prometheus_client.registry import Collector

from app.model import ObjectRef
from app.seeing.families import counter, histogram
from app.seeing.histogram import Histogram
from app.storage.moved import Moved, Way

_CHANGES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class WriteFamilies(Collector):
    """Rewrites of shards, and the bytes that S3 got for them."""

    def __init__(self) -> None:
        self._changes = Histogram(_CHANGES)
        self._lost = 0
        self._writes = Counter[Way](put=0, copy=0)
        self._moved = Moved()

    def on_write(self, way: Way, _: ObjectRef, moved: Moved) -> None:
        """Count an object that was written to S3."""
        self._writes[way] += 1
        self._moved = Moved(*map(sum, zip(self._moved, moved, strict=True)))

    def on_rewrite(self, changes: int, lost: int) -> None:
        """Count a rewrite of a shard."""
        self._changes.observe(changes)
        self._lost += lost

    def collect(self) -> Iterator[Metric]:
        """Give the counts."""
        about = "Inner chunks put or deleted by one rewrite of their shard"
        yield histogram("rewrite_changes", about, [], [((), self._changes)])
        about = "Rewrites of shards begun anew because another writer was faster"
        yield counter("swaps_lost", about, [], [((), self._lost)])
        about = "Objects written to S3, by how: all bytes sent, or some copied by the server"
        writes = (((way,), count) for way, count in self._writes.items())
        yield counter("writes", about, ["way"], writes)
        for name, about, nbytes in (
            ("written", "Bytes sent to S3", self._moved.sent),
            ("fetched", "Bytes read from S3 to be sent again", self._moved.fetched),
            ("copied", "Bytes that S3 copied by itself", self._moved.copied),
        ):
            yield counter(f"{name}_bytes", about, [], [((), nbytes)])
