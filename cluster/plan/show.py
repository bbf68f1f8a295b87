"""The plan of speculation as tables. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from cluster.plan.speculation import Cell


def by_batch(cells: Sequence[Cell]) -> Table:
    """The cells of one acceptance: what a step is made of."""
    title = f"Acceptance {cells[0].acceptance:g}: what a step comes to"
    table = Table(title=title, title_justify="left")
    for head in (
        "batch",
        "drafted\neach",
        "tokens\neach",
        "plain\nms",
        "verify\nms",
        "draft\nms",
        "speed-up",
    ):
        table.add_column(head, justify="right")
    for c in cells:
        table.add_row(
            str(c.batch),
            _nodes(c.nodes),
            f"{c.tokens:.2f}",
            f"{c.plain_ms:.2f}",
            f"{c.verify_ms:.2f}" if c.nodes else "",
            f"{c.draft_ms:.2f}" if c.nodes else "",
            _speedup(c),
        )
    return table


def by_acceptance(cells: Sequence[Cell], even: Mapping[float, int], largest: int) -> Table:
    """Speed-ups of all cells, and the largest batch at which it pays."""
    table = Table(title="Speed-up by acceptance of a drafted token", title_justify="left")
    table.add_column("batch", justify="right")
    for acceptance in even:
        table.add_column(f"{acceptance:g}", justify="right")
    for batch in dict.fromkeys(c.batch for c in cells):
        table.add_row(str(batch), *(_speedup(c) for c in cells if c.batch == batch))
    table.add_section()
    ends = [f"{batch}+" if batch >= largest else str(batch) for batch in even.values()]
    table.add_row("pays up to", *ends, style="bold")
    return table


def _nodes(nodes: float) -> str:
    return f"{nodes:.0f}" if nodes == int(nodes) else f"{nodes:.1f}"


def _speedup(c: Cell) -> str:
    return f"{c.speedup:.2f}" if c.nodes else "-"


def show(
    console: Console, about: str, cells: Sequence[Cell], even: Mapping[float, int], of: float
) -> None:
    """``of``: the acceptance that is shown in detail."""
    console.print(about, style="dim")
    console.print()
    console.print(by_batch([c for c in cells if c.acceptance == of]))
    console.print()
    console.print(by_acceptance(cells, even, max(c.batch for c in cells)))
    console.print(
        "\n-: drafting does not pay, and Baton does not draft then. Passes attend to one token and"
        " draw none; reading KV and drawing come to every step alike.",
        style="dim",
    )
