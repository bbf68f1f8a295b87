"""Metrics as workers show them: ``baton_`` before a name, ``model`` and ``role`` as labels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from engine.ipc.counters import Tally

LABELS = ["model", "role"]


def gauge(name: str, text: str, labels: list[str], value: float) -> Metric:
    """``labels``: values of LABELS, and the replica's."""
    metric = GaugeMetricFamily(f"baton_{name}", text, labels=[*LABELS, "replica"])
    metric.add_metric(labels, value)
    return metric


def gauge_by(
    by: str, name: str, text: str, labels: list[str], values: Iterable[tuple[str, float]]
) -> Metric:
    """With one more label, ``by``."""
    metric = GaugeMetricFamily(f"baton_{name}", text, labels=[*LABELS, "replica", by])
    for of, value in values:
        metric.add_metric([*labels, of], value)
    return metric


def counter(name: str, text: str, labels: list[str], value: float) -> Metric:
    metric = CounterMetricFamily(f"baton_{name}", text, labels=LABELS)
    metric.add_metric(labels, value)
    return metric


def counter_by(
    by: str, name: str, text: str, labels: list[str], values: Iterable[tuple[str, float]]
) -> Metric:
    """With one more label, ``by``."""
    metric = CounterMetricFamily(f"baton_{name}", text, labels=[*LABELS, by])
    for of, value in values:
        metric.add_metric([*labels, of], value)
    return metric


def histogram(
    name: str, text: str, labels: list[str], tally: Tally, edges: Sequence[float]
) -> Metric:
    metric = HistogramMetricFamily(f"baton_{name}", text, labels=LABELS)
    metric.add_metric(labels, buckets(tally, edges), tally.total)
    return metric


def buckets(tally: Tally, edges: Sequence[float]) -> list[tuple[str, float]]:
    """Cumulated, with their upper edges."""
    names = [*(str(float(edge)) for edge in edges), "+Inf"]
    return list(zip(names, accumulate(tally.counts), strict=True))
