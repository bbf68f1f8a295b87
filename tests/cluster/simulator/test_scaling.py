"""The policy in the simulated cluster, and its log decided anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.simulator.simulation import SimulationRun, simulate
from cluster.sizing.decision import encode_record
from tests.cluster.simulator.scenarios import mix, scenario

STEP = [0.01, 0.0005, 1e-7, 0.0005, 0.0]
SCALING = {"mode": "act", "prefill_max": 12, "decode_max": 12, "interval_s": 5, "start_s": 20,
           "down_after_s": 60, "down_every_s": 10, "warm_up_s": 10}  # fmt: skip


def shifting(**rest: Any) -> SimulationRun:
    """Long prompts, then long answers, then little of either."""
    of = scenario(
        mix(6, "lognormal:1000,0.5,4000", 20, for_s=150),
        mix(6, "lognormal:60,0.5,400", "lognormal:300,0.5,1500", from_s=150, for_s=150),
        mix(0.5, 100, 20),
        seconds=500,
        machine={"step": STEP, "max_batch": 24},
        pools={"prefill": 5, "decode": 2},
        objectives={"ttft_ms": 2000, "tpot_ms": 40},
        autoscaler={**SCALING, **rest},
    )
    return simulate(of, keep_records=True)


@pytest.fixture(scope="module")
def shifted() -> SimulationRun:
    return shifting()


def serving(of: SimulationRun, at_s: float) -> tuple[int, int]:
    moment = min(of.result.moments, key=lambda m: abs(m.at_s - at_s))
    return moment.prefill, moment.decode


def test_pools_follow_the_mix_and_lend_before_they_start(shifted: SimulationRun) -> None:
    prefill, decode = serving(shifted, 140)
    later_prefill, later_decode = serving(shifted, 290)
    assert prefill > later_prefill and decode < later_decode
    assert sum(serving(shifted, 495)) < later_prefill + later_decode
    assert shifted.result.loans > 0
    assert shifted.result.ok > 0.97 * shifted.result.requests


def test_an_overload_leaves_no_correction_of_exact_steps() -> None:
    """Steps are exact in the simulator. Prompts wait for up to a minute while workers start."""
    of = scenario(
        mix(3, "lognormal:1000,0.5,4000", 20),
        mix(15, "lognormal:1000,0.5,4000", 20, from_s=100, for_s=100),
        seconds=600,
        machine={"step": STEP, "max_batch": 24},
        pools={"prefill": 3, "decode": 1},
        objectives={"ttft_ms": 2000, "tpot_ms": 60},
        routing={"admission_ttft_ms": 120_000},
        autoscaler={**SCALING, "start_s": 60},
    )
    run = simulate(of, keep_records=True)
    assert run.result.ttft.p99 > 20.0
    found = [r.decision.memory.corrections.prefill for r in run.records]
    assert min(found) > 0.9 and max(found) < 1.05


def test_advice_changes_nothing() -> None:
    advised = shifting(mode="advise")
    assert serving(advised, 290) == (5, 2) and advised.result.loans == 0
    assert len({r.decision.reason for r in advised.records}) > 1
    assert not any(r.acted for r in advised.records)


def test_without_metrics_everything_stays(shifted: SimulationRun) -> None:
    of = scenario(
        mix(1), mix(40, 200, 50, from_s=50), seconds=100, pools={"prefill": 1, "decode": 1},
        autoscaler=SCALING, events=[{"kind": "blind", "at_s": 40, "for_s": 100}],
    )  # fmt: skip
    records = simulate(of, keep_records=True).records
    blind = [r for r in records if 45 <= r.snapshot.at_s < 100]
    assert blind and {r.decision.reason for r in blind} == {"no_metrics"}


def test_a_long_time_without_metrics_is_a_gap_of_the_window() -> None:
    """What was counted meanwhile is one interval, and the mix is that of what follows."""
    of = scenario(
        mix(6, 200, 50), seconds=400, pools={"prefill": 4, "decode": 4},
        autoscaler={**SCALING, "window_s": 60},
        events=[{"kind": "blind", "at_s": 101, "for_s": 150}],
    )  # fmt: skip
    records = simulate(of, keep_records=True).records
    before, after = (
        {r.time_s: r.snapshot.mix for r in records if (r.time_s < 101) == early}
        for early in (True, False)
    )
    assert before[100.0] is not None and before[100.0].window_s > 60
    assert after[255.0] is None, "the first interval after the event is the gap"
    first = min(time_s for time_s, found in after.items() if found is not None)
    found = after[first]
    assert found is not None and found.window_s == first - 255.0 >= 15.0
    assert found.rate == pytest.approx(6, rel=0.3)


def test_starts_that_take_longer_are_noticed_as_by_the_product() -> None:
    of = scenario(
        mix(2, 1000, 20), mix(10, 1000, 20, from_s=50), seconds=400,
        pools={"prefill": 4, "decode": 2}, machine={"step": STEP},
        autoscaler={**SCALING, "start_s": 60},
        events=[{"kind": "slow_start", "at_s": 0, "for_s": 400, "start_s": 122}],
    )  # fmt: skip
    records = simulate(of, keep_records=True).records
    asked_s = next(r.time_s for r in records if r.decision.targets != r.snapshot.targets)
    assert {r.snapshot.tuning.start_s for r in records if r.time_s < asked_s + 122} == {60}
    after = next(r for r in records if r.time_s > asked_s + 122)
    assert after.snapshot.tuning.start_s == after.time_s - asked_s == 125


@pytest.fixture
def log(shifted: SimulationRun, tmp_path: Path) -> Path:
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(b"".join(encode_record(r) + b"\n" for r in shifted.records))
    return path


def invoke(path: Path) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["simulate", "--replay", str(path)])
    return found.exit_code, found.output


def test_a_log_comes_out_as_it_was_recorded(log: Path, shifted: SimulationRun) -> None:
    count = len(shifted.records)
    told = f"{count} of {count} decisions are the same as recorded"
    assert invoke(log) == (0, told + "\n")


def test_the_first_difference_is_told_field_by_field(log: Path, shifted: SimulationRun) -> None:
    lines = log.read_bytes().splitlines()
    changed = msgspec.json.decode(lines[3])
    changed["decision"]["wanted"]["prefill"] = 77
    lines[3] = msgspec.json.encode(changed)
    log.write_bytes(b"\n".join(lines))
    code, output = invoke(log)
    now = shifted.records[3].decision.wanted.prefill
    assert code == 1
    assert f"line 4: wanted.prefill: recorded 77, decided {now}" in output


def test_a_damaged_line_is_told_by_its_number(log: Path) -> None:
    log.write_bytes(log.read_bytes()[:-40])
    code, output = invoke(log)
    assert code == 1
    assert f"line {len(log.read_bytes().splitlines())}" in output


def test_a_line_of_figures_that_no_cluster_has_is_damaged(log: Path) -> None:
    lines = log.read_bytes().splitlines()
    lines[30] = lines[30].replace(b'"chunk":', b'"chunk":0,"was":')
    log.write_bytes(b"\n".join(lines))
    code, output = invoke(log)
    assert code == 1
    assert "line 31: cannot be decided" in output and "Traceback" not in output


def test_a_log_that_is_not_there_is_said_to_be_so(tmp_path: Path) -> None:
    code, output = invoke(tmp_path / "none.jsonl")
    assert code == 2 and "cannot be read" in output
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(b"")
    assert invoke(empty) == (2, f"baton: {empty} holds no decision\n")


def test_the_command_writes_a_page_a_log_and_json(tmp_path: Path) -> None:
    page, written = tmp_path / "page.html", tmp_path / "log.jsonl"
    values = ["seconds=30", "traffic.mixes=[{rate: 5, prompt: 500, output: 20}]"]
    args = [part for value in values for part in ("--set", value)]
    found = CliRunner().invoke(
        app, ["simulate", *args, "--html", str(page), "--log", str(written), "--json"]
    )
    assert found.exit_code == 0, found.output
    figures = msgspec.json.decode(found.stdout)
    assert figures["ok"] == figures["requests"] > 100
    assert "Content-Security-Policy" in page.read_text()
    assert invoke(written)[0] == 0


def test_backlog_is_what_is_still_to_be_computed_of_the_prompts() -> None:
    """A prompt each 20 s on one worker, which computes 1000 of its 40,000 tokens in 1.01 s. At the
    first turn that knows the traffic the third prompt waits for the last step of the second one."""
    of = scenario(
        mix(0.05, 40_000, 2, arrivals="constant"),
        seconds=60,
        machine={"chunk": 1000},
        objectives={"ttft_ms": 60_000, "tpot_ms": 100},
        autoscaler={**SCALING, "mode": "advise"},
    )
    turns = [record.snapshot for record in simulate(of, keep_records=True).records]
    backlog = [turn.mix.backlog_tokens for turn in turns if turn.mix]
    assert backlog == [41_000 - 5000 * i for i in range(9)]
