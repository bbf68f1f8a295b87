"""Metrics of tenants, on the page of every router. Created by ``open_router_state``.

A tenant's name is a label only while the file of API keys has it, and the first ``LABELS_MAX``
names of the file at most, so that a page stays small; other tenants count together as ``other``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from router.tenants.usage import TenantUsage

LABELS_MAX = 256
OTHER = "other"

_LABELS = ["model", "role", "tenant"]


class TenantMetrics:
    """What each tenant has used of one router. ``labels``: model and role."""

    def __init__(self, registry: CollectorRegistry, labels: tuple[str, str], replica: str) -> None:
        self._labels, self._replica = labels, replica
        self._names: frozenset[str] = frozenset()

        def counter(name: str, text: str) -> Counter:
            return Counter(f"baton_tenant_{name}", text, _LABELS, registry=registry)

        self._requests = counter("requests", "Requests of a tenant that ended")
        self._prompt = counter("prompt_tokens", "Prompt tokens of a tenant's requests")
        self._cached = counter(
            "cached_tokens", "Prompt tokens of a tenant that were in a prefix cache"
        )
        self._output = counter("output_tokens", "Tokens generated for a tenant")
        self._refusals = counter("refusals", "Requests refused by the limits of their tenant")
        self._counters = (
            *(self._requests, self._prompt, self._cached),
            *(self._output, self._refusals),
        )
        self._running = Gauge(
            "baton_tenant_choices_running",
            "Choices of a tenant in this router",
            [*_LABELS, "replica"],
            registry=registry,
        )
        self._valid = Gauge(
            "baton_api_keys_valid",
            "0: the file of API keys has become invalid, and its last content is in use",
            ["model", "role", "replica"],
            registry=registry,
        )
        self._dropped = Counter(
            "baton_usage_log_dropped_lines",
            "Lines of the usage log that were not written",
            ["model", "role"],
            registry=registry,
        ).labels(*labels)
        self._dropped_before = 0
        self.show_keys(valid=True)

    def retain(self, names: Iterable[str]) -> None:
        """Use these tenants' names as labels from now on, and forget other series."""
        kept = frozenset(list(names)[:LABELS_MAX])
        for name in self._names - kept:
            for counter in self._counters:
                counter.remove_by_labels({"tenant": name})
        self._names = kept

    def count_refusal(self, tenant: str) -> None:
        self._refusals.labels(*self._labels, self._label(tenant)).inc()

    def count_end(self, tenant: str, usage: TenantUsage, cached: int) -> None:
        """Count a request that ended; ``cached``: prompt tokens from a prefix cache."""
        labels = (*self._labels, self._label(tenant))
        self._requests.labels(*labels).inc()
        self._prompt.labels(*labels).inc(usage.prompt_tokens)
        self._cached.labels(*labels).inc(cached)
        self._output.labels(*labels).inc(usage.output_tokens)

    def show_running(self, running: Mapping[str, int]) -> None:
        """Set the choices in this router, by tenant."""
        self._running.clear()
        for name, choices in running.items():
            self._running.labels(*self._labels, self._label(name), self._replica).inc(choices)

    def show_keys(self, *, valid: bool) -> None:
        self._valid.labels(*self._labels, self._replica).set(valid)

    def show_dropped(self, lines: int) -> None:
        """Set the lines that the usage log has dropped since the start."""
        self._dropped.inc(lines - self._dropped_before)
        self._dropped_before = lines

    def _label(self, tenant: str) -> str:
        return tenant if tenant in self._names else OTHER
