"""A plan as one HTML page with plots that opens offline. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np
import plotly.graph_objects as go

from cluster.planner import tables
from cluster.planner.break_even import ACCEPTANCES, best_colocated, speculation_speedup
from cluster.planner.plan import DeploymentPlan
from cluster.planner.pools import size_pools
from cluster.planner.roofline import step_model
from cluster.planner.tables import PlanTable
from cluster.workloads.offline_page import (
    blank_figure,
    html_document,
    html_lines,
    html_table,
    plots_html,
)
from protocol.performance.speculation_profile import DecodePace, decode_pace
from protocol.performance.step_model import StepModel
from protocol.roles import ROLES

PREFILL, DECODE, OTHER, BAD, DARK = "#2563eb", "#d97706", "#64748b", "#dc2626", "#1e293b"
RATES = tuple(2.0 ** (i / 2) for i in range(-4, 9))
"""Multiples of the planned rate."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def all_plots(plan: DeploymentPlan) -> list[go.Figure]:
    each = (_workers, _objectives, _steps, _tokens, _prompts, _wire, _drafts)
    return [draw(plan) for draw in each]


def _figure(title: str, x: str, y: str) -> go.Figure:
    made = blank_figure(title, x, y, height=400)
    made.update_xaxes(rangemode="tozero")
    return made


def _logarithmic(figure: go.Figure, *axes: str) -> None:
    """Make axes logarithmic; to be called before ``_mark``."""
    for axis in axes:
        figure.layout[f"{axis}axis"].update(type="log", rangemode="normal")


def _line(
    figure: go.Figure, name: str, x: Sequence[float], y: Sequence[float | None], colour: str
) -> None:
    figure.add_scatter(x=list(x), y=list(y), name=name, line={"color": colour}, mode="lines")


def _mark(figure: go.Figure, name: str, colour: str, axis: str, value: float) -> None:
    """Draw a line at ``value`` of an axis. Unlike the line, its text needs the logarithm of the
    value on a logarithmic axis."""
    upright = axis == "x"
    (figure.add_vline if upright else figure.add_hline)(
        value, line={"color": colour, "dash": "dot", "width": 1}
    )
    at = np.log10(value) if figure.layout[f"{axis}axis"].type == "log" else value
    where = {"x": at, "y": 1, "yref": "y domain"} if upright else {"y": at, "x": 0.01}
    figure.add_annotation(
        text=name,
        showarrow=False,
        font={"size": 11, "color": colour},
        xanchor="right" if upright else "left",
        yanchor="top" if upright else "bottom",
        **({} if upright else {"xref": "x domain"}),
        **where,
    )


def _mark_batch(figure: go.Figure, plan: DeploymentPlan) -> None:
    ceilings = plan.sized.ceilings
    _mark(figure, f"batch: {ceilings.binds} binds", DECODE, "x", ceilings.size)


def _workers(plan: DeploymentPlan) -> go.Figure:
    """Plot both pools, and colocated workers, against the rate."""
    planned = plan.wanted.workload.mix.rate
    rates = [planned * share for share in RATES]
    requests = [plan.wanted.at_rate(rate) for rate in rates]
    at = [size_pools(request) for request in requests]
    figure = _figure("Workers by request rate", "requests a second", "workers")
    _logarithmic(figure, "x")
    for role, colour in zip(ROLES, (PREFILL, DECODE), strict=True):
        _line(figure, role, rates, [s.pools[role].workers for s in at], colour)
    _line(figure, "both", rates, [s.workers for s in at], DARK)
    for name, mixed, colour in (
        ("one pool, mixed steps", True, OTHER),
        ("one pool, separate steps", False, BAD),
    ):
        each = zip(requests, at, strict=True)
        found = [best_colocated(request, sized, mixed=mixed) for request, sized in each]
        _line(figure, name, rates, [u.workers if u else None for u in found], colour)
    _mark(figure, "planned", OTHER, "x", planned)
    return figure


def _objectives(plan: DeploymentPlan) -> go.Figure:
    """Plot the workers that a tighter TPOT needs, with two pools and without."""
    samples = plan.split.looks
    milliseconds = [sample.tpot_s * 1e3 for sample in samples]
    figure = _figure("Workers by TPOT objective", "ms", "workers")
    _logarithmic(figure, "x", "y")
    _line(figure, "two pools", milliseconds, [s.split for s in samples], DARK)
    _line(figure, "one pool, mixed steps", milliseconds, [s.mixed for s in samples], OTHER)
    _line(figure, "one pool, separate steps", milliseconds, [s.apart for s in samples], BAD)
    _mark(figure, "planned", OTHER, "x", plan.wanted.goals.tpot_s * 1e3)
    return figure


def _batches(plan: DeploymentPlan) -> list[int]:
    most = 2 * plan.sized.ceilings.size
    return sorted({round(b) for b in np.geomspace(1, max(2, most), 48)})


def _pace(plan: DeploymentPlan, batch: int) -> DecodePace:
    machine = plan.sized.pools["decode"].machine
    held = batch * plan.wanted.workload.context
    return decode_pace(StepModel(*machine.step), machine.speculation, batch, held)


def _steps(plan: DeploymentPlan) -> go.Figure:
    """Plot what a token of a sequence takes, and what limits the batch."""
    wanted, batches = plan.wanted, _batches(plan)
    context, memory = wanted.workload.context, wanted.rates("decode").memory_alone
    moving = step_model(wanted.shape, memory, context, plan.sized.ceilings.size)
    figure = _figure("Time per output token by batch size", "sequences", "ms")
    _line(figure, "TPOT", batches, [_pace(plan, b).tpot_s * 1e3 for b in batches], DECODE)
    moved = [moving.decode_s(b, b * context) / _pace(plan, b).tokens * 1e3 for b in batches]
    _line(figure, "of which reading", batches, moved, OTHER)
    _mark(figure, "TPOT objective", BAD, "y", wanted.goals.tpot_s * 1e3)
    _mark_batch(figure, plan)
    return figure


def _tokens(plan: DeploymentPlan) -> go.Figure:
    """Plot the gain and the cost of a larger batch."""
    batches = _batches(plan)
    figure = _figure("Tokens a second of a decode worker", "sequences", "tokens a second")
    _line(figure, "tokens a second", batches, [b / _pace(plan, b).tpot_s for b in batches], DECODE)
    _mark_batch(figure, plan)
    return figure


def _prompts(plan: DeploymentPlan) -> go.Figure:
    """Plot a prompt alone by its length, without cached tokens and with the workload's share of
    them."""
    request = plan.wanted
    lengths = sorted({round(n) for n in np.geomspace(64, 131072, 34)})
    figure = _figure("A prompt on an idle worker", "tokens", "ms")
    _logarithmic(figure, "x", "y")
    shares = [("nothing cached", 0.0, PREFILL)]
    if (shared := request.workload.shared) > 0:
        shares.append((f"{shared:.0%} cached", shared, OTHER))
    for name, share, colour in shares:
        seconds = [_prompt_s(plan, tokens, share) * 1e3 for tokens in lengths]
        _line(figure, name, lengths, seconds, colour)
    _mark(figure, "TTFT objective", BAD, "y", request.goals.ttft_s * 1e3)
    return figure


def _prompt_s(plan: DeploymentPlan, tokens: int, share: float) -> float:
    machine, cached = plan.sized.pools["prefill"].machine, int(tokens * share)
    return StepModel(*machine.step).prefill_s(cached, max(1, tokens - cached), machine.chunk)


def _drafts(plan: DeploymentPlan) -> go.Figure:
    figure = _figure("Speed-up by speculation", "sequences", "speed-up (tokens per second)")
    _logarithmic(figure, "x")
    for acceptance, shade in zip(ACCEPTANCES, _SHADES, strict=True):
        gains = list(map(speculation_speedup(plan.wanted, acceptance), BATCHES))
        _line(figure, f"acceptance {acceptance:g}", BATCHES, gains, shade)
    _mark_batch(figure, plan)
    figure.update_xaxes(tickvals=list(BATCHES))
    figure.update_yaxes(rangemode="normal")
    return figure


_SHADES = ("#a5b4fc", "#818cf8", "#6366f1", "#4338ca", "#1e1b4b")


def _wire(plan: DeploymentPlan) -> go.Figure:
    """Plot the transfer of a mean prompt's KV by the link's speed, and the time to compute it."""
    links = np.geomspace(0.1, 100, 31)
    prompt = plan.wanted.workload.prompt
    figure = _figure("KV of a mean prompt on the wire", "GB/s of the link", "ms")
    _logarithmic(figure, "x", "y")
    each = (("as computed", plan.wire.raw_bytes, PREFILL), ("fp8", plan.wire.fp8_bytes, DECODE))
    for name, token_bytes, colour in each:
        milliseconds = [prompt * token_bytes / (link * 1e9) * 1e3 for link in links]
        _line(figure, name, links.tolist(), milliseconds, colour)
    _mark(figure, "computing it", OTHER, "y", plan.sized.pools["prefill"].need.each * 1e3)
    return figure


_STYLE = "th, td { overflow-wrap: normal; } .wide { overflow-x: auto; }"
_WIDE = 2
"""The first tables contain sentences and take the whole width."""


def render_page(plan: DeploymentPlan) -> str:
    found = tables.plan_tables(plan)
    sentences = [*tables.slo_warnings(plan), *tables.plan_notes(plan)]
    warnings = "".join(f'<p class="warn">{escape(line)}</p>' for line in sentences)
    left, right = found[_WIDE::2], found[_WIDE + 1 :: 2]
    body = (
        f"{html_lines(tables.describe_request(plan))}{warnings}{_all(found[:_WIDE])}"
        f'<div class="side"><div>{_all(left)}</div><div>{_all(right)}</div></div>'
        f"<h2>Plots</h2>{plots_html(all_plots(plan))}"
        f"<h2>Assumptions</h2>{html_lines(tables.legend(plan))}"
    )
    return html_document("baton plan", body, _STYLE)


def _all(found: Sequence[PlanTable]) -> str:
    return "".join(table_html(table) for table in found)


def table_html(table: PlanTable) -> str:
    """Return the table below its title; figures are aligned to the right."""
    words = max((len(cell) for row in table.rows for cell in row[1:]), default=0) > 40
    heads = table.heads if any(table.heads) else None
    inner = html_table(heads, table.rows, "" if words else ' class="n"')
    return f'<h2>{escape(table.title)}</h2><div class="wide">{inner}</div>'
