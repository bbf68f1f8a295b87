"""The autoscaler's page."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from cluster.autoscale.loop import AutoscalerTurn
from cluster.autoscale.metrics import AutoscalerFigures, metrics_page
from cluster.observation.reading import ClusterReading
from cluster.sizing.decision import DecisionRecord
from cluster.sizing.policy import decide
from cluster.sizing.snapshot import (
    ComparedWork,
    DemandSample,
    ObservedLatency,
    RequestMix,
    SizingMemory,
    SizingSnapshot,
    WorkerCounts,
)
from tests.cluster.sizing.worlds import mix, snapshot, workers

Page = dict[tuple[str, str], float]


def turn(seen: SizingSnapshot) -> AutoscalerTurn:
    made = decide(seen)
    record = DecisionRecord(run="r", number=1, time_s=0.0, acted=True, snapshot=seen, decision=made)
    return AutoscalerTurn(record, ClusterReading(at_s=seen.at_s, mix=seen.mix, age_s=1.0), True)


def figures(*turns: AutoscalerTurn) -> AutoscalerFigures:
    made = AutoscalerFigures(lambda: "m", "a" * 32, Counter(loan=2))
    for each in turns:
        made.take(each)
    return made


def shown(of: AutoscalerFigures) -> Page:
    """By name, and what tells series apart beside model and replica."""
    found: Page = {}
    families = list(text_string_to_metric_families(metrics_page(of)().decode()))
    names = [family.name for family in families]
    assert len(names) == len(set(names)), "a family comes once"
    for family in families:
        for sample in family.samples:
            if not sample.name.startswith("baton_"):
                continue
            labels = dict(sample.labels)
            assert labels.pop("model") == "m"
            assert ("replica" in labels) == (family.type == "gauge"), sample
            labels.pop("replica", None)
            role = labels.pop("role")
            key = (sample.name, " ".join([role, *labels.values()]))
            assert key not in found
            found[key] = sample.value
    return found


def busy(rate: float = 40.0, **changes: object) -> SizingSnapshot:
    load: RequestMix | None = mix(rate) if rate else None
    return replace(snapshot(2, 3, load), **changes)


def test_before_the_first_turn() -> None:
    found = shown(figures())
    assert found["baton_scaling_decisions_total", "autoscaler demand"] == 0
    assert found["baton_autoscaler_failures_total", "autoscaler loan"] == 2
    assert found["baton_worker_seconds_total", "decode"] == 0
    assert not any(name == "baton_desired_replicas" for name, _ in found)


def test_of_the_last_decision() -> None:
    seen = busy(targets=WorkerCounts(prefill=2, decode=5), observed=ObservedLatency(ttft_s=0.3))
    made = decide(seen)
    found = shown(figures(turn(seen)))
    for role in ("prefill", "decode"):
        need = made.prefill if role == "prefill" else made.decode
        assert need is not None
        assert found["baton_desired_replicas", role] == getattr(made.wanted, role)
        assert found["baton_needed_replicas", role] == need.workers
        assert found["baton_pool_load", role] == pytest.approx(need.load)
        assert found["baton_correction_factor", role] == getattr(made.memory.corrections, role)
    assert found["baton_actual_replicas", "prefill"] == 2
    assert found["baton_actual_replicas", "decode"] == 3
    assert found["baton_starting_replicas", "decode"] == 2
    assert found["baton_observed_ttft_seconds", "autoscaler"] == 0.3
    assert ("baton_observed_tpot_seconds", "autoscaler") not in found
    assert found["baton_resident_kv_correction_factor", "autoscaler"] == 1.0
    assert found["baton_slo_infeasible", "autoscaler ttft"] == 0
    assert found["baton_autoscaler_mode", "autoscaler act"] == 1
    assert found["baton_autoscaler_mode", "autoscaler watch"] == 0
    assert found["baton_scaling_reason", f"autoscaler {made.reason}"] == 1
    assert sum(v for (name, _), v in found.items() if name == "baton_scaling_reason") == 1


def test_what_cannot_be_met_is_raised() -> None:
    seen = replace(busy(), goals=replace(busy().goals, tpot_s=0.001))
    assert shown(figures(turn(seen)))["baton_slo_infeasible", "autoscaler tpot"] == 1


def test_a_correction_at_its_bound_is_raised() -> None:
    wrong = SizingMemory(
        computed_s=ComparedWork(1.9, 1.0, requests=1000),
        held_kv=ComparedWork(0.4, 1.0, requests=1000),
    )
    found = shown(figures(turn(busy(memory=wrong))))
    at_bound = "baton_correction_at_bound"
    assert found[at_bound, "autoscaler kv"] == 1
    assert found[at_bound, "autoscaler prefill"] == found[at_bound, "autoscaler decode"] == 0


def test_the_error_of_the_forecast_is_that_of_a_minute_ago() -> None:
    seen = busy(memory=SizingMemory(past=(DemandSample(940.0, 1, 4, 50.0),)))
    made = decide(seen)
    found = shown(figures(turn(seen)))
    errors = [found["baton_forecast_error_ratio", f"autoscaler {of}"] for of in ("rate", "decode")]
    assert made.decode is not None
    assert errors == pytest.approx([40 / 50 - 1, made.decode.workers / 4 - 1])
    assert not any("forecast" in name for name, _ in shown(figures(turn(busy()))))


def test_workers_are_paid_for_from_the_asking_until_they_are_gone() -> None:
    there = workers(2, 3)
    leaving = (replace(there[0], state="leaving"), *there[1:])
    lent = replace(there[1], role="decode")
    first = busy(workers=leaving, targets=WorkerCounts(prefill=1, decode=4), at_s=10.0)
    second = busy(workers=(lent, *there[2:]), targets=WorkerCounts(prefill=1, decode=3), at_s=15.0)
    found = shown(figures(turn(first), turn(second), turn(replace(second, at_s=17.0))))
    assert found["baton_worker_seconds_total", "prefill"] == 2 * 5 + 0 * 2
    assert found["baton_worker_seconds_total", "decode"] == (3 + 1) * 5 + 4 * 2


def test_blind() -> None:
    found = shown(figures(turn(busy()), turn(busy(rate=0.0))))
    assert found["baton_scaling_decisions_total", "autoscaler no_metrics"] == 1
    assert found["baton_scaling_reason", "autoscaler no_metrics"] == 1
    assert ("baton_needed_replicas", "prefill") not in found
    assert found["baton_planner_reading_age_seconds", "autoscaler"] > 0
