"""From a spec to an engine that has run: config, weights, pool, warm-up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine import sizing
from engine.ceilings import ceilings
from engine.checkpoint import fingerprint, load_config
from engine.core import Engine, EngineConfig
from engine.counters import SpecFigures
from engine.grammar.compiler import Compiler
from engine.kv_format import KVFormat
from engine.messages import Ready
from engine.model import Model
from engine.policy import Policy
from engine.spec import Ceilings, EngineSpec
from engine.speculation.loading import control, load_speculation
from engine.speculation.source import draft_size
from engine.step_time import SETTLED
from engine.warming import warm_products
from engine.weights import load_weights
from protocol.blocks import BLOCK_TOKENS
from protocol.errors import StartupError
from protocol.request import Request, Sampling


@dataclass(frozen=True)
class Loaded:
    engine: Engine
    grammars: Compiler
    ready: Ready
    speculation: SpecFigures  # at the start


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
    progress("measuring the machine", 0.0)
    found = ceilings(spec.ceilings, device, dtype, weights.bytes)  # while there is memory for it
    max_len = sizing.context_length(spec, config)
    model = Model(config, weights, max_len)
    storage = sizing.storage(spec, _kind(device))
    kv = config.kv_format(spec.kv_precision, storage, dtype.itemsize)
    _check_slots(kv, spec)
    draft = draft_size(spec.speculation, config, dtype.itemsize, on_cpu=device.type == "cpu")
    free = _free_bytes(device, draft.elements * dtype.itemsize)
    sizes = EngineConfig(
        pages=sizing.pool_pages(spec, kv, max_len, free, draft.kv_bytes_per_token),
        max_batch=spec.max_batch,
        chunk=spec.chunk,
        max_model_len=max_len,
        kv_precision=spec.kv_precision,
        kv_storage=storage,
        step_budget_ms=spec.step_budget_ms,
    )
    engine = Engine(model, sizes, policy)
    if device.type == "cpu":
        progress("making products ready", 0.0)
        rows = spec.chunk + spec.max_batch
        warm_products(model, rows, lambda done: progress("making products ready", done))
    progress("warming up", 0.0)
    step_seconds = warm_up(engine)
    speculation = speculate(spec, engine, progress)
    grammars = Compiler(folder, config.vocab_size, config.eos_token_ids)
    ready = _ready(engine, fingerprint(folder, str(dtype)), step_seconds, speculation, found)
    return Loaded(engine, grammars, ready, speculation)


def _place(spec: EngineSpec) -> tuple[torch.device, torch.dtype]:
    device = torch.device(spec.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise StartupError("device cuda was asked for, but torch sees no GPU; use device cpu")
    return device, getattr(torch, sizing.dtype_name(spec, _kind(device)))


def _kind(device: torch.device) -> sizing.Device:
    return "cuda" if device.type == "cuda" else "cpu"


def _free_bytes(device: torch.device, draft_bytes: int) -> int | None:
    """Of a GPU's memory, with the weights on it; ``draft_bytes`` are still to come."""
    if device.type != "cuda":
        return None
    return max(0, torch.cuda.mem_get_info(device)[0] - draft_bytes)


def _check_slots(kv: KVFormat, spec: EngineSpec) -> None:
    largest = max(kv.page_layer_bytes(codec) for codec in kv.codecs)
    if largest > spec.arena.slot_bytes:
        raise StartupError(
            f"one layer of {BLOCK_TOKENS} tokens of KV takes {largest} bytes, more than a slot of"
            f" the arena ({spec.arena.slot_bytes})"
        )


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


def speculate(
    spec: EngineSpec, engine: Engine, progress: Callable[[str, float], None]
) -> SpecFigures:
    """Have the engine draft as configured, if that can be; how it stands."""
    figures = load_speculation(spec.speculation, engine, Path(spec.model_path))
    if engine.speculator is None:
        return figures
    progress("measuring what drafts cost", 0.0)
    _warm_up_round(engine, {-4: 2, -5: 4}, tokens=SETTLED)
    engine.manager.forget()
    control(engine)
    return engine.speculator.figures()


def _ready(
    engine: Engine,
    model_fingerprint: str,
    step_seconds: float,
    speculation: SpecFigures,
    found: Ceilings,
) -> Ready:
    return Ready(
        fingerprint=model_fingerprint,
        vocab_size=engine.model.config.vocab_size,
        max_model_len=engine.config.max_model_len,
        kv=engine.format,
        kv_tokens=engine.manager.pages * BLOCK_TOKENS,
        step_seconds=step_seconds,
        speculation=str(speculation),
        ceilings=found,
        element_bytes=engine.model.dtype.itemsize,
        gpu=engine.model.device.type == "cuda",
    )
