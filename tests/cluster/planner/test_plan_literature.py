"""What is in textbooks and papers comes out of the planner within rounding."""

from __future__ import annotations

import pytest

from cluster.planner.gpus import find_gpu
from cluster.planner.model_shape import find_model
from cluster.planner.roofline import (
    SPEED_OF_LIGHT,
    DraftingOptions,
    best_drafts,
    decode_step_s,
    gpu_rates,
    largest_batch_within,
    prefill_s,
)
from engine.kv_cache.kv_format import Codec

EIGHT = "params=8e9,layers=32,kv_heads=8,head_dim=128,heads=32"
SEVENTY = "params=70e9,layers=80,kv_heads=8,head_dim=128,heads=64"


@pytest.mark.parametrize(
    ("name", "kib"),
    [("Llama-3-8B", 128), ("Llama-3-70B", 320), ("Llama-3.2-1B", 32), ("Qwen3-8B", 144)],
)
def test_kv_of_a_token_in_bf16(name: str, kib: int) -> None:
    assert find_model(name, "exact").kv_bytes == kib * 1024


def test_kv_in_fp8_is_half_and_a_scale() -> None:
    of = find_model("Llama-3-8B", "fp8")
    assert of.kv_bytes == pytest.approx(64 * 1024, rel=0.01)
    assert of.wire_bytes(Codec.FP8) == of.kv_bytes
    assert of.codec is Codec.FP8


def test_fewer_heads_of_keys_divide_kv() -> None:
    heads = {
        n: find_model(f"params=8e9,layers=32,kv_heads={n},head_dim=128,heads=32", "exact").kv_bytes
        for n in (32, 8, 1)
    }
    assert heads[32] / heads[8] == 4 and heads[8] / heads[1] == 8


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("Llama-3-8B", 8.03, 8.03),
        ("Llama-3-70B", 70.6, 70.6),
        ("Llama-3.2-1B", 1.24, 1.24),
        ("Qwen3-8B", 8.19, 8.19),
        ("Qwen3-32B", 32.8, 32.8),
        ("Qwen3-30B-A3B", 30.5, 3.3),
        ("Mixtral-8x7B", 46.7, 12.9),
    ],
)
def test_parameters_are_those_published(name: str, billions: float, active: float) -> None:
    """A row of the embedding is looked up and not multiplied: ``active`` is without it."""
    of = find_model(name, "exact")
    assert of.parameters / 1e9 == pytest.approx(billions, rel=0.005)
    assert of.active / 1e9 == pytest.approx(active, rel=0.1)


@pytest.mark.parametrize(
    ("name", "tflops", "fp8", "gb_per_s", "gb"),
    [
        ("A100-40GB", 312, 0, 1555, 40),
        ("A100", 312, 0, 2039, 80),
        ("H100", 989, 1979, 3350, 80),
        ("H100-PCIe", 756, 1513, 2000, 80),
        ("H200", 989, 1979, 4800, 141),
        ("B200", 2250, 4500, 8000, 180),
        ("MI300X", 1307, 2615, 5300, 192),
        ("L40S", 362, 733, 864, 48),
    ],
)
def test_data_sheets(name: str, tflops: float, fp8: float, gb_per_s: float, gb: float) -> None:
    """Dense; memory as the driver shows it is a few percent less than on the sheet, or as much in
    units that are 7% larger."""
    of = find_gpu(name)
    assert of.tflops == pytest.approx(tflops, rel=0.002)
    assert of.fp8_tflops == pytest.approx(fp8, rel=0.002)
    assert of.gb_per_s == gb_per_s
    assert 0.93 * gb <= of.gib * 2**30 / 1e9 <= 1.08 * gb
    assert of.source.startswith("https://") and of.price and (of.usd_per_hour or 0) > 0


@pytest.mark.parametrize(("name", "ridge"), [("H100", 295), ("H200", 206)])
def test_ridge(name: str, ridge: int) -> None:
    assert round(find_gpu(name).ridge) == ridge


def test_eight_billion_at_two_terabytes_a_second() -> None:
    at = gpu_rates(find_gpu("989,2000,80"), SPEED_OF_LIGHT)
    of = find_model(EIGHT, "exact")
    assert of.weight_bytes == 16e9
    assert 1 / decode_step_s(of, at, 1, 0) == pytest.approx(125)


@pytest.mark.parametrize(("element_bytes", "gb", "ms"), [(2, 140, 42), (1, 70, 21)])
def test_seventy_billion_on_an_h100(element_bytes: int, gb: float, ms: int) -> None:
    of = find_model(SEVENTY, "exact", element_bytes)
    assert of.weight_bytes == gb * 1e9
    seconds = decode_step_s(of, gpu_rates(find_gpu("H100"), SPEED_OF_LIGHT), 1, 0)
    assert round(seconds * 1e3) == ms


def test_a_sequence_brings_one_flop_for_each_byte() -> None:
    work = find_model(EIGHT, "exact").decode(1, 0)
    assert work.flops / work.bytes == pytest.approx(1.0)


def test_a_batch_is_free_up_to_the_ridge() -> None:
    of, h100 = find_model(EIGHT, "exact"), find_gpu("H100")
    at = gpu_rates(h100, SPEED_OF_LIGHT)
    alone = decode_step_s(of, at, 1, 0)
    assert largest_batch_within(of, at, alone * 1.0001, 0, 10_000) == int(h100.ridge)
    assert decode_step_s(of, at, 2 * h100.ridge, 0) == pytest.approx(2 * alone)


@pytest.mark.parametrize(("cached", "tokens"), [(0, 8192), (8192, 4096)])
def test_floor_of_prefill(cached: int, tokens: int) -> None:
    """(2 N u + 4 L d (c u + u^2/2)) / FLOPS, chunk by chunk."""
    at = gpu_rates(find_gpu("H100"), SPEED_OF_LIGHT)
    flops = 2 * 8e9 * tokens + 4 * 32 * 4096 * (cached * tokens + tokens**2 / 2)
    seconds = prefill_s(find_model(EIGHT, "exact"), at, cached, tokens, 1024)
    assert seconds == pytest.approx(flops / 989e12, rel=1e-6)


def test_floor_of_decode() -> None:
    """Weights once, every sequence's KV once."""
    at = gpu_rates(find_gpu("H100"), SPEED_OF_LIGHT)
    nbytes = 16e9 + 32 * 4000 * 131072
    assert decode_step_s(find_model(EIGHT, "exact"), at, 32, 4000) == pytest.approx(nbytes / 3350e9)


def test_attention_overtakes_the_rest_at_tens_of_thousands_of_tokens() -> None:
    of = find_model("Llama-3-8B", "exact")

    def share(tokens: int) -> float:
        work = of.prompt(0, tokens)
        return work.attention_flops / work.flops

    assert share(10_000) < 0.5 < share(90_000)


@pytest.mark.parametrize(
    ("cost", "speedup"),
    [(0.0, 3.36), (0.1, 3.36 / 1.4)],
)
def test_four_drafts_of_acceptance_0_8(cost: float, speedup: float) -> None:
    """(1 - a^(K+1))/(1 - a) tokens for 1 + c K, while verifying is free: at batch 1 it is."""
    like = DraftingOptions(acceptance=0.8, cost=cost, most=4)
    at = gpu_rates(find_gpu("H100"), SPEED_OF_LIGHT)
    cell = best_drafts(find_model(EIGHT, "exact"), at, 1, 0, 0.8, like)
    assert cell.nodes == 4
    assert round(cell.tokens, 2) == 3.36
    assert cell.speedup == pytest.approx(speedup, rel=0.002)


def test_drafts_pay_less_as_the_batch_nears_the_ridge() -> None:
    of, at = find_model(EIGHT, "exact"), gpu_rates(find_gpu("H100"), SPEED_OF_LIGHT)
    like = DraftingOptions(acceptance=0.8, most=4)
    speedups = [best_drafts(of, at, b, 0, 0.8, like).speedup for b in (1, 59, 148, 250, 296)]
    assert speedups[0] == pytest.approx(speedups[1], rel=0.01)  # 59 * 5 rows: the ridge
    assert speedups[1:] == sorted(speedups[1:], reverse=True)
    assert speedups[-1] == 1.0
