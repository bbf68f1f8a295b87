"""A file of many tenants makes no page of many lines."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from router.tenants.tenant_metrics import LABELS_MAX, TenantMetrics
from router.tenants.usage import TenantUsage


def test_labels_are_bounded_and_the_rest_is_counted_together() -> None:
    registry = CollectorRegistry()
    metrics = TenantMetrics(registry, ("m", "router"), "r1")
    names = [f"t{number}" for number in range(10_000)]
    metrics.retain(names)
    for name in [*names, "evil" * 50]:
        metrics.count_end(name, TenantUsage(1, 10, 2), 3)
        metrics.count_refusal(name)
    metrics.show_running(dict.fromkeys(names, 2))
    assert len(generate_latest(registry).splitlines()) < 20 * LABELS_MAX

    def value(name: str, tenant: str) -> float | None:
        labels = {"model": "m", "role": "router", "tenant": tenant}
        return registry.get_sample_value(name, labels)

    left = 10_001 - LABELS_MAX
    for name, each in (("requests", 1), ("prompt_tokens", 10), ("refusals", 1)):
        assert value(f"baton_tenant_{name}_total", "t7") == each
        assert value(f"baton_tenant_{name}_total", "other") == each * left
        assert value(f"baton_tenant_{name}_total", f"t{LABELS_MAX}") is None
    running = {"model": "m", "role": "router", "tenant": "other", "replica": "r1"}
    gauge = registry.get_sample_value("baton_tenant_choices_running", running)
    assert gauge == 2.0 * (10_000 - LABELS_MAX)
    metrics.retain(["t7"])
    assert value("baton_tenant_requests_total", "t7") == 1
    assert value("baton_tenant_requests_total", "t8") is None


def test_dropped_lines_count_up() -> None:
    registry = CollectorRegistry()
    metrics = TenantMetrics(registry, ("m", "router"), "r1")
    for dropped in (2, 2, 5):
        metrics.show_dropped(dropped)
    labels = {"model": "m", "role": "router"}
    assert registry.get_sample_value("baton_usage_log_dropped_lines_total", labels) == 5
