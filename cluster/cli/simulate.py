"""`baton simulate`: a cluster on paper. What is heavy is imported when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.configured import failure

if TYPE_CHECKING:
    from cluster.simulator.scenario import Scenario
    from cluster.simulator.simulation import Simulated

DIFFERENT = 1


def simulate(
    scenario: Annotated[
        Path | None, typer.Argument(help="YAML file; without it a sample that comes along.")
    ] = None,
    values: Annotated[
        list[str] | None,
        typer.Option("--set", help="KEY=VALUE over the file's, as in pools.decode=4; repeatable."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Requests of a file, Mooncake's or (.csv) Azure's format.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with plots; it opens offline.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help="Write the autoscaler's decisions, JSON lines.")
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="Decide an autoscaler's log anew; exits with 1 if anything differs."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Play a workload through a cluster that is not there: the product's own choice of workers,
    admission and scaling, on devices made of coefficients.

    Keys of a scenario: docs/operations.md, "Simulating".
    """
    from protocol.errors import StartupError

    try:
        if replay is not None:
            _replay(replay)
        else:
            _simulate(scenario, values or [], trace, html, log, as_json=json)
    except StartupError as e:
        raise failure(e) from None


def _simulate(
    path: Path | None,
    values: list[str],
    trace: Path | None,
    html: Path | None,
    log: Path | None,
    *,
    as_json: bool,
) -> None:
    import msgspec
    from rich.console import Console

    from cluster.simulator.result import show
    from cluster.simulator.simulation import simulate as run

    of = _scenario(path, values, trace)
    with Console(stderr=True).status("simulating"):
        found = run(of, keep_records=html is not None or log is not None)
    if html is not None:
        from cluster.simulator.result_page import write_page

        write_page(html, found.result, found.jobs, found.records)
    if log is not None:
        _write_log(log, found)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found.result), indent=2).decode())
        return
    show(Console(highlight=False), found.result)
    for name, written in (("page", html), ("decisions", log)):
        if written is not None:
            typer.echo(f"{name}: {written}")


def _scenario(path: Path | None, values: list[str], trace: Path | None) -> Scenario:
    from cluster.simulator.scenario import given

    return given(path, values, trace)


def _write_log(path: Path, found: Simulated) -> None:
    from cluster.sizing.decision import to_line
    from protocol.errors import StartupError

    try:
        path.write_bytes(b"".join(to_line(record) + b"\n" for record in found.records))
    except OSError as e:
        raise StartupError(f"{path} cannot be written: {e.strerror}") from None


def _replay(path: Path) -> None:
    from cluster.simulator.replay import replay

    found = replay(path)
    typer.echo(f"{found.agreed} of {found.lines} decisions come out as they were recorded")
    for line, field, recorded, decided in found.first:
        typer.echo(f"line {line}: {field}: recorded {recorded}, decided {decided}")
    if found.damaged is not None:
        typer.echo(f"baton: {path}: {found.damaged}", err=True)
    if not found.exact:
        raise typer.Exit(DIFFERENT)
