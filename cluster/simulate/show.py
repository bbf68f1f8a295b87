"""A simulation's result as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from cluster.simulate.result import Result, Spread

Row = tuple[str, str]

LATENCIES = ("", "mean", "p50", "p90", "p99")


def of_requests(of: Result) -> list[Row]:
    return [
        ("requests", f"{of.requests} in {_span(of.seconds)}"),
        ("goodput", f"{of.goodput:.3g} requests/s met both objectives"),
        ("both met", f"{of.both_met:.2%}"),
        (f"TTFT within {of.goals.ttft_s * 1e3:g} ms", f"{of.ttft_met:.2%}"),
        (f"TPOT within {of.goals.tpot_s * 1e3:g} ms", f"{of.tpot_met:.2%}"),
        ("refused", str(of.refused)),
        ("failed", str(of.failed)),
        ("too long for a pool", str(of.too_long)),
        ("begun anew elsewhere", str(of.moved)),
        ("prompt tokens cached", f"{of.cached_share:.1%}"),
    ]


def of_pools(of: Result) -> list[Row]:
    hours = of.gpu_hours
    each = of.goodput * of.seconds / (hours * 3600) if hours else 0.0
    rows = [
        ("GPU-hours", f"{hours:.2f}"),
        ("goodput of a GPU", f"{each:.3g} requests/s"),
        ("busy, prefill", f"{of.busy_prefill:.1%}"),
        ("busy, decode", f"{of.busy_decode:.1%}"),
    ]
    if of.reasons:
        told = ", ".join(f"{reason} {count}" for reason, count in sorted(of.reasons.items()))
        rows += [("loans", str(of.loans)), ("decisions", told)]
    return rows


def latencies(of: Result) -> list[tuple[str, ...]]:
    return [_latency("TTFT ms", of.ttft), _latency("TPOT ms", of.tpot)]


def _latency(name: str, of: Spread) -> tuple[str, ...]:
    return (name, *(f"{1e3 * v:.4g}" for v in (of.mean, of.p50, of.p90, of.p99)))


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(*head, show_header=any(head), box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right" if any(head) else "left"
    for row in rows:
        table.add_row(*row)
    return table


def show(console: Console, of: Result) -> None:
    console.print(f"[bold]{of.name}[/bold]", highlight=False)
    for rows in (of_requests(of), of_pools(of)):
        console.print(_table(("", ""), rows))
        console.print()
    console.print(_table(LATENCIES, latencies(of)))
    speed = f"{of.events} events in {of.wall_s:.1f} s"
    console.print(f"\n{speed}", style="dim")
