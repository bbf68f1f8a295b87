"""Parts of HTML pages with plots that open offline: frame, text, tables, figures. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

import plotly.graph_objects as go
import plotly.io
from plotly.offline import get_plotlyjs

CONTENT_POLICY = (
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


def html_document(title: str, body: str, style: str = "") -> str:
    """Return a page; ``body`` is HTML below the title, ``style`` CSS beside that of all pages."""
    name = escape(title)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{name}</title><style>{STYLE}{style}</style><script>{get_plotlyjs()}</script></head>"
        f"<body><h1>{name}</h1>{body}</body></html>"
    )


def html_lines(sentences: Sequence[str]) -> str:
    """Return a paragraph with one sentence on each line."""
    return f'<p class="sub">{"<br>".join(escape(line) for line in sentences)}</p>'


def html_table(
    heads: Sequence[str] | None, rows: Iterable[Sequence[str]], attributes: str = ""
) -> str:
    """Return a table; ``heads`` None leaves the first row out."""
    lines = [_html_row(row, "td") for row in rows]
    top = "" if heads is None else _html_row(heads, "th")
    return f"<table{attributes}>{top}{''.join(lines)}</table>"


def _html_row(cells: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def plots_html(figures: Iterable[go.Figure]) -> str:
    """Return the figures in two columns."""
    config = {"displaylogo": False, "responsive": True}
    each = (
        f"<div>{plotly.io.to_html(f, config, include_plotlyjs=False, full_html=False)}</div>"
        for f in figures
    )
    return f'<div class="plots">{"".join(each)}</div>'


def blank_figure(title: str, x: str, y: str, height: int) -> go.Figure:
    """Return an empty figure of ``height`` pixels with its legend below it."""
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
