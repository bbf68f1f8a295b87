"""`baton plan speculation`: measures a model and its draft, and shows where drafting pays."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.common import print_json, report_failure, write_file

if TYPE_CHECKING:
    from cluster.planner.speculation_grid import PassTimes

_DEFAULT_TOKENS = 8


def speculation(
    model: Annotated[
        str | None, typer.Option(help="Folder or hub id; by default the demo model.")
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
            help="Acceptance of a drafted token, for the table of steps. `baton status` shows"
            " that of a running cluster.",
        ),
    ] = 0.7,
    tokens: Annotated[
        int,
        typer.Option(
            min=1, max=16, help="Maximum number of tokens drafted for a sequence in a step."
        ),
    ] = _DEFAULT_TOKENS,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads of the model; by default half of the cores."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with plots, which needs no network.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure up to which batch size speculation pays, and how much, for acceptances of 0.3 to 0.9.

    Loads the model and its draft here, measures their passes for a few seconds, and asks the code
    that decides the lengths of drafts in a decode worker.
    """
    from protocol.errors import StartupError

    try:
        _speculation(model, draft, acceptance, tokens, threads, html, as_json=json)
    except StartupError as e:
        raise report_failure(e) from None


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
    from rich.console import Console

    from cluster.models import locate
    from cluster.planner import speculation_grid as grid
    from cluster.planner.speculation_report import describe_measurement, print_report

    found = locate.resolve_model(model)
    if model is None and draft is None:
        draft = locate.demo_path().parent / "draft"
    machine = _measure(found.path, draft, tokens, threads)
    acceptances = sorted({*grid.ACCEPTANCES, acceptance})
    each = itertools.product(grid.BATCHES, acceptances)
    cells = [grid.speculation_cell(machine, *at, tokens) for at in each]
    largest = max(grid.BATCHES)
    even = {a: grid.break_even_batch(machine, a, tokens, largest) for a in acceptances}
    about = describe_measurement(machine, found.id, None if draft is None else draft.name, tokens)
    if html is not None:
        from cluster.planner.speculation_report import render_page

        write_file(html, render_page(about, cells, even, acceptance))
    if as_json:
        figures = {
            "about": " ".join(about),
            "cells": cells,
            "pays_up_to": {f"{a:g}": b for a, b in even.items()},
        }
        print_json(figures)
        return
    print_report(Console(highlight=False), about, cells, even, acceptance)
    if html is not None:
        typer.echo(f"page: {html}")


def _measure(model: Path, draft: Path | None, tokens: int, threads: int | None) -> PassTimes:
    from rich.console import Console

    from cluster.planner import speculation_grid

    largest = max(speculation_grid.BATCHES)
    with Console(stderr=True).status("loading") as status:
        return speculation_grid.measure_passes(
            model, draft, largest * (1 + tokens), largest, threads, status.update
        )
