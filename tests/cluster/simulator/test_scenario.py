"""Scenarios: files, what the command line says over them, and mistakes that are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.simulator.scenario import (
    SAMPLE,
    Scenario,
    load_scenario,
    parse_scenario,
)
from cluster.simulator.simulation import scenario_machines, simulate
from cluster.simulator.traffic import scenario_requests
from cluster.sizing.decision import encode_record
from cluster.sizing.snapshot import MachineModel
from protocol.errors import StartupError
from tests.cluster.simulator.scenarios import MACHINE, mix, scenario

DATA = SAMPLE.parent
GPU: dict[str, Any] = {"gpu": "H200", "model": "Llama-3-70B", "weight_bytes": 1}


def raw(**rest: Any) -> dict[str, Any]:
    return {
        "seconds": 10,
        "machines": {"prefill": MACHINE},
        "traffic": {"mixes": [mix(1)]},
        **rest,
    }


def test_the_sample_can_be_read_and_has_machines_of_the_data_file() -> None:
    of = load_scenario(SAMPLE, [], None)
    assert of.autoscaler.mode == "act"
    both = scenario_machines(of)
    assert both["prefill"] == both["decode"]
    assert 0.001 < both["prefill"].step[0] < 0.05


def test_requests_of_a_mix_that_begins_after_the_end_are_none() -> None:
    assert not scenario_requests(parse_scenario(raw(traffic={"mixes": [mix(1, from_s=10)]})))
    assert not simulate(parse_scenario(raw(traffic={"mixes": [mix(1, from_s=99)]}))).requests


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"pools": {"decod": 1}}, "pools.decod: unknown key"),
        ({"routing": {"policy": "cost"}}, "routing.policy: unknown key"),
        ({"routing": {"routers": 2}}, "routing: expected load_age_ms of at least 1"),
        ({"pools": {"decode": 0}}, "pools.decode: must be greater than or equal to 1, not 0"),
        ({"pools": {"decode": "abc"}}, "pools.decode: expected a whole number, not 'abc'"),
        ({"objectives": {"ttft_ms": "abc"}}, "objectives.ttft_ms: expected a number, not 'abc'"),
        ({"events": [{"kind": "kill"}]}, "at_s: missing"),
        ({"objectives": {"ttft_ms": float("nan")}}, "objectives.ttft_ms"),
        ({"machines": {"prefill": {"gpu": "H100"}}}, "expected step (five coefficients"),
        ({"machines": {"prefill": {"step": [1, 2]}}}, "machines.prefill.step"),
        ({"machines": {"prefill": {"step": [0.1] * 5}}}, "kv_tokens and kv_bytes"),
        ({"machines": {"prefill": {**MACHINE, "step": [0.1] * 6}}}, "and the rows, KV tokens"),
        (
            {"machines": {"prefill": {**MACHINE, "step": [0, 0, 0, 1e-3, 0]}}},
            "step: a step that decodes takes no time",
        ),
        ({"autoscaler": {"prefill_min": 9, "prefill_max": 2}}, "prefill_min is 9, more than"),
        ({"traffic": {}}, "expected trace, or mixes"),
        ({"traffic": {"mixes": [{"prompt": 1, "output": 1}]}}, "expected rate, or rates"),
        ({"traffic": {"mixes": [mix(1, prompt="lognormal:x")]}}, "lognormal:MEAN,SIGMA"),
        ({"seconds": None}, "seconds: expected, as there is no trace"),
        ({"events": [{"kind": "flood", "at_s": 1}]}, "events.0.kind"),
        ({"autoscaler": {"mode": "maybe"}}, "autoscaler.mode"),
        (
            {"events": [{"kind": "slow_link", "at_s": 1, "pool": "prefill"}]},
            "events.0: slow_link has no effect on a link without a bound; expected link_gb_per_s",
        ),
        (
            {"machines": {"prefill": {**MACHINE, "gpu": "H100"}}},
            "machines.prefill: gpu has no effect beside step",
        ),
        ({"machines": {"prefill": {**MACHINE, "model": "x"}}}, "model has no effect beside step"),
        ({"machines": {"prefill": {**MACHINE, "context": 9}}}, "context has no effect"),
        ({"machines": {"prefill": {**MACHINE, "compute": 0.5}}}, "compute has no effect"),
        ({"machines": {"prefill": {**MACHINE, "bandwidth": 0.5}}}, "bandwidth has no effect"),
        ({"machines": {"prefill": {**MACHINE, "weight_bytes": 1}}}, "weight_bytes has no effect"),
        ({"machines": {"prefill": {**MACHINE, "draft": "Llama-3-8B"}}}, "draft has no effect"),
        (
            {"machines": {"prefill": GPU, "decode": {**GPU, "kv_precision": "exact"}}},
            "machines: decode.kv_precision: expected fp8, as prefill sends",
        ),
        (
            {"machines": {"prefill": {"gpu": "H100", "model": "Llama-3-8B", "kv_bytes": 1}}},
            "machines.prefill: kv_bytes has no effect beside model",
        ),
        (
            {"machines": {"prefill": MACHINE, "decode": {**MACHINE, "kv_bytes": 2000}}},
            "machines: decode.kv_bytes: expected 1000, as prefill sends, not 2000",
        ),
        ({"traffic": {"mixes": [mix(1)], "copies": 5}}, "traffic: copies has no effect without"),
        ({"traffic": {"mixes": [mix(1)], "speed": 5}}, "traffic: speed has no effect without"),
        ({"warm_up_s": 10}, "warm_up_s is 10; expected less than seconds, 10"),
        (
            {"events": [{"kind": "die", "at_s": 1000}]},
            "events.0: at_s is 1000; expected less than seconds, 10",
        ),
    ],
)
def test_a_mistake_is_named_with_its_key(change: dict[str, Any], told: str) -> None:
    with pytest.raises(StartupError, match="scenario:") as caught:
        parse_scenario(raw(**change))
    assert told in str(caught.value)


def test_a_draft_model_and_exact_kv_leave_room_for_fewer_tokens() -> None:
    def machine(**keys: object) -> MachineModel:
        of = parse_scenario(raw(machines={"prefill": {**GPU, **keys}}))
        return scenario_machines(of)["prefill"]

    plain, exact, drafting = machine(), machine(kv_precision="exact"), machine(draft="Llama-3-8B")
    assert 1.8 < exact.kv_bytes / plain.kv_bytes <= 2.0
    assert 0.5 <= exact.kv_tokens / plain.kv_tokens < 0.56
    # Llama-3-8B has 32 layers to the 80 of Llama-3-70B, with KV heads of the same size.
    assert drafting.kv_tokens < plain.kv_tokens * 80 / (80 + 32)
    assert drafting.kv_bytes == plain.kv_bytes


def test_measured_prefill_workers_go_with_decode_workers_of_exact_kv() -> None:
    """How KV is stored is said of models alone: a machine with steps has its bytes."""
    exact = {**GPU, "kv_precision": "exact"}
    of = parse_scenario(raw(machines={"prefill": MACHINE, "decode": exact}))
    assert of.machines.of("decode").kv_precision == "exact"


def test_a_machine_of_an_autoscaler_s_log_is_one_of_a_scenario() -> None:
    """What workers measure: the coefficients, and the largest steps that they are known for."""
    measured = {**MACHINE, "step": [*MACHINE["step"], 64.0, 1e5, 1e5]}
    of = raw(machines={"prefill": measured}, autoscaler={"mode": "advise"})
    line = encode_record(simulate(parse_scenario(of), keep_records=True).records[-1])
    logged = json.loads(line)["snapshot"]["machines"]["decode"]
    assert {key: logged[key] for key in MACHINE} == measured
    assert parse_scenario(raw(machines={"prefill": {key: logged[key] for key in MACHINE}}))


def test_the_word_off_is_a_mode_in_yaml_too() -> None:
    assert (
        parse_scenario(
            yaml.safe_load(yaml.dump(raw()) + "\nautoscaler: {mode: off}")
        ).autoscaler.mode
        == "off"
    )


def test_the_command_line_says_keys_over_the_file_s() -> None:
    of = load_scenario(
        None, ["pools.decode=5", "objectives.tpot_ms=40", "autoscaler.mode=off"], None
    )
    assert (of.pools.decode, of.pools.prefill, of.objectives.tpot_ms) == (5, 3, 40)
    for wrong in ("pools", "pools.=3", "=3", "name.deeper=1"):
        with pytest.raises(StartupError, match="--set"):
            load_scenario(None, [wrong], None)


def test_traces_of_both_formats_become_requests() -> None:
    of = load_scenario(None, [], DATA / "mooncake.jsonl")
    jobs = scenario_requests(of)
    assert [job.prompt for job in jobs] == [1650, 900, 2800, 310, 1400, 5200, 700, 2100]
    assert jobs[0].blocks[0] == jobs[2].blocks[0] and len(jobs[0].blocks) == 3  # whole blocks
    azure = scenario_requests(load_scenario(None, [], DATA / "azure.csv"))
    assert [(job.at, job.output) for job in azure[:2]] == [(0.0, 41), (1.25, 97)]


def test_copies_of_a_trace_are_strangers_and_speed_shortens_it() -> None:
    """Each copy begins at a moment of its own; what it left out it plays at the end."""
    text = ["traffic.copies=4", "traffic.speed=2", "traffic.spread_s=2"]
    jobs = scenario_requests(load_scenario(None, text, DATA / "mooncake.jsonl"))
    long = [job for job in jobs if job.prompt == 5200]
    assert [job.at for job in long] == [4.5, 5.0, 5.5, 6.0]
    assert len({job.blocks[0] for job in long}) == 4
    first = [job.at for job in jobs if job.prompt == 1650]
    assert first == [0.0, 0.5, 1.0, 1.5]
    last = [job.at for job in jobs if job.prompt == 2100]
    assert last == pytest.approx([9.0 - 7.5 * 8 / 7, 7.5, 8.0, 8.5])


def rate(of: Scenario, begin: float, end: float) -> float:
    return sum(begin <= job.at < end for job in scenario_requests(of)) / (end - begin)


def test_rates_change_as_told() -> None:
    steps = [{"at_s": 0, "rate": 5}, {"at_s": 100, "rate": 50}]
    of = scenario(mix(None, arrivals="constant", rates=steps), seconds=200)
    assert rate(of, 0, 100) == pytest.approx(5, rel=0.02)
    assert rate(of, 100, 200) == pytest.approx(50, rel=0.02)


def test_a_sine_is_least_at_its_beginning_and_has_its_mean() -> None:
    sine = {"amplitude": 0.9, "period_s": 200}
    of = scenario(mix(20, arrivals="constant", sine=sine), seconds=200)
    assert rate(of, 0, 200) == pytest.approx(20, rel=0.02)
    assert rate(of, 0, 20) < 4 < 36 < rate(of, 90, 110)


def test_a_burst_multiplies_what_comes_in_its_time() -> None:
    burst = {"kind": "burst", "at_s": 50, "for_s": 10, "times": 5}
    of = scenario(mix(10, arrivals="constant"), seconds=100, events=[burst])
    assert rate(of, 50, 60) == pytest.approx(50, rel=0.05)
    assert rate(of, 60, 100) == pytest.approx(10, rel=0.05)


def test_a_burst_that_lasts_longer_than_the_scenario_ends_with_it() -> None:
    burst = {"kind": "burst", "at_s": 50, "for_s": 60, "times": 3}
    of = scenario(mix(10, arrivals="constant"), seconds=60, events=[burst])
    assert rate(of, 50, 60) == pytest.approx(30, rel=0.05)
    assert max(job.at for job in scenario_requests(of)) < 60


def test_a_burst_ends_with_a_trace() -> None:
    values = ["events=[{kind: burst, at_s: 4, times: 2}]"]
    plain = scenario_requests(load_scenario(None, [], DATA / "mooncake.jsonl"))
    jobs = scenario_requests(load_scenario(None, values, DATA / "mooncake.jsonl"))
    assert len(jobs) > len(plain) and jobs[-1].at == plain[-1].at


def test_prefixes_are_shared_within_a_group_only() -> None:
    jobs = scenario_requests(scenario(mix(10, prompt=3000, prefix=2048, groups=3), seconds=20))
    firsts = {job.blocks for job in jobs}
    assert len(firsts) == 3 and all(len(blocks) == 4 for blocks in firsts)


def test_a_trace_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text('{"timestamp": 1}\n')
    found = CliRunner().invoke(app, ["simulate", "--trace", str(file)])
    assert found.exit_code == 2 and f"{file}:1" in found.output
