"""Collects metrics of a ``ConnectionTable``. ``RouterServer`` registers the collector."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.connections.connection_table import ConnectionTable, Refusal

_LABELS = ("model", "role")
_ROLE = "router"
_REASONS: tuple[Refusal, ...] = ("all", "address", "descriptors")


class ConnectionMetrics(Collector):
    """Reads the table when Prometheus asks. ``model``: the label of the router's other series."""

    def __init__(self, table: ConnectionTable, model: str) -> None:
        self._table = table
        self._labels = (model, _ROLE)

    def collect(self) -> Iterator[Metric]:
        table, labels = self._table, self._labels
        for name, text, value in (
            ("connections", "Connections of clients that are open", table.open),
            ("connections_idle", "Open connections without a request", table.idle),
            ("connections_limit", "Maximum number of clients' connections", table.limits.total),
        ):
            gauge = GaugeMetricFamily(f"baton_router_{name}", text, labels=_LABELS)
            gauge.add_metric(labels, value)
            yield gauge
        evicted = CounterMetricFamily(
            "baton_router_connections_evicted",
            "Idle connections closed to make room for others",
            labels=_LABELS,
        )
        evicted.add_metric(labels, table.evicted)
        yield evicted
        refused = CounterMetricFamily(
            "baton_router_connections_refused",
            "Refused connections: too many in total, too many from one address, or no file"
            " descriptor left",
            labels=(*_LABELS, "reason"),
        )
        for reason in _REASONS:
            refused.add_metric((*labels, reason), table.refused[reason])
        yield refused
