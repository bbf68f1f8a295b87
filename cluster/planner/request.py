"""From what was asked on the command line to what a plan is for."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from cluster.planner import model_shape
from cluster.planner.gpus import Gpu, gpu
from cluster.planner.pools import Wanted
from cluster.planner.roofline import Drafting, Efficiency
from cluster.planner.workload import FORMS, Workload, length, stated, traced
from cluster.sizing.snapshot import Goals
from cluster.workloads.lengths import Share
from cluster.workloads.traces import read_trace
from engine.kv_cache.kv_format import Precision
from protocol.errors import StartupError
from protocol.roles import Role

_MOST = 1e9


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `baton plan`, as they were given."""

    model: str | None = None
    gpu: str | None = None
    prefill_gpu: str | None = None
    decode_gpu: str | None = None
    rate: float | None = None
    prompt: str | None = None
    output: str | None = None
    trace: Path | None = None
    scale: float = 1.0
    shared: float | None = None
    ttft_ms: float = 2000.0
    tpot_ms: float = 100.0
    kv_precision: Precision = "fp8"
    prefill_chunk: int = 512
    max_batch: int = 64
    link_gb_per_s: float | None = None
    acceptance: float | None = None
    draft_cost: float = 0.0
    compute_efficiency: float = 0.5
    bandwidth_efficiency: float = 0.7
    overhead_ms: float = 1.0

    def wanted(self) -> Wanted:
        """Raises StartupError, which names the option that cannot be."""
        if self.model is None:
            known = ", ".join(model_shape.known())
            raise StartupError(
                f"--model is missing: one of {known}, a folder, or {model_shape.FORM}"
            )
        for name in ("rate", "scale", "ttft_ms", "tpot_ms", "link_gb_per_s"):
            _check(name, getattr(self, name))
        link = self.link_gb_per_s
        return Wanted(
            shape=model_shape.shape(self.model, self.kv_precision),
            workload=self._workload(),
            goals=Goals(ttft_s=self.ttft_ms / 1e3, tpot_s=self.tpot_ms / 1e3),
            gpus=self._gpus(),
            chunk=self.prefill_chunk,
            max_batch=self.max_batch,
            efficiency=Efficiency(
                compute=self.compute_efficiency,
                bandwidth=self.bandwidth_efficiency,
                overhead_s=self.overhead_ms / 1e3,
            ),
            link_bytes_s=None if link is None else link * 1e9,
            drafting=self._drafting(),
        )

    def _gpus(self) -> dict[Role, Gpu]:
        found: dict[Role, Gpu] = {}
        own: tuple[tuple[Role, str | None], ...] = (
            ("prefill", self.prefill_gpu),
            ("decode", self.decode_gpu),
        )
        for role, text in own:
            if text is not None:
                found[role] = gpu(text, f"--{role}-gpu")
            elif self.gpu is not None:
                found[role] = gpu(self.gpu)
            else:
                raise StartupError(f"--gpu is missing (or --{role}-gpu): of the {role} pool")
        return found

    def _workload(self) -> Workload:
        if self.trace is not None:
            if self.prompt is not None or self.output is not None:
                raise StartupError("--trace has lengths of its own: leave --prompt and --output")
            lines = read_trace(self.trace)
            return traced(lines, self.trace.name, self.rate, self.scale, self.shared)
        given = (("rate", self.rate), ("prompt", self.prompt), ("output", self.output))
        lacking = [f"--{name}" for name, value in given if value is None]
        if lacking:
            raise StartupError(f"{', '.join(lacking)} missing (or --trace); lengths: {FORMS}")
        assert self.rate is not None and self.prompt is not None and self.output is not None
        share = Share(1.0, length(self.prompt, "--prompt"), length(self.output, "--output"))
        return stated((share,), self.rate * self.scale, self.shared or 0.0)

    def _drafting(self) -> Drafting | None:
        if self.acceptance is None:
            return None
        return Drafting(acceptance=self.acceptance, cost=self.draft_cost)


def _check(name: str, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and 0 < value < _MOST):
        option = name.replace("_", "-")
        raise StartupError(f"--{option}: expected a number above 0, not {value:g}")
