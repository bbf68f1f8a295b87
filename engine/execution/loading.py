"""Loads an engine: configuration, weights, KV pool, warm-up, speculation.

The engine process calls ``load_engine`` once (``cluster.worker.engine_main``).
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.execution.engine import Engine, EngineConfig
from engine.execution.gpu_memory import MemoryGuard, prepare_gpu
from engine.execution.machine_ceilings import measure_ceilings
from engine.execution.speculation_loading import load_speculation
from engine.execution.warm_up import OnProgress, measure_drafts, warm_up
from engine.ipc.counters import SpeculationStatus
from engine.ipc.messages import EngineReady
from engine.ipc.settings import DeviceKind, EngineSettings, MachineCeilings
from engine.kv_cache.kv_format import KVFormat
from engine.memory import memory_footprint
from engine.model.decoder import DecoderModel, warm_up_products
from engine.model.weights import load_weights
from engine.model_config.checkpoint import fingerprint, load_config, read_shards
from engine.model_config.config import ModelConfig
from engine.scheduling.step_policy import StepPolicy
from engine.slots.copy_costs import measure_copy_costs
from engine.structured_output.compiler import GrammarCompiler
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import StartupError


@dataclass(frozen=True)
class LoadedEngine:
    """What ``EngineServer`` needs to serve."""

    engine: Engine
    grammars: GrammarCompiler
    ready: EngineReady
    speculation: SpeculationStatus  # at the start
    memory: MemoryGuard


def load_engine(settings: EngineSettings, policy: StepPolicy, progress: OnProgress) -> LoadedEngine:
    """Return an engine that has run its warm-up. Raise StartupError naming what cannot be loaded
    or does not fit."""
    doing = "starting"

    def report(what: str, fraction: float) -> None:
        nonlocal doing
        doing = what
        progress(what, fraction)

    device = choose_device(settings)
    memory = MemoryGuard(device, settings.gpu_share)
    with memory.explained(lambda: doing):
        return _load(settings, policy, device, memory, report)


def _load(
    settings: EngineSettings,
    policy: StepPolicy,
    device: torch.device,
    memory: MemoryGuard,
    progress: OnProgress,
) -> LoadedEngine:
    torch.set_num_threads(settings.threads or max(1, (os.cpu_count() or 2) // 2))
    torch.set_grad_enabled(False)
    folder = Path(settings.model_path)
    config = load_config(folder)
    engine, ceilings = _build(settings, config, policy, device, memory, progress)
    sizes = engine.config
    if device.type == "cpu":
        progress("preparing matrix products", 0.0)
        rows = sizes.prefill_chunk + sizes.max_batch
        warm_up_products(
            engine.model, rows, lambda done: progress("preparing matrix products", done)
        )
    step_seconds = warm_up(engine, progress)
    if settings.speculation.model_path is not None:  # n-grams need none
        progress("loading the draft model", 0.0)
    speculation = load_speculation(settings.speculation, engine, folder)
    if engine.model.uses_kernels:
        # The first steps compiled kernels. From now on steps run in graphs, which are faster.
        engine.record_graphs(lambda done: progress("recording CUDA graphs", done))
        step_seconds = warm_up(engine, progress)
    if engine.speculator is not None:
        speculation = measure_drafts(engine, progress)
    kernels = engine.model.uses_kernels
    copy_costs = measure_copy_costs(engine.pool, engine.manager.pages, by_kernels=kernels)
    grammars = GrammarCompiler(folder, config.vocab_size, config.eos_token_ids)
    dtype = engine.model.dtype
    ready = EngineReady(
        fingerprint=fingerprint(folder, str(dtype)),
        vocab_size=config.vocab_size,
        max_model_len=sizes.max_model_len,
        kv=engine.format,
        kv_tokens=engine.manager.pages * BLOCK_TOKENS,
        step_seconds=step_seconds,
        speculation=str(speculation),
        ceilings=ceilings,
        element_bytes=dtype.itemsize,
        gpu=device.type == "cuda",
        max_batch=sizes.max_batch,
        prefill_chunk=sizes.prefill_chunk,
        copy_costs=copy_costs,
    )
    return LoadedEngine(engine, grammars, ready, speculation, memory)


def _build(
    settings: EngineSettings,
    config: ModelConfig,
    policy: StepPolicy,
    device: torch.device,
    memory: MemoryGuard,
    progress: OnProgress,
) -> tuple[Engine, MachineCeilings]:
    """Load the weights, measure the machine and allocate the KV pool."""
    folder, kind = Path(settings.model_path), _kind(device)
    shards = read_shards(folder) if kind == "cuda" else None  # only a GPU's plan needs them
    memory.plan = plan = memory_footprint.estimate_footprint(settings, config, shards, kind)
    dtype = getattr(torch, plan.dtype)
    progress("loading weights", 0.0)
    weights = load_weights(
        folder, config, dtype, device, lambda done: progress("loading weights", done)
    )
    progress("measuring the machine", 0.0)
    # Measured before the pool takes the rest of the memory.
    ceilings = measure_ceilings(settings.ceilings, device, dtype, weights.bytes)
    storage = memory_footprint.choose_storage(settings, kind)
    kv = config.kv_format(settings.kv_precision, storage, dtype.itemsize)
    _check_slots(kv, settings)
    model = DecoderModel(config, weights, plan.max_len)
    if kind == "cuda":
        plan = memory.size_pool(plan)
    progress("allocating the KV pool", 0.0)
    steps = settings.step_sizes(kind)
    sizes = EngineConfig(
        pages=plan.kv_tokens // BLOCK_TOKENS,
        max_batch=steps.max_batch,
        prefill_chunk=steps.prefill_chunk,
        max_model_len=plan.max_len,
        kv_precision=settings.kv_precision,
        batch_invariant=settings.batch_invariant,
        kv_storage=storage,
        step_budget_ms=settings.step_budget_ms,
        ttft_slo_s=settings.ttft_slo_s,
        tpot_slo_s=settings.tpot_slo_s,
    )
    core_clock = time.thread_time if device.type == "cpu" else None
    return Engine(model, sizes, policy, core_clock=core_clock), ceilings


def choose_device(settings: EngineSettings) -> torch.device:
    """Return the device of an engine, ready for use. Raise StartupError if torch has none such."""
    name = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return prepare_gpu(name) if name.startswith("cuda") else torch.device(name)


def _kind(device: torch.device) -> DeviceKind:
    return "cuda" if device.type == "cuda" else "cpu"


def _check_slots(kv: KVFormat, settings: EngineSettings) -> None:
    largest = max(kv.block_layer_bytes(codec) for codec in kv.codecs)
    if largest > settings.arena.slot_bytes:
        raise StartupError(
            f"one layer of {BLOCK_TOKENS} tokens of KV takes {largest} bytes, more than a slot of"
            f" the arena ({settings.arena.slot_bytes})"
        )
