"""`baton plan speculation`. What is heavy is imported when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.configured import failure

if TYPE_CHECKING:
    from cluster.planner.speculation_grid import DraftMachine

PASSES = 8


def speculation(
    model: Annotated[
        str | None, typer.Option(help="Folder or hub id; without it the demo model.")
    ] = None,
    draft: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a draft model; without it drafts cost nothing (n-grams), but the demo"
            " model has its own.",
        ),
    ] = None,
    acceptance: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=0.999,
            help="Of a drafted token, for the table of what a step comes to. `baton status` shows"
            " that of a running cluster.",
        ),
    ] = 0.7,
    tokens: Annotated[
        int, typer.Option(min=1, max=16, help="Most that are drafted for a sequence in a step.")
    ] = PASSES,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of the model on a CPU; without it half of the cores.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with plots; it opens offline.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Up to which batch speculation pays, and how much it brings, for acceptances from 0.3 to 0.9.

    Loads the model and its draft here, measures their passes for a few seconds, and asks the code
    that decides the lengths of drafts in a decode worker.
    """
    from protocol.errors import StartupError

    try:
        _speculation(model, draft, acceptance, tokens, threads, html, as_json=json)
    except StartupError as e:
        raise failure(e) from None


def _speculation(
    model: str | None,
    draft: Path | None,
    acceptance: float,
    tokens: int,
    threads: int | None,
    html: Path | None,
    *,
    as_json: bool,
) -> None:
    import msgspec
    from rich.console import Console

    from cluster.models import models
    from cluster.planner import speculation_grid as of
    from cluster.planner.speculation_report import about, show

    found = models.resolve(model)
    if model is None and draft is None:
        draft = models.demo_path().parent / "draft"
    machine = _measured(found.path, draft, tokens, threads)
    acceptances = sorted({*of.ACCEPTANCES, acceptance})
    cells = of.grid(machine, of.BATCHES, acceptances, tokens)
    largest = max(of.BATCHES)
    even = {a: of.break_even(machine, a, tokens, largest) for a in acceptances}
    told = about(machine, found.id, None if draft is None else draft.name, tokens)
    if html is not None:
        from cluster.planner.speculation_report import write_page

        write_page(html, told, cells, even, acceptance)
    if as_json:
        figures = {
            "about": " ".join(told),
            "cells": cells,
            "pays_up_to": {f"{a:g}": b for a, b in even.items()},
        }
        typer.echo(msgspec.json.format(msgspec.json.encode(figures), indent=2).decode())
        return
    show(Console(highlight=False), told, cells, even, acceptance)
    if html is not None:
        typer.echo(f"page: {html}")


def _measured(model: Path, draft: Path | None, tokens: int, threads: int | None) -> DraftMachine:
    from rich.console import Console

    from cluster.planner import speculation_grid
    from cluster.planner.speculation_grid import BATCHES

    largest = max(BATCHES)
    with Console(stderr=True).status("loading") as status:
        return speculation_grid.measured(
            model, draft, largest * (1 + tokens), largest, threads, status.update
        )
