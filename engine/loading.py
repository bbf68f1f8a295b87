"""From a spec to an engine that has run: config, weights, pool, warm-up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.checkpoint import fingerprint, load_config
from engine.core import Engine, EngineConfig
from engine.kv_format import KVFormat, Storage
from engine.linear import row_counts
from engine.messages import Ready
from engine.model import Model
from engine.policy import Policy
from engine.sequence import blocks_for
from engine.spec import EngineSpec
from engine.step_time import SETTLED
from engine.weights import load_weights
from protocol.blocks import BLOCK_TOKENS
from protocol.errors import StartupError
from protocol.request import Request, Sampling

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CPU_KV_BYTES = 256 << 20
"""Most that the KV pool takes on a CPU by itself; ``kv_tokens`` asks for more."""
GPU_KV_SHARE = 0.8
"""Of the memory that is free once the weights are loaded; the rest is workspace."""
WARM_S = 1.0
"""Most that making products ready on a CPU may take; what is not ready is made when needed."""


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
    storage = _storage(spec, device)
    kv = config.kv_format(spec.kv_precision, storage, dtype.itemsize)
    _check_slots(kv, spec)
    sizes = EngineConfig(
        pages=_pages(spec, kv, device, max_len),
        max_batch=spec.max_batch,
        chunk=spec.chunk,
        max_model_len=max_len,
        kv_precision=spec.kv_precision,
        kv_storage=storage,
        step_budget_ms=spec.step_budget_ms,
    )
    engine = Engine(model, sizes, policy)
    progress("warming up", 0.0)
    if device.type == "cpu":
        warm_products(model, spec.chunk + spec.max_batch)
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


def _storage(spec: EngineSpec, device: torch.device) -> Storage:
    """On a GPU memory binds, and fp8 halves what KV takes of it; on a CPU turning bytes into
    values costs more than reading them."""
    if spec.kv_storage != "auto":
        return spec.kv_storage
    return "fp8" if spec.kv_precision == "fp8" and device.type == "cuda" else "wide"


def _check_slots(kv: KVFormat, spec: EngineSpec) -> None:
    largest = max(kv.page_layer_bytes(codec) for codec in kv.codecs)
    if largest > spec.arena.slot_bytes:
        raise StartupError(
            f"one layer of {BLOCK_TOKENS} tokens of KV takes {largest} bytes, more than a slot of"
            f" the arena ({spec.arena.slot_bytes})"
        )


def _pages(spec: EngineSpec, kv: KVFormat, device: torch.device, max_len: int) -> int:
    page_bytes = kv.bytes_per_token * BLOCK_TOKENS
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


def warm_products(model: Model, most_rows: int) -> None:
    """Make the products of all numbers of rows, the smallest first, as far as a second goes."""
    deadline = time.perf_counter() + WARM_S
    for rows in row_counts(most_rows):
        if time.perf_counter() > deadline:
            break
        model.warm(rows)


def warm_up(engine: Engine) -> float:
    """Run the largest prefill step and some others; the seconds of the longest. What the first ones
    cost is not what steps cost: the model of their time learns from the second round."""
    longest = _warm_up_round(engine, {-1: 1}, tokens=2)
    engine.step_time.forget()
    _warm_up_round(engine, {-2: 1, -3: 4}, tokens=SETTLED)
    engine.manager.forget()  # nobody ever asks for these blocks
    return longest


def _warm_up_round(engine: Engine, shares: dict[int, int], tokens: int) -> float:
    """For each handle (no request ever has a negative one) a prompt of 1/share of the chunk, and
    ``tokens`` tokens after it; the longest step."""
    limit = min(engine.config.max_model_len, engine.manager.pages * BLOCK_TOKENS)
    tokens = min(tokens, limit // 2)
    sampling = Sampling(temperature=1.0, top_p=0.9, max_tokens=tokens, ignore_eos=True)
    for handle, share in shares.items():
        length = max(1, min(engine.config.chunk // share, limit - tokens))
        prompt = tuple(i % engine.model.config.vocab_size for i in range(length))
        # A cache root of its own, so that no request ever meets these blocks.
        root = os.urandom(16)
        request = Request(id="warm-up", prompt=prompt, sampling=sampling, cache_root=root)
        engine.generate(handle, request)
    longest = 0.0
    while plan := engine.plan():
        began = time.perf_counter()
        engine.run(plan)
        longest = max(longest, time.perf_counter() - began)
    engine.scheduler.take_started()
    return longest


def _ready(engine: Engine, model_fingerprint: str, step_seconds: float) -> Ready:
    return Ready(
        fingerprint=model_fingerprint,
        vocab_size=engine.model.config.vocab_size,
        max_model_len=engine.config.max_model_len,
        kv=engine.format,
        kv_tokens=engine.manager.pages * BLOCK_TOKENS,
        step_seconds=step_seconds,
    )
