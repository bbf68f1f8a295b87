"""`baton simulate`: plays a workload through a simulated cluster, or replays a decision log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.common import print_json, report_failure, write_file

EXIT_DIFFERENT = 1


def simulate(
    scenario: Annotated[Path | None, typer.Argument(help="YAML file; by default a sample.")] = None,
    values: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Override a key of the file, as in pools.decode=4; may be repeated."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Replay the requests of this file, in Mooncake's or (.csv) Azure's format."
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with plots, which needs no network.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help="Write the autoscaler's decisions as JSON lines.")
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            help="Repeat the decisions of an autoscaler's log; exits with 1 if any differs."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Simulate a workload on a cluster: the product's own choice of workers,
    admission and scaling, on devices that are modelled by coefficients.

    Keys of a scenario: docs/operations.md, "Simulating".
    """
    from protocol.errors import StartupError

    try:
        if replay is not None:
            _replay(replay)
        else:
            _simulate(scenario, values or [], trace, html, log, as_json=json)
    except StartupError as e:
        raise report_failure(e) from None


def _simulate(
    path: Path | None,
    values: list[str],
    trace: Path | None,
    html: Path | None,
    log: Path | None,
    *,
    as_json: bool,
) -> None:
    from rich.console import Console

    from cluster.simulator.result import print_result
    from cluster.simulator.scenario import load_scenario
    from cluster.simulator.simulation import simulate as run_simulation

    scenario = load_scenario(path, values, trace)
    with Console(stderr=True).status("simulating"):
        found = run_simulation(scenario, keep_records=html is not None or log is not None)
    if html is not None:
        from cluster.simulator.result_page import render_page

        write_file(html, render_page(found.result, found.requests, found.records))
    if log is not None:
        from cluster.sizing.decision import encode_record

        write_file(log, b"".join(encode_record(record) + b"\n" for record in found.records))
    if as_json:
        print_json(found.result)
        return
    print_result(Console(highlight=False), found.result)
    for name, written in (("page", html), ("decisions", log)):
        if written is not None:
            typer.echo(f"{name}: {written}")


def _replay(path: Path) -> None:
    from cluster.simulator.replay import replay

    found = replay(path)
    typer.echo(f"{found.agreed} of {found.lines} decisions are the same as recorded")
    for line, field, recorded, decided in found.first:
        typer.echo(f"line {line}: {field}: recorded {recorded}, decided {decided}")
    if found.damaged is not None:
        typer.echo(f"baton: {path}: {found.damaged}", err=True)
    if not found.exact:
        raise typer.Exit(EXIT_DIFFERENT)
