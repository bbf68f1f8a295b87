"""Small random models, and an engine that runs requests to their end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decode_worker.policy import plan
from engine.config import ModelConfig, load_config
from engine.core import Engine, EngineConfig
from engine.model import Model
from engine.weights import load_weights
from protocol.request import Request, Sampling

ROOT = bytes(16)
TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def save_tiny(folder: Path, shard: str = "10GB", **changes: Any) -> Path:
    """A random Llama saved by transformers itself."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**{**TINY, "initializer_range": 0.3, **changes}))
    model.save_pretrained(folder, max_shard_size=shard)
    assert json.loads((folder / "config.json").read_text())["architectures"]
    return folder


def load_model(folder: Path, max_positions: int = 1024) -> Model:
    config: ModelConfig = load_config(folder)
    weights = load_weights(folder, config, torch.float32, torch.device("cpu"))
    return Model(config, weights, max_positions)


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> Model:
    return load_model(tiny_folder)


@pytest.fixture
def make_engine(tiny: Model) -> Callable[..., Engine]:
    def make(**changes: Any) -> Engine:
        sizes = {"pages": 64, "max_batch": 8, "chunk": 64, "max_model_len": 1024, **changes}
        return Engine(tiny, EngineConfig(**sizes), plan)

    return make


def request(name: str, prompt: list[int], **sampling: Any) -> Request:
    options = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **sampling}
    return Request(id=name, prompt=tuple(prompt), sampling=Sampling(**options), cache_root=ROOT)


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
