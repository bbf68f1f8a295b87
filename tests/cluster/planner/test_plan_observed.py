"""The planner's model of a step against steps of this engine on a GPU."""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster.planner.gpus import find_gpu
from cluster.planner.model_shape import find_model
from cluster.planner.roofline import gpu_rates, step_model

OBSERVED: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("observed.toml").read_text(encoding="utf-8")
)
SHAPE = find_model(OBSERVED["model"], "fp8")
RATES = gpu_rates(SHAPE, find_gpu(OBSERVED["gpu"]))


def decode_ratios() -> Iterator[float]:
    """Yield predicted over observed seconds."""
    for batch, context, ms in OBSERVED["decode"]:
        model = step_model(SHAPE, RATES, context, batch)
        yield model.decode_s(batch, batch * context) * 1e3 / ms


def prefill_ratios(rows: str) -> Iterator[float]:
    """Yield predicted over observed seconds."""
    for prompt, chunk, ms in OBSERVED[rows]:
        model = step_model(SHAPE, RATES, prompt, 1)
        yield model.prefill_s(0, prompt, chunk) * 1e3 / ms


def test_decode_steps_are_within_16_percent() -> None:
    found = list(decode_ratios())
    print("decode", *(f"{ratio:.2f}" for ratio in found))
    assert max(abs(ratio - 1) for ratio in found) < 0.16
    assert statistics.median(abs(ratio - 1) for ratio in found) < 0.1


def test_prefills_are_within_10_percent() -> None:
    found = list(prefill_ratios("prefill"))
    print("prefill", *(f"{ratio:.2f}" for ratio in found))
    assert max(abs(ratio - 1) for ratio in found) < 0.1


def test_short_prefills_are_within_half() -> None:
    found = list(prefill_ratios("short_prefill"))
    print("short prefill", *(f"{ratio:.2f}" for ratio in found))
    assert max(abs(ratio - 1) for ratio in found) < 0.5
