"""A plan in a terminal. Torch-free."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table as RichTable

from cluster.plan import tables
from cluster.plan.report import Plan
from cluster.plan.tables import Table


def show(console: Console, of: Plan) -> None:
    for line in tables.about(of):
        console.print(line, style="dim")
    for warning in tables.warnings(of):
        console.print(f"\n{warning}", style="bold yellow")
    for note in tables.notes(of):
        console.print(f"\n{note}", style="yellow")
    for table in tables.tables(of):
        console.print()
        console.print(_rich(table))
    console.print()
    for line in tables.legend(of):
        console.print(line, style="dim")


def _rich(table: Table) -> RichTable:
    found = RichTable(title=table.title, title_justify="left", show_header=any(table.heads))
    for i, head in enumerate(table.heads):
        figures = i > 0 and all(_figure(row[i]) for row in table.rows)
        found.add_column(head, justify="right" if figures else "left")
    for row in table.rows:
        found.add_row(*row)
    return found


def _figure(text: str) -> bool:
    """Or what stands for one."""
    return not text or text in ("-", "x", "none") or (text[0].isdigit() and len(text) < 16)
