"""A result in words: rows of text that the terminal and the page have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.serve.figures import LATENCIES, Quantiles
from bench.serve.result import Result

COLUMNS = ("ms", "mean", "p50", "p90", "p95", "p99", "max")


def number(value: float | None, unit: str = "") -> str:
    """Three digits at least; a dash for none."""
    if value is None:
        return "-"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}{unit}"


def facts(of: Result) -> Iterator[tuple[str, str]]:
    """Label and value."""
    s = of.summary
    yield "requests", f"{s.requests:,} sent, {s.ok:,} whole" + _if(s.interrupted, "interrupted")
    for kind, count in s.errors.items():
        message = s.messages.get(kind, "")
        yield f"failed: {kind}", f"{count:,}" + (f"  ({message})" if message else "")
    yield "span", number(s.span_s, " s")
    offered = "" if s.offered_rate is None else f", offered {number(s.offered_rate)}"
    yield "request rate", f"{number(s.achieved_rate)} whole/s, sent {number(s.sent_rate)}{offered}"
    yield "output tokens", f"{number(s.output_tokens_per_s)} per s, {_spread(s.output_tokens)}"
    if s.short_outputs:
        yield "ended early", f"{s.short_outputs:,} outputs shorter than asked (see --ignore-eos)"
    yield "prompt tokens", f"{number(s.prompt_tokens_per_s)} per s, {_spread(s.prompt_tokens)}"
    if s.cached_share is not None:
        yield "prompt cached", f"{s.cached_share:.1%}"
    yield "tokens per arrival", number(s.tokens_per_arrival)
    if s.goodput is not None:
        bounds = (("TTFT", of.config["ttft_slo_ms"]), ("TPOT", of.config["tpot_slo_ms"]))
        goal = ", ".join(f"{name} <= {ms:g} ms" for name, ms in bounds if ms is not None)
        share = "" if s.good_share is None else f", {s.good_share:.1%} of the requests"
        yield "goodput", f"{number(s.goodput)} requests/s{share} ({goal})"
    lag = of.health.lag_ms
    late = (
        "" if lag is None else f"late by {number(lag.p50)} ms (p50), {number(lag.p99)} ms (p99); "
    )
    yield "generator", f"{late}{of.health.cpu_share:.0%} of a core"


def _if(count: int, what: str) -> str:
    return f", {count:,} {what}" if count else ""


def _spread(of: Quantiles | None) -> str:
    return "-" if of is None else f"{number(of.mean)} a request (p99 {of.p99:,.0f})"


def latency_rows(of: Result) -> list[tuple[str, ...]]:
    """A row for each of COLUMNS. With a closed loop, due is sent, and a row says it all."""
    closed = of.config["concurrency"] is not None
    return [
        (name, *map(number, (q.mean, q.p50, q.p90, q.p95, q.p99, q.most)))
        for key, name in LATENCIES.items()
        if (q := of.summary.latencies.get(key)) and not (closed and "from_sent" in key)
    ]


def comparison(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """A row for each figure: its value in each result, and of the last against the first."""
    figures = [_figures(r) for r in results]
    rows = []
    for name in figures[0]:
        values = [f.get(name) for f in figures]
        first, last = values[0], values[-1]
        change = f"{last / first - 1:+.1%}" if first and last is not None else "-"
        rows.append((name, *map(number, values), change))
    return rows


def _figures(of: Result) -> dict[str, float | None]:
    s = of.summary
    figures: dict[str, float | None] = {
        "requests/s": s.achieved_rate,
        "output tokens/s": s.output_tokens_per_s,
        "goodput, requests/s": s.goodput,
        "failed": float(sum(s.errors.values())),
    }
    for key, name in LATENCIES.items():
        q = s.latencies.get(key)
        if not key.endswith("from_sent_ms"):
            figures[f"{name} p50, ms"] = q.p50 if q else None
            figures[f"{name} p99, ms"] = q.p99 if q else None
    return figures


def print_result(console: Console, of: Result) -> None:
    if of.interrupted:
        console.print("[bold]Interrupted: what follows is of the part that ran.[/]")
    console.print(_table(("", of.name), facts(of)))
    console.print(_table(COLUMNS, latency_rows(of), right=True))
    for warning in of.health.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))


def print_comparison(console: Console, results: Sequence[Result]) -> None:
    names = [f"{chr(65 + i)}: {r.name}" for i, r in enumerate(results)]
    console.print(_table(("", *names, "last against first"), comparison(results), right=True))


def _table(
    head: Sequence[str],
    rows: Iterator[tuple[str, ...]] | list[tuple[str, ...]],
    right: bool = False,
) -> Table:
    table = Table()
    for i, name in enumerate(head):
        table.add_column(Text(name), justify="right" if right and i else "left")
    for row in rows:
        table.add_row(*map(Text, row))  # Text: what a server says is no markup
    return table
