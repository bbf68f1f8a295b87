"""The arithmetic of memory: does it fit, and what would."""

from pathlib import Path

import msgspec
import pytest

from bench.lib.settings import engine_settings
from cluster.doctor import memory
from cluster.doctor import memory as fitting
from cluster.doctor.gpus import GpuDevice
from cluster.doctor.memory import MemoryFacts, MemoryPlan, PoolEngines
from cluster.doctor.subject import SubjectPool
from cluster.models import locate
from engine.memory.memory_footprint import (
    Footprint,
    GpuMemory,
    estimate_footprint,
)
from engine.memory.workspace import Workspace
from engine.model_config.checkpoint import load_config, read_shards
from protocol.block_keys import BLOCK_TOKENS
from tests.cluster.doctor.subjects import SUBJECT, levels

GIB = 2**30
PER_TOKEN = 1 << 17
ENGINE = Footprint(
    device="cpu",
    dtype="float32",
    weights=4 * GIB,
    kv=1 * GIB,
    workspace=GIB // 2,
    runtime=GIB // 4,
    shared=GIB // 4,
    kv_tokens=GIB // PER_TOKEN,
    kv_bytes_per_token=PER_TOKEN,
    kv_grows=False,
)
BOTH = (PoolEngines("prefill", 1, ENGINE), PoolEngines("decode", 1, ENGINE))


def needed(plan: MemoryPlan, tokens: int) -> int:
    """With ``tokens`` of KV for each engine."""
    fixed = sum(pool.count * pool.each.fixed for pool in plan.engines)
    count = sum(pool.count for pool in plan.engines)
    return fixed + count * tokens * PER_TOKEN + plan.others


def test_fitting_plan_reports_its_sizes() -> None:
    (found,) = memory.judge(MemoryFacts(total=32 * GIB, free=20 * GIB, engines=BOTH), SUBJECT)
    assert found.level == "ok" and found.text == "12.8 GiB needed, 20.0 GiB free"


def test_plan_that_does_not_fit_proposes_fitting_flags() -> None:
    (found,) = memory.judge(MemoryFacts(total=16 * GIB, free=13 * GIB, engines=BOTH), SUBJECT)
    assert found.level == "problem"
    tokens, workers, dtype = found.remedy.split(" or ")
    assert tokens.startswith("--kv-tokens ")
    assert workers == "--prefill 0 --decode 1"
    assert dtype == "--dtype bfloat16"


@pytest.mark.parametrize("free", [11.5, 12, 13, 13.6])
def test_the_proposed_tokens_are_the_most_that_fit(free: float) -> None:
    plan = MemoryPlan("memory", int(free * GIB), BOTH, GIB // 2)
    tokens = fitting.kv_tokens_that_fit(plan)
    assert tokens > 0 and tokens % BLOCK_TOKENS == 0
    assert needed(plan, tokens) <= plan.room < needed(plan, tokens + BLOCK_TOKENS)


def test_no_tokens_are_proposed_where_the_weights_alone_do_not_fit() -> None:
    assert fitting.kv_tokens_that_fit(MemoryPlan("memory", 8 * GIB, BOTH, 0)) == 0


def test_fewer_workers_keep_one_that_decodes() -> None:
    four = (PoolEngines("prefill", 2, ENGINE), PoolEngines("decode", 2, ENGINE))
    three = MemoryPlan("memory", 20 * GIB, four, 0)
    assert "--prefill 1 --decode 2" in fitting.remedy_flags(three, 0, cluster=True)
    one = MemoryPlan("memory", 7 * GIB, four, 0)
    assert "--prefill 0 --decode 1" in fitting.remedy_flags(one, 0, cluster=True)
    assert "--prefill" not in fitting.remedy_flags(one, 0, cluster=False)


def test_fewer_workers_with_less_kv_each_where_neither_is_enough_alone() -> None:
    big = msgspec.structs.replace(ENGINE, dtype="bfloat16", kv=16 * GIB)
    fronts = GIB // 10
    many = (PoolEngines("prefill", 9, big), PoolEngines("decode", 9, big))
    plan = MemoryPlan("memory", 14 * GIB, many, 18 * fronts)
    told = fitting.remedy_flags(plan, fronts, cluster=True)
    flags, _, tokens = told.rpartition(" ")
    assert flags == "--prefill 1 --decode 1 --kv-tokens"
    one = msgspec.structs.replace(big, kv=int(tokens) * PER_TOKEN)
    pools = (PoolEngines("prefill", 1, one), PoolEngines("decode", 1, one))
    assert MemoryPlan("memory", 14 * GIB, pools, 2 * fronts).fits


def test_missing_memory_is_named_when_no_flags_help() -> None:
    bf16 = msgspec.structs.replace(ENGINE, dtype="bfloat16")
    plan = MemoryPlan("memory", 1 * GIB, (PoolEngines("decode", 1, bf16),), 0)
    assert (
        fitting.remedy_flags(plan, 0, cluster=True) == "free 5.1 GiB more, or use a smaller model"
    )


def test_gpus_share_the_engines_and_each_is_judged() -> None:
    on_gpu = msgspec.structs.replace(ENGINE, device="cuda", dtype="bfloat16", kv_grows=True)
    engines = (PoolEngines("prefill", 2, on_gpu), PoolEngines("decode", 1, on_gpu))
    cards = (GpuDevice(0, "A", 24 * GIB, 24 * GIB, ""), GpuDevice(1, "A", 24 * GIB, 4 * GIB, ""))
    facts = MemoryFacts(total=64 * GIB, free=60 * GIB, gpus=cards, engines=engines)
    host, first, second = memory.memory_plans(facts, SUBJECT)
    assert host.engines == () and host.fits
    assert [(pool.role, pool.count) for pool in first.engines] == [("prefill", 1), ("decode", 1)]
    assert [(pool.role, pool.count) for pool in second.engines] == [("prefill", 1)]
    assert levels(memory.judge(facts, SUBJECT)) == ["ok", "ok", "problem"]


def on_gpu(**fields: object) -> Footprint:
    made = msgspec.structs.replace(ENGINE, device="cuda", dtype="bfloat16", kv_grows=True)
    made = msgspec.structs.replace(made, phases=(Workspace(GIB // 2),), max_len=8192)
    return msgspec.structs.replace(made, **fields)


def gpu_plan(total: int, free: int, share: float, *engines: Footprint) -> MemoryPlan:
    gpu = GpuMemory(total=total, free=free, share=share)
    pools = tuple(PoolEngines("decode", 1, engine) for engine in engines)
    return MemoryPlan("gpu 0", free, pools, 0, gpu)


@pytest.mark.parametrize("total", [12, 13, 14, 24])
@pytest.mark.parametrize("used", [0, 1, 4])
def test_two_engines_on_one_gpu_fit_exactly_when_both_can_size_their_pools(
    total: int, used: int
) -> None:
    """The engines start one after the other, as the doctor foresees it."""
    engine = on_gpu(shared=0)
    free = (total - used) * GIB
    for _ in range(2):
        own = engine.weights + engine.runtime
        gpu = GpuMemory(total=total * GIB, free=max(0, free - own), share=0.5)
        left = gpu.left(own) - engine.workspace
        # The first engine takes no more than its whole share, reserve included.
        free -= min(int(gpu.total * gpu.share), own + engine.workspace + engine.kv + gpu.reserve)
        if left < engine.kv:
            break
    else:
        assert gpu_plan(total * GIB, (total - used) * GIB, 0.5, engine, engine).fits
        return
    assert not gpu_plan(total * GIB, (total - used) * GIB, 0.5, engine, engine).fits


def test_an_engine_beyond_its_share_is_a_problem_though_the_sum_fits() -> None:
    large, small = on_gpu(weights=12 * GIB), on_gpu(weights=1 * GIB)
    plan = gpu_plan(24 * GIB, 24 * GIB, 0.5, large, small)
    assert plan.needed < plan.room and not plan.fits
    facts = MemoryFacts(
        total=64 * GIB,
        free=60 * GIB,
        gpus=(GpuDevice(0, "A", 24 * GIB, 24 * GIB, ""),),
        engines=(PoolEngines("prefill", 1, large), PoolEngines("decode", 1, small)),
    )
    _, found = memory.judge(facts, SUBJECT)
    assert found.level == "problem"
    assert "an engine needs 14.0 GiB, and may take 10.8 GiB (50% of 24.0 GiB" in found.text
    assert "start fewer workers on each GPU" in found.remedy


def test_the_context_that_is_proposed_for_a_gpu_fits() -> None:
    engine = on_gpu(kv=16 * GIB, kv_tokens=16 * GIB // PER_TOKEN, max_len=131072)
    plan = gpu_plan(40 * GIB, 40 * GIB, 0.5, engine, engine)
    assert not plan.fits
    flag, _, tokens = fitting.gpu_remedy(plan).partition(" or ")[0].partition(" ")
    assert flag == "--max-model-len"
    shorter = msgspec.structs.replace(engine, kv=int(tokens) * PER_TOKEN)
    assert gpu_plan(40 * GIB, 40 * GIB, 0.5, shorter, shorter).fits
    fixed = msgspec.structs.replace(engine, kv_grows=False)
    assert fitting.gpu_remedy(gpu_plan(40 * GIB, 40 * GIB, 0.5, fixed)).startswith("--kv-tokens ")


@pytest.mark.parametrize(
    ("gpus", "workers", "most", "configured", "share"),
    [(1, 2, 0, None, 0.5), (1, 2, 4, None, 0.25), (2, 2, 4, None, 1.0), (1, 2, 0, 0.4, 0.4)],
)
def test_the_doctor_counts_with_the_share_that_engines_are_told(
    gpus: int, workers: int, most: int, configured: float | None, share: float
) -> None:
    engine = engine_settings("", gpu_share=configured)
    pool = SubjectPool("decode", workers, engine)
    subject = msgspec.structs.replace(SUBJECT, pools=(pool,), most_workers=most)
    assert subject.gpu_share(gpus) == share
    engines = (PoolEngines("decode", workers, on_gpu()),)
    cards = tuple(GpuDevice(i, "A", 80 * GIB, 80 * GIB, "") for i in range(gpus))
    facts = MemoryFacts(total=64 * GIB, free=60 * GIB, gpus=cards, engines=engines)
    _, first, *_ = memory.memory_plans(facts, subject)
    assert first.gpu is not None and first.gpu.share == share


def test_the_arenas_of_engines_on_gpus_count_on_the_host() -> None:
    def host_bytes(pinned: int) -> int:
        engines = (PoolEngines("decode", 2, on_gpu(pinned=pinned)),)
        card = GpuDevice(0, "A", 80 * GIB, 80 * GIB, "")
        facts = MemoryFacts(total=64 * GIB, free=60 * GIB, gpus=(card,), engines=engines)
        host, gpu = memory.memory_plans(facts, SUBJECT)
        assert gpu.needed == 2 * on_gpu().total
        return host.needed

    assert host_bytes(128 << 20) == host_bytes(0) + (256 << 20)


def test_unknown_model_has_no_plan() -> None:
    (found,) = memory.judge(MemoryFacts(total=2 * GIB, free=GIB), SUBJECT)
    assert found.level == "ok" and found.text == "1.0 GiB of 2.0 GiB free"


# ---- what one engine takes -------------------------------------------------------------------


def demo(**fields: object) -> Footprint:
    path: Path = locate.demo_path()
    spec = msgspec.structs.replace(engine_settings(""), **fields)
    return estimate_footprint(spec, load_config(path), read_shards(path), "cpu")


def test_weights_are_counted_as_they_are_computed_with() -> None:
    assert demo(dtype="float32").weights == 2 * demo(dtype="bfloat16").weights


def test_kv_is_counted_in_whole_pages() -> None:
    asked = demo(kv_tokens=1000)
    assert asked.kv_tokens == 1000 // BLOCK_TOKENS * BLOCK_TOKENS
    assert asked.kv == asked.kv_tokens * asked.kv_bytes_per_token


def test_a_larger_step_takes_more() -> None:
    assert demo(prefill_chunk=2048).workspace > demo(prefill_chunk=64).workspace
    assert demo(max_batch=256).workspace > demo(max_batch=8).workspace
