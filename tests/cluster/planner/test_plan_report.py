"""What `baton plan` prints and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.simulator.scenario import load_scenario
from cluster.simulator.simulation import simulate

CALL = ("plan", "--model", "Llama-3-8B", "--gpu", "H100", "--rate", "40")
LENGTHS = ("--prompt", "2000/4000", "--output", "300")


def run(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, [*CALL, *words], env={"COLUMNS": "160"})
    return done.exit_code, done.stdout, done.stderr


def test_tables_tell_all() -> None:
    code, text, _ = run(*LENGTHS)
    assert code == 0
    for title in (
        "Pools",
        "Which wall binds",
        "Latency, with these workers",
        "Largest batch of a decode worker",
        "KV on the wire",
        "Speculation (if drafts cost nothing)",
        "Two pools or one pool",
        "Cost",
        "Assumed, not measured",
        "Prices: H100-SXM",
    ):
        assert title in text, title


def test_json_and_page_say_the_same(tmp_path: Path) -> None:
    html = tmp_path / "plan.html"
    code, text, _ = run(*LENGTHS, "--json", "--html", str(html))
    told = json.loads(text)
    assert code == 0 and told["slo_infeasible"] == []
    assert set(told["workers"]) == {"prefill", "decode"}
    assert round(told["wanted"]["workload"]["prompt_tokens"]) == 2000
    shown = html.read_text()
    assert "default-src 'none'" in shown
    for role in ("prefill", "decode"):
        cells = f"<td>{role}</td><td>H100-SXM</td><td>{told['workers'][role]}</td>"
        assert cells in shown
    for title in ("Workers by request rate", "Time per output token by batch size"):
        assert title in shown


def test_a_model_by_numbers_is_shown_as_text(tmp_path: Path) -> None:
    html = tmp_path / "plan.html"
    gpu = ("--gpu", "989,3350,80@2")
    numbers = "params=8e9,layers=32,kv_heads=8,head_dim=128"
    code, _, _ = run(*LENGTHS, *gpu, "--model", numbers, "--html", str(html))
    assert code == 0
    assert "a model of 8 B parameters" in html.read_text()
    code, _, err = run(*LENGTHS, "--html", str(tmp_path / "no" / "plan.html"))
    assert code == 1 and "cannot be written" in err


def test_objectives_that_nothing_meets_end_it_with_1() -> None:
    code, text, err = run(*LENGTHS, "--ttft-ms", "20", "--tpot-ms", "2", "--json")
    assert code == 1
    assert json.loads(text)["slo_infeasible"] == ["ttft", "tpot"]
    assert "No batch meets a TPOT of 2 ms: a sequence alone takes 7.05 ms" in err
    assert "No number of workers meets a TTFT of 20 ms" in err
    assert "no longer than the time by which it misses the objective anyway" in err


def test_a_pool_that_is_mostly_idle_is_described_in_plain_words() -> None:
    code, text, _ = run(*LENGTHS, "--rate", "0.01")
    assert code == 0 and "0.00 workers busy" in text and "erlang" not in text
    said = " ".join(text.replace("│", " ").split())
    assert "a cheaper GPU: 5% of this one's speed suffices (but less headroom" in said


def test_a_trace_is_a_workload(tmp_path: Path) -> None:
    path = tmp_path / "conv.csv"
    rows = [f"2023-11-16 18:15:{s:02}.0000000,{300 + 10 * s},{40 + s}" for s in range(50)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    done = CliRunner().invoke(
        app, ["plan", "--model", "Qwen3-8B", "--gpu", "L40S", "--trace", str(path), "--json"]
    )
    assert done.exit_code == 0, done.output
    load = json.loads(done.stdout)["wanted"]["workload"]
    assert load["rate"] == 1.0 and load["prompt_tokens"] == 545


def test_a_trace_says_what_cache_its_hits_take(tmp_path: Path) -> None:
    """Blocks of 512, 512, 176 and 512 tokens, of which the last alone comes once."""
    path, page = tmp_path / "t.jsonl", tmp_path / "t.html"
    blocks = ([0, 1, 2], [0, 1, 2], [3])
    rows = [
        {"timestamp": 1000 * i, "input_length": 1200, "output_length": 9, "hash_ids": ids}
        for i, ids in enumerate(blocks)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    trace = ("plan", "--model", "Llama-3-8B", "--gpu", "H100", "--trace", str(path))

    def told(*words: str) -> str:
        done = CliRunner().invoke(app, [*trace, *words], env={"COLUMNS": "400"})
        assert done.exit_code == 0, done.output
        return done.stdout

    found = json.loads(told("--json"))
    load, pool = found["wanted"]["workload"], found["kv"]["pool_tokens"]["prefill"]
    assert load["kept_tokens"] == 1712
    assert load["kept_bytes"] == 1712 * found["kv"]["token_bytes"]
    room = found["workers"]["prefill"] * pool * found["kv"]["token_bytes"]
    says = (
        f"take {load['kept_bytes'] / 2**20:.0f} MiB of KV (1,712 tokens); the pools of the prefill"
        f" workers hold {room / 2**30:.3g} GiB"
    )
    assert says in told("--html", str(page))
    assert says in page.read_text()
    assert "caches of unlimited size" not in told("--shared", "0.3")
    path.write_text("\n".join(json.dumps(row) for row in rows[1:]))
    assert "caches of unlimited size" not in told(), "no block comes again"


def test_options_are_not_lost_before_a_command() -> None:
    code, _, err = run("speculation")
    assert code == 2
    assert (
        "--model is an option of `baton plan`; put the options of `baton plan speculation`" in err
    )


def test_a_plan_can_be_simulated(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    drafts = ("--acceptance", "0.7", "--draft", "Llama-3.2-1B")
    code, text, _ = run(*LENGTHS, *drafts, "--shared", "0.3", "--json", "--scenario", str(path))
    assert code == 0
    told, found = json.loads(text), load_scenario(path, [], None)
    assert found.machines.gpus == {"prefill": 1, "decode": 1}
    assert found.pools.model_dump() == told["workers"]
    assert found.machines.prefill.step == tuple(
        told["sized"]["pools"]["prefill"]["machine"]["step"]
    )
    assert found.goals.tpot_s == 0.1
    assert found.machines.decode is not None
    speculation = found.machines.decode.speculation
    assert speculation.accept == (0.7,) * 8 and speculation.per_pass_s > 0
    (mix,) = found.traffic.mixes
    assert mix.rate == 40 and mix.prompt.mean == 2000 and mix.output.tokens == 300
    assert mix.prefix is not None and mix.prefix.tokens == 600


def test_a_plan_and_its_simulation_agree(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    code, text, _ = run(*LENGTHS, "--json", "--scenario", str(path))
    assert code == 0
    sized, found = json.loads(text)["sized"], simulate(load_scenario(path, ["seconds=60"], None))
    told, seen = sized["predicted"], found.result
    assert seen.both_met > 0.95
    assert seen.busy_prefill == pytest.approx(sized["pools"]["prefill"]["busy"], abs=0.1)
    assert seen.tpot.mean == pytest.approx(told["tpot_s"], rel=0.15)
    assert seen.ttft.mean == pytest.approx(told["ttft_s"], rel=0.3)


def test_gpus_of_a_worker_count_in_the_gpu_hours_of_the_plans_simulation(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    code, text, _ = run(*LENGTHS, "--tp", "4", "--json", "--scenario", str(path))
    assert code == 0
    found = load_scenario(path, ["seconds=60"], None)
    assert found.machines.gpus == {"prefill": 4, "decode": 4}
    workers = sum(json.loads(text)["workers"].values())
    assert simulate(found).result.gpu_hours == pytest.approx(4 * workers * 60 / 3600)


def test_weights_and_gpus_of_a_worker_are_told() -> None:
    code, text, _ = run(*LENGTHS, "--weights", "fp8", "--tp", "2")
    assert code == 0
    assert "7.5 GiB of weights (fp8)" in text
    assert "2x H100-SXM" in text


def test_a_plan_says_what_a_larger_batch_would_save() -> None:
    _, shown, _ = run(*LENGTHS, "--max-batch", "64")
    assert "max_batch 256 would need 2 decode workers instead of 3" in " ".join(shown.split())
    assert "would need" not in run(*LENGTHS)[1]


def test_used_capacity_and_the_time_in_which_steps_run_are_two_columns() -> None:
    """`baton simulate` of this plan reports the second one, which is near 100% for decode."""
    _, shown, _ = run(*LENGTHS)
    [row] = [line for line in shown.splitlines() if line.startswith("│ decode  │ H100-SXM")]
    assert "29%" in row and "100%" in row


def test_a_gpu_by_its_figures_is_as_fast_as_by_its_name() -> None:
    """Without its rates in fp8 and of NVLink it is slower, and the plan says so."""
    wanted = (*LENGTHS, "--weights", "fp8", "--tp", "2")
    figures = "989,3350,79.6"
    lacks = "2x 989 TFLOPS, 3350 GB/s, 79.6 GiB has no {}"

    def prompt_s(*gpu: str) -> float:
        pools = json.loads(run(*wanted, *gpu, "--json")[1])["sized"]["pools"]
        return float(pools["prefill"]["need"]["each"])

    full = ("--gpu", f"{figures},fp8=1979,nvlink=900,link=50")
    assert prompt_s(*full) == prompt_s()
    assert prompt_s("--gpu", figures) > 1.5 * prompt_s()
    shown = " ".join(run(*wanted, "--gpu", figures)[1].split())
    assert lacks.format("rate in fp8, so") in shown and lacks.format("NVLink, so") in shown
    assert "has no" not in run(*wanted, *full)[1]
    assert "A100-80GB has no rate in fp8" in run(*wanted[:-2], "--gpu", "A100")[1]
