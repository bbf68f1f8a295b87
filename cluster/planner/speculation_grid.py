"""What speculation is worth on a machine: the controller's own choice, batch by batch.

Pure; torch-free. For one sequence whose draft costs a share c of a step, it is the formula of
engine/speculation/control/draft_choice.py; for batches the cost of verifying is what was measured.
"""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch

from decode_worker.policy import plan
from engine.execution.loading import load, passes_of
from engine.ipc.spec import EngineSpec
from engine.scheduling.sequence import MOST_NODES
from engine.speculation.control.controller import MARGIN
from engine.speculation.control.draft_choice import Curve, Prices, calibrate, choose
from engine.speculation.draft_source import kind_of
from protocol.errors import StartupError

ACCEPTANCES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class DraftMachine:
    """Seconds of a pass by its rows: of the model, and of its draft (None: drafts for nothing)."""

    model: Curve
    draft: Curve | None
    where: str = ""  # processor, threads and type that they were measured with


class Cell(msgspec.Struct, frozen=True):
    """One batch at one acceptance: what the controller would settle on."""

    batch: int
    acceptance: float
    nodes: float  # for each sequence, on average; 0: nothing pays
    tokens: float  # of a step, for each sequence
    plain_ms: float  # of a step without
    verify_ms: float  # of the model's pass
    draft_ms: float
    speedup: float


def cell(machine: DraftMachine, batch: int, acceptance: float, most: int) -> Cell:
    """With chains of at most ``most`` tokens for each sequence, and of what a step takes."""
    most = min(most, max(1, MOST_NODES // batch))
    gains = np.tile(acceptance ** np.arange(1.0, most + 1.0), (batch, 1))
    a_pass = 0.0 if machine.draft is None else machine.draft(batch)
    verify = machine.model.span(batch, batch * (1 + most))
    plain = float(verify[0])
    passes = np.arange(most + 1)
    choice = choose(gains, np.ones_like(gains), Prices(plain, verify, passes, a_pass))
    if choice.speedup < 1.0 + MARGIN:
        return Cell(batch, acceptance, 0.0, 1.0, plain * 1e3, plain * 1e3, 0.0, 1.0)
    nodes, longest = sum(choice.counts), max(choice.counts)
    return Cell(
        batch,
        acceptance,
        nodes / batch,
        choice.tokens / batch,
        plain * 1e3,
        float(verify[nodes]) * 1e3,
        a_pass * longest * 1e3,
        choice.speedup,
    )


def grid(
    machine: DraftMachine, batches: Sequence[int], acceptances: Sequence[float], most: int
) -> list[Cell]:
    """All of them, batch by batch."""
    return [cell(machine, b, a, most) for b in batches for a in acceptances]


def break_even(machine: DraftMachine, acceptance: float, most: int, largest: int) -> int:
    """The last batch, up to ``largest``, of those from 1 on that speculation pays at without a gap;
    0: it does not pay for one sequence. It may pay at some larger ones, too: where rows are padded,
    a batch just above a step of the curve verifies for nothing."""
    gaps = (b for b in range(1, largest + 1) if not cell(machine, b, acceptance, most).nodes)
    return next(gaps, largest + 1) - 1


# MERGED cluster.plan.measure
# Seconds of passes on this machine: a model is loaded, run for a second or two, and let go.

Progress = Callable[[str], None]

KV_TOKENS = 8192


def measured(
    model: Path, draft: Path | None, rows: int, batch: int, threads: int | None, progress: Progress
) -> DraftMachine:
    """The model with up to ``rows`` rows, and its draft with up to ``batch``. Raises StartupError
    for what cannot be loaded."""
    if draft is not None and (kind := kind_of(draft)) != "draft":
        raise StartupError(
            f"{draft} holds {kind} heads; only draft models are measured (heads take next to"
            " nothing beside their model: leave --draft away for a bound from above)"
        )
    of_model, where = _curve(model, rows, threads, progress)
    of_draft = None if draft is None else _curve(draft, batch, threads, progress)[0]
    return DraftMachine(of_model, of_draft, where)


def _curve(folder: Path, rows: int, threads: int | None, progress: Progress) -> tuple[Curve, str]:
    """And what it was measured with."""
    spec = EngineSpec(
        model_path=str(folder),
        role="decode",
        threads=threads,
        kv_tokens=KV_TOKENS,
        max_batch=64,
        chunk=64,
        max_model_len=1024,
        kv_precision="exact",
    )
    engine = load(spec, plan, lambda what, _share: progress(f"{folder.name}: {what}")).engine
    progress(f"{folder.name}: measuring passes")
    curve = calibrate(passes_of(engine), rows, time.perf_counter, budget_s=2.0)
    return curve, _where(engine.model.device, engine.model.dtype)


def _where(device: torch.device, dtype: torch.dtype) -> str:
    kind = str(dtype).removeprefix("torch.")
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {kind}"
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} thread{'s' * (threads > 1)}, {kind}"


def _processor() -> str:
    """Its name where Linux tells it, else its architecture."""
    try:
        told = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        told = None
    return told[1] if told else platform.machine()
