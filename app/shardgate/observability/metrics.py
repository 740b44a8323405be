"""Prometheus metrics of one process, and the request that metrics, logs and traces describe.

Every label has a closed set of values: none comes from a client. With several processes each one
has its own registry, and adds the label ``worker`` to all that it exposes.
"""

import asyncio
import re
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from http import HTTPStatus
from importlib.metadata import version
from itertools import accumulate, chain
from platform import python_version
from typing import Any, Final, Literal

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
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from shardgate.errors import RangeNotSatisfiedError, ShardgateError
from shardgate.read.budget import ByteBudget
from shardgate.read.metadata_cache import CacheCounters, SizedLRUCache
from shardgate.storage.contract import WriteNotice
from shardgate.storage.wrappers import Call

MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS: Final = (0.0005, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)

type _Cache = SizedLRUCache[Any, Any]
type _Samples = Iterable[tuple[tuple[str, ...], float]]
"""Values, each after the values of its labels."""
type Outcome = Literal["hit", "answered", "not_modified", "absent", "refused", "failed", "gone"]
"""``hit`` is a response from memory, ``answered`` other success, ``absent`` 404, ``refused`` any
other 4xx and 501, ``failed`` 424, any other 5xx or a response that broke off, ``gone`` a client
that left before the end."""

METHODS: Final = frozenset({"GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS"})
OTHER_METHOD: Final = "other"
"""Label of all other methods: clients may invent any number."""
NO_DATASET: Final = ""
"""Label of the control plane, and of names that are no configured dataset."""

# A possible token in a path, wherever it stands, percent-encoded any number of times.
_TOKEN: Final = re.compile(r"(?:~|%(?:25)*7[Ee])[^/\s]*")


@dataclass(slots=True, eq=False)
class RequestContext:
    """A request in progress, and its response as far as it is known."""

    method: str
    dataset: str
    sent_key: str
    client: bytes
    is_private: bool
    """Whether logs withhold the texts of errors."""
    request_id: bytes = b""
    caller: str = ""
    trace_id: str = ""
    span: Any = None
    status: int = 0
    nbytes: int = 0
    outcome: Outcome = "gone"
    started_at: float = field(default_factory=time.perf_counter)

    @property
    def key(self) -> str:
        """The key, without tokens."""
        return mask_tokens(self.sent_key)


current_request: Final = ContextVar[RequestContext | None]("current_request", default=None)
"""The request that this task, and the tasks it starts, work for."""


def note_caller(name: str) -> None:
    """Set the authenticated caller of the current request."""
    if (context := current_request.get()) is not None:
        context.caller = name


@cache
def outcome_of(status: int) -> Outcome:
    """Return the outcome of a complete response that took some waiting."""
    if status < HTTPStatus.BAD_REQUEST:
        return "not_modified" if status == HTTPStatus.NOT_MODIFIED else "answered"
    if status == HTTPStatus.NOT_FOUND:
        return "absent"
    return "failed" if is_failure(status) else "refused"


def is_failure(status: int) -> bool:
    """Return whether the service or a store is at fault: 424, and any 5xx but 501."""
    if status == HTTPStatus.FAILED_DEPENDENCY:
        return True
    return status >= HTTPStatus.INTERNAL_SERVER_ERROR and status != HTTPStatus.NOT_IMPLEMENTED


def mask_tokens(text: str) -> str:
    """Replace every segment of a path in *text* that may be a token by ``~``."""
    return _TOKEN.sub("~", text) if "~" in text or "%" in text else text


class Metrics(Collector):
    """All metrics of one process."""

    def __init__(self, datasets: Iterable[str], *, worker: str | None = None) -> None:
        """Expose requests of each of *datasets*; *worker* names one of several processes."""
        # Times of creation would double the number of series.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._worker = worker
        self.registry = CollectorRegistry()
        self.requests = RequestMetrics(datasets, self.registry)
        self.stores = StoreMetrics(self.registry)
        self.caches = CacheMetrics()
        self.registry.register(self.caches)
        counter = partial(Counter, registry=self.registry)
        text = "Commits to Icechunk repositories, by what became of them"
        self._commits = counter("shardgate_commits", text, ["outcome"])
        text = "Sessions of Icechunk repositories that were begun, and discarded"
        self._sessions = counter("shardgate_sessions", text, ["event"])
        text = "Lines of the audit log that could not be written"
        self._audit_losses = counter("shardgate_audit_lost_lines", text)
        for outcome in "made", "conflict", "failed":
            self._commits.labels(outcome)
        for event in "begun", "discarded":
            self._sessions.labels(event)
        for collector in ProcessCollector, PlatformCollector, GCCollector:
            collector(registry=self.registry)
        text = "Always 1; the labels are the versions of Shardgate and of Python"
        build = Gauge("shardgate_build_info", text, ["version", "python"], registry=self.registry)
        build.labels(version("shardgate"), python_version()).set(1)

    def on_commit(self, outcome: str) -> None:
        """Count a commit: ``made``, ``conflict`` or ``failed``."""
        self._commits.labels(outcome).inc()

    def on_session(self, event: str) -> None:
        """Count a session: ``begun`` or ``discarded``."""
        self._sessions.labels(event).inc()

    def on_audit_loss(self, lines: int) -> None:
        """Count lost *lines* of the audit log."""
        self._audit_losses.inc(lines)

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


class _Durations:
    """Histograms of seconds by the values of labels."""

    def __init__(self) -> None:
        self._counts: defaultdict[tuple[str, ...], list[int]]
        self._counts = defaultdict(lambda: [0] * (len(_SECONDS) + 1))  # the last is of longer ones
        self._sums: defaultdict[tuple[str, ...], float] = defaultdict(float)

    def note(self, labels: tuple[str, ...], seconds: float) -> None:
        self._counts[labels][bisect_left(_SECONDS, seconds)] += 1
        self._sums[labels] += seconds

    def exposed(self, name: str, text: str, labels: list[str]) -> Metric:
        """Return the metric *name*, whose buckets each count the shorter ones too."""
        family = HistogramMetricFamily(f"shardgate_{name}", text, labels=labels)
        bounds = [*map(floatToGoString, _SECONDS), "+Inf"]
        for values, counts in self._counts.items():
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric(values, buckets, self._sums[values])
        return family


class RequestMetrics(Collector):
    """Requests by label: plain numbers, read when they are scraped.

    Two counters of the library take a sixth of the processor time of a cached chunk.
    """

    def __init__(self, datasets: Iterable[str], registry: CollectorRegistry) -> None:
        # By dataset, method and outcome.
        self._requests: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        self._sent_nbytes = defaultdict(int, dict.fromkeys((NO_DATASET, *datasets), 0))
        self._seconds = _Durations()
        registry.register(self)
        self.in_flight = 0
        self.connections = 0
        self.is_stopping = False

    def count(
        self, dataset: str, method: str, outcome: Outcome, nbytes: int, seconds: float | None = None
    ) -> None:
        """Count a finished request with *nbytes* of body; *seconds* unless nothing was awaited."""
        self._requests[dataset, method, outcome] += 1
        self._sent_nbytes[dataset] += nbytes
        if seconds is not None:
            self._seconds.note((method, outcome), seconds)

    def collect(self) -> Iterator[Metric]:
        """Yield the current values."""
        text = "Requests answered, or ended by their client; no dataset stands for other paths"
        yield _counter("requests", text, ["dataset", "method", "outcome"], self._requests.items())
        sent = [((dataset,), nbytes) for dataset, nbytes in self._sent_nbytes.items()]
        yield _counter("sent_bytes", "Bytes of bodies sent to clients", ["dataset"], sent)
        text = "Requests under way, which wait for a store, a client or their turn"
        yield _gauge("requests_in_flight", text, [], [((), self.in_flight)])
        text = "Connections of clients, busy and idle"
        yield _gauge("connections", text, [], [((), self.connections)])
        text = (
            "Time from the head of a request to the end of its answer, if anything was waited for"
        )
        yield self._seconds.exposed("request_seconds", text, ["method", "outcome"])


class StoreMetrics(Collector):
    """Calls of object stores, each attempt by itself, and objects and shards written."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        # By store, method and kind; plain numbers, as those of `RequestMetrics`.
        self._nbytes: defaultdict[tuple[str, ...], int] = defaultdict(int)
        self._seconds = _Durations()
        registry.register(self)
        text = "Calls of a store that failed, by the class of the error"
        self._errors = counter("shardgate_upstream_errors", text, ["store", "error"])
        text = "Inner chunks put or deleted by one rewrite of their shard"
        self._changes = Histogram(
            "shardgate_rewrite_changes",
            text,
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
            registry=registry,
        )
        text = "Rewrites of shards begun anew because another writer was faster"
        self._conflicts = counter("shardgate_swaps_lost", text)
        text = "Objects written to servers, by how: all bytes sent, or some copied by the server"
        self._writes = counter("shardgate_writes", text, ["way"])
        for way in "put", "copy":
            self._writes.labels(way)
        self._written = (
            counter("shardgate_written_bytes", "Bytes of objects sent to servers"),
            counter("shardgate_fetched_bytes", "Bytes read from servers to be sent again"),
            counter("shardgate_copied_bytes", "Bytes that servers copied by themselves"),
        )

    def on_call(self, call: Call) -> None:
        """Count a finished call of a store."""
        store = store_of(call.ref.bucket)
        labels = (store, call.method, call.kind)
        self._nbytes[labels] += call.nbytes
        self._seconds.note(labels, call.seconds)
        # Empty and short objects, and clients that leave, are no errors of the store.
        if call.error is not None and not isinstance(
            call.error, RangeNotSatisfiedError | asyncio.CancelledError | GeneratorExit
        ):
            self._errors.labels(store, error_label(call.error)).inc()

    def collect(self) -> Iterator[Metric]:
        """Yield the current values of the calls."""
        labels = ["store", "method", "kind"]
        text = "Bytes that stores sent, or that were sent to them by put"
        yield _counter("upstream_bytes", text, labels, self._nbytes.items())
        text = "Time that a call of a store took, each attempt by itself"
        yield self._seconds.exposed("upstream_seconds", text, labels)

    def on_write(self, notice: WriteNotice) -> None:
        """Count an object that was written over a network."""
        self._writes.labels("copy" if notice.copied else "put").inc()
        for counter, nbytes in zip(self._written, notice, strict=True):
            counter.inc(nbytes)

    def on_rewrite(self, changes: int, conflicts: int) -> None:
        """Count a rewrite of a shard, and the compare-and-swap conflicts before it."""
        self._changes.observe(changes)
        self._conflicts.inc(conflicts)


class CacheMetrics(Collector):
    """Caches and byte budgets, read when they are scraped."""

    def __init__(self) -> None:
        # By label and identity: readers may share a cache.
        self._caches: defaultdict[str, dict[int, _Cache]] = defaultdict(dict)
        self._counters: defaultdict[str, list[CacheCounters]] = defaultdict(list)
        self._budgets: dict[str, ByteBudget] = {}

    def watch(self, name: str, entries: _Cache, counters: CacheCounters) -> None:
        """Expose *entries*, which other readers may share, and the look-ups of one reader."""
        self._caches[name][id(entries)] = entries
        self._counters[name].append(counters)

    def watch_budget(self, use: str, budget: ByteBudget) -> None:
        """Expose *budget* with the label *use*."""
        self._budgets[use] = budget

    def collect(self) -> Iterator[Metric]:
        """Yield the current values."""
        text = "Look-ups: in the cache (hit), joined to a read under way, or read from a store"
        yield _counter("cache_lookups", text, ["cache", "result"], self._lookups())
        text = "Chunks that came with a read that was begun for a neighbour"
        counters = list(chain(*self._counters.values()))
        merged = sum(each.merged for each in counters)
        yield _counter("coalesced_chunks", text, [], [((), merged)])
        text = "Bytes of stores that were read between and around chunks, for no request"
        overfetched_nbytes = sum(each.overfetched_nbytes for each in counters)
        yield _counter("coalesced_gap_bytes", text, [], [((), overfetched_nbytes)])
        yield _gauge("cache_entries", "Entries held", ["cache"], self._sums(len))
        held = self._sums(lambda each: each.currsize)
        yield _gauge("cache_bytes", "Weight of the entries held", ["cache"], held)
        most = self._sums(lambda each: each.maxsize)
        yield _gauge("cache_max_bytes", "Weight that the entries may have", ["cache"], most)
        evicted = self._sums(lambda each: each.evictions)
        yield _counter("cache_evictions", "Entries that made room for others", ["cache"], evicted)
        for name, text, member in (
            ("in_flight_bytes", "Bytes held for requests under way", "held_bytes"),
            ("in_flight_max_bytes", "Bytes that may be held for requests under way", "max_bytes"),
        ):
            values = [((use,), getattr(each, member)) for use, each in self._budgets.items()]
            yield _gauge(name, text, ["use"], values)

    def _lookups(self) -> _Samples:
        for name, group in self._counters.items():
            for result, member in ("hit", "hits"), ("joined", "joins"), ("miss", "misses"):
                yield (name, result), sum(getattr(each, member) for each in group)

    def _sums(self, measure: Callable[[_Cache], float]) -> _Samples:
        for name, group in self._caches.items():
            yield (name,), sum(map(measure, group.values()))


@lru_cache
def store_of(bucket: str) -> str:
    """Return the label of a store: ``file``, ``s3+lab``, ``guarded+https``."""
    return bucket.partition("://")[0]


def error_label(error: BaseException) -> str:
    """Return the class name of an error of this service, ``other`` of any other."""
    return type(error).__name__ if isinstance(error, ShardgateError) else "other"


def _counter(name: str, text: str, labels: list[str], samples: _Samples) -> Metric:
    return _filled(CounterMetricFamily(f"shardgate_{name}", text, labels=labels), samples)


def _gauge(name: str, text: str, labels: list[str], samples: _Samples) -> Metric:
    return _filled(GaugeMetricFamily(f"shardgate_{name}", text, labels=labels), samples)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, samples: _Samples) -> Metric:
    for values, value in samples:
        family.add_metric(values, value)
    return family
