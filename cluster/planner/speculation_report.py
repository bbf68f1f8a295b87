"""The report of `baton plan speculation`: tables in a terminal, or an HTML page. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale
from rich.console import Console

from cluster.planner.page import table_html
from cluster.planner.speculation_grid import PassTimes, SpeculationCell
from cluster.planner.tables import PlanTable, rich_table
from cluster.workloads.offline_page import blank_figure, html_document, html_lines, plots_html
from engine.scheduling.draft_pages import MAX_DRAFT_NODES

STEP = (
    *("batch", "drafted each", "tokens each"),
    *("plain step ms", "verify ms", "draft ms", "speed-up"),
)

LEGEND = (
    "Batch: sequences that decode together; each: for one of them, in a step. Speed-up: tokens a"
    " second, over plain decoding. -: drafts do not pay, and Baton drafts nothing then.",
    "Pays up to: at every batch from 1 to this one, those between the rows of the table included;"
    " -: not even at 1. Larger ones may pay again: passes are padded to certain numbers of rows,"
    " and drafts in padded rows cost nothing to verify.",
    "Times are of passes that attend to one token and sample none: reading KV and sampling add"
    " the same time to every step.",
)


def describe_measurement(
    machine: PassTimes, model: str, draft: str | None, tokens: int
) -> list[str]:
    """Return sentences on what was measured and what is assumed."""
    drafts = "" if draft is None else f" and of its draft model ({draft})"
    free = " Drafts cost nothing, as with n-grams." if draft is None else ""
    return [
        f"Measured here, on {machine.where}: passes of {model}{drafts}, by the number of rows.",
        "Assumed, not measured: the acceptance, which is the probability that a drafted token is"
        f" accepted if the one before it was. At most {tokens} tokens are drafted for a sequence"
        " in a step, and"
        f" {MAX_DRAFT_NODES} for all.{free}",
    ]


def report_tables(
    cells: Sequence[SpeculationCell], even: Mapping[float, int], acceptance: float
) -> tuple[PlanTable, PlanTable]:
    """Return a table of the steps at one acceptance, and one of the speed-ups at all of them, whose
    last row says up to which batch speculation pays."""
    steps = [_step_row(c) for c in cells if c.acceptance == acceptance]
    largest = max(c.batch for c in cells)
    gains = [
        (str(batch), *(_speedup(c) for c in cells if c.batch == batch))
        for batch in dict.fromkeys(c.batch for c in cells)
    ]
    ends = (f"{b}{'+' * (b >= largest)}" if b else "-" for b in even.values())
    heads = ("batch", *(f"{each:g}" for each in even))
    return (
        PlanTable(f"A step, if the acceptance is {acceptance:g}", STEP, steps),
        PlanTable("Speed-up, by batch and acceptance", heads, [*gains, ("pays up to", *ends)]),
    )


def _step_row(c: SpeculationCell) -> tuple[str, ...]:
    nodes = f"{c.nodes:.0f}" if c.nodes == int(c.nodes) else f"{c.nodes:.1f}"
    drafted = (f"{c.verify_ms:.2f}", f"{c.draft_ms:.2f}") if c.nodes else ("", "")
    return (str(c.batch), nodes, f"{c.tokens:.2f}", f"{c.plain_ms:.2f}", *drafted, _speedup(c))


def _speedup(c: SpeculationCell) -> str:
    return f"{c.speedup:.2f}" if c.nodes else "-"


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
    for table in report_tables(cells, even, acceptance):
        console.print()
        console.print(rich_table(table))
    console.print()
    for line in LEGEND:
        console.print(line, style="dim")


def figures(cells: Sequence[SpeculationCell]) -> list[go.Figure]:
    """Return plots of speed-up and drafted tokens against the batch, with a line for each
    acceptance."""
    return [
        _lines("Speed-up over plain decoding", "speed-up (tokens per second)", cells, "speedup"),
        _lines("Tokens drafted for each sequence", "tokens in a step", cells, "nodes"),
    ]


def _lines(title: str, y: str, cells: Sequence[SpeculationCell], field: str) -> go.Figure:
    figure = blank_figure(title, "batch: sequences that decode together", y, height=420)
    acceptances = sorted({c.acceptance for c in cells}, reverse=True)
    # Bright shades for low acceptances; the brightest end of the scale is invisible on white.
    shades = sample_colorscale("Viridis", np.linspace(0.0, 0.85, len(acceptances)).tolist())
    for acceptance, shade in zip(acceptances, shades, strict=True):
        selected = [c for c in cells if c.acceptance == acceptance]
        figure.add_scatter(
            x=[c.batch for c in selected],
            y=[getattr(c, field) for c in selected],
            name=f"acceptance {acceptance:g}",
            line={"color": shade},
        )
    figure.update_xaxes(type="log", tickvals=sorted({c.batch for c in cells}))
    figure.update_yaxes(rangemode="normal")
    return figure


def render_page(
    description: Sequence[str],
    cells: Sequence[SpeculationCell],
    even: Mapping[float, int],
    acceptance: float,
) -> str:
    """Return the page; ``acceptance``: the one shown in detail."""
    steps, speedups = (table_html(t) for t in report_tables(cells, even, acceptance))
    body = (
        f"{html_lines(description)}{plots_html(figures(cells))}"
        f'<div class="side"><div>{speedups}</div><div>{steps}</div></div>'
        f"<h2>How to read it</h2>{html_lines(LEGEND)}"
    )
    return html_document("baton plan speculation", body, ".n th { overflow-wrap: normal; }")
