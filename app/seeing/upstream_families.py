"""The counts of calls of stores as Prometheus reads them."""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.registry import Collector

from app.seeing.families import counter, histogram
from app.seeing.upstream_counts import UpstreamCounts

_LABELS = ("store", "method", "kind")


class UpstreamFamilies(Collector):
    """What stores were asked for, and how they answered."""

    def __init__(self, counts: UpstreamCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """Give the counts."""
        calls = self._counts.calls.items()
        yield counter(
            "upstream_bytes",
            "Bytes that stores sent, or that were sent to them by put",
            _LABELS,
            ((names, each.nbytes) for names, each in calls),
        )
        yield histogram(
            "upstream_seconds",
            "Time that a call of a store took, each attempt by itself",
            _LABELS,
            ((names, each.seconds) for names, each in calls),
        )
        yield counter(
            "upstream_errors",
            "Calls of a store that failed, by the class of the error",
            ["store", "error"],
            self._counts.errors.items(),
        )
