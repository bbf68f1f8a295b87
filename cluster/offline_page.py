"""HTML pages with plots that open offline: their frame, and how plots look. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

import plotly.graph_objects as go
import plotly.io
from plotly.offline import get_plotlyjs

from bench.serve.page import POLICY, STYLE
from protocol.errors import StartupError


def document(title: str, body: str, style: str = "") -> str:
    """``body``: HTML below the title; ``style``: CSS beside that of all pages."""
    name = escape(title)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{name}</title><style>{STYLE}{style}</style><script>{get_plotlyjs()}</script></head>"
        f"<body><h1>{name}</h1>{body}</body></html>"
    )


def plots(figures: Iterable[go.Figure]) -> str:
    config = {"displaylogo": False, "responsive": True}
    each = (
        f"<div>{plotly.io.to_html(f, config, include_plotlyjs=False, full_html=False)}</div>"
        for f in figures
    )
    return f'<div class="plots">{"".join(each)}</div>'


def blank(title: str, x: str, y: str, height: int) -> go.Figure:
    """An empty one, ``height`` in pixels; its legend is below it."""
    made = go.Figure()
    made.update_layout(
        title={"text": title, "font": {"size": 15}},
        template="plotly_white",
        height=height,
        hovermode="x unified",
        legend={"orientation": "h", "y": -90 / height},
    )
    made.update_xaxes(title=x)
    made.update_yaxes(title=y, rangemode="tozero")
    return made


def write(path: Path, page: str) -> None:
    """Raises StartupError."""
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as e:
        raise StartupError(f"{path} cannot be written: {e.strerror}") from None
