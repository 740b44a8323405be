"""`shardgate.observability.metrics`: values that Prometheus scrapes."""

import platform
from collections.abc import Mapping
from importlib.metadata import version

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shardgate.errors import StorageDeniedError, VersionChangedError
from shardgate.model import ObjectRef
from shardgate.observability.metrics import Metrics
from shardgate.read.budget import ByteBudget
from shardgate.read.metadata_cache import CacheCounters, SizedLRUCache
from shardgate.storage.contract import WriteNotice
from shardgate.storage.wrappers import Call

REF = ObjectRef("s3+lab://bucket", "key")


def _check(metrics: Metrics, expected: Mapping[str, float], **labels: str) -> None:
    """Compare samples that have the same *labels*."""
    assert {name: _read(metrics, f"shardgate_{name}", **labels) for name in expected} == expected


def _read(metrics: Metrics, name: str, **labels: str) -> float | None:
    """Return a sample as Prometheus parses it."""
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return float(sample.value)
    return None


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (StorageDeniedError(REF, "no"), "StorageDeniedError"),
        (VersionChangedError(REF), "VersionChangedError"),
        (ZeroDivisionError(), "other"),
    ],
)
def test_store_errors_are_counted_by_class(error: Exception, name: str) -> None:
    """Errors of stores are counted by class; a class that is not the service's is `other`."""
    metrics = Metrics([])
    metrics.stores.on_call(Call("get", REF, 0.3, 10, error))

    assert _read(metrics, "shardgate_upstream_errors_total", store="s3+lab", error=name) == 1


def test_build_info_has_versions_of_service_and_python() -> None:
    """`shardgate_build_info` is 1, with the versions of the service and of Python as labels."""
    versions = {"version": version("shardgate"), "python": platform.python_version()}

    assert _read(Metrics([]), "shardgate_build_info", **versions) == 1


def test_caches_are_exposed() -> None:
    """Readers that share a cache add up their look-ups, and its size is counted once."""
    metrics = Metrics([])
    entries = SizedLRUCache[str, bytes](100, lambda _, value: len(value))
    for each in (CacheCounters(hits=3, joins=2, misses=1, merged=5), CacheCounters(hits=1)):
        metrics.caches.watch("chunk", entries, each)
    for key in "abc":
        entries.put(key, bytes(40))

    for result, count in ("hit", 4), ("joined", 2), ("miss", 1):
        _check(metrics, {"cache_lookups_total": count}, cache="chunk", result=result)
    sizes = {"cache_entries": 2, "cache_bytes": 80, "cache_max_bytes": 100}
    _check(metrics, {**sizes, "cache_evictions_total": 1}, cache="chunk")
    _check(metrics, {"coalesced_chunks_total": 5})


async def test_bytes_in_flight_are_exposed_with_their_limit() -> None:
    """A watched budget is exposed with its held bytes and its limit."""
    metrics, budget = Metrics([]), ByteBudget(100, wait_s=1)
    metrics.caches.watch_budget("bodies", budget)
    await budget.acquire(30)

    _check(metrics, {"in_flight_bytes": 30, "in_flight_max_bytes": 100}, use="bodies")


def test_writes_add_up() -> None:
    """Rewrites, lost swaps, lost lines, and written, fetched and copied bytes add up."""
    metrics = Metrics([])
    metrics.stores.on_rewrite(3, 1)
    metrics.stores.on_rewrite(5, 0)
    metrics.stores.on_write(WriteNotice(10, 20, 30))
    metrics.stores.on_write(WriteNotice(1, 2))
    metrics.on_audit_loss(3)

    _check(metrics, {"audit_lost_lines_total": 3})
    _check(metrics, {"rewrite_changes_count": 2, "rewrite_changes_sum": 8, "swaps_lost_total": 1})
    _check(metrics, {"writes_total": 1}, way="copy")
    moved = {"written_bytes_total": 11, "fetched_bytes_total": 22, "copied_bytes_total": 30}
    _check(metrics, moved)


def test_samples_have_the_worker_label() -> None:
    """All samples of a worker process have its `worker` label."""
    metrics = Metrics(["em"], worker="17")

    families = list(text_string_to_metric_families(metrics.exposition().decode()))
    samples = [sample for family in families for sample in family.samples]

    assert len(samples) > 20
    assert all(sample.labels["worker"] == "17" for sample in samples)
