"""What dashboards ask for: what routers and workers export, in PromQL that holds for many."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from bench.lib.settings import worker_settings
from cluster.autoscale import metrics as autoscaler
from cluster.dashboards.boards import DASHBOARDS, annotation_queries, panel_queries
from cluster.dashboards.panels import catalog
from cluster.dashboards.panels.catalog import Metric
from cluster.dashboards.panels.spec import Panel
from cluster.sizing.snapshot import ObservedLatency
from cluster.worker.worker import Worker, WorkerRegistration
from protocol.registry.directory import ModelInfo
from router.generation.metrics import RouterMetrics
from router.placement.snapshot import Objectives
from tests.cluster.autoscale.test_metrics import busy, figures, turn
from tests.cluster.promtool import promtool
from tests.system import needs

METRICS = [made for made in vars(catalog).values() if isinstance(made, Metric)]
PANELS = [panel for board in DASHBOARDS for panel in board.panels()]
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
TARGET = {"cluster", "model", "role", "replica"}
"""Labels that Prometheus gives every series."""

MODEL = ModelInfo(
    id="tiny",
    fingerprint="f" * 32,
    precision="exact",
    max_model_len=64,
    vocab_size=8,
    kv_bytes_per_token=8,
)


def families(page: bytes) -> list[Family]:
    return list(text_string_to_metric_families(page.decode()))


async def exported(tmp_path: Path) -> dict[str, list[Family]]:
    """What the pages of a router, a decode worker and an autoscaler have, by name. None runs."""
    settings = worker_settings(
        "decode",
        cluster="test",
        redis_url="redis://127.0.0.1:1/0",
        token="t" * 32,
        model_path=str(tmp_path),
        model_id=MODEL.id,
    )
    worker = Worker(settings)
    worker._registered = WorkerRegistration("w" * 32, MODEL, "w:1", "w:2", "w:3", 64, 512)
    router = RouterMetrics("tiny", Objectives(1.0, 0.1), "r" * 12).page()
    told = figures(turn(busy(1.0, observed=ObservedLatency(ttft_s=0.3, tpot_s=0.02))))
    pages = [router, worker._metrics._page(), autoscaler.metrics_page(told)()]
    found: dict[str, list[Family]] = {}
    for family in (family for page in pages for family in families(page)):
        found.setdefault(family.name, []).append(family)
    return found


async def test_every_metric_is_exported_as_the_catalog_has_it(tmp_path: Path) -> None:
    pages = await exported(tmp_path)
    assert len(METRICS) > 40
    for metric in METRICS:
        # of an engine's process there is nothing before it runs; it has what any process has
        name = metric.name.removeprefix("baton_engine_") if metric.bare else metric.name
        known = {(family.type, family.documentation) for family in pages.get(name, ())}
        assert (metric.kind, metric.about) in known, (metric, known)
        for sample in (s for family in pages[name] for s in family.samples):
            labels = set(sample.labels) - {"le"} - TARGET
            if not metric.bare and metric.name != "baton_replicas":
                assert labels == set(metric.labels), (metric, sample)


def names(text: str) -> set[str]:
    return set(re.findall(r"\b(?:baton|process)_\w+", text))


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_expressions_use_metrics_of_the_catalog(panel: Panel) -> None:
    for query in panel.queries:
        uses, text = query.expr.uses, query.expr.text
        may = {metric.name + suffix for metric in uses for suffix in SUFFIXES[metric.kind]}
        assert names(text) <= may, text
        assert set(uses) <= set(METRICS)
        own = {label for metric in uses for label in metric.labels}
        assert labels_of(text) <= own | TARGET | {"le", "alertname", "alertstate"}, text
        assert placeholders(query.legend) <= grouped(text), (query.legend, text)


def labels_of(text: str) -> set[str]:
    """That are matched, or grouped by."""
    matched = re.findall(r'(\w+)=~?"', text)
    return {*matched, *grouped(text)}


def grouped(text: str) -> set[str]:
    return {label for group in re.findall(r"by \(([^)]*)\)", text) for label in group.split(", ")}


def placeholders(legend: str) -> set[str]:
    return set(re.findall(r"{{(\w+)}}", legend))


def written(text: str) -> str:
    """As Grafana sends it, with everything picked."""
    for name, value in (("$__rate_interval", "5m"), ("$cluster", ".*"), ("$model", ".*")):
        text = text.replace(name, value)
    return text


def test_prometheus_understands_every_query(tmp_path: Path) -> None:
    needs("promtool")
    exprs = sorted({written(text) for _, _, text in [*panel_queries(), *annotation_queries()]})
    rules = [{"record": f"panel:{n}", "expr": text} for n, text in enumerate(exprs)]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(exprs)} rules found" in promtool("check", "rules", str(file))


def of_router(replica: str) -> dict[str, str]:
    """Ten minutes of one of two routers: half of its requests are in time."""
    ready = f'baton_replicas{{role="decode", state="ready", replica="{replica}"}}'
    wall = f'baton_binding_wall{{role="decode", wall="WALL", replica="{replica}"}}'
    met = f'baton_slo_met_total{{slo="all", role="router", replica="{replica}"}}'
    of = f'baton_slo_requests_total{{slo="all", role="router", replica="{replica}"}}'
    walls = dict.fromkeys(("compute", "bandwidth", "capacity", "network", "none"), "0x10")
    walls["bandwidth"] = "1x10"
    return {
        **{ready: "2x10", met: "0+60x10", of: "0+120x10"},
        **{wall.replace("WALL", name): values for name, values in walls.items()},
    }


def test_values_exported_by_two_routers_count_once(tmp_path: Path) -> None:
    needs("promtool")
    series = of_router("a" * 12) | of_router("b" * 12)
    asked = {title: written(text) for _, title, text in panel_queries()}
    none = '{alertname="none"}'
    expected = {
        "Workers ready": ('{role="decode"}', 2),
        "Decode workers": ("{}", 2),
        "In time": ("{}", 0.5),
        "Goodput": ("{}", 2),
        "The wall that binds": ('{role="decode"}', 2),
        "Alerts": (none, 0),
    }
    tests = [
        {
            "expr": asked[title],
            "eval_time": "10m",
            "exp_samples": [{"labels": labels, "value": value}],
        }
        for title, (labels, value) in expected.items()
    ]
    given = [{"series": name, "values": values} for name, values in series.items()]
    case = {"interval": "1m", "input_series": given, "promql_expr_test": tests}
    file = tmp_path / "case.yml"
    file.write_text(yaml.safe_dump({"tests": [case]}))
    promtool("test", "rules", str(file))


def test_shares_have_no_value_without_requests() -> None:
    for _, _, text in panel_queries():
        for whole in re.findall(r"\n/\n(.*)", text):
            assert whole.endswith(" > 0)"), text
