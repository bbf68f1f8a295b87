"""Loads the proposer that the settings ask for, and gives the engine a speculator.

    source -> proposer -> Speculator with fixed lengths for the warm-up -> cost curve -> Controller

``load_engine`` calls it. If a proposer cannot be loaded, the engine serves without speculation.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch

from engine.batching.attention_metadata import AttentionMetadata, PackedBatch, decode_groups
from engine.execution.engine import Engine
from engine.ipc.counters import SpeculationStatus
from engine.ipc.settings import SpeculationSettings
from engine.scheduling.draft_pages import MAX_DRAFT_NODES
from engine.speculation.control.controller import Controller
from engine.speculation.control.draft_lengths import FixedDraftLength
from engine.speculation.control.latency_curve import LatencyCurve, calibrate
from engine.speculation.control.speculator import Speculator
from engine.speculation.control.step_costs import StepCostModel
from engine.speculation.draft_source import DraftSource, resolve_draft_source
from engine.speculation.proposers.draft_model import load_draft
from engine.speculation.proposers.eagle import EagleProposer
from engine.speculation.proposers.medusa import MedusaProposer
from engine.speculation.proposers.ngram import NgramProposer
from engine.speculation.proposers.proposer import Proposer
from protocol.block_keys import BLOCK_TOKENS

log = logging.getLogger("baton.engine")


def load_speculation(
    settings: SpeculationSettings, engine: Engine, target: Path
) -> SpeculationStatus:
    """Let ``engine``, whose model lies in the folder ``target``, draft tokens with fixed lengths.
    Return the status: an error is logged and reported there instead of being raised."""
    try:
        found = resolve_draft_source(settings)
        if found is None:
            return SpeculationStatus()
        proposer = load_proposer(found, engine, settings.max_tokens, target)
    except Exception as error:  # no error of a draft may stop the target model
        log.warning("speculation is off: %s", error)
        return SpeculationStatus(dropped=str(error) or type(error).__name__)
    lengths = FixedDraftLength(proposer.most)
    engine.speculate(Speculator(proposer, lengths, engine.model.config.vocab_size))
    return SpeculationStatus(proposer.name)


def load_proposer(found: DraftSource, engine: Engine, most: int, target: Path) -> Proposer:
    """Return a proposer of at most ``most`` nodes per sequence; ``target`` is the folder of the
    engine's model. Raise StartupError if it cannot be loaded or does not fit the model."""
    model, state, pages = engine.model, engine.state, engine.config.pages
    if found.folder is None:
        return NgramProposer(most)
    if found.method == "medusa":
        return MedusaProposer(model, state, found.folder, most)
    if found.method == "eagle":
        return EagleProposer(model, state, found.folder, pages, most)
    # Without both tokenizers, only the vocabulary sizes are compared.
    both = all((folder / "tokenizer.json").is_file() for folder in (found.folder, target))
    compared = target if both else None
    return load_draft(found.folder, model, state, pages=pages, most=most, target_folder=compared)


def start_controller(engine: Engine, clock: Callable[[], float] = time.perf_counter) -> None:
    """Measure the cost of passes, and let a Controller choose the draft lengths from now on. The
    engine must be idle; this takes about a second."""
    speculator = engine.speculator
    assert speculator is not None

    def controller(proposer: Proposer) -> Controller:
        config, most = engine.config, proposer.most
        rows = config.max_batch + min(
            config.max_batch * most, MAX_DRAFT_NODES, config.prefill_chunk
        )
        curve = calibrate(dummy_pass(engine), rows, clock)
        return Controller(step_costs(engine, curve), most, proposer.passes)

    speculator.use_policy(controller)


def step_costs(engine: Engine, curve: LatencyCurve) -> StepCostModel:
    """Return the costs of the steps of ``engine``, whose passes take as long as ``curve`` says."""
    return StepCostModel(curve, lambda: engine.step_time.known, engine.rows_computed)


def dummy_pass(engine: Engine) -> Callable[[int], None]:
    """Return a function that runs the model over the given number of rows. It overwrites the KV of
    the first pages, so no sequence may run and no block may be cached."""
    model, pool, device = engine.model, engine.pool, engine.model.device
    slots = engine.config.pages * BLOCK_TOKENS

    @torch.inference_mode()
    def run(rows: int) -> None:
        if engine.run_empty_graph(rows):
            torch.cuda.synchronize()
            return
        zeros = torch.zeros(rows, dtype=torch.int64, device=device)
        table, lengths = zeros[:, None], zeros + 1
        attention = {
            window: AttentionMetadata(rows, decode_groups(table, lengths, window, model.dtype), ())
            for window in set(model.config.windows)
        }
        at = torch.arange(rows, device=device) % slots
        hidden = model.hidden(PackedBatch(zeros, zeros, at, attention, None), pool)
        model.logits(hidden).argmax(-1).tolist()  # waits for a GPU

    return run
