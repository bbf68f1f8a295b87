"""When alerts about the autoscaler fire and when not, over hours that promtool makes up."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.monitoring.files import RuleOptions, write_prometheus
from cluster.monitoring.prometheus import ScrapeConfig
from tests.cluster.monitoring.test_monitoring_alerts import OF, ROUTER
from tests.cluster.promtool import judge
from tests.system import needs

needs("promtool")

OWN = f'{OF}, role="autoscaler", replica="a"'
AGE = f"baton_planner_reading_age_seconds{{{OWN}}}"
ACTS = {f'baton_autoscaler_mode{{{OWN}, mode="act"}}': "1x60"}
BLIND = {("BatonAutoscalerBlind", "ticket")}


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rules")
    write_prometheus(folder, ScrapeConfig(("http://127.0.0.1:8000",)), RuleOptions())
    return folder


def test_infeasible_objective_fires(rules: Path) -> None:
    said = {f'baton_slo_infeasible{{{OWN}, slo="{slo}"}}': "0x60" for slo in ("ttft", "tpot")}
    said[f'baton_slo_infeasible{{{OWN}, slo="ttft"}}'] = "0x10 1x3 0x10 1x20 0x20"
    fires = {("BatonSloInfeasible", "ticket")}
    judge(rules, ROUTER | said, {"13m": set(), "27m": set(), "32m": fires, "50m": set()})


def test_a_correction_at_its_bound_fires(rules: Path) -> None:
    bound = f'baton_correction_at_bound{{{OWN}, correction="kv"}}'
    fires = {("BatonCorrectionAtBound", "ticket")}
    series = ROUTER | {bound: "0x10 1x5 0x5 1x20"}
    judge(rules, series, {"19m": set(), "28m": set(), "33m": fires})


def test_without_metrics_the_autoscaler_is_blind(rules: Path) -> None:
    judge(rules, ROUTER | {AGE: "3x10 60+60x5 3x40"}, {"11m": set(), "14m": BLIND, "18m": set()})


def test_an_autoscaler_that_goes_is_missed_for_a_while(rules: Path) -> None:
    series = {AGE: "3x10 stale"}
    judge(rules, ROUTER | series, {"11m": set(), "14m": BLIND, "39m": BLIND, "45m": set()})
    again = {AGE: "3x10 stale", AGE.replace('"a"', '"b"'): "_x11 3x60"}
    judge(rules, ROUTER | again, {f"{m}m": set() for m in (12, 15, 30, 45)})


def test_cluster_without_autoscaler_fires_nothing(rules: Path) -> None:
    judge(rules, ROUTER, {"30m": set()})


def pool(role: str, wanted: str, there: str) -> dict[str, str]:
    of = f'{OF}, role="{role}", replica="a"'
    return {
        f"baton_desired_replicas{{{of}}}": wanted,
        f"baton_actual_replicas{{{of}}}": there,
    }


def test_missing_replicas_fire(rules: Path) -> None:
    slow = pool("prefill", "1x10 3x50", "1x15 3x45") | pool("decode", "2x60", "3x60")
    judge(rules, ROUTER | ACTS | slow, {"12m": set(), "30m": set()})
    never = pool("prefill", "1x10 3x50", "1x10 2x50")
    fires = {("BatonScalingBehind", "ticket")}
    judge(rules, ROUTER | ACTS | never, {"19m": set(), "23m": fires})
    judge(rules, ROUTER | never, {"23m": set()})  # it only advises
