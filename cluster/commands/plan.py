"""`baton plan`: what it takes, and what would pay. What is heavy is imported when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cluster.commands.failing import failure
from cluster.commands.plan_speculation import speculation

if TYPE_CHECKING:
    from cluster.plan.asked import Asked

app = typer.Typer(no_args_is_help=True, help="How many workers of which kind, and what binds them.")
app.command()(speculation)


@app.callback(invoke_without_command=True)
def plan(
    ctx: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="A known name, a folder, a hub id, or params=8e9,layers=...")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="Of both pools: H100, or TFLOPS,GB/s,GiB; with its price H100@2.50."),
    ] = None,
    prefill_gpu: Annotated[str | None, typer.Option(help="Of the prefill pool.")] = None,
    decode_gpu: Annotated[str | None, typer.Option(help="Of the decode pool.")] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests a second; with --trace instead of its own.")
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(help="Tokens: N, MEAN/P90, uniform:LOW-HIGH, lognormal:MEAN,SIGMA[,MAX]."),
    ] = None,
    output: Annotated[str | None, typer.Option(help="Tokens of answers, likewise.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Requests: Mooncake's JSON lines, or Azure's .csv.")
    ] = None,
    scale: Annotated[float, typer.Option(help="Of the trace's rate.")] = 1.0,
    shared: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=0.99,
            help="Share of the prompts' tokens that is cached; a trace with blocks has its own.",
        ),
    ] = None,
    ttft_ms: Annotated[float, typer.Option(help="Objective: ms to the first token.")] = 2000.0,
    tpot_ms: Annotated[float, typer.Option(help="Objective: ms for each further token.")] = 100.0,
    kv_precision: Annotated[
        Literal["fp8", "exact"], typer.Option(help="As of `baton up`.")
    ] = "fp8",
    prefill_chunk: Annotated[int, typer.Option(min=32, help="Prompt tokens in a step.")] = 512,
    max_batch: Annotated[int, typer.Option(min=1, max=65536, help="Sequences in a step.")] = 64,
    link_gb_per_s: Annotated[
        float | None, typer.Option(help="Of each worker's network; without it the GPU's NIC.")
    ] = None,
    acceptance: Annotated[
        float | None,
        typer.Option(min=0.0, max=0.99, help="Of drafted tokens; without it none are drafted."),
    ] = None,
    draft_cost: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Of a draft pass, in steps; n-grams: 0.")
    ] = 0.0,
    compute_efficiency: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of the GPU's FLOPs that steps reach.")
    ] = 0.5,
    bandwidth_efficiency: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of its bandwidth.")
    ] = 0.7,
    overhead_ms: Annotated[
        float, typer.Option(min=0.0, max=1000.0, help="Of a step, beside both.")
    ] = 1.0,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with plots; it opens offline.")
    ] = None,
    scenario: Annotated[
        Path | None, typer.Option(help="Write it for `baton simulate`, as a YAML file.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """How many prefill and decode workers a load needs, which wall binds each pool, what relaxes
    it, and what tokens cost: the autoscaler's own policy, on GPUs that you need not have.

    baton plan --model Llama-3-8B --gpu H100 --rate 40 --prompt 2000/4000 --output 300
    """
    if ctx.invoked_subcommand is not None:
        _refuse_options(ctx)
        return
    from cluster.plan.asked import Asked
    from protocol.errors import StartupError

    out = ("html", "scenario", "json")
    given = {name: value for name, value in ctx.params.items() if name not in out}
    try:
        _plan(Asked(**given), html, scenario, as_json=json)
    except StartupError as e:
        raise failure(e) from None


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


def _plan(asked: Asked, html: Path | None, scenario: Path | None, *, as_json: bool) -> None:
    import msgspec
    from rich.console import Console

    from cluster.plan.report import as_json as figures
    from cluster.plan.report import plan as made
    from cluster.plan.tables import warnings
    from cluster.plan.terminal import show

    found = made(asked.wanted())
    if html is not None:
        from cluster.plan.plan_page import write_page

        write_page(html, found)
    if scenario is not None:
        from cluster.plan.scenario import write_scenario

        write_scenario(scenario, asked, found)
    if as_json:
        out: dict[str, Any] = figures(found)
        typer.echo(msgspec.json.format(msgspec.json.encode(out), indent=2).decode())
    else:
        show(Console(highlight=False), found)
        if html is not None:
            typer.echo(f"page: {html}")
    if told := warnings(found):
        if as_json:
            typer.echo("\n".join(f"baton: {line}" for line in told), err=True)
        raise typer.Exit(1)
