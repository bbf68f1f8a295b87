"""From settings to an engine that speculates; whatever cannot be had, it goes on without.

source -> proposer -> Speculator, at fixed lengths to warm up -> curve of costs -> Controller
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch

from engine.batch import Batch, View
from engine.core import Engine
from engine.counters import SpecFigures
from engine.draft_pages import MOST_NODES
from engine.reach import decode_groups
from engine.spec import SpeculationSpec
from engine.speculation.controller import Controller
from engine.speculation.costs import Costs
from engine.speculation.curve import calibrate
from engine.speculation.draft_model import load_draft
from engine.speculation.eagle import Eagle
from engine.speculation.lengths import FixedLength
from engine.speculation.medusa import Medusa
from engine.speculation.ngram import NGram
from engine.speculation.proposer import Proposer
from engine.speculation.source import Source, source
from engine.speculation.speculator import Speculator
from protocol.blocks import BLOCK_TOKENS

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
