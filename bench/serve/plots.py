"""The plots of a page: pure functions from results to plotly's figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import plotly.graph_objects as go

from bench.serve.figures import GRID, LATENCIES
from bench.serve.result import Result
from bench.serve.timeline import Timeline

COLORS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#dc2626", "#0891b2")
HEIGHT = 340


def _figure(title: str, x: str, y: str) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        title={"text": title, "font": {"size": 15}},
        template="plotly_white",
        height=HEIGHT,
        margin={"l": 60, "r": 20, "t": 48, "b": 48},
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 1.0, "xanchor": "right"},
        hovermode="x unified",
    )
    figure.update_xaxes(title=x)
    figure.update_yaxes(title=y, rangemode="tozero")
    return figure


def _color(i: int) -> str:
    return COLORS[i % len(COLORS)]


def cdf(key: str, results: Sequence[Result], names: Sequence[str]) -> go.Figure:
    """The share of requests (of gaps, for ITL) that took at most so long."""
    figure = _figure(f"{LATENCIES[key]}: distribution", "ms", "share at most")
    for i, (of, name) in enumerate(zip(results, names, strict=True)):
        values = of.distributions[key]
        figure.add_scatter(x=values, y=GRID[: len(values)], name=name, line={"color": _color(i)})
    goal = results[0].config.get(key.replace("_ms", "_slo_ms"))
    if goal is not None:
        line = {"color": "#64748b", "dash": "dot"}
        figure.add_scatter(x=[goal, goal], y=[0, 1], name="objective", mode="lines", line=line)
    figure.update_xaxes(type="log" if _wide(key, results) else "linear")
    figure.update_yaxes(range=[0, 1.02])
    figure.update_layout(showlegend=len(results) > 1 or goal is not None)
    return figure


def _wide(key: str, results: Sequence[Result]) -> bool:
    """So far apart that a linear axis would show one step."""
    found = [q for r in results if (q := r.summary.latencies.get(key)) is not None]
    return any(q.p50 > 0 and q.most / q.p50 > 20 for q in found) and all(
        r.distributions[key] and r.distributions[key][0] > 0 for r in results
    )


def ttft_over_time(results: Sequence[Result], names: Sequence[str]) -> go.Figure:
    figure = _figure("TTFT over time", "due after, s", "TTFT, ms")
    for i, (of, name) in enumerate(zip(results, names, strict=True)):
        x, y = [p.due for p in of.points], [p.ttft_ms for p in of.points]
        figure.add_scatter(x=x, y=y, name=name, mode="markers", marker=_dots(i))
    return _pointed(figure, len(results))


def ttft_by_prompt(results: Sequence[Result], names: Sequence[str]) -> go.Figure:
    figure = _figure("TTFT by length of the prompt", "prompt, tokens", "TTFT, ms")
    for i, (of, name) in enumerate(zip(results, names, strict=True)):
        x, y = [p.prompt for p in of.points], [p.ttft_ms for p in of.points]
        figure.add_scatter(x=x, y=y, name=name, mode="markers", marker=_dots(i))
    return _pointed(figure, len(results))


def _dots(i: int) -> dict[str, object]:
    return {"size": 5, "opacity": 0.5, "color": _color(i)}


def _pointed(figure: go.Figure, results: int) -> go.Figure:
    figure.update_layout(hovermode="closest", showlegend=results > 1)
    return figure


Series = tuple[str, Callable[[Timeline], list[float]]]
REQUESTS: tuple[Series, ...] = (
    ("whole", lambda t: t.completed),
    ("sent", lambda t: t.sent),
    ("failed", lambda t: t.failed),
)
TOKENS: tuple[Series, ...] = (("tokens", lambda t: t.output_tokens),)
IN_FLIGHT: tuple[Series, ...] = (("in flight", lambda t: t.in_flight),)


def over_time(
    title: str, y: str, series: Sequence[Series], results: Sequence[Result], names: Sequence[str]
) -> go.Figure:
    """Of one result all series; of several the first of each, lest they hide each other."""
    figure = _figure(title, "s", y)
    if len(results) == 1:
        lines = [(what, results[0].timeline, values) for what, values in series]
    else:
        values = series[0][1]
        lines = [(name, of.timeline, values) for name, of in zip(names, results, strict=True)]
    for i, (name, timeline, of_timeline) in enumerate(lines):
        found = of_timeline(timeline)
        if name == "failed" and not any(found):
            continue
        x = [timeline.step_s * (k + 0.5) for k in range(len(found))]
        figure.add_scatter(x=x, y=found, name=name, line={"color": _color(i)})
    figure.update_layout(showlegend=len(lines) > 1)
    return figure


def all_plots(results: Sequence[Result], names: Sequence[str]) -> list[go.Figure]:
    return [
        *(cdf(key, results, names) for key in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")),
        ttft_over_time(results, names),
        ttft_by_prompt(results, names),
        over_time("Requests", "per s", REQUESTS, results, names),
        over_time("Output tokens", "per s", TOKENS, results, names),
        over_time("In flight", "requests", IN_FLIGHT, results, names),
    ]
