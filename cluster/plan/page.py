"""The plan of speculation as one HTML page that opens offline. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from cluster.offline_page import document, plots, write
from cluster.plan import show
from cluster.plan.speculation import Cell

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
    detail = [c for c in cells if c.acceptance == of]
    body = (
        f"{_lines_of(told)}{plots(figures(cells))}"
        f'<div class="side"><div>{_table(show.SPEEDUPS, *show.speedup_rows(cells, even))}</div>'
        f"<div>{_table(show.step_title(detail), show.STEP, show.step_rows(detail))}</div></div>"
        f"<h2>How to read it</h2>{_lines_of(show.LEGEND)}"
    )
    return document("baton plan speculation", body, _WHOLE)


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
    write(path, page(told, cells, even, of))
