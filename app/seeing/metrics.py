"""What the service did, as Prometheus reads it."""

from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    Metric,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.registry import Collector

from app.seeing.access_log import AccessLog
from app.seeing.cache_families import CacheFamilies
from app.seeing.repository_families import RepositoryFamilies
from app.seeing.request_families import RequestFamilies
from app.seeing.requests import Requests
from app.seeing.upstream_counts import UpstreamCounts
from app.seeing.upstream_families import UpstreamFamilies
from app.seeing.write_families import WriteFamilies

MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Metrics(Collector):
    """Counts what one process has done; labels come from closed sets."""

    def __init__(
        self,
        datasets: Iterable[str],
        *,
        worker: str | None = None,
        access_log: AccessLog | None = None,
    ) -> None:
        """Count requests of *datasets*; where there are several processes each names itself."""
        self._worker = worker
        self.requests = Requests(datasets, access_log)
        self.upstream = UpstreamCounts()
        self.caches = CacheFamilies()
        self.repositories = RepositoryFamilies()
        self.writes = WriteFamilies()
        self._registry = CollectorRegistry()
        self._registry.register(RequestFamilies(self.requests))
        self._registry.register(UpstreamFamilies(self.upstream))
        for each in (self.caches, self.writes, self.repositories):
            self._registry.register(each)
        for build in (ProcessCollector, PlatformCollector, GCCollector):
            build(registry=self._registry)

    def exposition(self) -> bytes:
        """Write all counts."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """Give all counts, with the name of this process if it is one of several."""
        for metric in self._registry.collect():
            if self._worker is not None:
                metric.samples = [
                    sample._replace(labels={**sample.labels, "worker": self._worker})
                    for sample in metric.samples
                ]
            yield metric
