"""The planner's model of a step against steps of this engine on GPUs."""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.planner.gpus import find_gpu
from cluster.planner.model_shape import find_model
from cluster.planner.roofline import gpu_rates, step_model
from protocol.performance.step_model import StepModel

OBSERVED: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("observed.toml").read_text(encoding="utf-8")
)
SHAPE = find_model(OBSERVED["model"], "fp8")
CHUNK = 2048


def model_of(gpu: str, context: int, batch: int) -> StepModel:
    return step_model(SHAPE, gpu_rates(SHAPE, find_gpu(gpu)), context, batch)


def decode_ratios(gpu: str) -> Iterator[float]:
    """Yield predicted over observed seconds."""
    for batch, context, ms in OBSERVED[gpu]["decode"]:
        yield model_of(gpu, context, batch).decode_s(batch, batch * context) * 1e3 / ms


def prefill_ratios(gpu: str, rows: str) -> Iterator[float]:
    """Yield predicted over observed seconds."""
    for prompt, chunk, ms in OBSERVED[gpu][rows]:
        yield model_of(gpu, prompt, 1).prefill_s(0, prompt, chunk) * 1e3 / ms


@pytest.mark.parametrize(("gpu", "most", "median"), [("H100-SXM", 0.16, 0.1), ("H200", 0.23, 0.16)])
def test_decode_steps(gpu: str, most: float, median: float) -> None:
    found = list(decode_ratios(gpu))
    print(gpu, "decode", *(f"{ratio:.2f}" for ratio in found))
    assert max(abs(ratio - 1) for ratio in found) < most
    assert statistics.median(abs(ratio - 1) for ratio in found) < median


@pytest.mark.parametrize("gpu", ["H100-SXM", "H200"])
def test_prefills_are_within_10_percent(gpu: str) -> None:
    found = list(prefill_ratios(gpu, "prefill"))
    print(gpu, "prefill", *(f"{ratio:.2f}" for ratio in found))
    assert max(abs(ratio - 1) for ratio in found) < 0.1


def test_short_prefills_are_within_half() -> None:
    found = list(prefill_ratios("H200", "short"))
    print("H200 short prefill", *(f"{ratio:.2f}" for ratio in found))
    assert max(abs(ratio - 1) for ratio in found) < 0.5


def test_prompts_behind_cached_tokens_are_within_a_factor_of_two() -> None:
    found = [
        model_of("H200", cached, 1).prefill_s(cached, prompt, CHUNK) * 1e3 / ms
        for prompt, cached, ms in OBSERVED["H200"]["cached"]
    ]
    print("H200 cached", *(f"{ratio:.2f}" for ratio in found))
    assert min(found) > 0.48 and max(found) < 1.1
