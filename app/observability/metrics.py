"""Prometheus metrics of one process.

Every label has a closed set of values: none comes from a client. With several processes each one
has its own registry, and adds the label ``worker`` to all that it exposes.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    Metric,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from app.errors import RangeNotSatisfiedError, ShardgateError
from app.model import ObjectRef
from app.observability.requests import NO_DATASET, Outcome
from app.resolve.budget import ByteBudget
from app.resolve.metadata_cache import CacheCounters, SizedLRUCache, kind_of_read
from app.storage.contract import WriteNotice, WriteWay
from app.storage.traced import Call

MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OTHER_ERROR: Final = "other"

_SECONDS: Final = (0.0005, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_CHANGES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_NO_ERRORS: Final = (RangeNotSatisfiedError, asyncio.CancelledError, GeneratorExit)
"""Results of empty and short objects, and of clients that leave: no errors of the store."""

type _Cache = SizedLRUCache[Any, Any]
type _Samples = Iterable[tuple[tuple[str, ...], float]]
"""Values, each after the values of its labels."""


class Metrics(Collector):
    """All metrics of one process."""

    def __init__(self, datasets: Iterable[str], *, worker: str | None = None) -> None:
        """Expose requests of each of *datasets*; *worker* names one of several processes."""
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._worker = worker
        self.registry = CollectorRegistry()
        self.requests = RequestMetrics(datasets, self.registry)
        self.stores = StoreMetrics(self.registry)
        self.caches = CacheMetrics()
        self.registry.register(self.caches)
        self.commits = Counter(
            "shardgate_commits",
            "Commits to Icechunk repositories, by what became of them",
            ["outcome"],
            registry=self.registry,
        )
        self.sessions = Counter(
            "shardgate_sessions",
            "Sessions of Icechunk repositories that were begun, and discarded",
            ["event"],
            registry=self.registry,
        )
        for outcome in "made", "conflict", "failed":
            self.commits.labels(outcome)
        for event in "begun", "discarded":
            self.sessions.labels(event)
        for collector in ProcessCollector, PlatformCollector, GCCollector:
            collector(registry=self.registry)

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, with the label ``worker`` if this is one of several processes."""
        for metric in self.registry.collect():
            if self._worker is not None:
                metric.samples = [
                    sample._replace(labels={**sample.labels, "worker": self._worker})
                    for sample in metric.samples
                ]
            yield metric


class RequestMetrics:
    """Requests by dataset, method and outcome.

    The child of a combination of labels is looked up once: ``labels`` costs five times as much
    as counting.
    """

    def __init__(self, datasets: Iterable[str], registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "shardgate_requests",
            "Requests that are answered, or whose client has gone; no dataset is all else",
            ["dataset", "method", "outcome"],
            registry=registry,
        )
        self._sent = Counter(
            "shardgate_sent_bytes",
            "Bytes of bodies sent to clients",
            ["dataset"],
            registry=registry,
        )
        self._seconds = Histogram(
            "shardgate_request_seconds",
            "Time from the head of a request to the end of its answer, if anything was waited for",
            ["method", "outcome"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.in_flight = Gauge(
            "shardgate_requests_in_flight",
            "Requests under way, which wait for a store, a client or their turn",
            registry=registry,
        )
        self.connections = Gauge(
            "shardgate_connections", "Connections of clients, busy and idle", registry=registry
        )
        self._children = cache(self._resolve)
        for dataset in (NO_DATASET, *datasets):
            self._sent.labels(dataset)

    def count(
        self, dataset: str, method: str, outcome: Outcome, nbytes: int, seconds: float | None = None
    ) -> None:
        """Count a finished request with *nbytes* of body; *seconds* unless nothing was awaited."""
        requests, sent = self._children(dataset, method, outcome)
        requests.inc()
        sent.inc(nbytes)
        if seconds is not None:
            self._seconds.labels(method, outcome).observe(seconds)

    def _resolve(self, dataset: str, method: str, outcome: Outcome) -> tuple[Counter, Counter]:
        return self._requests.labels(dataset, method, outcome), self._sent.labels(dataset)

    def totals(self) -> tuple[int, int]:
        """Return the number of requests, and of bytes sent, since the start."""
        requests, sent = (
            sum(sample.value for metric in counter.collect() for sample in metric.samples)
            for counter in (self._requests, self._sent)
        )
        return int(requests), int(sent)


class StoreMetrics:
    """Calls of object stores, each attempt by itself, and objects and shards written."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ["store", "method", "kind"]
        self._bytes = Counter(
            "shardgate_upstream_bytes",
            "Bytes that stores sent, or that were sent to them by put",
            labels,
            registry=registry,
        )
        self._seconds = Histogram(
            "shardgate_upstream_seconds",
            "Time that a call of a store took, each attempt by itself",
            labels,
            buckets=_SECONDS,
            registry=registry,
        )
        self._errors = Counter(
            "shardgate_upstream_errors",
            "Calls of a store that failed, by the class of the error",
            ["store", "error"],
            registry=registry,
        )
        self._changes = Histogram(
            "shardgate_rewrite_changes",
            "Inner chunks put or deleted by one rewrite of their shard",
            buckets=_CHANGES,
            registry=registry,
        )
        self._conflicts = Counter(
            "shardgate_swaps_lost",
            "Rewrites of shards begun anew because another writer was faster",
            registry=registry,
        )
        self._writes = Counter(
            "shardgate_writes",
            "Objects written to S3, by how: all bytes sent, or some copied by the server",
            ["way"],
            registry=registry,
        )
        for way in "put", "copy":
            self._writes.labels(way)
        self._moved = [
            Counter(f"shardgate_{name}_bytes", text, registry=registry)
            for name, text in (
                ("written", "Bytes sent to S3"),
                ("fetched", "Bytes read from S3 to be sent again"),
                ("copied", "Bytes that S3 copied by itself"),
            )
        ]
        self._bytes_of = cache(self._bytes.labels)
        self._seconds_of = cache(self._seconds.labels)

    def on_call(self, call: Call) -> None:
        """Count a finished call of a store."""
        store = store_of(call.ref)
        labels = store, call.method, kind_of_read.get()
        self._bytes_of(*labels).inc(call.nbytes)
        self._seconds_of(*labels).observe(call.seconds)
        if call.error is not None and not isinstance(call.error, _NO_ERRORS):
            self._errors.labels(store, error_label(call.error)).inc()

    def on_write(self, way: WriteWay, _: ObjectRef, moved: WriteNotice) -> None:
        """Count an object that was written to S3."""
        self._writes.labels(way).inc()
        for counter, nbytes in zip(self._moved, moved, strict=True):
            counter.inc(nbytes)

    def on_rewrite(self, changes: int, conflicts: int) -> None:
        """Count a rewrite of a shard, and the compare-and-swap conflicts before it."""
        self._changes.observe(changes)
        self._conflicts.inc(conflicts)


@dataclass(slots=True)
class _CacheGroup:
    """Caches with one label: what they hold, by identity, and counters of their look-ups."""

    entries: dict[int, _Cache] = field(default_factory=dict)
    tallies: list[CacheCounters] = field(default_factory=list)


class CacheMetrics(Collector):
    """Caches and byte budgets, read when they are scraped."""

    def __init__(self) -> None:
        self._caches: defaultdict[str, _CacheGroup] = defaultdict(_CacheGroup)
        self._budgets: dict[str, ByteBudget] = {}

    def watch(self, name: str, entries: _Cache, tally: CacheCounters) -> None:
        """Expose *entries*, which other readers may share, and the look-ups of one reader."""
        self._caches[name].entries[id(entries)] = entries
        self._caches[name].tallies.append(tally)

    def watch_budget(self, use: str, budget: ByteBudget) -> None:
        """Expose *budget* with the label *use*."""
        self._budgets[use] = budget

    def collect(self) -> Iterator[Metric]:
        """Yield the current values."""
        tallies = [tally for group in self._caches.values() for tally in group.tallies]
        yield _counter(
            "cache_lookups",
            "Look-ups: at hand, on the way for others (joined), or asked of a store (miss)",
            ["cache", "result"],
            self._lookups(),
        )
        yield _counter(
            "coalesced_chunks",
            "Chunks that came with a read that was begun for a neighbour",
            [],
            [((), sum(tally.merged for tally in tallies))],
        )
        yield _gauge("cache_entries", "Entries held", ["cache"], self._sums(len))
        yield _gauge(
            "cache_bytes",
            "Weight of the entries held",
            ["cache"],
            self._sums(lambda each: each.currsize),
        )
        yield _gauge(
            "cache_max_bytes",
            "Weight that the entries may have",
            ["cache"],
            self._sums(lambda each: each.maxsize),
        )
        yield _counter(
            "cache_evictions",
            "Entries that made room for others",
            ["cache"],
            self._sums(lambda each: each.evictions),
        )
        budgets = self._budgets.items()
        yield _gauge(
            "in_flight_bytes",
            "Bytes held for requests under way",
            ["use"],
            [((use,), budget.held_bytes) for use, budget in budgets],
        )
        yield _gauge(
            "in_flight_max_bytes",
            "Bytes that may be held for requests under way",
            ["use"],
            [((use,), budget.max_bytes) for use, budget in budgets],
        )

    def _lookups(self) -> _Samples:
        for name, group in self._caches.items():
            for result, member in ("hit", "hits"), ("joined", "joins"), ("miss", "misses"):
                yield (name, result), sum(getattr(tally, member) for tally in group.tallies)

    def _sums(self, measure: Callable[[_Cache], float]) -> _Samples:
        for name, group in self._caches.items():
            yield (name,), sum(map(measure, group.entries.values()))


def store_of(ref: ObjectRef) -> str:
    """Return the label of a store: its scheme, and its name in the settings.

    Examples are ``file``, ``s3+lab``, and ``guarded+https`` for virtual references.
    """
    return ref.bucket.partition("://")[0]


def error_label(error: BaseException) -> str:
    """Return the class name of an error of this service, ``other`` of any other."""
    return type(error).__name__ if isinstance(error, ShardgateError) else OTHER_ERROR


def _counter(name: str, text: str, labels: list[str], samples: _Samples) -> Metric:
    family = CounterMetricFamily(f"shardgate_{name}", text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _gauge(name: str, text: str, labels: list[str], samples: _Samples) -> Metric:
    family = GaugeMetricFamily(f"shardgate_{name}", text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family
