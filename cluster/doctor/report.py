"""Findings and memory as a person reads them, 80 columns wide, or as JSON."""

from __future__ import annotations

import time

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.doctor import checks, memory
from cluster.doctor.finding import Finding, Level, examine, problems
from cluster.doctor.memory import Plan
from cluster.doctor.subject import Wanted
from cluster.local.start_report import size

_MARKS: dict[Level, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "note": ("note", "yellow"),
    "problem": ("PROBLEM", "bold red"),
}


def table(findings: list[Finding]) -> RenderableType:
    """A row each; the remedy below what it is for."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for finding in findings:
        word, style = _MARKS[finding.level]
        text = Text(finding.text)
        if finding.remedy:
            text.append(f"\n-> {finding.remedy}", style="cyan")
        grid.add_row(Text(word, style=style), finding.check, text)
    return grid


def summary(findings: list[Finding], seconds: float) -> str:
    wrong = len(problems(findings))
    notes = sum(finding.level == "note" for finding in findings)
    said = f"{wrong} problem{'s' * (wrong != 1)}" if wrong else "no problems"
    if notes:
        said += f", {notes} note{'s' * (notes != 1)}"
    return f"{said}  ({seconds:.1f} s)"


def findings_as_json(findings: list[Finding], plans: list[Plan], seconds: float) -> str:
    """One object: whether it is ok, findings, memory in bytes."""
    memory = [
        {**msgspec.to_builtins(plan), "needed": plan.needed, "fits": plan.fits} for plan in plans
    ]
    answer = {
        "ok": not problems(findings),
        "seconds": round(seconds, 2),
        "findings": msgspec.to_builtins(findings),
        "memory": memory,
    }
    return msgspec.json.format(msgspec.json.encode(answer), indent=2).decode()


def memory_lines(plans: list[Plan], wanted: Wanted) -> RenderableType:
    """What takes the memory of each place."""
    return Group(*(_memory(plan, wanted) for plan in plans))


def _memory(plan: Plan, wanted: Wanted) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    for justify in ("left", "right", "right", "right", "right", "right", "right"):
        grid.add_column(justify=justify, no_wrap=True)
    if plan.engines:
        grid.add_row(plan.place, "weights", "KV cache", "workspace", "runtime", "each", "all")
    for pool in plan.engines:
        each = pool.each
        parts = (each.weights, each.kv, each.workspace, each.runtime + each.shared, each.total)
        sizes = [size(part) for part in parts]
        sizes[1] = (">= " if each.kv_grows else "") + sizes[1]
        grid.add_row(f"{pool.count} {pool.role}", *sizes, size(pool.total))
    if plan.others:
        name = "front" if wanted.what == "worker" else "others"
        grid.add_row(name, "", "", "", "", "", size(plan.others))
    grid.add_row("needed", "", "", "", "", "", size(plan.needed))
    sign = "" if plan.fits else "  (too little)"
    return Group(grid, Text(f"free: {size(plan.free)}{sign}"))


def print_report(
    console: Console, findings: list[Finding], plans: list[Plan], wanted: Wanted, seconds: float
) -> None:
    """All of `baton doctor`."""
    console.print(table(findings))
    if plans:
        console.print()
        console.print(memory_lines(plans, wanted))
    console.print()
    style = "bold red" if problems(findings) else "green"
    console.print(Text(summary(findings, seconds), style=style))


# MERGED cluster.doctor.command
# `baton doctor`: every check, and the report.


def run(wanted: Wanted, *, as_json: bool) -> int:
    """Exit status: 0 when nothing would keep it from starting, else 1."""
    began = time.monotonic()
    examined = examine(checks.everything(), wanted)
    plans = memory.plans(examined.facts.get(checks.MEMORY.name), wanted)
    findings, seconds = examined.findings, time.monotonic() - began
    if as_json:
        print(findings_as_json(findings, plans, seconds))
    else:
        print_report(Console(highlight=False), findings, plans, wanted, seconds)
    return int(bool(problems(findings)))
