"""The options of `baton plan`, as types that Typer reads; defaults stand at the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from typer import Option

# ---- the cluster ---------------------------------------------------------------------------

Model: TypeAlias = Annotated[
    str | None, Option(help="A known name, a folder, a hub id, or params=8e9,layers=...")
]
Gpu: TypeAlias = Annotated[
    str | None,
    Option(help="Of both pools: H100, or TFLOPS,GB/s,GiB; with its price H100@2.50."),
]
PrefillGpu: TypeAlias = Annotated[str | None, Option(help="Of the prefill pool.")]
DecodeGpu: TypeAlias = Annotated[str | None, Option(help="Of the decode pool.")]
KvPrecision: TypeAlias = Annotated[Literal["fp8", "exact"], Option(help="As of `baton up`.")]
PrefillChunk: TypeAlias = Annotated[int, Option(min=32, help="Prompt tokens in a step.")]
MaxBatch: TypeAlias = Annotated[int, Option(min=1, max=65536, help="Sequences in a step.")]
LinkGbPerS: TypeAlias = Annotated[
    float | None, Option(help="Of each worker's network; without it the GPU's NIC.")
]
Acceptance: TypeAlias = Annotated[
    float | None,
    Option(min=0.0, max=0.99, help="Of drafted tokens; without it none are drafted."),
]
DraftCost: TypeAlias = Annotated[
    float, Option(min=0.0, max=1.0, help="Of a draft pass, in steps; n-grams: 0.")
]
ComputeEfficiency: TypeAlias = Annotated[
    float, Option(min=0.01, max=1.0, help="Share of the GPU's FLOPs that steps reach.")
]
BandwidthEfficiency: TypeAlias = Annotated[
    float, Option(min=0.01, max=1.0, help="Share of its bandwidth.")
]
OverheadMs: TypeAlias = Annotated[
    float, Option(min=0.0, max=1000.0, help="Of a step, beside both.")
]

# ---- the load, and how well it is to be served ---------------------------------------------

Rate: TypeAlias = Annotated[
    float | None, Option(help="Requests a second; with --trace instead of its own.")
]
Prompt: TypeAlias = Annotated[
    str | None,
    Option(help="Tokens: N, MEAN/P90, uniform:LOW-HIGH, lognormal:MEAN,SIGMA[,MAX]."),
]
Output: TypeAlias = Annotated[str | None, Option(help="Tokens of answers, likewise.")]
Trace: TypeAlias = Annotated[
    Path | None, Option(help="Requests: Mooncake's JSON lines, or Azure's .csv.")
]
Scale: TypeAlias = Annotated[float, Option(help="Of the trace's rate.")]
Shared: TypeAlias = Annotated[
    float | None,
    Option(
        min=0.0,
        max=0.99,
        help="Share of the prompts' tokens that is cached; a trace with blocks has its own.",
    ),
]
TtftMs: TypeAlias = Annotated[float, Option(help="Objective: ms to the first token.")]
TpotMs: TypeAlias = Annotated[float, Option(help="Objective: ms for each further token.")]

# ---- what comes out ------------------------------------------------------------------------

Html: TypeAlias = Annotated[Path | None, Option(help="Write a page with plots; it opens offline.")]
Scenario: TypeAlias = Annotated[
    Path | None, Option(help="Write it for `baton simulate`, as a YAML file.")
]
Json: TypeAlias = Annotated[bool, Option("--json", help="Print it as JSON.")]
