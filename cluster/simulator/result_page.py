"""A simulation as one HTML page that opens offline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import numpy as np
import plotly.graph_objects as go

from cluster.simulator.devices.job import Job
from cluster.simulator.result import LATENCIES, Result, latencies, of_pools, of_requests
from cluster.simulator.watching import Moment
from cluster.sizing.decision import Record
from cluster.workloads.offline_page import blank, document, plots, write
from protocol.roles import ROLES

BLUE, ORANGE, GREY, RED = "#2563eb", "#d97706", "#64748b", "#dc2626"
_BUSY = {"busy_prefill": BLUE, "busy_decode": ORANGE, "kv_share": GREY}
_NAMES = {"busy_prefill": "prefill", "busy_decode": "decode", "kv_share": "KV pools of decode"}
_MOST_DOTS = 2000


def figures(of: Result, jobs: Sequence[Job], records: Sequence[Record]) -> list[go.Figure]:
    moments = of.moments
    return [
        _workers(moments, records),
        _arrivals(jobs),
        _lines("Busy, and full", "share", moments, _BUSY),
        _lines("Requests inside", "requests", moments, {"queued": BLUE, "decoding": ORANGE}),
        _dots("Time to first token", "s", [(j.at, j.ttft_s) for j in jobs], of.goals.ttft_s),
        _dots("Time per output token", "s", [(j.at, j.tpot_s) for j in jobs], of.goals.tpot_s),
    ]


def _figure(title: str, y: str) -> go.Figure:
    return blank(title, "seconds", y, height=360)


def _lines(title: str, y: str, moments: Sequence[Moment], names: dict[str, str]) -> go.Figure:
    figure = _figure(title, y)
    at = [m.at_s for m in moments]
    for name, color in names.items():
        values = [getattr(m, name) for m in moments]
        figure.add_scatter(x=at, y=values, name=_NAMES.get(name, name), line={"color": color})
    return figure


def _workers(moments: Sequence[Moment], records: Sequence[Record]) -> go.Figure:
    """What serves, and what the policy wanted."""
    names = {"prefill": BLUE, "decode": ORANGE, "starting": GREY}
    figure = _lines("Workers that serve", "workers", moments, names)
    figure.update_traces(line_shape="hv")
    at = [r.snapshot.at_s for r in records]
    for role, color in zip(ROLES, (BLUE, ORANGE), strict=True):
        wanted = [r.decision.wanted.of(role) for r in records]
        dotted = {"color": color, "dash": "dot", "width": 1, "shape": "hv"}
        if records:
            figure.add_scatter(x=at, y=wanted, name=f"wanted {role}", line=dotted)
    return figure


def _arrivals(jobs: Sequence[Job]) -> go.Figure:
    figure = _figure("Requests that arrive", "requests/s")
    counts, edges = np.histogram([j.at for j in jobs], bins=min(200, max(1, len(jobs) // 10)))
    rates = counts / np.diff(edges)
    figure.add_scatter(x=edges[:-1].tolist(), y=rates.tolist(), name="rate", line={"color": GREY})
    return figure


def _dots(
    title: str, y: str, points: Iterable[tuple[float, float | None]], goal: float
) -> go.Figure:
    """At most _MOST_DOTS of them, evenly picked."""
    figure = _figure(title, y)
    known = [(at, value) for at, value in points if value is not None]
    known = known[:: max(1, len(known) // _MOST_DOTS)]
    figure.add_scatter(
        x=[at for at, _ in known],
        y=[value for _, value in known],
        mode="markers",
        name="a request",
        marker={"size": 3, "color": BLUE, "opacity": 0.4},
    )
    figure.add_hline(y=goal, line={"color": RED, "dash": "dash"}, annotation_text="objective")
    return figure


def page(of: Result, jobs: Sequence[Job], records: Sequence[Record]) -> str:
    body = (
        f'<div class="side"><div>{_table((), of_requests(of))}</div>'
        f"<div>{_table((), of_pools(of))}{_table(LATENCIES, latencies(of))}</div></div>"
        f"<h2>Plots</h2>{plots(figures(of, jobs, records))}"
    )
    return document(f"baton simulate: {of.name}", body)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f'<table class="{"n" if head else ""}"><tr>{top}</tr>{body}</table>'


def write_page(path: Path, of: Result, jobs: Sequence[Job], records: Sequence[Record]) -> None:
    """Raises StartupError."""
    write(path, page(of, jobs, records))
