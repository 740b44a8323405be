"""What the service did, as Prometheus reads it."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from app.model import ObjectRef
from app.storage.moved import Moved, Way

MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_CHANGES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_BYTES: Final = {
    "written": "Bytes sent to S3",
    "fetched": "Bytes read from S3 to be sent again",
    "copied": "Bytes that S3 copied by itself",
}


class Metrics:
    """Counts what one process has done; labels come from closed sets."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._changes = Histogram(
            "shardgate_rewrite_changes",
            "Inner chunks put or deleted by one rewrite of their shard",
            buckets=_CHANGES,
            registry=self._registry,
        )
        self._lost = Counter(
            "shardgate_swaps_lost",
            "Rewrites of shards begun anew because another writer was faster",
            registry=self._registry,
        )

        self._writes = Counter(
            "shardgate_writes",
            "Objects written to S3, by how: all bytes sent, or some copied by the server",
            ["way"],
            registry=self._registry,
        )
        self._written, self._fetched, self._copied = (
            Counter(f"shardgate_{name}_bytes", text, registry=self._registry)
            for name, text in _BYTES.items()
        )

    def on_write(self, way: Way, _: ObjectRef, moved: Moved) -> None:
        """Count an object that was written to S3."""
        self._writes.labels(way).inc()
        self._written.inc(moved.sent)
        self._fetched.inc(moved.fetched)
        self._copied.inc(moved.copied)

    def on_rewrite(self, changes: int, lost: int) -> None:
        """Count a rewrite of a shard."""
        self._changes.observe(changes)
        self._lost.inc(lost)

    def exposition(self) -> bytes:
        """Write all counts."""
        return generate_latest(self._registry)
