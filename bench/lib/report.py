"""The result line that every benchmark prints, and the rows in it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table


class ResultRow(msgspec.Struct, frozen=True):
    """One figure; ``against`` names what ``ratio`` compares with, and larger ratios are better."""

    name: str
    value: float
    unit: str
    against: str = ""
    ratio: float | None = None


def percentile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile: the value below which ``share`` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median(values: Sequence[float]) -> float:
    return percentile(values, 0.5)


def finish(bench: str, rows: Sequence[ResultRow]) -> None:
    """Print the rows as a table, then the result line."""
    table = Table(title=bench)
    for column in ("what", "value", "unit", "against", "ratio"):
        table.add_column(column, justify="left" if column in ("what", "against") else "right")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(row.name, f"{row.value:.4g}", row.unit, row.against, ratio)
    Console(width=110).print(table)
    print(msgspec.json.encode({"bench": bench, "rows": rows}).decode())
