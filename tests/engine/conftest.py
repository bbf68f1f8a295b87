"""Small random models, and an engine that runs requests to their end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.lib.engines import engine_config
from engine.execution.engine import Engine
from engine.model.decoder import DecoderModel
from engine.model.weights import load_weights
from engine.model_config.checkpoint import load_config
from engine.model_config.config import ModelConfig
from engine.scheduling.step_policy import plan_decode_step
from protocol.requests import Request
from protocol.sampling_params import SamplingParams
from tests.engine.families import save

ROOT = bytes(16)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("tiny"))


def load_model(folder: Path, max_positions: int = 1024) -> DecoderModel:
    config: ModelConfig = load_config(folder)
    weights = load_weights(folder, config, torch.float32, torch.device("cpu"))
    return DecoderModel(config, weights, max_positions)


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> DecoderModel:
    return load_model(tiny_folder)


@pytest.fixture
def make_engine(tiny: DecoderModel) -> Callable[..., Engine]:
    def make(**changes: Any) -> Engine:
        sizes = {"pages": 64, "max_batch": 8, "chunk": 64, "max_model_len": 1024, **changes}
        return Engine(tiny, engine_config(**sizes), plan_decode_step)

    return make


def request(name: str, prompt: list[int], **sampling: Any) -> Request:
    options = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **sampling}
    return Request(
        id=name, prompt=tuple(prompt), sampling=SamplingParams(**options), cache_root=ROOT
    )


def drain(engine: Engine, steps: int = 10_000) -> dict[int, list[int]]:
    """Run until nothing is left to do; tokens by handle."""
    out: dict[int, list[int]] = {}
    for _ in range(steps):
        step = engine.plan()
        if not step:
            return out
        for token in engine.run(step):
            out.setdefault(token.handle, []).append(token.token)
    raise AssertionError(f"not done after {steps} steps")
