"""The report of `baton plan speculation`: tables in a terminal, or an HTML page. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale
from rich.console import Console
from rich.table import Table

from cluster.planner.speculation_grid import PassTimes, SpeculationCell
from cluster.workloads.offline_page import (
    html_document,
    html_lines,
    html_table,
    plots_html,
)
from engine.scheduling.draft_pages import MAX_DRAFT_NODES

STEP = (
    "batch",
    "drafted\neach",
    "tokens\neach",
    "plain step\nms",
    "verify\nms",
    "draft\nms",
    "speed-up",
)

LEGEND = (
    "Batch: sequences that decode together; each: for one of them, in a step. Speed-up: tokens a"
    " second, over plain decoding. -: drafts do not pay, and Baton drafts nothing then.",
    "Pays up to: at every batch from 1 to this one, those between the rows of the table included;"
    " -: not even at 1. Larger ones may pay again: passes are made for certain numbers of rows, and"
    " drafts in what is padded are verified for nothing.",
    "Times are of passes that attend to one token and draw none: reading KV and drawing come to"
    " every step alike.",
)


def describe_measurement(
    machine: PassTimes, model: str, draft: str | None, tokens: int
) -> list[str]:
    """Return sentences on what was measured and what is assumed."""
    drafts = "" if draft is None else f" and of its draft model ({draft})"
    free = " Drafts cost nothing, as n-grams do." if draft is None else ""
    return [
        f"Measured here, on {machine.where}: passes of {model}{drafts}, by the number of rows.",
        "Assumed, not measured: the acceptance, the chance that a drafted token is accepted once"
        f" the one before it is. At most {tokens} tokens are drafted for a sequence in a step, and"
        f" {MAX_DRAFT_NODES} for all.{free}",
    ]


def step_title(cells: Sequence[SpeculationCell]) -> str:
    return f"A step, if the acceptance is {cells[0].acceptance:g}"


def step_rows(cells: Sequence[SpeculationCell]) -> list[list[str]]:
    """Return the rows below STEP: the cells of one acceptance, batch by batch."""
    return [
        [
            str(c.batch),
            _nodes(c.nodes),
            f"{c.tokens:.2f}",
            f"{c.plain_ms:.2f}",
            f"{c.verify_ms:.2f}" if c.nodes else "",
            f"{c.draft_ms:.2f}" if c.nodes else "",
            _speedup(c),
        ]
        for c in cells
    ]


SPEEDUPS = "Speed-up, by batch and acceptance"


def speedup_rows(
    cells: Sequence[SpeculationCell], even: Mapping[float, int]
) -> tuple[list[str], list[list[str]]]:
    """Return heads, and a row for each batch; the last row shows up to which batch speculation
    pays."""
    largest = max(c.batch for c in cells)
    heads = ["batch", *(f"{acceptance:g}" for acceptance in even)]
    rows = [
        [str(batch), *(_speedup(c) for c in cells if c.batch == batch)]
        for batch in dict.fromkeys(c.batch for c in cells)
    ]
    return heads, [*rows, ["pays up to", *(_end(batch, largest) for batch in even.values())]]


def _end(batch: int, largest: int) -> str:
    if not batch:
        return "-"
    return f"{batch}+" if batch >= largest else str(batch)


def _nodes(nodes: float) -> str:
    return f"{nodes:.0f}" if nodes == int(nodes) else f"{nodes:.1f}"


def _speedup(c: SpeculationCell) -> str:
    return f"{c.speedup:.2f}" if c.nodes else "-"


def _table(title: str, heads: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for head in heads:
        table.add_column(head, justify="right")
    return table


def print_report(
    console: Console,
    description: Sequence[str],
    cells: Sequence[SpeculationCell],
    even: Mapping[float, int],
    acceptance: float,
) -> None:
    """Print the report; ``acceptance``: the one shown in detail."""
    for line in description:
        console.print(line, style="dim")
    console.print()
    detail = [c for c in cells if c.acceptance == acceptance]
    step = _table(step_title(detail), STEP)
    for row in step_rows(detail):
        step.add_row(*row)
    console.print(step)
    console.print()
    heads, (*rows, last) = speedup_rows(cells, even)
    speedups = _table(SPEEDUPS, heads)
    for row in rows:
        speedups.add_row(*row)
    speedups.add_section()
    speedups.add_row(*last, style="bold")
    console.print(speedups)
    console.print()
    for line in LEGEND:
        console.print(line, style="dim")


_STYLE = ".n th { overflow-wrap: normal; }"


def figures(cells: Sequence[SpeculationCell]) -> list[go.Figure]:
    """Return plots of speed-up and drafted tokens against the batch, with a line for each
    acceptance."""
    return [
        _lines("Speed-up over plain decoding", "times the tokens a second", cells, "speedup"),
        _lines("Tokens drafted for each sequence", "tokens in a step", cells, "nodes"),
    ]


def _lines(title: str, y: str, cells: Sequence[SpeculationCell], field: str) -> go.Figure:
    figure = go.Figure()
    acceptances = list(dict.fromkeys(c.acceptance for c in cells))
    # Bright shades for low acceptances; the brightest end of the scale is invisible on white.
    shades = sample_colorscale("Viridis", np.linspace(0.85, 0.0, len(acceptances)).tolist())
    for acceptance, shade in zip(reversed(acceptances), reversed(shades), strict=True):
        selected = [c for c in cells if c.acceptance == acceptance]
        figure.add_scatter(
            x=[c.batch for c in selected],
            y=[getattr(c, field) for c in selected],
            name=f"{acceptance:g}",
            line={"color": shade},
        )
    figure.update_layout(
        title={"text": title, "font": {"size": 15}},
        template="plotly_white",
        height=420,
        hovermode="x unified",
        legend={"title": {"text": "acceptance"}},
    )
    figure.update_xaxes(
        title="batch: sequences that decode together",
        type="log",
        tickvals=sorted({c.batch for c in cells}),
    )
    figure.update_yaxes(title=y)
    return figure


def render_page(
    description: Sequence[str],
    cells: Sequence[SpeculationCell],
    even: Mapping[float, int],
    acceptance: float,
) -> str:
    """Return the page; ``acceptance``: the one shown in detail."""
    detail = [c for c in cells if c.acceptance == acceptance]
    body = (
        f"{html_lines(description)}{plots_html(figures(cells))}"
        f'<div class="side"><div>{_section(SPEEDUPS, *speedup_rows(cells, even))}</div>'
        f"<div>{_section(step_title(detail), STEP, step_rows(detail))}</div></div>"
        f"<h2>How to read it</h2>{html_lines(LEGEND)}"
    )
    return html_document("baton plan speculation", body, _STYLE)


def _section(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    table = html_table(heads, rows, ' class="n"')
    return f"<h2>{escape(title)}</h2>{table}"
