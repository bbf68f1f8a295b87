"""The result of a simulation as one HTML page that opens offline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import plotly.graph_objects as go

from cluster.simulator.devices.request import SimulatedRequest
from cluster.simulator.fleet_sampler import FleetSample
from cluster.simulator.result import (
    LATENCIES,
    SimulationResult,
    latency_rows,
    pool_rows,
    request_rows,
)
from cluster.sizing.decision import DecisionRecord
from cluster.workloads.offline_page import (
    blank_figure,
    html_document,
    html_table,
    plots_html,
)
from protocol.roles import ROLES

BLUE, ORANGE, GREY, RED = "#2563eb", "#d97706", "#64748b", "#dc2626"
_BUSY = {"busy_prefill": BLUE, "busy_decode": ORANGE, "kv_share": GREY}
_NAMES = {"busy_prefill": "prefill", "busy_decode": "decode", "kv_share": "KV pools of decode"}
_MAX_DOTS = 2000


def result_figures(
    result: SimulationResult,
    requests: Sequence[SimulatedRequest],
    records: Sequence[DecisionRecord],
) -> list[go.Figure]:
    moments = result.moments
    return [
        _workers(moments, records),
        _arrivals(requests),
        _lines("Busy, and full", "share", moments, _BUSY),
        _lines("Requests inside", "requests", moments, {"queued": BLUE, "decoding": ORANGE}),
        _dots(
            "Time to first token", "s", [(r.at, r.ttft_s) for r in requests], result.goals.ttft_s
        ),
        _dots(
            "Time per output token", "s", [(r.at, r.tpot_s) for r in requests], result.goals.tpot_s
        ),
    ]


def _figure(title: str, y: str) -> go.Figure:
    return blank_figure(title, "seconds", y, height=360)


def _lines(title: str, y: str, moments: Sequence[FleetSample], names: dict[str, str]) -> go.Figure:
    figure = _figure(title, y)
    at = [m.at_s for m in moments]
    for name, color in names.items():
        values = [getattr(m, name) for m in moments]
        figure.add_scatter(x=at, y=values, name=_NAMES.get(name, name), line={"color": color})
    return figure


def _workers(moments: Sequence[FleetSample], records: Sequence[DecisionRecord]) -> go.Figure:
    """Plot the workers that serve and those that the policy wants."""
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


def _arrivals(requests: Sequence[SimulatedRequest]) -> go.Figure:
    figure = _figure("Requests that arrive", "requests/s")
    counts, edges = np.histogram(
        [r.at for r in requests], bins=min(200, max(1, len(requests) // 10))
    )
    rates = counts / np.diff(edges)
    figure.add_scatter(x=edges[:-1].tolist(), y=rates.tolist(), name="rate", line={"color": GREY})
    return figure


def _dots(
    title: str, y: str, points: Iterable[tuple[float, float | None]], goal: float
) -> go.Figure:
    """Plot at most _MAX_DOTS points, evenly picked."""
    figure = _figure(title, y)
    known = [(at, value) for at, value in points if value is not None]
    known = known[:: max(1, len(known) // _MAX_DOTS)]
    figure.add_scatter(
        x=[at for at, _ in known],
        y=[value for _, value in known],
        mode="markers",
        name="a request",
        marker={"size": 3, "color": BLUE, "opacity": 0.4},
    )
    figure.add_hline(y=goal, line={"color": RED, "dash": "dash"}, annotation_text="objective")
    return figure


def render_page(
    result: SimulationResult,
    requests: Sequence[SimulatedRequest],
    records: Sequence[DecisionRecord],
) -> str:
    figures = html_table(None, request_rows(result))
    pools = html_table(None, pool_rows(result))
    latencies = html_table(LATENCIES, latency_rows(result), ' class="n"')
    body = (
        f'<div class="side"><div>{figures}</div>'
        f"<div>{pools}{latencies}</div></div>"
        f"<h2>Plots</h2>{plots_html(result_figures(result, requests, records))}"
    )
    return html_document(f"baton simulate: {result.name}", body)
