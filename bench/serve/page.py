"""One HTML file that opens offline: its policy forbids it to load anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import plotly.io
from plotly.offline import get_plotlyjs

from bench.serve.plots import all_plots
from bench.serve.result import Result
from bench.serve.show import COLUMNS, comparison, facts, latency_rows
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


def page(results: Sequence[Result]) -> str:
    """Of one result, or of several beside each other."""
    names = [r.name if len(results) == 1 else f"{chr(65 + i)}" for i, r in enumerate(results)]
    first = results[0]
    title = f"baton bench serve: {first.name}" if len(results) == 1 else "baton bench compare"
    body = [f"<h1>{escape(title)}</h1>", *_one(first)] if len(results) == 1 else []
    body = body or [f"<h1>{title}</h1>", *_several(results)]
    body.append(f'<h2>Plots</h2><div class="plots">{"".join(_plots(results, names))}</div>')
    for name, of in zip(names, results, strict=True):
        body.append(f"<h2>Options{'' if len(results) == 1 else ' of ' + escape(name)}</h2>")
        body.append(_table((), _config(of)))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
        f"<script>{get_plotlyjs()}</script></head><body>{''.join(body)}</body></html>"
    )


def _one(of: Result) -> Iterable[str]:
    yield f'<p class="sub">{escape(of.config["url"])}, {escape(of.began)}</p>'
    yield from _warnings(of)
    yield '<div class="side"><div>' + _table((), facts(of)) + "</div><div>"
    yield _table(COLUMNS, latency_rows(of), numbers=True) + "</div></div>"


def _several(results: Sequence[Result]) -> Iterable[str]:
    for i, of in enumerate(results):
        about = f"{chr(65 + i)}: {of.name}, {of.config['url']}, {of.began}"
        yield f'<p class="sub">{escape(about)}</p>'
        yield from _warnings(of)
    head = ("", *(chr(65 + i) for i in range(len(results))), "last against first")
    yield _table(head, comparison(results), numbers=True)


def _warnings(of: Result) -> Iterable[str]:
    if of.interrupted:
        yield '<p class="warn">Interrupted: what follows is of the part that ran.</p>'
    for warning in of.health.warnings:
        yield f'<p class="warn">{escape(warning)}</p>'


def _config(of: Result) -> Iterable[tuple[str, str]]:
    yield "prompts", of.prompts
    yield "requests", of.dialect
    for key, value in of.config.items():
        if value is not None and value != "" and value != {}:
            yield key, str(value)


def _plots(results: Sequence[Result], names: Sequence[str]) -> Iterable[str]:
    for figure in all_plots(results, names):
        config = {"displaylogo": False, "responsive": True}
        html = plotly.io.to_html(figure, config, include_plotlyjs=False, full_html=False)
        yield f"<div>{html}</div>"


def _table(head: Sequence[str], rows: Iterable[tuple[str, ...]], numbers: bool = False) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(c)}</{tag}>" for c in cells) + "</tr>"

    top = line(head, "th") if head else ""
    return (
        f'<table class="{"n" if numbers else ""}">{top}'
        + "".join(line(row, "td") for row in rows)
        + "</table>"
    )


def write_page(path: Path, results: Sequence[Result]) -> None:
    """Raises StartupError."""
    try:
        path.write_text(page(results), encoding="utf-8")
    except OSError as e:
        raise StartupError(f"{path} cannot be written: {e.strerror}") from None
