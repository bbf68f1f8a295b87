"""Defines the metrics of a router's queue."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge, Histogram

WAITS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)


class QueueMetrics:
    """Length and waiting times of the queue of one router. ``labels``: model and role."""

    def __init__(self, registry: CollectorRegistry, labels: tuple[str, str], replica: str) -> None:
        self._length = Gauge(
            "baton_router_queue_requests",
            "Requests that wait in this router until a worker has room",
            ["model", "role", "replica"],
            registry=registry,
        ).labels(*labels, replica)
        self._prompt_tokens = Gauge(
            "baton_router_queue_prompt_tokens",
            "Prompt tokens of the requests that wait in this router, cached ones included",
            ["model", "role", "replica"],
            registry=registry,
        ).labels(*labels, replica)
        self._waits = Histogram(
            "baton_router_queue_seconds",
            "Time that a dispatched request has waited in this router's queue",
            ["model", "role"],
            buckets=WAITS,
            registry=registry,
        ).labels(*labels)

    def read(self, length: Callable[[], int], prompt_tokens: Callable[[], int]) -> None:
        """Let the gauges call these whenever metrics are read."""
        self._length.set_function(length)
        self._prompt_tokens.set_function(prompt_tokens)

    def observe_dispatch(self, waited_s: float) -> None:
        """Observe the time that a request has waited; none where it did not wait."""
        self._waits.observe(waited_s)
