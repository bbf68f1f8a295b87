"""What steps are said to compute and to move, against torch's own count and by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.lib.engines import engine_config
from engine.execution.engine import Engine
from engine.execution.machine_ceilings import measure_ceilings
from engine.execution.pass_cost import PassCost, pass_cost
from engine.ipc.counters import SpeculationStatus, WorkDone
from engine.ipc.settings import MachineCeilings
from engine.model.decoder import DecoderModel
from engine.model.weights import load_weights
from engine.model_config.checkpoint import load_config
from engine.model_config.config import MoeConfig
from engine.process.meter import StepMeter
from engine.scheduling.step_policy import plan_decode_step
from tests.engine.conftest import request
from tests.engine.families import save


def steps(engine: Engine) -> tuple[WorkDone, int, int]:
    """Until nothing is left to do: the work as counted, the FLOPs as torch counts them, steps."""
    done = engine.scheduler.counters.done = WorkDone()
    counted = ran = 0
    while step := engine.plan():
        with FlopCounterMode(display=False) as flops:
            engine.run(step)
        counted += flops.get_total_flops()
        ran += 1
    return done, counted, ran


def wide(folder: Path) -> Engine:
    """In float64, where products and attention are those that torch can count."""
    config = load_config(folder)
    weights = load_weights(folder, config, torch.float64, torch.device("cpu"))
    sizes = engine_config(pages=64, max_batch=8, chunk=64, max_model_len=1024)
    return Engine(DecoderModel(config, weights, 1024), sizes, plan_decode_step)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3-moe"])
def test_flops_equal_those_that_torch_counts(family: str, tmp_path: Path) -> None:
    """But for attention, which torch does not count on a CPU."""
    engine = wide(save(tmp_path, family))
    engine.model._pads = False  # what is computed for nobody does not count
    cost = engine._stepper._cost
    engine._stepper._cost = msgspec.structs.replace(cost, pair_flops=0.0)
    for handle in (1, 2):
        engine.generate(handle, request("a", [5 + handle, *range(1, 70)], max_tokens=12))
    done, counted, ran = steps(engine)
    assert done.decode_steps == 12, "one of them while the other's prompt is computed"
    assert ran == 14
    assert done.flops == counted


def test_each_query_is_paired_with_the_keys_before_it(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    config, cost = engine.model.config, engine._stepper._cost
    engine._stepper._cost = msgspec.structs.replace(cost, row_flops=0.0, draw_flops=0.0)
    engine.generate(1, request("a", list(range(1, 101)), max_tokens=5))
    done, _, _ = steps(engine)
    a_pair = 4 * config.layers * config.heads * config.head_dim
    prompt = 100 * 100 / 2  # within half a pair for each query
    assert done.flops == a_pair * (prompt + 101 + 102 + 103 + 104)


def test_bytes_are_the_weights_and_the_kv_attended_to(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine()
    engine.generate(1, request("a", list(range(1, 41)), max_tokens=3))
    done, _, ran = steps(engine)
    assert ran == 3
    assert done.weight_bytes == 3 * engine.model.weights.bytes
    # 40 written; 41 read and 1 written; 42 read and 1 written.
    assert done.kv_bytes == (40 + 41 + 1 + 42 + 1) * engine.format.bytes_per_token


def test_window_bounds_the_kv_read(tmp_path: Path) -> None:
    engine = wide(save(tmp_path, "mistral"))  # 40 tokens
    engine.generate(1, request("a", list(range(1, 65)), max_tokens=2))
    done, _, _ = steps(engine)
    assert done.kv_bytes == (64 + 40 + 1) * engine.format.bytes_per_token


def test_only_chosen_experts_are_read() -> None:
    sizes = {"row_flops": 0.0, "draw_flops": 0.0, "pair_flops": 0.0, "kv_bytes": 0.0}
    cost = PassCost(**sizes, reaches=(), dense_bytes=10.0, expert_bytes=80.0, expert_share=0.25)
    assert cost.weight_bytes(1) == 30.0
    assert 89.9 < cost.weight_bytes(64) < 90.0


def test_costs_of_an_8b_model(tiny: DecoderModel) -> None:
    """16 GB, 16 GFLOP and 128 KiB of KV for a token: Llama 3 8B."""
    changes = {"hidden_size": 4096, "intermediate_size": 14336, "layers": 32, "heads": 32}
    more = {"kv_heads": 8, "head_dim": 128, "vocab_size": 128256, "windows": (0,) * 32}
    config = msgspec.structs.replace(tiny.config, **changes, **more)
    kv = config.kv_format("exact", "wide", 2)
    cost = pass_cost(config, kv, 15 * 10**9, 2)
    assert cost.row_flops + cost.draw_flops == pytest.approx(15.0e9, rel=0.01)
    assert 32 * cost.kv_bytes == 128 << 10
    # 4 FLOPs for each of 4096 columns in 32 layers; keys in a window do not grow with the prompt
    assert cost.pair_rows == pytest.approx(32 * 4 * 4096 / 14.0e9, rel=0.01)
    half = msgspec.structs.replace(config, windows=(0, 512) * 16)
    assert pass_cost(half, kv, 15 * 10**9, 2).pair_rows == cost.pair_rows / 2
    sparse = MoeConfig(
        experts=8, per_token=2, intermediate_size=14336, renormalize=True, layers=(True,) * 32
    )
    mixed = pass_cost(msgspec.structs.replace(config, moe=sparse), kv, 93 * 10**9, 2)
    assert mixed.row_flops + mixed.draw_flops == pytest.approx(25.8e9, rel=0.02)  # 12.9 B active
    assert mixed.expert_bytes == pytest.approx(90.2e9, rel=0.01)


def test_time_is_weighted_with_the_pool_usage_at_its_start(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine(pages=8)
    now = [0.0]
    meter = StepMeter(engine, lambda: now[0], SpeculationStatus())
    now[0] = 10.0
    meter.beat()
    for handle in (1, 2):  # 5 pages each: the second one waits for the first
        engine.prefill(handle, request("a", [handle] * 129))
    step = engine.plan()
    now[0] = 11.0
    meter.run(step)
    now[0] = 13.0
    meter.beat()
    done = engine.scheduler.counters.done
    assert (done.seconds, done.starved_seconds, done.kv_seconds) == (13.0, 2.0, 2.0)
    engine.drop(1)
    engine.plan()
    meter.beat()
    now[0] = 14.0
    meter.beat()
    assert done.starved_seconds == 2.0
    assert done.kv_seconds == 2.0 + 5 / 8


def test_ceilings_are_declared_or_measured() -> None:
    cpu = torch.device("cpu")
    found = measure_ceilings(MachineCeilings(bytes=7.0), cpu, torch.float32, 1)
    assert found.bytes == 7.0
    assert found.flops > 1e9
    assert measure_ceilings(MachineCeilings(flops=5.0), cpu, torch.float32, 1).bytes > 1e8
