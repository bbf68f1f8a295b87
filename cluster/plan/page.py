"""The plan of speculation as one HTML page that opens offline. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

import plotly.graph_objects as go
import plotly.io
from plotly.offline import get_plotlyjs

from bench.serve.page import POLICY, STYLE
from bench.serve.plots import COLORS
from cluster.plan.speculation import Cell
from protocol.errors import StartupError


def figures(cells: Sequence[Cell]) -> list[go.Figure]:
    """Speed-ups, and how many tokens are drafted, against the batch; a line for each acceptance."""
    return [
        _lines("Speed-up over plain decoding", "speed-up", cells, "speedup"),
        _lines("Tokens drafted for each sequence", "tokens", cells, "nodes"),
    ]


def _lines(title: str, y: str, cells: Sequence[Cell], field: str) -> go.Figure:
    figure = go.Figure()
    for i, acceptance in enumerate(dict.fromkeys(c.acceptance for c in cells)):
        of = [c for c in cells if c.acceptance == acceptance]
        figure.add_scatter(
            x=[c.batch for c in of],
            y=[getattr(c, field) for c in of],
            name=f"{acceptance:g}",
            line={"color": COLORS[i % len(COLORS)], "dash": "solid" if i < len(COLORS) else "dash"},
        )
    figure.update_layout(
        title={"text": title, "font": {"size": 15}},
        template="plotly_white",
        height=420,
        hovermode="x unified",
        legend={"title": {"text": "acceptance"}},
    )
    figure.update_xaxes(title="batch", type="log", tickvals=[c.batch for c in cells])
    figure.update_yaxes(title=y)
    return figure


def page(about: str, cells: Sequence[Cell]) -> str:
    config = {"displaylogo": False, "responsive": True}
    plots = "".join(
        f"<div>{plotly.io.to_html(f, config, include_plotlyjs=False, full_html=False)}</div>"
        for f in figures(cells)
    )
    title = "baton plan speculation"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}</style><script>{get_plotlyjs()}</script></head>"
        f'<body><h1>{title}</h1><p class="sub">{escape(about)}</p>'
        f'<div class="plots">{plots}</div></body></html>'
    )


def write_page(path: Path, about: str, cells: Sequence[Cell]) -> None:
    """Raises StartupError."""
    try:
        path.write_text(page(about, cells), encoding="utf-8")
    except OSError as e:
        raise StartupError(f"{path} cannot be written: {e.strerror}") from None
