"""Collects metrics of a ``RequestObserver``. ``open_router_state`` registers the collector."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from router.observation.observer import RequestObserver


class ObservationMetrics(Collector):
    """Reads the observer when Prometheus asks. ``model``, ``role``: as of the other series."""

    def __init__(self, observer: RequestObserver, model: str, role: str) -> None:
        self._observer = observer
        self._labels = (model, role)

    def collect(self) -> Iterator[Metric]:
        dropped = CounterMetricFamily(
            "baton_observation_dropped_requests",
            "Requests missing in the access log or in traces, because disk or collector failed",
            labels=("model", "role", "export"),
        )
        for export, requests in self._observer.dropped.items():
            dropped.add_metric((*self._labels, export), requests)
        yield dropped
