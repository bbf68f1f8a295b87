"""What speculation gains on a machine, batch by batch, by the decode worker's own choice of drafts.

For one sequence whose draft costs a share c of a step, this is the formula of
``protocol/performance/draft_choice.py``; for batches the cost of verifying is measured: a
model is loaded and run for a few seconds.
"""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch

from engine.execution.loading import load_engine
from engine.execution.speculation_loading import dummy_pass
from engine.ipc.settings import EngineSettings, MachineCeilings, SpeculationSettings
from engine.scheduling.draft_pages import MAX_DRAFT_NODES
from engine.scheduling.step_policy import plan_decode_step
from engine.speculation.control.controller import MARGIN
from engine.speculation.control.latency_curve import LatencyCurve, calibrate
from engine.speculation.draft_source import detect_draft_kind
from protocol.errors import StartupError
from protocol.performance.draft_choice import BatchCosts, choose_draft_lengths

ACCEPTANCES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class PassTimes:
    """Seconds of a pass by its rows, of the model and of its draft model (None: drafts cost
    nothing)."""

    model: LatencyCurve
    draft: LatencyCurve | None
    where: str = ""  # processor, threads and data type of the measurement


class SpeculationCell(msgspec.Struct, frozen=True):
    """The controller's choice for one batch at one acceptance."""

    batch: int
    acceptance: float
    nodes: float  # drafted tokens of each sequence, on average; 0: drafts do not pay
    tokens: float  # output tokens of a step for each sequence
    plain_ms: float  # of a step without drafts
    verify_ms: float  # of the model's pass with drafts
    draft_ms: float
    speedup: float


def speculation_cell(
    machine: PassTimes, batch: int, acceptance: float, most: int
) -> SpeculationCell:
    """Return the choice with chains of at most ``most`` tokens for each sequence, within a step's
    limit."""
    most = min(most, max(1, MAX_DRAFT_NODES // batch))
    gains = np.tile(acceptance ** np.arange(1.0, most + 1.0), (batch, 1))
    a_pass = 0.0 if machine.draft is None else machine.draft(batch)
    verify = machine.model.span(batch, batch * (1 + most))
    plain = float(verify[0])
    passes = np.arange(most + 1)
    choice = choose_draft_lengths(
        gains, np.ones_like(gains), BatchCosts(plain, verify, passes, a_pass)
    )
    if choice.speedup < 1.0 + MARGIN:
        return SpeculationCell(batch, acceptance, 0.0, 1.0, plain * 1e3, plain * 1e3, 0.0, 1.0)
    nodes, longest = sum(choice.counts), max(choice.counts)
    return SpeculationCell(
        batch,
        acceptance,
        nodes / batch,
        choice.tokens / batch,
        plain * 1e3,
        float(verify[nodes]) * 1e3,
        a_pass * longest * 1e3,
        choice.speedup,
    )


def break_even_batch(machine: PassTimes, acceptance: float, most: int, largest: int) -> int:
    """Return the last batch, up to ``largest``, of those from 1 on at which speculation pays
    without a gap; 0: it does not pay for one sequence. It may pay at some larger ones, too: where
    rows are padded, a batch just above a step of the curve verifies at no cost."""
    gaps = (
        b for b in range(1, largest + 1) if not speculation_cell(machine, b, acceptance, most).nodes
    )
    return next(gaps, largest + 1) - 1


Progress = Callable[[str], None]

KV_TOKENS = 8192


def measure_passes(
    model: Path, draft: Path | None, rows: int, batch: int, threads: int | None, progress: Progress
) -> PassTimes:
    """Measure the model with up to ``rows`` rows, and its draft model with up to ``batch``. Raises
    StartupError for what cannot be loaded."""
    if draft is not None and (kind := detect_draft_kind(draft)) != "draft":
        raise StartupError(
            f"{draft} holds {kind} heads; only draft models are measured (heads cost little"
            " compared with their model: leave out --draft for an upper bound)"
        )
    model_curve, where = _curve(model, rows, threads, progress)
    draft_curve = None if draft is None else _curve(draft, batch, threads, progress)[0]
    return PassTimes(model_curve, draft_curve, where)


def _curve(
    folder: Path, rows: int, threads: int | None, progress: Progress
) -> tuple[LatencyCurve, str]:
    """Return the curve of a model and a description of the machine."""
    spec = EngineSettings(
        model_path=str(folder),
        role="decode",
        dtype=None,
        device=None,
        threads=threads,
        gpu_share=None,
        kv_tokens=KV_TOKENS,
        max_batch=64,
        prefill_chunk=64,
        max_model_len=1024,
        step_budget_ms=None,
        ttft_slo_s=None,
        tpot_slo_s=None,
        kv_precision="exact",
        batch_invariant=False,
        speculation=SpeculationSettings(method="off", model_path=None, max_tokens=1),
        ceilings=MachineCeilings(),
    )
    engine = load_engine(
        spec, plan_decode_step, lambda what, _share: progress(f"{folder.name}: {what}")
    ).engine
    progress(f"{folder.name}: measuring passes")
    curve = calibrate(dummy_pass(engine), rows, time.perf_counter, budget_s=2.0)
    return curve, _where(engine.model.device, engine.model.dtype)


def _where(device: torch.device, dtype: torch.dtype) -> str:
    kind = str(dtype).removeprefix("torch.")
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {kind}"
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} thread{'s' * (threads > 1)}, {kind}"


def _processor() -> str:
    """Return the processor's name on Linux, else its architecture."""
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.machine()
