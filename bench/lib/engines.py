"""Models with random weights, and configurations of engines that run in the caller's process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from cluster.models.locate import demo_path
from engine.execution.engine import EngineConfig
from engine.kv_cache.kv_format import Precision, Storage
from engine.model.weights import tensor_shapes
from engine.model_config.checkpoint import load_config

SHAPE_100M = {
    "hidden_size": 768,
    "intermediate_size": 2560,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
"""96 M parameters with the demo tokenizer's vocabulary."""


def make(folder: Path, shape: dict[str, int], std: float = 0.05) -> Path:
    """Write fp32 safetensors, config and tokenizer to ``folder``, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_path() / name, folder / name)
    raw = json.loads((demo_path() / "config.json").read_text())
    raw.update(shape, torch_dtype="float32")
    (folder / "config.json").write_text(json.dumps(raw))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(size)
        if len(size) == 1
        else torch.randn(size, generator=generator).mul_(std)
        for name, size in tensor_shapes(load_config(folder))
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def engine_config(
    *,
    pages: int,
    max_batch: int = 64,
    chunk: int = 512,
    max_model_len: int = 4096,
    step_budget_ms: float | None = None,
    kv_precision: Precision = "exact",
    kv_storage: Storage = "wide",
    batch_invariant: bool = False,
) -> EngineConfig:
    """Return the configuration of an engine that runs in the caller's process."""
    return EngineConfig(
        pages=pages,
        max_batch=max_batch,
        prefill_chunk=chunk,
        max_model_len=max_model_len,
        step_budget_ms=step_budget_ms,
        ttft_slo_s=None,
        tpot_slo_s=None,
        kv_precision=kv_precision,
        batch_invariant=batch_invariant,
        kv_storage=kv_storage,
    )
