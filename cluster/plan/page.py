"""The plan of speculation as one HTML page that opens offline. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import plotly.io
from plotly.colors import sample_colorscale
from plotly.offline import get_plotlyjs

from bench.serve.page import POLICY, STYLE
from cluster.plan import show
from cluster.plan.speculation import Cell
from protocol.errors import StartupError

_WHOLE = ".n th { overflow-wrap: normal; }"


def figures(cells: Sequence[Cell]) -> list[go.Figure]:
    """Speed-ups, and how many tokens are drafted, against the batch; a line for each acceptance."""
    return [
        _lines("Speed-up over plain decoding", "times the tokens a second", cells, "speedup"),
        _lines("Tokens drafted for each sequence", "tokens in a step", cells, "nodes"),
    ]


def _lines(title: str, y: str, cells: Sequence[Cell], field: str) -> go.Figure:
    figure = go.Figure()
    acceptances = list(dict.fromkeys(c.acceptance for c in cells))
    # Bright for those that are accepted seldom; the brightest end of the scale fades on white.
    shades = sample_colorscale("Viridis", np.linspace(0.85, 0.0, len(acceptances)).tolist())
    for acceptance, shade in zip(reversed(acceptances), reversed(shades), strict=True):
        of = [c for c in cells if c.acceptance == acceptance]
        figure.add_scatter(
            x=[c.batch for c in of],
            y=[getattr(c, field) for c in of],
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


def page(told: Sequence[str], cells: Sequence[Cell], even: Mapping[float, int], of: float) -> str:
    """``told``: what it is about; ``of``: the acceptance that is shown in detail."""
    config = {"displaylogo": False, "responsive": True}
    plots = "".join(
        f"<div>{plotly.io.to_html(f, config, include_plotlyjs=False, full_html=False)}</div>"
        for f in figures(cells)
    )
    detail = [c for c in cells if c.acceptance == of]
    title = "baton plan speculation"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}{_WHOLE}</style><script>{get_plotlyjs()}</script></head>"
        f"<body><h1>{title}</h1>{_lines_of(told)}"
        f'<div class="plots">{plots}</div><div class="side">'
        f"<div>{_table(show.SPEEDUPS, *show.speedup_rows(cells, even))}</div>"
        f"<div>{_table(show.step_title(detail), show.STEP, show.step_rows(detail))}</div></div>"
        f"<h2>How to read it</h2>{_lines_of(show.LEGEND)}</body></html>"
    )


def _lines_of(sentences: Sequence[str]) -> str:
    return f'<p class="sub">{"<br>".join(escape(line) for line in sentences)}</p>'


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f'<h2>{escape(title)}</h2><table class="n"><tr>{head}</tr>{body}</table>'


def write_page(
    path: Path,
    told: Sequence[str],
    cells: Sequence[Cell],
    even: Mapping[float, int],
    of: float,
) -> None:
    """Raises StartupError."""
    try:
        path.write_text(page(told, cells, even, of), encoding="utf-8")
    except OSError as e:
        raise StartupError(f"{path} cannot be written: {e.strerror}") from None
