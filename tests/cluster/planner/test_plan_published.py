"""The planner's model of a step against the published throughput of whole engines."""

from __future__ import annotations

import math
import statistics
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.planner.gpus import find_gpu
from cluster.planner.model_shape import find_model
from cluster.planner.roofline import gpu_rates, kv_pool_tokens, step_model

PUBLISHED = tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))
RUNS: list[dict[str, Any]] = PUBLISHED["runs"]
MAX_STEP_TOKENS, MAX_BATCH, KV_SHARE = 8192, 4096, 0.95
"""As the pages give them."""


def predicted_tokens_per_s(run: dict[str, Any], prompt: int, output: int, requests: int) -> float:
    """Return the output tokens/s of ``requests`` equal requests that arrive together.

    As many run at a time as the KV pool has room for: prompts share steps of MAX_STEP_TOKENS, then
    all decode together to the end. The last requests are fewer.
    """
    fp8 = run["weights"] == "fp8"
    shape = find_model(run["model"], "fp8" if fp8 else "exact", 1 if fp8 else 2)
    gpu = find_gpu(run["gpu"]).group(run["tp"])
    room = kv_pool_tokens(shape, gpu, KV_SHARE) // (prompt + output)
    batch, context = max(1, min(room, MAX_BATCH, requests)), prompt + output / 2
    model = step_model(shape, gpu_rates(shape, gpu), context, batch)

    def wave_s(count: int) -> float:
        steps = math.ceil(count * prompt / MAX_STEP_TOKENS)
        prefill_s = count * model.prompt_s(0, prompt) + steps * model.step
        return prefill_s + output * model.decode_s(count, count * context) if count else 0.0

    full, rest = divmod(requests, batch)
    return requests * output / (full * wave_s(batch) + wave_s(rest))


def ratios(run: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield predicted over published throughput by lengths."""
    for prompt, output, published in run["rows"]:
        lengths = f"{prompt}/{output}"
        found = predicted_tokens_per_s(run, prompt, output, PUBLISHED["requests"][lengths])
        yield lengths, found / published


def told(run: dict[str, Any]) -> str:
    return f"{run['model']}, {run['tp']}x {run['gpu']}, {run['weights']}"


@pytest.mark.parametrize("run", RUNS, ids=told)
def test_published_throughput_within_25_percent(run: dict[str, Any]) -> None:
    found = dict(ratios(run))
    print(told(run), *(f"{lengths}: {ratio:.2f}" for lengths, ratio in found.items()), sep="  ")
    assert {lengths: r for lengths, r in found.items() if not 0.75 <= r <= 1.25} == {}
    assert PUBLISHED["sources"][run["source"]].startswith("https://")


@pytest.mark.parametrize("fitted", [True, False])
def test_most_rows_are_within_15_percent(fitted: bool) -> None:
    """Rows that no constant was fitted to come out as well as the others."""
    errors = [abs(r - 1) for run in RUNS if run["fitted"] is fitted for _, r in ratios(run)]
    assert len(errors) >= 15
    assert sum(error <= 0.15 for error in errors) >= 0.95 * len(errors)
    assert statistics.median(errors) < 0.07


@pytest.mark.parametrize(("model", "gpu", "tp", "prompt", "ms"), PUBLISHED["first_token"]["rows"])
def test_first_token_on_an_idle_worker_within_15_percent(
    model: str, gpu: str, tp: int, prompt: int, ms: float
) -> None:
    """A short prompt is little work, so that reading, multiplying and overheads count alike. The
    longer of reading and multiplying, instead of their sum, would give 0.6 of some times."""
    fp8 = gpu != "A100"
    numbers = PUBLISHED["first_token"]["models"][model]
    shape = find_model(numbers, "fp8" if fp8 else "exact", 1 if fp8 else 2)
    worker = find_gpu(gpu).group(tp)
    step = step_model(shape, gpu_rates(shape, worker), prompt, 1)
    assert 0.85 <= step.prefill_s(0, prompt, MAX_STEP_TOKENS) * 1e3 / ms <= 1.15


def test_fp8_weights_count_with_their_rate_and_not_with_their_bytes_alone() -> None:
    """As fp8 bytes at the speed of bf16, prompts of a 70B model took twice their time."""
    run = next(run for run in RUNS if (run["model"], run["gpu"]) == ("Llama-3-70B", "H200"))
    bf16 = find_model("Llama-3-70B", "fp8", 2)
    gpu = find_gpu("H200")
    slow, quick = (
        step_model(of, gpu_rates(of, gpu), 1000, 64).prompt_token
        for of in (bf16, find_model("Llama-3-70B", "fp8", 1))
    )
    assert 1.7 < slow / quick < 2.0  # activations cost the same
    assert bf16.kv_bytes == find_model("Llama-3-70B", "fp8", 1).kv_bytes
    assert dict(ratios(run))["2048/128"] == pytest.approx(1.0, abs=0.1)
