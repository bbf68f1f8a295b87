"""A plan as one HTML page that opens offline. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np
import plotly.graph_objects as go

from cluster.planner import tables
from cluster.planner.break_even import best_unsplit
from cluster.planner.plan import Plan
from cluster.planner.pools import Wanted, sized
from cluster.planner.roofline import ACCEPTANCES, BATCHES, Drafting, decode_s, drafted, prefill_s
from cluster.planner.tables import Table
from cluster.workloads.offline_page import blank, document, plots, write
from protocol.roles import ROLES

# MERGED cluster.plan.plots
# A plan in plots. Torch-free.

PREFILL, DECODE, OTHER, BAD, DARK = "#2563eb", "#d97706", "#64748b", "#dc2626", "#1e293b"
RATES = tuple(2.0 ** (i / 2) for i in range(-4, 9))
"""Of the planned rate."""


def all_plots(of: Plan) -> list[go.Figure]:
    each = (_workers, _objectives, _steps, _tokens, _prompts, _wire, _drafts)
    return [draw(of) for draw in each]


def _figure(title: str, x: str, y: str) -> go.Figure:
    made = blank(title, x, y, height=400)
    made.update_xaxes(rangemode="tozero")
    return made


def _logarithmic(figure: go.Figure, *axes: str) -> None:
    """Before marks are made."""
    for axis in axes:
        figure.layout[f"{axis}axis"].update(type="log", rangemode="normal")


def _line(
    figure: go.Figure, name: str, x: Sequence[float], y: Sequence[float | None], colour: str
) -> None:
    figure.add_scatter(x=list(x), y=list(y), name=name, line={"color": colour}, mode="lines")


def _mark(figure: go.Figure, name: str, colour: str, axis: str, value: float) -> None:
    """A line across, at ``value`` of an axis. Its text stands where an axis with logarithms wants
    a logarithm, unlike the line."""
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


def _workers(of: Plan) -> go.Figure:
    """Both pools, and unsplit workers, against the rate."""
    planned = of.wanted.workload.mix.rate
    rates = [planned * share for share in RATES]
    at = [sized(of.wanted, rate) for rate in rates]
    figure = _figure("Workers, against the rate", "requests a second", "workers")
    _logarithmic(figure, "x")
    for role, colour in zip(ROLES, (PREFILL, DECODE), strict=True):
        _line(figure, role, rates, [s.pools[role].workers for s in at], colour)
    _line(figure, "both", rates, [s.workers for s in at], DARK)
    for name, mixed, colour in (
        ("unsplit, mixed steps", True, OTHER),
        ("unsplit, apart", False, BAD),
    ):
        each = zip(at, rates, strict=True)
        found = [best_unsplit(of.wanted, s, mixed=mixed, rate=rate) for s, rate in each]
        _line(figure, name, rates, [u.workers if u else None for u in found], colour)
    _mark(figure, "planned", OTHER, "x", planned)
    return figure


def _objectives(of: Plan) -> go.Figure:
    """What a tighter TPOT costs, with two pools and without."""
    looks = of.split.looks
    milliseconds = [look.tpot_s * 1e3 for look in looks]
    figure = _figure("Workers, against the TPOT objective", "ms", "workers")
    _logarithmic(figure, "x", "y")
    _line(figure, "two pools", milliseconds, [look.split for look in looks], DARK)
    _line(figure, "unsplit, mixed steps", milliseconds, [look.mixed for look in looks], OTHER)
    _line(figure, "unsplit, apart", milliseconds, [look.apart for look in looks], BAD)
    _mark(figure, "planned", OTHER, "x", of.wanted.goals.tpot_s * 1e3)
    return figure


def _batches(of: Plan) -> list[int]:
    most = 2 * of.sized.ceilings.size
    return sorted({round(b) for b in np.geomspace(1, max(2, most), 48)})


def _steps(of: Plan) -> go.Figure:
    """The roofline of a decode step, and what cuts the batch."""
    at, context = of.wanted.rates("decode"), of.wanted.workload.context
    batches, shape = _batches(of), of.wanted.shape
    figure = _figure("A step of decode, against the batch", "sequences", "ms")
    steps = [decode_s(shape, at, b, context) * 1e3 for b in batches]
    _line(figure, "step", batches, steps, DECODE)
    work = [shape.decode(b, context) for b in batches]
    moved = [(w.bytes / at.bytes_s + at.overhead_s) * 1e3 for w in work]
    _line(figure, "of which reading", batches, moved, OTHER)
    _mark(figure, "TPOT objective", BAD, "y", of.wanted.goals.tpot_s * of.sized.pace * 1e3)
    _mark(figure, f"batch: {of.sized.ceilings.binds} binds", DECODE, "x", of.sized.ceilings.size)
    return figure


def _tokens(of: Plan) -> go.Figure:
    """What a larger batch brings, and costs."""
    at, context = of.wanted.rates("decode"), of.wanted.workload.context
    batches = _batches(of)
    rates = [b * of.sized.pace / decode_s(of.wanted.shape, at, b, context) for b in batches]
    figure = _figure("Tokens a second of a decode worker", "sequences", "tokens a second")
    _line(figure, "tokens a second", batches, rates, DECODE)
    _mark(figure, f"batch: {of.sized.ceilings.binds} binds", DECODE, "x", of.sized.ceilings.size)
    return figure


def _prompts(of: Plan) -> go.Figure:
    """A prompt alone, by its length, as it is and with the workload's share of it cached."""
    wanted = of.wanted
    lengths = sorted({round(n) for n in np.geomspace(64, 131072, 34)})
    figure = _figure("A prompt on an idle worker", "tokens", "ms")
    _logarithmic(figure, "x", "y")
    for name, share, colour in _shares(wanted):
        seconds = [_alone(wanted, tokens, share) * 1e3 for tokens in lengths]
        _line(figure, name, lengths, seconds, colour)
    _mark(figure, "TTFT objective", BAD, "y", wanted.goals.ttft_s * 1e3)
    return figure


def _shares(wanted: Wanted) -> list[tuple[str, float, str]]:
    shared = wanted.workload.shared
    cached = [(f"{shared:.0%} cached", shared, OTHER)] if shared > 0 else []
    return [("nothing cached", 0.0, PREFILL), *cached]


def _alone(wanted: Wanted, tokens: int, share: float) -> float:
    cached = int(tokens * share)
    at = wanted.rates("prefill")
    return prefill_s(wanted.shape, at, cached, max(1, tokens - cached), wanted.chunk)


def _drafts(of: Plan) -> go.Figure:
    at, context = of.wanted.rates("decode"), of.wanted.workload.context
    like = of.wanted.drafting or Drafting(acceptance=0.0)
    figure = _figure("What speculation brings", "sequences", "times the tokens a second")
    _logarithmic(figure, "x")
    for acceptance, shade in zip(ACCEPTANCES, _SHADES, strict=True):
        cells = [drafted(of.wanted.shape, at, b, context, acceptance, like) for b in BATCHES]
        _line(figure, f"acceptance {acceptance:g}", BATCHES, [c.speedup for c in cells], shade)
    _mark(figure, "batch", DECODE, "x", of.sized.ceilings.size)
    figure.update_xaxes(tickvals=list(BATCHES))
    figure.update_yaxes(rangemode="normal")
    return figure


_SHADES = ("#a5b4fc", "#818cf8", "#6366f1", "#4338ca", "#1e1b4b")


def _wire(of: Plan) -> go.Figure:
    """Of a mean prompt's KV, by the link, beside what it takes to compute it."""
    links = np.geomspace(0.1, 100, 31)
    prompt = of.wanted.workload.prompt
    figure = _figure("KV of a mean prompt on the wire", "GB/s of the link", "ms")
    _logarithmic(figure, "x", "y")
    each = (("as computed", of.wire.raw_bytes, PREFILL), ("fp8", of.wire.fp8_bytes, DECODE))
    for name, token_bytes, colour in each:
        milliseconds = [prompt * token_bytes / (link * 1e9) * 1e3 for link in links]
        _line(figure, name, links.tolist(), milliseconds, colour)
    _mark(figure, "computing it", OTHER, "y", of.sized.pools["prefill"].need.each * 1e3)
    return figure


_OWN = "th, td { overflow-wrap: normal; } .wide { overflow-x: auto; }"
_WIDE = 2
"""The first tables have sentences in them, and the whole width."""


def page(of: Plan) -> str:
    found = tables.tables(of)
    told = [*tables.warnings(of), *tables.notes(of)]
    warnings = "".join(f'<p class="warn">{escape(line)}</p>' for line in told)
    left, right = found[_WIDE::2], found[_WIDE + 1 :: 2]
    body = (
        f"{_lines(tables.about(of))}{warnings}{_all(found[:_WIDE])}"
        f'<div class="side"><div>{_all(left)}</div><div>{_all(right)}</div></div>'
        f"<h2>Plots</h2>{plots(all_plots(of))}"
        f"<h2>What it rests on</h2>{_lines(tables.legend(of))}"
    )
    return document("baton plan", body, _OWN)


def _lines(sentences: Sequence[str]) -> str:
    return f'<p class="sub">{"<br>".join(escape(line) for line in sentences)}</p>'


def _all(found: Sequence[Table]) -> str:
    return "".join(_table(table) for table in found)


def _table(table: Table) -> str:
    head = _row(table.heads, "th") if any(table.heads) else ""
    rows = "".join(_row(row, "td") for row in table.rows)
    words = max((len(cell) for row in table.rows for cell in row[1:]), default=0) > 40
    numbers = "" if words else ' class="n"'
    inner = f"<table{numbers}>{head}{rows}</table>"
    return f'<h2>{escape(table.title)}</h2><div class="wide">{inner}</div>'


def _row(cells: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def write_page(path: Path, of: Plan) -> None:
    """Raises StartupError."""
    write(path, page(of))
