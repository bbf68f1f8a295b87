"""The arithmetic of memory: does it fit, and what would."""

from pathlib import Path

import msgspec
import pytest

from cluster.doctor import memory
from cluster.doctor import memory as fitting
from cluster.doctor.gpus import Gpu
from cluster.doctor.memory import Engines, Memory, Plan
from cluster.models import models
from engine.execution.memory_footprint import Footprint, footprint
from engine.ipc.spec import EngineSpec
from engine.model_config.checkpoint import load_config, read_shards
from protocol.block_keys import BLOCK_TOKENS
from tests.cluster.doctor.wishes import WANTED, levels

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
BOTH = (Engines("prefill", 1, ENGINE), Engines("decode", 1, ENGINE))


def needed(plan: Plan, tokens: int) -> int:
    """With ``tokens`` of KV for each engine."""
    fixed = sum(pool.count * pool.each.fixed for pool in plan.engines)
    count = sum(pool.count for pool in plan.engines)
    return fixed + count * tokens * PER_TOKEN + plan.others


def test_what_fits_is_said_with_its_numbers() -> None:
    (found,) = memory.judge(Memory(total=32 * GIB, free=20 * GIB, engines=BOTH), WANTED)
    assert found.level == "ok" and found.text == "12.8 GiB needed, 20.0 GiB free"


def test_what_does_not_fit_comes_with_values_that_do() -> None:
    (found,) = memory.judge(Memory(total=16 * GIB, free=13 * GIB, engines=BOTH), WANTED)
    assert found.level == "problem"
    tokens, workers, dtype = found.remedy.split(" or ")
    assert tokens.startswith("--kv-tokens ")
    assert workers == "--prefill 0 --decode 1"
    assert dtype == "--dtype bfloat16"


@pytest.mark.parametrize("free", [11.5, 12, 13, 13.6])
def test_the_proposed_tokens_are_the_most_that_fit(free: float) -> None:
    plan = Plan("memory", int(free * GIB), BOTH, GIB // 2)
    tokens = fitting.kv_tokens_that_fit(plan)
    assert tokens > 0 and tokens % BLOCK_TOKENS == 0
    assert needed(plan, tokens) <= plan.room < needed(plan, tokens + BLOCK_TOKENS)


def test_no_tokens_are_proposed_where_the_weights_alone_do_not_fit() -> None:
    assert fitting.kv_tokens_that_fit(Plan("memory", 8 * GIB, BOTH, 0)) == 0


def test_fewer_workers_keep_one_that_decodes() -> None:
    four = (Engines("prefill", 2, ENGINE), Engines("decode", 2, ENGINE))
    three = Plan("memory", 20 * GIB, four, 0)
    assert "--prefill 1 --decode 2" in fitting.ways(three, 0, cluster=True)
    one = Plan("memory", 7 * GIB, four, 0)
    assert "--prefill 0 --decode 1" in fitting.ways(one, 0, cluster=True)
    assert "--prefill" not in fitting.ways(one, 0, cluster=False)


def test_fewer_workers_with_less_kv_each_where_neither_is_enough_alone() -> None:
    big = msgspec.structs.replace(ENGINE, dtype="bfloat16", kv=16 * GIB)
    fronts = GIB // 10
    many = (Engines("prefill", 9, big), Engines("decode", 9, big))
    plan = Plan("memory", 14 * GIB, many, 18 * fronts)
    told = fitting.ways(plan, fronts, cluster=True)
    flags, _, tokens = told.rpartition(" ")
    assert flags == "--prefill 1 --decode 1 --kv-tokens"
    one = msgspec.structs.replace(big, kv=int(tokens) * PER_TOKEN)
    pools = (Engines("prefill", 1, one), Engines("decode", 1, one))
    assert Plan("memory", 14 * GIB, pools, 2 * fronts).fits


def test_where_nothing_fits_it_says_what_is_missing() -> None:
    bf16 = msgspec.structs.replace(ENGINE, dtype="bfloat16")
    plan = Plan("memory", 1 * GIB, (Engines("decode", 1, bf16),), 0)
    assert fitting.ways(plan, 0, cluster=True) == "free 5.1 GiB more, or take a smaller model"


def test_gpus_share_the_engines_and_each_is_judged() -> None:
    on_gpu = msgspec.structs.replace(ENGINE, device="cuda", dtype="bfloat16", kv_grows=True)
    engines = (Engines("prefill", 2, on_gpu), Engines("decode", 1, on_gpu))
    cards = (Gpu(0, "A", 24 * GIB, 24 * GIB, ""), Gpu(1, "A", 24 * GIB, 4 * GIB, ""))
    facts = Memory(total=64 * GIB, free=60 * GIB, gpus=cards, engines=engines)
    host, first, second = memory.plans(facts, WANTED)
    assert host.engines == () and host.fits
    assert [(pool.role, pool.count) for pool in first.engines] == [("prefill", 1), ("decode", 1)]
    assert [(pool.role, pool.count) for pool in second.engines] == [("prefill", 1)]
    assert levels(memory.judge(facts, WANTED)) == ["ok", "ok", "problem"]


def test_an_unknown_model_leaves_the_question_open() -> None:
    (found,) = memory.judge(Memory(total=2 * GIB, free=GIB), WANTED)
    assert found.level == "ok" and found.text == "1.0 GiB of 2.0 GiB free"


# ---- what one engine takes -------------------------------------------------------------------


def demo(**fields: object) -> Footprint:
    path: Path = models.demo_path()
    spec = msgspec.structs.replace(EngineSpec(model_path="", role="decode"), **fields)
    return footprint(spec, load_config(path), read_shards(path), "cpu")


def test_weights_are_counted_as_they_are_computed_with() -> None:
    assert demo(dtype="float32").weights == 2 * demo(dtype="bfloat16").weights


def test_kv_is_what_the_pool_will_be() -> None:
    asked = demo(kv_tokens=1000)
    assert asked.kv_tokens == 1000 // BLOCK_TOKENS * BLOCK_TOKENS
    assert asked.kv == asked.kv_tokens * asked.kv_bytes_per_token


def test_a_larger_step_takes_more() -> None:
    assert demo(chunk=2048).workspace > demo(chunk=64).workspace
    assert demo(max_batch=256).workspace > demo(max_batch=8).workspace
