"""`baton plan`: what it takes, and what would pay. What is heavy is imported when it is called.

options --> Asked --> Plan --> page, scenario --> tables or JSON
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from cluster.commands import plan_options as of
from cluster.commands.failing import failure
from cluster.commands.plan_speculation import speculation

if TYPE_CHECKING:
    from cluster.plan.asked import Asked
    from cluster.plan.report import Plan

app = typer.Typer(no_args_is_help=True, help="How many workers of which kind, and what binds them.")
app.command()(speculation)

_OUT = ("html", "scenario", "json")
"""Options that are not of what is asked."""


@app.callback(invoke_without_command=True)
def plan(
    ctx: typer.Context,
    model: of.Model = None,
    gpu: of.Gpu = None,
    prefill_gpu: of.PrefillGpu = None,
    decode_gpu: of.DecodeGpu = None,
    rate: of.Rate = None,
    prompt: of.Prompt = None,
    output: of.Output = None,
    trace: of.Trace = None,
    scale: of.Scale = 1.0,
    shared: of.Shared = None,
    ttft_ms: of.TtftMs = 2000.0,
    tpot_ms: of.TpotMs = 100.0,
    kv_precision: of.KvPrecision = "fp8",
    prefill_chunk: of.PrefillChunk = 512,
    max_batch: of.MaxBatch = 64,
    link_gb_per_s: of.LinkGbPerS = None,
    acceptance: of.Acceptance = None,
    draft_cost: of.DraftCost = 0.0,
    compute_efficiency: of.ComputeEfficiency = 0.5,
    bandwidth_efficiency: of.BandwidthEfficiency = 0.7,
    overhead_ms: of.OverheadMs = 1.0,
    html: of.Html = None,
    scenario: of.Scenario = None,
    json: of.Json = False,
) -> None:
    """How many prefill and decode workers a load needs, which wall binds each pool, what relaxes
    it, and what tokens cost: the autoscaler's own policy, on GPUs that you need not have.

    baton plan --model Llama-3-8B --gpu H100 --rate 40 --prompt 2000/4000 --output 300
    """
    if ctx.invoked_subcommand is not None:
        _refuse_options(ctx)
        return
    from cluster.plan import report
    from protocol.errors import StartupError

    try:
        asked = _asked(ctx)
        found = report.plan(asked.wanted())
        _write(asked, found, html, scenario)
    except StartupError as e:
        raise failure(e) from None
    _tell(found, html, as_json=json)


def _asked(ctx: typer.Context) -> Asked:
    from cluster.plan.asked import Asked

    return Asked(**{name: value for name, value in ctx.params.items() if name not in _OUT})


def _write(asked: Asked, found: Plan, html: Path | None, scenario: Path | None) -> None:
    """Files, where they are wanted. Raises StartupError."""
    if html is not None:
        from cluster.plan.plan_page import write_page

        write_page(html, found)
    if scenario is not None:
        from cluster.plan.scenario import write_scenario

        write_scenario(scenario, asked, found)


def _tell(found: Plan, html: Path | None, *, as_json: bool) -> None:
    """Ends with 1 where an objective cannot be met."""
    from cluster.plan.tables import warnings

    told = warnings(found)
    if as_json:
        _print_json(found)
        if told:
            typer.echo("\n".join(f"baton: {line}" for line in told), err=True)
    else:
        _print_tables(found)
        if html is not None:
            typer.echo(f"page: {html}")
    if told:
        raise typer.Exit(1)


def _print_json(found: Plan) -> None:
    import msgspec

    from cluster.plan.report import as_json

    out: dict[str, Any] = as_json(found)
    typer.echo(msgspec.json.format(msgspec.json.encode(out), indent=2).decode())


def _print_tables(found: Plan) -> None:
    from rich.console import Console

    from cluster.plan.terminal import show

    show(Console(highlight=False), found)


def _refuse_options(ctx: typer.Context) -> None:
    """They would be ignored."""
    given = [
        name.replace("_", "-")
        for name in ctx.params
        if (source := ctx.get_parameter_source(name)) and source.name == "COMMANDLINE"
    ]
    if given:
        where = f"baton plan {ctx.invoked_subcommand}"
        raise failure(Exception(f"--{given[0]} is of `baton plan`; options go behind `{where}`"))
