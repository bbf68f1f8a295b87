"""Renders a cluster overview for `baton status`: lines and tables as narrow as the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from router.overview.link_view import LinkView
from router.overview.overview import ClusterOverview
from router.overview.pool_view import AutoscalerView, WallView
from router.overview.router_view import STAGES, HistogramSummary, RouterView
from router.overview.worker_view import SpeculationView, WorkerView

_WIDE = 100  # terminal width from which every column fits
_COLOURS = {"ready": "green", "draining": "yellow", "down": "red", "silent": "red"}
_VERDICT_COLOURS = {"fine": "green", "strained": "yellow", "down": "red"}
_STAGES_AFTER_FIRST_TOKEN = ("wire", "scatter")

T = TypeVar("T")


def render_overview(overview: ClusterOverview, console: Console) -> RenderableType:
    bars = "█░" if "utf" in console.encoding.lower() else "#."
    silent = [f"{w.role} {w.instance[:6]}: {w.target} {w.why}" for w in overview.workers if w.why]
    return Group(
        _head(overview),
        Text(),
        _workers(overview.workers, bars, console.width),
        *(Text(why, style="red") for why in silent),
        *(
            speculation_line(w.instance[:6], w.speculation)
            for w in overview.workers
            if w.speculation
        ),
        *(link_line(w.instance[:6], w.links) for w in overview.workers if w.links),
        *map(_wall, overview.walls),
        *_autoscaler(overview.autoscaler),
        Text(),
        *_requests(overview.router),
        Text(),
        _latencies(overview.router),
        *_stages(overview.router),
    )


def _head(overview: ClusterOverview) -> Text:
    router = overview.router
    window = overview.window_s
    window_text = "since the start" if window is None else f"of the last {window:.0f} s"
    verdict = overview.verdict
    head = Text.assemble(
        ("baton ", "bold"),
        (overview.cluster, "bold cyan"),
        f"  {overview.model}  {overview.url}  up {_format_duration(router.uptime_s)}",
    )
    if router.replicas != 1:
        head.append(f"  {router.replicas} routers")
    level = "healthy" if verdict.level == "fine" else verdict.level
    text = ": ".join(filter(None, (level, "; ".join(verdict.reasons))))
    head.append(f"\n{text}", style=_VERDICT_COLOURS[verdict.level])
    return head.append(
        f"\nrates, times and ratios {window_text}; objectives of the router", style="dim"
    )


class _Column(NamedTuple):
    """A column of the workers' table, shown from a terminal width of ``least`` characters.

    ``cell`` is not called for a worker that does not answer."""

    name: str
    least: int
    cell: Callable[[WorkerView], str]


_COLUMNS = (
    _Column("run", 0, lambda w: str(w.running)),
    _Column("wait", 0, lambda w: str(w.waiting)),
    _Column("queued", 70, lambda w: _format_count(w.queued_prefill_tokens)),
    _Column("hits", 70, lambda w: _format_percent(w.hit_ratio)),
    _Column("tok/s", 0, lambda w: _format_optional(w.tokens_per_s, _format_count)),
    _Column(
        "MB/s", 78, lambda w: _format_optional(w.received_bytes_per_s, lambda b: f"{b / 1e6:.1f}")
    ),
    _Column("step", _WIDE, lambda w: _format_seconds(w.step_s)),
    _Column("mem", _WIDE, lambda w: f"{w.memory_bytes / 2**20:.0f}M"),
    _Column("engine", 78, lambda w: _engine(w)),
)


def _workers(workers: list[WorkerView], bars: str, width: int) -> RenderableType:
    if not workers:
        return Text("no workers", style="red")
    gap = 2 if width >= _WIDE else 1
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim")
    for name in ("worker", "role", "state", "KV in use"):
        table.add_column(name, no_wrap=True)
    columns = [column for column in _COLUMNS if width >= column.least]
    for column in columns:
        table.add_column(column.name, justify="right", no_wrap=True)
    for worker in workers:
        named = "lent" if worker.lent and worker.state == "ready" else worker.state
        state = Text(named, style=_COLOURS[worker.state])
        cells: list[Text | str] = [worker.instance[:6], worker.role, state]
        if worker.state != "silent":
            cells.append(_bar(worker.kv_usage or 0.0, bars, 10 if width >= _WIDE else 5))
            cells += [column.cell(worker) for column in columns]
        table.add_row(*cells)
    return table


def speculation_line(worker: str, view: SpeculationView) -> Text:
    """Return the line on a decode worker's speculation; ``worker`` is its name in the table."""
    start = Text.assemble(("drafts    ", "dim"), f"{worker} ")
    if view.state == "dropped":
        return start.append("dropped: see the worker's log", style="yellow")
    parts = [view.proposer]
    drafted = f"{view.tokens_per_draft:.1f} per step, " if view.tokens_per_draft else ""
    accepted = "" if view.acceptance is None else f"{drafted}{view.acceptance:.0%} accepted"
    step = view.tokens_per_step
    tokens = "" if step is None else f"{step:.2f} tokens" + " a step" * (not drafted)
    parts += filter(None, [": ".join(filter(None, [accepted, tokens]))])
    if accepted:
        parts.append(f"speed-up {view.measured_speedup:.2f}")
    return start.append("  ".join(parts))


def link_line(worker: str, links: Sequence[LinkView]) -> Text:
    """Return the line on how a worker receives KV; ``worker`` is its name in the table. Links of
    one carrier, chosen for one reason, are shown together with the best of their rates."""
    line = Text.assemble(("KV by     ", "dim"), f"{worker} ")
    groups: dict[tuple[str, str], list[LinkView]] = {}
    for link in links:
        groups.setdefault((link.carrier, link.reason), []).append(link)
    for (carrier, reason), group in sorted(groups.items()):
        best = max((link.bytes_per_s or 0.0 for link in group), default=0.0)
        rate = f" {best / 1e9:.2f} GB/s" if best else ""
        peers = f" from {len(group)} workers" if len(group) > 1 else f" from {group[0].peer[:6]}"
        line.append(f" {carrier}{rate}{peers}")
        if reason and reason != "best":
            line.append(f" ({reason})", style="yellow" if group[0].avoided else "dim")
    return line


def _wall(view: WallView) -> Text:
    """Return the line on the wall that binds a pool, and on what would relax it."""
    style = "yellow" if view.wall is not None else ""
    return Text.assemble(("wall      ", "dim"), f"{view.role}: ", (view.text, style))


def _autoscaler(view: AutoscalerView | None) -> list[Text]:
    if view is None:
        return []
    style = "yellow" if view.infeasible or not view.mode else ""
    return [Text.assemble(("scaling   ", "dim"), (view.text, style))]


def _engine(worker: WorkerView) -> str:
    """Return the engine's pid, and how often the engine was replaced."""
    again = f" (+{worker.engine_restarts})" if worker.engine_restarts else ""
    return f"{worker.engine_pid or '-'}{again}"


def _requests(router: RouterView) -> list[Text]:
    ended = "  ".join(f"{status}: {count}" for status, count in router.requests.items()) or "none"
    lines = [
        Text.assemble(
            ("requests  ", "dim"),
            f"running {router.running}  waiting {router.waiting}",
            (_format_optional(router.requests_per_s, lambda r: f"  {r:.1f}/s", ""), "bold"),
            _format_optional(
                router.output_tokens_per_s, lambda r: f"  {_format_count(r)} tok/s", ""
            ),
            f"  cache hits {_format_percent(router.hit_ratio)}",
        ),
        Text.assemble(("ended     ", "dim"), ended),
    ]
    if router.refusals:
        reasons = "  ".join(f"{reason} {count}" for reason, count in router.refusals.items())
        lines.append(Text.assemble(("refused   ", "dim"), (f"by {reasons}", "yellow")))
    met = "  ".join(
        f"{shown} {_format_percent(router.slo[n])}"
        for n, shown in _OBJECTIVES.items()
        if n in router.slo
    )
    goodput = _format_optional(router.goodput_per_s, lambda r: f"  goodput {r:.1f}/s", "")
    return [*lines, Text.assemble(("in time   ", "dim"), (met or "-") + goodput)]


_OBJECTIVES = {"ttft": "TTFT", "tpot": "TPOT", "all": "both"}


def _latencies(router: RouterView) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("latency", no_wrap=True)
    for name in ("p50", "p90", "p99", "mean", "of"):
        table.add_column(name, justify="right", no_wrap=True)
    for label, spread in (("TTFT", router.ttft), ("TPOT", router.tpot), ("ITL", router.itl)):
        table.add_row(label, *_spread_cells(spread))
    return table


def _spread_cells(spread: HistogramSummary) -> list[str]:
    values = [spread.p50, spread.p90, spread.p99, spread.mean]
    return [*map(_format_seconds, values), _format_count(spread.count)]


def _stages(router: RouterView) -> list[Text]:
    """Return the mean times of the stages, which add up; those after the first token apart."""
    found = {name: router.stages[name] for name in STAGES if name in router.stages}
    if not found:
        return []
    first = [
        f"{n} {_format_seconds(s)}" for n, s in found.items() if n not in _STAGES_AFTER_FIRST_TOKEN
    ]
    lines = [Text.assemble(("TTFT =    ", "dim"), " + ".join(first))]
    after = [f"{n} {_format_seconds(found[n])}" for n in _STAGES_AFTER_FIRST_TOKEN if n in found]
    if after:
        lines.append(
            Text.assemble(("then      ", "dim"), " + ".join(after), " to the second token")
        )
    return lines


def _bar(part: float, bars: str, width: int) -> str:
    filled = round(min(1.0, max(0.0, part)) * width)
    return f"{bars[0] * filled}{bars[1] * (width - filled)} {part:4.0%}"


def _format_optional(value: T | None, form: Callable[[T], str], none: str = "-") -> str:
    return none if value is None else form(value)


def _format_percent(part: float | None) -> str:
    return _format_optional(part, lambda p: f"{p:.0%}")


def _format_count(value: float) -> str:
    """Return the value with three digits and k or M."""
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if value >= 10 * unit:
            return (
                f"{value / unit:.0f}{name}" if value >= 100 * unit else f"{value / unit:.1f}{name}"
            )
    return f"{value:.0f}"


def _format_seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s"


def _format_duration(seconds: float | None) -> str:
    """Return a duration in its two largest units."""
    if seconds is None:
        return "-"
    left = int(seconds)
    parts: list[str] = []
    for unit, name in ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        count, left = divmod(left, unit)
        if count or (name == "s" and not parts):
            parts.append(f"{count} {name}")
    return " ".join(parts[:2])
