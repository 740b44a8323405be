"""Metrics of the service as `prometheus_client` has them, made when they are asked for."""

from collections.abc import Iterable, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from app.seeing.histogram import Histogram

type Labelled[T] = Iterable[tuple[Sequence[str], T]]
"""Values, each behind those of its labels."""


def counter(name: str, about: str, labels: Sequence[str], values: Labelled[float]) -> Metric:
    """Describe what only grows."""
    family = CounterMetricFamily(f"shardgate_{name}", about, labels=labels)
    for names, value in values:
        family.add_metric(names, value)
    return family


def gauge(name: str, about: str, labels: Sequence[str], values: Labelled[float]) -> Metric:
    """Describe what goes up and down."""
    family = GaugeMetricFamily(f"shardgate_{name}", about, labels=labels)
    for names, value in values:
        family.add_metric(names, value)
    return family


def histogram(name: str, about: str, labels: Sequence[str], values: Labelled[Histogram]) -> Metric:
    """Describe how something is spread."""
    family = HistogramMetricFamily(f"shardgate_{name}", about, labels=labels)
    for names, value in values:
        family.add_metric(names, value.buckets, value.total)
    return family
