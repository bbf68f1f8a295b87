"""An engine whose layers are computed by kernels draws the texts of the CPU's engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.lib.engines import engine_config
from engine.execution.engine import Engine
from engine.kv_cache.kv_format import Storage
from engine.model.decoder import DecoderModel
from engine.model.weights import load_weights
from engine.model_config.checkpoint import load_config
from engine.scheduling.step_policy import plan_decode_step
from tests.engine.conftest import drain, request
from tests.engine.families import save

POSITIONS = 512


def engine(folder: Path, *, kernels: bool, storage: Storage = "wide", **changes: Any) -> Engine:
    device = torch.device("cuda" if kernels and torch.cuda.is_available() else "cpu")
    config = load_config(folder)
    weights = load_weights(folder, config, torch.float32, device)
    model = DecoderModel(config, weights, POSITIONS, kernels=kernels)
    sizes = {"pages": 64, "max_batch": 8, "chunk": 64, "max_model_len": POSITIONS, **changes}
    return Engine(model, engine_config(kv_storage=storage, **sizes), plan_decode_step)


def texts(own: Engine) -> dict[int, list[int]]:
    """Run prompts of several lengths, longer than a chunk and shorter than a block."""
    for handle, length in enumerate((3, 40, 150, 64, 31)):
        prompt = [3 + (handle * 7 + i * i) % 300 for i in range(length)]
        sampling = {"temperature": 0.8 * (handle % 2), "seed": handle}
        own.generate(handle, request(f"r{handle}", prompt, max_tokens=12 + handle, **sampling))
    return drain(own)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma2", "mixtral-window"])
@pytest.mark.parametrize("storage", ["wide", "fp8"])
def test_texts_are_those_of_the_cpu(family: str, storage: Storage, tmp_path: Path) -> None:
    folder = save(tmp_path, family)
    precision = {"kv_precision": "fp8"}
    expected = texts(engine(folder, kernels=False, **precision))
    assert texts(engine(folder, kernels=True, storage=storage, **precision)) == expected
