"""`baton plan`: machines, workloads, pools, and what it refuses."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from cluster.planner import model_shape
from cluster.planner.bottleneck import find_bottleneck
from cluster.planner.break_even import speculation_payoffs, speculation_speedup, split_payoff
from cluster.planner.gpus import find_gpu, known_gpus
from cluster.planner.model_shape import shape_from_config
from cluster.planner.plan import plan_cost
from cluster.planner.pools import PlanRequest, size_pools
from cluster.planner.request import PlanOptions
from cluster.planner.roofline import gpu_rates, kv_pool_tokens, machine_model, step_model
from cluster.planner.tables import size
from cluster.planner.workload import (
    POINTS,
    equally_likely_lengths,
    parse_workload_length,
    traced_workload,
)
from cluster.sizing.demand import demand_by_role, prefill_workers
from cluster.sizing.queueing import PrefillOutlook, prefill_service
from cluster.sizing.snapshot import NO_CORRECTIONS
from cluster.workloads.distributions import LogNormalLength
from cluster.workloads.traces import TraceRequest
from engine.model_config.families import parse_config
from engine.speculation.draft_source import catch_up_chunk
from protocol.errors import StartupError
from protocol.roles import Role

EIGHT = PlanOptions(
    model="Llama-3-8B",
    gpu="H100",
    rate=40.0,
    prompt="2000/4000",
    output="300",
    max_batch=256,
    ttft_ms=1000.0,
    tpot_ms=40.0,
)


def asked(**changes: object) -> PlanRequest:
    return msgspec.structs.replace(EIGHT, **changes).plan_request()


# ---- shapes and machines -----------------------------------------------------------------------


@pytest.mark.parametrize("name", known_gpus())
@pytest.mark.parametrize("model", ["Llama-3-8B", "Qwen3-30B-A3B"])
def test_a_machine_is_the_step_of_its_largest_batch(name: str, model: str) -> None:
    of, on = model_shape.find_model(model, "fp8"), find_gpu(name)
    if of.weight_bytes > on.memory:
        with pytest.raises(StartupError, match=r"more than the .* or 2 of these GPUs .*--tp 2"):
            kv_pool_tokens(of, on)
        on = on.group(2)
    found = machine_model(of, on, "decode", context=2000, max_batch=128)
    batch = min(128, kv_pool_tokens(of, on) / 2000)
    assert found.step == step_model(of, gpu_rates(of, on), 2000, batch)[:5]
    assert min(found.step) > 0


def test_a_window_bounds_what_is_read_and_not_what_is_held() -> None:
    raw = {**model_shape.known_models()["Llama-3-8B"], "architectures": ["MistralForCausalLM"]}
    near = shape_from_config(parse_config({**raw, "sliding_window": 1024}, "m"), "m", "exact")
    far = shape_from_config(parse_config({**raw, "sliding_window": None}, "m"), "m", "exact")
    assert near.kv_bytes == far.kv_bytes
    on = find_gpu("H100")
    short, whole = (step_model(of, gpu_rates(of, on), 8192, 1) for of in (near, far))
    assert short.kv_token * 8 == pytest.approx(whole.kv_token)
    # Attention of a prompt of the same length: 1024 tokens back, but for its beginning.
    reached = 1024 - 1024**2 / (2 * 8192)
    assert short.prompt_pair == 0
    further_s = 8192 * (short.prompt_token - whole.prompt_token)
    assert further_s == pytest.approx(whole.prompt_pair * 8192 * reached)


# ---- workloads ---------------------------------------------------------------------------------


def test_mean_and_p90_make_a_log_normal() -> None:
    of = parse_workload_length("2000/4000", "--prompt")
    assert isinstance(of, LogNormalLength)
    found = sorted(equally_likely_lengths(of))
    assert sum(found) / POINTS == pytest.approx(2000)
    assert found[57] < 4000 * 1.01 and found[58] > 4000 * 0.99  # of 64: 90% lies between


def test_a_trace_tells_rate_lengths_and_prefixes() -> None:
    lines = [TraceRequest(float(t), 1024, 100, (0, t)) for t in range(11)]
    found = traced_workload(lines, "t", None, 3.0, None)
    assert found.mix.rate == 3.0
    assert found.prompt == 1024 and found.output == 100
    assert found.shared == pytest.approx(10 / 22)  # the first block, of all but the first
    assert found.kept_tokens == 512 * 11  # blocks 0 to 10
    said = traced_workload(lines, "t", 7.0, 1.0, 0.25)
    assert said.shared == pytest.approx(0.25) and said.kept_tokens == 0
    with pytest.raises(StartupError, match="give --rate"):
        traced_workload([lines[0]._replace(at=1.0)] * 2, "t", None, 1.0, None)


def test_sizes_are_told_in_three_figures() -> None:
    told = {512: "0.5 KiB", 2**20: "1 MiB", 999 * 2**20: "999 MiB", 1000 * 2**20: "0.977 GiB"}
    assert {count: size(count) for count in told} == told
    assert size(51.3 * 2**30) == "51.3 GiB" and size(1e16) == "9,095 TiB"


# ---- pools -------------------------------------------------------------------------------------


def test_workers_are_what_the_autoscaler_would_ask_for() -> None:
    wanted = asked()
    found = size_pools(wanted)
    machines = {role: pool.machine for role, pool in found.pools.items()}
    need = demand_by_role(wanted.workload.mix, machines, wanted.goals, NO_CORRECTIONS)
    for role, pool in found.pools.items():
        assert pool.need == need[role] and pool.workers == need[role].workers >= 1
        assert 0 < pool.busy < 1
    assert found.infeasible == ()
    assert (found.predicted.ttft_s or 9) < 1.0 and (found.predicted.tpot_s or 9) < 0.04


@pytest.mark.parametrize("traced", [False, True])
def test_a_planned_load_is_known_and_does_not_grow(traced: bool) -> None:
    """A cluster that runs has workers for what its load may grow by; one pool, to which a plan
    compares its pools, has none either."""
    request = asked(rate=80.0, ttft_ms=500.0)
    if traced:
        lines = [TraceRequest(n / 80, 2000, 300) for n in range(100)]
        request = msgspec.structs.replace(
            request, workload=traced_workload(lines, "t", None, 1.0, 0.0)
        )
    found = size_pools(request).pools["prefill"]
    service = prefill_service(request.workload.mix, found.machine)
    load = request.workload.mix.rate * service.mean_s
    assert found.workers == prefill_workers(PrefillOutlook(load), service, 0.5)


def test_a_chunk_reads_experts_that_a_small_batch_does_not() -> None:
    few, many = (
        size_pools(asked(model="Qwen3-30B-A3B", rate=1.0, max_batch=batch)).pools["prefill"]
        for batch in (4, 256)
    )
    assert few.machine.step == many.machine.step


def test_each_ceiling_binds_where_it_is_the_least() -> None:
    assert size_pools(asked(max_batch=16)).ceilings.binds == "max_batch"
    assert size_pools(asked(max_batch=2048, kv_precision="exact")).ceilings.binds == "kv"
    assert size_pools(asked(max_batch=2048, tpot_ms=12.0)).ceilings.binds == "tpot"


@pytest.mark.parametrize(
    ("changes", "role", "wall"),
    [
        ({}, "prefill", "compute"),
        ({"prefill_chunk": 64}, "prefill", "bandwidth"),
        ({"kv_precision": "exact", "max_batch": 2048}, "decode", "capacity"),
        ({"tpot_ms": 12.0}, "decode", "bandwidth"),
        ({"link_gb_per_s": 0.5}, "decode", "network"),
        ({"rate": 0.1}, "decode", "cost"),
    ],
)
def test_the_wall_that_binds(changes: dict[str, object], role: Role, wall: str) -> None:
    wanted = asked(**changes)
    found = size_pools(wanted)
    what = find_bottleneck(wanted, found, found.pools[role])
    assert what.wall == wall
    assert what.why and what.relax


def test_what_relaxes_capacity_does() -> None:
    wanted = asked(kv_precision="exact", max_batch=2048)
    wide = size_pools(wanted)
    assert find_bottleneck(wanted, wide, wide.pools["decode"]).relax[0].name == "fp8 KV"
    near = size_pools(asked(kv_precision="fp8", max_batch=2048))
    assert near.ceilings.kv == pytest.approx(2 * wide.ceilings.kv, rel=0.02)


def test_drafts_raise_the_batch_as_far_as_they_pay_there() -> None:
    plain, quick = (size_pools(asked(tpot_ms=12.0, acceptance=a)) for a in (None, 0.8))
    assert quick.least_tpot_s < plain.least_tpot_s / 2.5  # the pace of a sequence alone
    assert 1.5 * plain.ceilings.tpot < quick.ceilings.tpot < 2.5 * plain.ceilings.tpot
    assert quick.pools["decode"].workers <= plain.pools["decode"].workers


def test_a_draft_model_takes_time_and_memory() -> None:
    free, paid = (
        size_pools(asked(tpot_ms=12.0, acceptance=0.8, draft=draft))
        for draft in (None, "Llama-3.2-1B")
    )
    gpu, draft = find_gpu("H100"), model_shape.find_model("Llama-3.2-1B", "fp8")
    pools = [of.pools["decode"].machine.kv_tokens for of in (free, paid)]
    model = model_shape.find_model("Llama-3-8B", "fp8")
    room = gpu.memory - 500 * 2**20 - model.weight_bytes
    with_draft = 0.8 * (room - draft.weight_bytes) / (model.kv_bytes + draft.kv_bytes)
    assert pools[1] == pytest.approx(with_draft, abs=32)
    assert pools[1] < 0.8 * pools[0]
    assert paid.pools["prefill"].machine == free.pools["prefill"].machine  # it drafts nothing
    assert free.least_tpot_s < paid.least_tpot_s
    with pytest.raises(StartupError, match="--draft needs --acceptance"):
        asked(draft="Llama-3.2-1B")


def test_a_draft_model_computes_prompts_too() -> None:
    """What it takes for a prompt is spread over the steps of the answer, so drafts pay less where
    answers are short."""
    short, long = (
        asked(acceptance=0.8, draft="Llama-3.2-1B", prompt="4000", output=output)
        for output in ("100", "2000")
    )
    model, draft = (model_shape.find_model(name, "fp8") for name in ("Llama-3-8B", "Llama-3.2-1B"))
    step = step_model(draft, gpu_rates(draft, find_gpu("H100")), short.workload.context, 16)
    prompt_s = step.prefill_s(0, 4000, catch_up_chunk(model.weight_bytes, draft.weight_bytes))
    for each in (short, long):
        machine = each.machine("decode")
        assert machine.speculation is not None
        assert machine.step == asked(prompt="4000").machine("decode").step
        in_all_s = machine.speculation.per_sequence_s * each.workload.output
        assert prompt_s <= in_all_s <= 5 * prompt_s  # a step brings up to five tokens
    at_16 = [speculation_speedup(each, 0.8)(16) for each in (short, long)]
    assert at_16[0] == 1.0 < at_16[1] - 0.1  # none are drafted for the short ones


def test_drafts_pay_the_more_are_accepted() -> None:
    wanted = asked(acceptance=0.95)
    found = speculation_payoffs(wanted, size_pools(wanted))
    gains = [payoff.speedup for payoff in found]
    assert [payoff.acceptance for payoff in found] == [0.5, 0.6, 0.7, 0.8, 0.9, 0.95]
    assert gains[0] > 1.0 and gains == sorted(set(gains))
    dear = asked(acceptance=0.95, draft="Llama-3-8B", max_batch=16)
    assert speculation_payoffs(dear, size_pools(dear))[0].pays_up_to == 0


def test_gpus_of_a_worker_are_paid_for_and_share_the_model() -> None:
    wanted = asked(model="Llama-3-70B", gpu="H100@2", tp=2, weights="fp8")
    found = size_pools(wanted)
    assert found.pools["decode"].gpu.name == "2x H100-SXM"
    assert found.usd_per_hour == 4 * found.workers
    alone = size_pools(asked(model="Llama-3-70B", gpu="H200@2", weights="fp8"))
    assert found.least_tpot_s < alone.least_tpot_s


def test_pools_may_be_of_different_gpus() -> None:
    wanted = asked(gpu=None, prefill_gpu="H100@2", decode_gpu="989,4800,140@3")
    found = size_pools(wanted)
    assert found.pools["prefill"].gpu.name == "H100-SXM"
    of = plan_cost(wanted, found)
    assert of is not None
    assert of.hour == 2 * found.pools["prefill"].workers + 3 * found.pools["decode"].workers
    tokens = 40 * 3600 * (wanted.workload.prompt + 300) / 1e6
    assert of.blended == pytest.approx(of.hour / tokens)
    unpriced = asked(gpu="989,4800,140")
    assert plan_cost(unpriced, size_pools(unpriced)) is None


def test_unsplit_workers_want_more_where_prompts_stall_streams() -> None:
    wanted = asked(rate=200.0, tpot_ms=15.0)
    found = split_payoff(wanted, size_pools(wanted))
    assert found.mixed is not None and found.apart is not None
    assert found.mixed.workers < found.apart.workers
    assert found.apart.workers > found.split
    apart = [look.apart for look in found.looks if look.apart is not None]
    assert apart[0] > 2 * apart[-1]  # as the objective gets looser they want fewer


def test_objectives_that_nothing_meets_are_said() -> None:
    found = size_pools(asked(ttft_ms=20.0, tpot_ms=5.0))
    assert found.infeasible == ("ttft", "tpot")
    assert found.least_ttft_s > 0.02 and found.least_tpot_s > 0.005
    met = size_pools(asked(ttft_ms=found.least_ttft_s * 2e3, tpot_ms=found.least_tpot_s * 1.2e3))
    assert met.infeasible == ()


# ---- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": None}, "--model: one of Llama-3-8B"),
        ({"model": None, "gpu": None, "rate": None}, "(?s)--model.*--gpu.*--rate.*example: baton"),
        ({"model": "Llama-3-9B"}, "is it Llama-3-8B?"),
        ({"model": "params=8e9"}, "layers, kv_heads, head_dim missing"),
        ({"model": "params=8e9,layers=nan,kv_heads=8,head_dim=128"}, "layers must be"),
        ({"model": "params=8e9,layers=32,kv_heads=8,head_dim=128,heads=12"}, "cannot share"),
        ({"model": "Llama-3-70B"}, "131.4 GiB of weights .* it fits B200, MI300X, or 4 of these"),
        ({"gpu": None}, "--gpu, or --prefill-gpu"),
        ({"gpu": "H10O"}, "is it H100-SXM?"),
        ({"gpu": "GB"}, "is it A100-40GB or A100-80GB"),
        ({"gpu": "L4"}, "'L4' is not known; is it L40S?"),
        ({"gpu": "H20"}, "'H20' is not known; is it H200"),
        ({"gpu": "989,3350"}, "expected TFLOPS,GB/s,GiB"),
        ({"gpu": "989,-1,80"}, "all above 0"),
        ({"gpu": "989,3350,80,fp4=1"}, "fp8=NUMBER, nvlink=NUMBER, link=NUMBER.*not 'fp4=1'"),
        ({"gpu": "989,3350,80,fp8=-1"}, "all above 0, after the three figures, not 'fp8=-1'"),
        ({"gpu": "989,3350,80,1979"}, "not '1979'"),
        ({"gpu": "H100@free"}, "expected a price above 0"),
        ({"rate": -1.0}, "--rate: expected a number above 0, not -1"),
        ({"rate": math.nan}, "--rate"),
        ({"rate": 1e7}, "plans are for up to 10,000"),
        ({"link_gb_per_s": 1e-8}, "plans are for up to 10,000"),
        ({"gpu": ""}, "--gpu: '' is not known"),
        ({"gpu": "@2"}, "--gpu: '' is not known"),
        ({"tpot_ms": 0.0}, "--tpot-ms"),
        ({"prompt": None}, "--prompt .or --trace"),
        ({"prompt": "4000/2000"}, "the mean at most the p90"),
        ({"prompt": "100/900"}, "at most 2.27 times"),
        ({"prompt": "900000"}, "a prefill worker's KV pool takes .*--prefill-gpu"),
        (
            {"prompt": "800000", "output": "200000"},
            "a decode worker's KV pool takes .*--decode-gpu",
        ),
        ({"trace": Path("none.jsonl")}, "leave out --prompt and --output"),
        ({"trace": Path("none.jsonl"), "prompt": None, "output": None}, "cannot be read"),
    ],
)
def test_what_cannot_be_is_named(changes: dict[str, object], says: str) -> None:
    with pytest.raises(StartupError, match=says):
        size_pools(asked(**changes))
