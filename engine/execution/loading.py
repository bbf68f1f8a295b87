"""From a spec to an engine that has run: config, weights, pool, warm-up."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.batching.attention_metadata import decode_groups
from engine.batching.batch import Batch, View
from engine.execution import memory_footprint
from engine.execution.engine import Engine, EngineConfig
from engine.execution.machine_costs import ceilings
from engine.ipc.counters import SpecFigures
from engine.ipc.messages import Ready
from engine.ipc.spec import Ceilings, EngineSpec, SpeculationSpec
from engine.kv_cache.kv_format import KVFormat
from engine.model.decoder import Model, warm_products
from engine.model.weights import load_weights
from engine.model_config.checkpoint import fingerprint, load_config
from engine.scheduling.sequence import MOST_NODES
from engine.scheduling.step_policy import Policy
from engine.scheduling.step_time import SETTLED
from engine.speculation.control.controller import Controller
from engine.speculation.control.draft_choice import calibrate
from engine.speculation.control.draft_lengths import FixedLength
from engine.speculation.control.speculator import Speculator
from engine.speculation.control.step_costs import Costs
from engine.speculation.draft_source import Source, draft_size, source
from engine.speculation.proposers.draft_model import load_draft
from engine.speculation.proposers.eagle import Eagle
from engine.speculation.proposers.medusa import Medusa
from engine.speculation.proposers.ngram import NGram
from engine.speculation.proposers.proposer import Proposer
from engine.structured_output.compiler import Compiler
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import StartupError
from protocol.requests import Request, Sampling

# MERGED engine.speculation.loading
# From settings to an engine that speculates; whatever cannot be had, it goes on without.
#
# source -> proposer -> Speculator, at fixed lengths to warm up -> curve of costs -> Controller

log = logging.getLogger("baton.engine")


def load_speculation(spec: SpeculationSpec, engine: Engine, target: Path) -> SpecFigures:
    """Have ``engine`` speculate, at fixed lengths at first; how that stands. ``target``: the folder
    of its model."""
    try:
        found = source(spec)
        if found is None:
            return SpecFigures()
        proposer = load_proposer(found, engine, spec.max_tokens, target)
    except Exception as error:  # of the draft whatever it is: none of it is the target's
        log.warning("speculation is off: %s", error)
        return SpecFigures(dropped=str(error) or type(error).__name__)
    lengths = FixedLength(proposer.most)
    engine.speculate(Speculator(proposer, lengths, engine.model.config.vocab_size))
    return SpecFigures(proposer.name)


def load_proposer(found: Source, engine: Engine, most: int, target: Path) -> Proposer:
    """Of at most ``most`` nodes; ``target``: the engine's model. Raises StartupError for what
    cannot be loaded or does not fit."""
    model, state, pages = engine.model, engine.state, engine.config.pages
    if found.folder is None:
        return NGram(most)
    if found.method == "medusa":
        return Medusa(model, state, found.folder, most)
    if found.method == "eagle":
        return Eagle(model, state, found.folder, pages, most)
    told = all((folder / "tokenizer.json").is_file() for folder in (found.folder, target))
    beside = target if told else None  # then the sizes of the vocabularies must do
    return load_draft(found.folder, model, state, pages=pages, most=most, target_folder=beside)


def control(engine: Engine, clock: Callable[[], float] = time.perf_counter) -> None:
    """From here on lengths are what pays. Takes about a second, of an engine that is idle."""
    speculator = engine.speculator
    assert speculator is not None

    def controller(proposer: Proposer) -> Controller:
        config, most = engine.config, proposer.most
        rows = config.max_batch + min(config.max_batch * most, MOST_NODES, config.chunk)
        curve = calibrate(passes_of(engine), rows, clock)
        costs = Costs(curve, lambda: engine.step_time.known)
        return Controller(costs, most, proposer.passes)

    speculator.decide_by(controller)


def passes_of(engine: Engine) -> Callable[[int], None]:
    """Runs the model over so many rows, on pages that nobody has."""
    model, pool, device = engine.model, engine.pool, engine.model.device
    slots = engine.config.pages * BLOCK_TOKENS

    @torch.inference_mode()
    def run(rows: int) -> None:
        zeros = torch.zeros(rows, dtype=torch.int64, device=device)
        table, lengths = zeros[:, None], zeros + 1
        views = {
            window: View(rows, decode_groups(table, lengths, window, model.dtype), ())
            for window in set(model.config.windows)
        }
        at = torch.arange(rows, device=device) % slots
        hidden = model.hidden(Batch(zeros, zeros, at, views, None), pool)
        model.logits(hidden).argmax(-1).tolist()  # waits for a GPU

    return run


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
    max_len = memory_footprint.context_length(spec, config)
    model = Model(config, weights, max_len)
    storage = memory_footprint.storage(spec, _kind(device))
    kv = config.kv_format(spec.kv_precision, storage, dtype.itemsize)
    _check_slots(kv, spec)
    draft = draft_size(spec.speculation, config, dtype.itemsize, on_cpu=device.type == "cpu")
    free = _free_bytes(device, draft.elements * dtype.itemsize)
    sizes = EngineConfig(
        pages=memory_footprint.pool_pages(spec, kv, max_len, free, draft.kv_bytes_per_token),
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
    return device, getattr(torch, memory_footprint.dtype_name(spec, _kind(device)))


def _kind(device: torch.device) -> memory_footprint.Device:
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
