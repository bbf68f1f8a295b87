"""Seconds of passes on this machine: a model is loaded, run for a second or two, and let go."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch

from cluster.plan.speculation import DraftMachine
from decode_worker.policy import plan
from engine.loading import load
from engine.spec import EngineSpec
from engine.speculation.curve import Curve, calibrate
from engine.speculation.heads_layout import kind_of
from engine.speculation.loading import passes_of
from protocol.errors import StartupError

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
