"""HTML pages with plots that open offline: their frame, and how plots look. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

import plotly.graph_objects as go
import plotly.io
from plotly.offline import get_plotlyjs

from protocol.errors import StartupError

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline';"
    " img-src data: blob:; font-src data:"
)
STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #1e293b; margin: 0 auto; max-width: 1320px;
       padding: 20px 24px 48px; }
h1 { font-size: 22px; margin: 0 0 2px; } h2 { font-size: 16px; margin: 28px 0 8px; }
.sub { color: #64748b; margin: 0 0 16px; }
.warn { background: #fef3c7; border-left: 4px solid #d97706; padding: 8px 12px; margin: 8px 0; }
.side, .plots { display: grid; gap: 16px 24px; grid-template-columns: repeat(2, minmax(0, 1fr)); }
.side { align-items: start; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid #e2e8f0; padding: 4px 8px; text-align: left;
         overflow-wrap: anywhere; }
table.n td + td, table.n th + th { text-align: right; font-variant-numeric: tabular-nums; }
th { color: #475569; font-weight: 600; }
@media (max-width: 900px) { .side, .plots { grid-template-columns: minmax(0, 1fr); } }
"""


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
