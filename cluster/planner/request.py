"""Turns the command-line options of `baton plan` into a plan request."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import msgspec

from cluster.planner import model_shape
from cluster.planner.gpus import GpuSpec, find_gpu
from cluster.planner.model_shape import ModelShape
from cluster.planner.pools import PlanRequest
from cluster.planner.roofline import ASSUMED, DraftingOptions, Efficiency
from cluster.planner.workload import (
    FORMS,
    Workload,
    parse_workload_length,
    stated_workload,
    traced_workload,
)
from cluster.sizing.snapshot import SloTargets
from cluster.workloads.traces import read_trace
from engine.kv_cache.kv_format import Precision
from protocol.errors import UsageError
from protocol.roles import Role

_MAX = 1e9
EXAMPLE = "baton plan --model Llama-3-8B --gpu H100 --rate 40 --prompt 2000/4000 --output 300"


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
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
    prefill_chunk: int | None = None
    max_batch: int | None = None
    link_gb_per_s: float | None = None
    acceptance: float | None = None
    draft: str | None = None
    weights: Literal["fp8", "bf16"] = "bf16"
    tp: int = 1
    compute_efficiency: float | None = None
    bandwidth_efficiency: float = ASSUMED.bandwidth
    overhead_ms: float = ASSUMED.overhead_s * 1e3

    def plan_request(self) -> PlanRequest:
        """Return the request. Raises StartupError, which names the wrong option."""
        model = self._check_given()
        for name in ("rate", "scale", "ttft_ms", "tpot_ms", "link_gb_per_s"):
            _check_positive(name, getattr(self, name))
        link = self.link_gb_per_s
        return PlanRequest(
            shape=self._find_model(model),
            workload=self._parse_workload(),
            goals=SloTargets(ttft_s=self.ttft_ms / 1e3, tpot_s=self.tpot_ms / 1e3),
            gpus=self._find_gpus(),
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

    def _check_given(self) -> str:
        """Return the model. Raises UsageError, which names all options that are missing."""
        missing = []
        if self.model is None:
            known = ", ".join(model_shape.known_models())
            missing.append(f"--model: one of {known}, a folder, or {model_shape.FORM}")
        if self.gpu is None and (self.prefill_gpu is None or self.decode_gpu is None):
            missing.append("--gpu, or --prefill-gpu and --decode-gpu")
        given = (("rate", self.rate), ("prompt", self.prompt), ("output", self.output))
        lacking = [f"--{name}" for name, value in given if value is None]
        if lacking and self.trace is None:
            missing.append(f"{', '.join(lacking)} (or --trace); lengths: {FORMS}")
        if self.model is None or missing:
            raise UsageError("\n  ".join(["missing:", *missing, f"for example: {EXAMPLE}"]))
        return self.model

    def _find_model(self, name: str) -> ModelShape:
        weight_bytes = 1 if self.weights == "fp8" else 2
        return model_shape.find_model(name, self.kv_precision, weight_bytes)

    def _find_gpus(self) -> dict[Role, GpuSpec]:
        own: dict[Role, str | None] = {"prefill": self.prefill_gpu, "decode": self.decode_gpu}
        found: dict[Role, GpuSpec] = {}
        for role, text in own.items():
            gpu, option = (self.gpu, "--gpu") if text is None else (text, f"--{role}-gpu")
            assert gpu is not None  # _check_given
            found[role] = find_gpu(gpu, option).group(self.tp)
        return found

    def _parse_workload(self) -> Workload:
        if self.trace is not None:
            if self.prompt is not None or self.output is not None:
                raise UsageError("--trace already has lengths: leave out --prompt and --output")
            lines = read_trace(self.trace)
            return traced_workload(lines, self.trace.name, self.rate, self.scale, self.shared)
        assert self.rate is not None and self.prompt is not None and self.output is not None
        prompt = parse_workload_length(self.prompt, "--prompt")
        output = parse_workload_length(self.output, "--output")
        return stated_workload(prompt, output, self.rate * self.scale, self.shared or 0.0)

    def _drafting(self) -> DraftingOptions | None:
        if self.acceptance is None:
            if self.draft is not None:
                raise UsageError(
                    "--draft needs --acceptance, too: the share of drafted tokens that are accepted"
                )
            return None
        model = None if self.draft is None else self._find_model(self.draft)
        return DraftingOptions(acceptance=self.acceptance, model=model)


def _check_positive(name: str, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and 0 < value < _MAX):
        option = name.replace("_", "-")
        raise UsageError(f"--{option}: expected a number above 0, not {value:g}")
