"""Families of Prometheus metrics with the prefix and the labels of a worker's metrics.

``labels`` are the values of LABELS; gauges have the label ``replica`` as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from engine.ipc.counters import BucketCounts

LABELS = ["model", "role"]


def gauge(name: str, text: str, labels: list[str], value: float) -> Metric:
    metric = GaugeMetricFamily(f"baton_{name}", text, labels=[*LABELS, "replica"])
    metric.add_metric(labels, value)
    return metric


def labelled_gauge(
    by: str, name: str, text: str, labels: list[str], values: Iterable[tuple[str, float]]
) -> Metric:
    """Return a family with one more label, ``by``. ``values``: pairs of its value and a number."""
    metric = GaugeMetricFamily(f"baton_{name}", text, labels=[*LABELS, "replica", by])
    for of, value in values:
        metric.add_metric([*labels, of], value)
    return metric


def counter(name: str, text: str, labels: list[str], value: float) -> Metric:
    metric = CounterMetricFamily(f"baton_{name}", text, labels=LABELS)
    metric.add_metric(labels, value)
    return metric


def labelled_counter(
    by: str, name: str, text: str, labels: list[str], values: Iterable[tuple[str, float]]
) -> Metric:
    """Return a family with one more label, ``by``. ``values``: pairs of its value and a number."""
    metric = CounterMetricFamily(f"baton_{name}", text, labels=[*LABELS, by])
    for of, value in values:
        metric.add_metric([*labels, of], value)
    return metric


def histogram(
    name: str, text: str, labels: list[str], tally: BucketCounts, edges: Sequence[float]
) -> Metric:
    metric = HistogramMetricFamily(f"baton_{name}", text, labels=LABELS)
    metric.add_metric(labels, cumulative_buckets(tally, edges), tally.total)
    return metric


def cumulative_buckets(tally: BucketCounts, edges: Sequence[float]) -> list[tuple[str, float]]:
    """Return pairs of the upper edge and the cumulative count, as Prometheus expects them."""
    names = [*(str(float(edge)) for edge in edges), "+Inf"]
    return list(zip(names, accumulate(tally.counts), strict=True))
