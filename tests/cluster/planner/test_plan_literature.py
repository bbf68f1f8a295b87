"""What is in textbooks and papers comes out of the planner within rounding."""

from __future__ import annotations

import pytest

from cluster.planner.gpus import find_gpu
from cluster.planner.model_shape import find_model
from cluster.planner.roofline import Efficiency, gpu_rates, kv_pool_tokens, step_model
from engine.kv_cache.kv_format import Codec
from protocol.performance.speculation_profile import SpeculationProfile, decode_pace
from protocol.performance.step_model import StepModel

SPEED_OF_LIGHT = Efficiency(
    compute=1.0, bandwidth=1.0, activations=0.0, links=1.0, hop_s=0.0, overhead_s=0.0
)
EIGHT = "params=8e9,layers=32,kv_heads=8,head_dim=128,heads=32"
SEVENTY = "params=70e9,layers=80,kv_heads=8,head_dim=128,heads=64"


def limit(
    model: str, gpu: str = "H100", weight_bytes: int = 2, context: float = 0, tp: int = 1
) -> StepModel:
    """Return a step at the speed of light."""
    of, on = find_model(model, "exact", weight_bytes), find_gpu(gpu).group(tp)
    return step_model(of, gpu_rates(of, on, SPEED_OF_LIGHT), context, 1)


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
    """FLOPs for each byte, from which on computing takes longer (Williams et al., 2009)."""
    of = find_gpu(name)
    assert round(of.flops / of.bytes_s) == ridge


def test_eight_billion_at_two_terabytes_a_second() -> None:
    assert find_model(EIGHT, "exact").weight_bytes == 16e9
    assert 1 / limit(EIGHT, "989,2000,80").step == pytest.approx(125)


@pytest.mark.parametrize(("weight_bytes", "gb", "ms"), [(2, 140, 42), (1, 70, 21)])
def test_seventy_billion_on_an_h100(weight_bytes: int, gb: float, ms: int) -> None:
    assert find_model(SEVENTY, "exact", weight_bytes).weight_bytes == gb * 1e9
    assert round(limit(SEVENTY, weight_bytes=weight_bytes).step * 1e3) == ms


def test_products_take_as_long_as_reading_at_the_ridge() -> None:
    """A sequence brings one FLOP for each byte of the weights."""
    found = limit(EIGHT)
    assert found.step / found.row == pytest.approx(989e12 / 3350e9)
    fp8 = limit(EIGHT, weight_bytes=1)
    assert (found.step / fp8.step, found.row / fp8.row) == pytest.approx((2, 1979 / 989))


@pytest.mark.parametrize(
    ("name", "billions", "active", "kib"),
    [("DeepSeek-V3", 671, 37, 70272 / 1024), ("DeepSeek-V2-Lite", 15.7, 2.4, 31104 / 1024)],
)
def test_latent_attention_keeps_one_vector_of_a_token(
    name: str, billions: float, active: float, kib: float
) -> None:
    """70.272 KB for DeepSeek-V3 in bf16 (DeepSeek-AI, "Insights into DeepSeek-V3", 2025, table 1),
    and the same 576 values in each of 27 layers."""
    of = find_model(name, "exact")
    assert (of.parameters / 1e9, of.active / 1e9) == (billions, active)
    assert of.kv_bytes == kib * 1024
    assert find_model(name, "fp8").kv_bytes == pytest.approx(of.kv_bytes / 2, rel=0.01)
    assert of.kv_copies(8) == 8  # a vector cannot be shared out by heads
    assert of.decode_pair_flops > 3 * of.cost.pair_flops


def test_the_type_of_weights_does_not_change_kv() -> None:
    for precision in ("exact", "fp8"):
        wide, narrow = (find_model("Llama-3-8B", precision, n) for n in (2, 1))
        assert narrow.weight_bytes == wide.weight_bytes / 2
        assert narrow.kv_bytes == wide.kv_bytes
        assert narrow.wire_bytes(Codec.RAW) == wide.wire_bytes(Codec.RAW)


def test_a_gpu_without_fp8_products_reads_fp8_weights_in_half_the_time() -> None:
    wide, narrow = (limit(EIGHT, "A100", weight_bytes=n) for n in (2, 1))
    assert narrow.step == wide.step / 2 and narrow.row == wide.row


def test_gpus_of_a_worker_share_weights_kv_and_products() -> None:
    """Each all-reduce sends 2 (g - 1) / g of its bytes, two of them in a layer."""
    alone, four = (limit(SEVENTY, context=1000, tp=n) for n in (1, 4))
    assert four.step == pytest.approx(alone.step / 4)
    assert four.kv_token == pytest.approx(alone.kv_token / 4)
    reduced_s = 80 * 2 * 2 * (3 / 4) * 8192 * 2 / 450e9
    assert four.row == pytest.approx(alone.row / 4 + reduced_s)
    eight, sixteen = (limit(SEVENTY, context=1000, tp=n) for n in (8, 16))
    assert eight.kv_token == pytest.approx(sixteen.kv_token)  # 8 heads: each is held twice
    of, on = find_model(SEVENTY, "fp8", 1), find_gpu("H100")
    runtime = 500 * 2**20
    for tp in (1, 2, 8, 16):
        free = tp * (on.memory - runtime) - of.weight_bytes
        held = 0.8 * free / (of.kv_bytes * max(1, tp / 8))
        assert kv_pool_tokens(of, on.group(tp)) == pytest.approx(held, abs=32)


@pytest.mark.parametrize(("cached", "tokens"), [(0, 8192), (8192, 4096)])
def test_floor_of_prefill(cached: int, tokens: int) -> None:
    """(2 N u + 4 L d (c u + u^2/2)) / FLOPS, and the weights once for each chunk."""
    flops = 2 * 8e9 * tokens + 4 * 32 * 4096 * (cached * tokens + tokens**2 / 2)
    seconds = limit(EIGHT, context=tokens).prefill_s(cached, tokens, 1024)
    floor = flops / 989e12 + tokens / 1024 * 16e9 / 3350e9
    assert seconds == pytest.approx(floor, rel=1e-6)


def test_floor_of_decode() -> None:
    """Weights once, every sequence's KV once, and two FLOPs for each weight and sequence."""
    floor = (16e9 + 32 * 4000 * 131072) / 3350e9 + 32 * 16e9 / 989e12
    assert limit(EIGHT, context=4000).decode_s(32, 32 * 4000) == pytest.approx(floor)


def test_attention_overtakes_the_rest_at_tens_of_thousands_of_tokens() -> None:
    found = limit("Llama-3-8B", context=10_000)

    def share(tokens: int) -> float:
        return found.prompt_pair * tokens**2 / 2 / found.prompt_s(0, tokens)

    assert share(10_000) < 0.5 < share(90_000)


@pytest.mark.parametrize(("cost", "speedup"), [(0.0, 3.36), (0.1, 3.36 / 1.4)])
def test_four_drafts_of_acceptance_0_8(cost: float, speedup: float) -> None:
    """(1 - a^(K+1))/(1 - a) tokens for 1 + c K, as verifying costs next to nothing at batch 1."""
    model = limit(EIGHT)
    plain_s = model.decode_s(1, 0)
    drafts = SpeculationProfile(accept=(0.8,) * 4, per_pass_s=cost * plain_s, row_s=model.row)
    pace = decode_pace(model, drafts, 1, 0)
    assert round(pace.tokens, 2) == 3.36
    assert plain_s / pace.tpot_s == pytest.approx(speedup, rel=0.015)


def test_drafts_pay_less_as_the_batch_grows() -> None:
    model = limit(EIGHT)
    drafts = SpeculationProfile(accept=(0.8,) * 4, row_s=model.row, most_nodes=4096)
    speedups = [model.decode_s(b, 0) / decode_pace(model, drafts, b, 0).tpot_s for b in BATCHES]
    assert speedups == sorted(speedups, reverse=True)
    assert speedups[0] > 3 and speedups[-1] < 1.1


BATCHES = (1, 8, 59, 148, 296, 1024)
