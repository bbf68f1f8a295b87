"""From a spec to an engine that has run: config, weights, pool, warm-up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import ModelConfig, fingerprint, load_config
from engine.core import Engine, EngineConfig
from engine.messages import Ready
from engine.model import Model
from engine.policy import Policy
from engine.sequence import blocks_for
from engine.spec import EngineSpec
from engine.weights import load_weights
from protocol.blocks import BLOCK_TOKENS
from protocol.errors import StartupError
from protocol.request import Request, Sampling

PRECISION = "exact"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CPU_KV_BYTES = 256 << 20
"""Most that the KV pool takes on a CPU by itself; ``kv_tokens`` asks for more."""
GPU_KV_SHARE = 0.8
"""Of the memory that is free once the weights are loaded; the rest is workspace."""


@dataclass(frozen=True)
class Loaded:
    engine: Engine
    ready: Ready


def load(spec: EngineSpec, policy: Policy, progress: Callable[[str, float], None]) -> Loaded:
    """Raises StartupError naming what cannot be loaded or does not fit."""
    device, dtype = _place(spec)
    torch.set_num_threads(spec.threads or max(1, (os.cpu_count() or 2) // 2))
    torch.set_grad_enabled(False)
    folder = Path(spec.model_path)
    config = load_config(folder)
    progress("loading weights", 0.0)
    weights = load_weights(
        folder, config, dtype, device, lambda done: progress("loading weights", done)
    )
    max_len = min(spec.max_model_len or config.max_positions, config.max_positions)
    model = Model(config, weights, max_len)
    pages = _pages(spec, config, dtype, device, max_len)
    sizes = EngineConfig(
        pages=pages, max_batch=spec.max_batch, chunk=spec.chunk, max_model_len=max_len
    )
    engine = Engine(model, sizes, policy)
    if engine.pool.page_layer_bytes > spec.arena.slot_bytes:
        raise StartupError(
            f"one layer of {BLOCK_TOKENS} tokens of KV takes {engine.pool.page_layer_bytes} bytes,"
            f" more than a slot of the arena ({spec.arena.slot_bytes})"
        )
    progress("warming up", 0.0)
    step_seconds = warm_up(engine)
    return Loaded(engine, _ready(engine, fingerprint(folder, str(dtype)), step_seconds))


def _place(spec: EngineSpec) -> tuple[torch.device, torch.dtype]:
    device = torch.device(spec.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise StartupError("device cuda was asked for, but torch sees no GPU; use device cpu")
    name = spec.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    if name not in DTYPES:
        raise StartupError(f"dtype {name!r} is not known; expected one of {', '.join(DTYPES)}")
    return device, DTYPES[name]


def _pages(
    spec: EngineSpec, config: ModelConfig, dtype: torch.dtype, device: torch.device, max_len: int
) -> int:
    page_bytes = config.kv_bytes_per_token(dtype.itemsize) * BLOCK_TOKENS
    if spec.kv_tokens is not None:
        pages = spec.kv_tokens // BLOCK_TOKENS
    elif device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        pages = int(free * GPU_KV_SHARE) // page_bytes
    else:
        pages = CPU_KV_BYTES // page_bytes
        pages = min(pages, spec.max_batch * blocks_for(max_len))
    if pages < 2:
        raise StartupError(
            f"the KV pool would have {pages} pages of {BLOCK_TOKENS} tokens; give it at least"
            f" {2 * BLOCK_TOKENS} tokens ({2 * page_bytes / 2**20:.1f} MiB)"
        )
    return pages


def warm_up(engine: Engine) -> float:
    """Run the largest prefill step and a decode step; the seconds of the longest."""
    length = min(engine.config.chunk, engine.config.max_model_len - 2)
    length = min(length, (engine.manager.pages - 1) * BLOCK_TOKENS)
    prompt = tuple(i % engine.model.config.vocab_size for i in range(length))
    sampling = Sampling(temperature=1.0, top_p=0.9, max_tokens=2, ignore_eos=True)
    # A cache root of its own, so that no request ever meets these blocks.
    request = Request(id="warm-up", prompt=prompt, sampling=sampling, cache_root=os.urandom(16))
    engine.generate(0, request)
    longest = 0.0
    while plan := engine.plan():
        began = time.perf_counter()
        engine.run(plan)
        longest = max(longest, time.perf_counter() - began)
    engine.scheduler.take_started()
    return longest


def _ready(engine: Engine, model_fingerprint: str, step_seconds: float) -> Ready:
    config = engine.model.config
    return Ready(
        fingerprint=model_fingerprint,
        precision=PRECISION,
        vocab_size=config.vocab_size,
        max_model_len=engine.config.max_model_len,
        kv_bytes_per_token=config.kv_bytes_per_token(engine.model.dtype.itemsize),
        kv_tokens=engine.manager.pages * BLOCK_TOKENS,
        page_layer_bytes=engine.pool.page_layer_bytes,
        layers=config.layers,
        step_seconds=step_seconds,
    )
