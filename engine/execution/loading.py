"""Loads an engine: configuration, weights, KV pool, warm-up, speculation.

The engine process calls ``load_engine`` once (``cluster.worker.engine_main``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.execution import memory_footprint
from engine.execution.engine import Engine, EngineConfig
from engine.execution.machine_ceilings import measure_ceilings
from engine.execution.speculation_loading import load_speculation, start_controller
from engine.ipc.counters import SpeculationStatus
from engine.ipc.messages import EngineReady
from engine.ipc.settings import EngineSettings, MachineCeilings
from engine.kv_cache.kv_format import KVFormat
from engine.model.decoder import DecoderModel, warm_up_products
from engine.model.weights import load_weights
from engine.model_config.checkpoint import fingerprint, load_config
from engine.model_config.config import ModelConfig
from engine.scheduling.step_policy import StepPolicy
from engine.scheduling.step_time import MIN_OBSERVATIONS
from engine.speculation.draft_source import draft_size
from engine.structured_output.compiler import GrammarCompiler
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import StartupError
from protocol.requests import Request
from protocol.sampling_params import SamplingParams

OnProgress = Callable[[str, float], None]
"""Called with (what is being done, fraction done)."""


@dataclass(frozen=True)
class LoadedEngine:
    """What ``EngineServer`` needs to serve."""

    engine: Engine
    grammars: GrammarCompiler
    ready: EngineReady
    speculation: SpeculationStatus  # at the start


def load_engine(settings: EngineSettings, policy: StepPolicy, progress: OnProgress) -> LoadedEngine:
    """Return an engine that has run its warm-up. Raise StartupError naming what cannot be loaded
    or does not fit."""
    device, dtype = _device_and_dtype(settings)
    torch.set_num_threads(settings.threads or max(1, (os.cpu_count() or 2) // 2))
    torch.set_grad_enabled(False)
    folder = Path(settings.model_path)
    config = load_config(folder)
    engine, ceilings = _build(settings, config, policy, device, dtype, progress)
    if device.type == "cpu":
        progress("making products ready", 0.0)
        rows = settings.prefill_chunk + settings.max_batch
        warm_up_products(engine.model, rows, lambda done: progress("making products ready", done))
    progress("warming up", 0.0)
    step_seconds = warm_up(engine)
    speculation = start_speculation(settings, engine, progress)
    grammars = GrammarCompiler(folder, config.vocab_size, config.eos_token_ids)
    ready = EngineReady(
        fingerprint=fingerprint(folder, str(dtype)),
        vocab_size=config.vocab_size,
        max_model_len=engine.config.max_model_len,
        kv=engine.format,
        kv_tokens=engine.manager.pages * BLOCK_TOKENS,
        step_seconds=step_seconds,
        speculation=str(speculation),
        ceilings=ceilings,
        element_bytes=dtype.itemsize,
        gpu=device.type == "cuda",
    )
    return LoadedEngine(engine, grammars, ready, speculation)


def _build(
    settings: EngineSettings,
    config: ModelConfig,
    policy: StepPolicy,
    device: torch.device,
    dtype: torch.dtype,
    progress: OnProgress,
) -> tuple[Engine, MachineCeilings]:
    """Load the weights, measure the machine and allocate the KV pool."""
    progress("loading weights", 0.0)
    weights = load_weights(
        Path(settings.model_path),
        config,
        dtype,
        device,
        lambda done: progress("loading weights", done),
    )
    progress("measuring the machine", 0.0)
    # Measured before the pool takes the rest of the memory.
    ceilings = measure_ceilings(settings.ceilings, device, dtype, weights.bytes)
    max_len = memory_footprint.context_length(settings, config)
    storage = memory_footprint.choose_storage(settings, _kind(device))
    kv = config.kv_format(settings.kv_precision, storage, dtype.itemsize)
    _check_slots(kv, settings)
    draft = draft_size(settings.speculation, config, dtype.itemsize, on_cpu=device.type == "cpu")
    model = DecoderModel(config, weights, max_len)
    free = _free_bytes(device, draft.elements * dtype.itemsize)
    sizes = EngineConfig(
        pages=memory_footprint.pool_pages(settings, kv, max_len, free, draft.kv_bytes_per_token),
        max_batch=settings.max_batch,
        prefill_chunk=settings.prefill_chunk,
        max_model_len=max_len,
        kv_precision=settings.kv_precision,
        kv_storage=storage,
        step_budget_ms=settings.step_budget_ms,
    )
    return Engine(model, sizes, policy), ceilings


def _device_and_dtype(settings: EngineSettings) -> tuple[torch.device, torch.dtype]:
    device = torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise StartupError("device cuda was asked for, but torch sees no GPU; use device cpu")
    return device, getattr(torch, memory_footprint.dtype_name(settings, _kind(device)))


def _kind(device: torch.device) -> memory_footprint.Device:
    return "cuda" if device.type == "cuda" else "cpu"


def _free_bytes(device: torch.device, draft_bytes: int) -> int | None:
    """Return the free memory of a GPU that holds the weights, less ``draft_bytes`` for the draft
    model that is still to be loaded."""
    if device.type != "cuda":
        return None
    return max(0, torch.cuda.mem_get_info(device)[0] - draft_bytes)


def _check_slots(kv: KVFormat, settings: EngineSettings) -> None:
    largest = max(kv.page_layer_bytes(codec) for codec in kv.codecs)
    if largest > settings.arena.slot_bytes:
        raise StartupError(
            f"one layer of {BLOCK_TOKENS} tokens of KV takes {largest} bytes, more than a slot of"
            f" the arena ({settings.arena.slot_bytes})"
        )


def warm_up(engine: Engine) -> float:
    """Run the largest prefill step and some others, and return the seconds of the longest. First
    steps are slower than later ones, so the step-time model learns from the second round only."""
    longest = _warm_up_round(engine, {-1: 1}, tokens=2)
    engine.step_time.reset()
    _warm_up_round(engine, {-2: 1, -3: 4}, tokens=MIN_OBSERVATIONS)
    engine.manager.evict_unused()  # no request will ever use these blocks
    return longest


def _warm_up_round(engine: Engine, shares: dict[int, int], tokens: int) -> float:
    """Run a prompt of 1/share of the chunk with ``tokens`` output tokens for each handle, and
    return the seconds of the longest step. Handles are negative, unlike those of requests."""
    limit = min(engine.config.max_model_len, engine.manager.pages * BLOCK_TOKENS)
    tokens = min(tokens, limit // 2)
    sampling = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=tokens, ignore_eos=True)
    for handle, share in shares.items():
        length = max(1, min(engine.config.prefill_chunk // share, limit - tokens))
        prompt = tuple(i % engine.model.config.vocab_size for i in range(length))
        # A random cache root, so that no request ever matches these blocks.
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


def start_speculation(
    settings: EngineSettings, engine: Engine, progress: OnProgress
) -> SpeculationStatus:
    """Start speculation as configured, measure its costs, and return its status."""
    status = load_speculation(settings.speculation, engine, Path(settings.model_path))
    if engine.speculator is None:
        return status
    progress("measuring what drafts cost", 0.0)
    _warm_up_round(engine, {-4: 2, -5: 4}, tokens=MIN_OBSERVATIONS)
    engine.manager.evict_unused()
    start_controller(engine)
    return engine.speculator.status()
