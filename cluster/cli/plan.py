"""`baton plan`: computes the workers that a load needs and the techniques that would pay.

PlanOptions --> PlanRequest --> DeploymentPlan --> page, scenario --> tables or JSON
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer
from typer import Option

from cluster.cli.common import print_json, report_failure, write_file
from cluster.cli.help_format import HelpCommand, HelpGroup
from cluster.cli.plan_speculation import speculation
from protocol.errors import UsageError

if TYPE_CHECKING:
    from cluster.planner.plan import DeploymentPlan
    from cluster.planner.request import PlanOptions


# ---- the cluster ------------------------------------------------------------------------------

Model: TypeAlias = Annotated[
    str | None, Option(help="A known name, a folder, a hub id, or params=8e9,layers=...")
]
Gpu: TypeAlias = Annotated[
    str | None,
    Option(
        help="GPU of both pools: H100, or TFLOPS,GB/s,GiB and perhaps fp8=TFLOPS,nvlink=GB/s,"
        "link=GB/s after a comma; with a price: H100@2.50."
    ),
]
PrefillGpu: TypeAlias = Annotated[str | None, Option(help="GPU of the prefill pool.")]
DecodeGpu: TypeAlias = Annotated[str | None, Option(help="GPU of the decode pool.")]
KvPrecision: TypeAlias = Annotated[
    Literal["fp8", "exact"], Option(help="How KV is stored and sent, as for `baton up`.")
]
PrefillChunk: TypeAlias = Annotated[
    int | None,
    Option(min=32, help="Prompt tokens in a step; by default those of a worker on a GPU."),
]
MaxBatch: TypeAlias = Annotated[
    int | None,
    Option(min=1, max=65536, help="Sequences in a step; by default those of a worker on a GPU."),
]
LinkGbPerS: TypeAlias = Annotated[
    float | None, Option(help="Speed of each worker's network; by default that of the GPU's NIC.")
]
Acceptance: TypeAlias = Annotated[
    float | None,
    Option(min=0.0, max=0.99, help="Acceptance of drafted tokens; without it, none are drafted."),
]
Draft: TypeAlias = Annotated[
    str | None, Option(help="Draft model, given like --model; by default n-grams, at no cost.")
]
Weights: TypeAlias = Annotated[
    Literal["fp8", "bf16"], Option(help="Type of the weights, and of the products with them.")
]
TensorParallel: TypeAlias = Annotated[
    int, Option("--tp", min=1, max=64, help="GPUs of a worker (tensor parallelism).")
]
ComputeEfficiency: TypeAlias = Annotated[
    float | None,
    Option(min=0.01, max=1.0, help="Share of the GPU's peak FLOPS that matrix products reach."),
]
BandwidthEfficiency: TypeAlias = Annotated[
    float,
    Option(min=0.01, max=1.0, help="Share of the GPU's peak memory bandwidth that steps reach."),
]
OverheadMs: TypeAlias = Annotated[
    float,
    Option(
        min=0.0, max=1000.0, help="Overhead of a step in ms, in addition to computing and reading."
    ),
]

# ---- the load, and how well it is to be served ------------------------------------------------

Rate: TypeAlias = Annotated[
    float | None, Option(help="Requests per second; with --trace: instead of the trace's rate.")
]
Prompt: TypeAlias = Annotated[
    str | None,
    Option(help="Prompt lengths: N, MEAN/P90, uniform:LOW-HIGH, lognormal:MEAN,SIGMA[,MAX]."),
]
Output: TypeAlias = Annotated[str | None, Option(help="Lengths of answers, in the same forms.")]
Trace: TypeAlias = Annotated[
    Path | None, Option(help="File of requests: Mooncake's JSON lines, or Azure's .csv.")
]
Scale: TypeAlias = Annotated[float, Option(help="Factor of the trace's rate.")]
Shared: TypeAlias = Annotated[
    float | None,
    Option(
        min=0.0,
        max=0.99,
        help="Share of the prompts' tokens that is cached; a trace with blocks implies it.",
    ),
]
TtftMs: TypeAlias = Annotated[float, Option(help="Objective: ms to the first token.")]
TpotMs: TypeAlias = Annotated[float, Option(help="Objective: ms for each further token.")]

# ---- what comes out ---------------------------------------------------------------------------

Html: TypeAlias = Annotated[
    Path | None, Option(help="Write a page with plots, which needs no network.")
]
Scenario: TypeAlias = Annotated[Path | None, Option(help="Write a YAML file for `baton simulate`.")]
Json: TypeAlias = Annotated[bool, Option("--json", help="Print JSON.")]


app = typer.Typer(
    cls=HelpGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Compute how many workers of each kind a load needs, and what limits them.",
)
app.command(cls=HelpCommand)(speculation)

_OUTPUT_OPTIONS = ("html", "scenario", "json")
"""Options that say where the result goes, and are no part of the request."""


@app.callback(invoke_without_command=True)
def plan(
    ctx: typer.Context,
    model: Model = None,
    gpu: Gpu = None,
    prefill_gpu: PrefillGpu = None,
    decode_gpu: DecodeGpu = None,
    rate: Rate = None,
    prompt: Prompt = None,
    output: Output = None,
    trace: Trace = None,
    scale: Scale = 1.0,
    shared: Shared = None,
    ttft_ms: TtftMs = 2000.0,
    tpot_ms: TpotMs = 100.0,
    kv_precision: KvPrecision = "fp8",
    prefill_chunk: PrefillChunk = None,
    max_batch: MaxBatch = None,
    link_gb_per_s: LinkGbPerS = None,
    acceptance: Acceptance = None,
    draft: Draft = None,
    weights: Weights = "bf16",
    tp: TensorParallel = 1,
    compute_efficiency: ComputeEfficiency = None,
    bandwidth_efficiency: BandwidthEfficiency = 0.9,
    overhead_ms: OverheadMs = 2.0,
    html: Html = None,
    scenario: Scenario = None,
    json: Json = False,
) -> None:
    """Compute how many prefill and decode workers a load needs, which wall limits each pool, what
    relaxes it, and what tokens cost: the autoscaler's own policy, on GPUs that you need not have.

    baton plan --model Llama-3-8B --gpu H100 --rate 40 --prompt 2000/4000 --output 300
    """
    if ctx.invoked_subcommand is not None:
        _refuse_options(ctx)
        return
    from cluster.planner import plan as report
    from protocol.errors import StartupError

    try:
        options = _plan_options(ctx)
        found = report.make_plan(options.plan_request())
        _write_files(options, found, html, scenario)
    except StartupError as e:
        raise report_failure(e) from None
    _print_result(found, html, as_json=json)


def _plan_options(ctx: typer.Context) -> PlanOptions:
    from cluster.planner.request import PlanOptions

    request = {name: value for name, value in ctx.params.items() if name not in _OUTPUT_OPTIONS}
    return PlanOptions(**request)


def _write_files(
    options: PlanOptions, found: DeploymentPlan, html: Path | None, scenario: Path | None
) -> None:
    """Write the files that the options ask for. Raises StartupError."""
    if html is not None:
        from cluster.planner.page import render_page

        write_file(html, render_page(found))
    if scenario is not None:
        from cluster.planner.plan import plan_scenario

        write_file(scenario, plan_scenario(options, found))


def _print_result(found: DeploymentPlan, html: Path | None, *, as_json: bool) -> None:
    """Print the plan; exit with status 1 when an objective cannot be met."""
    from cluster.planner.tables import slo_warnings

    warnings = slo_warnings(found)
    if as_json:
        from cluster.planner.plan import plan_as_json

        print_json(plan_as_json(found))
        if warnings:
            typer.echo("\n".join(f"baton: {line}" for line in warnings), err=True)
    else:
        from rich.console import Console

        from cluster.planner.tables import print_plan

        print_plan(Console(highlight=False), found)
        if html is not None:
            typer.echo(f"page: {html}")
    if warnings:
        raise typer.Exit(1)


def _refuse_options(ctx: typer.Context) -> None:
    """Fail for options of `baton plan` before a subcommand, which would ignore them."""
    given = [
        name.replace("_", "-")
        for name in ctx.params
        if (source := ctx.get_parameter_source(name)) and source.name == "COMMANDLINE"
    ]
    if given:
        where = f"baton plan {ctx.invoked_subcommand}"
        raise report_failure(
            UsageError(
                f"--{given[0]} is an option of `baton plan`; put the options of `{where}`"
                " after its name"
            )
        )
