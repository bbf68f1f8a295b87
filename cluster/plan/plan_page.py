"""A plan as one HTML page that opens offline. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from cluster.offline_page import document, plots, write
from cluster.plan import tables
from cluster.plan.plots import all_plots
from cluster.plan.report import Plan
from cluster.plan.tables import Table

_OWN = "th, td { overflow-wrap: normal; } .wide { overflow-x: auto; }"
_WIDE = 2
"""The first tables have sentences in them, and the whole width."""


def page(of: Plan) -> str:
    found = tables.tables(of)
    told = [*tables.warnings(of), *tables.notes(of)]
    warnings = "".join(f'<p class="warn">{escape(line)}</p>' for line in told)
    left, right = found[_WIDE::2], found[_WIDE + 1 :: 2]
    body = (
        f"{_lines(tables.about(of))}{warnings}{_all(found[:_WIDE])}"
        f'<div class="side"><div>{_all(left)}</div><div>{_all(right)}</div></div>'
        f"<h2>Plots</h2>{plots(all_plots(of))}"
        f"<h2>What it rests on</h2>{_lines(tables.legend(of))}"
    )
    return document("baton plan", body, _OWN)


def _lines(sentences: Sequence[str]) -> str:
    return f'<p class="sub">{"<br>".join(escape(line) for line in sentences)}</p>'


def _all(found: Sequence[Table]) -> str:
    return "".join(_table(table) for table in found)


def _table(table: Table) -> str:
    head = _row(table.heads, "th") if any(table.heads) else ""
    rows = "".join(_row(row, "td") for row in table.rows)
    words = max((len(cell) for row in table.rows for cell in row[1:]), default=0) > 40
    numbers = "" if words else ' class="n"'
    inner = f"<table{numbers}>{head}{rows}</table>"
    return f'<h2>{escape(table.title)}</h2><div class="wide">{inner}</div>'


def _row(cells: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def write_page(path: Path, of: Plan) -> None:
    """Raises StartupError."""
    write(path, page(of))
