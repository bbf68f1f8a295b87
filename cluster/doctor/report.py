"""Runs `baton doctor`, and renders findings and memory plans for 80 columns or as JSON."""

from __future__ import annotations

import time

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.doctor import checks, memory
from cluster.doctor.finding import Finding, Level, problems, run_checks
from cluster.doctor.memory import MemoryPlan
from cluster.doctor.subject import DoctorSubject
from cluster.local.start_report import format_size

_MARKS: dict[Level, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "note": ("note", "yellow"),
    "problem": ("PROBLEM", "bold red"),
}


def table(findings: list[Finding]) -> RenderableType:
    """Return a table with a row per finding, each followed by its remedy."""
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
    text = f"{wrong} problem{'s' * (wrong != 1)}" if wrong else "no problems"
    if notes:
        text += f", {notes} note{'s' * (notes != 1)}"
    return f"{text}  ({seconds:.1f} s)"


def findings_as_json(findings: list[Finding], plans: list[MemoryPlan], seconds: float) -> str:
    """Return one JSON object with the findings and the memory plans, in bytes."""
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


def memory_lines(plans: list[MemoryPlan], subject: DoctorSubject) -> RenderableType:
    """Return a table per place with the memory of each pool."""
    return Group(*(_plan_table(plan, subject) for plan in plans))


def _plan_table(plan: MemoryPlan, subject: DoctorSubject) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    for justify in ("left", "right", "right", "right", "right", "right", "right"):
        grid.add_column(justify=justify, no_wrap=True)
    if plan.engines:
        grid.add_row(plan.place, "weights", "KV cache", "workspace", "runtime", "each", "all")
    for pool in plan.engines:
        each = pool.each
        parts = (each.weights, each.kv, each.workspace, each.runtime + each.shared, each.total)
        sizes = [format_size(part) for part in parts]
        sizes[1] = (">= " if each.kv_grows else "") + sizes[1]
        grid.add_row(f"{pool.count} {pool.role}", *sizes, format_size(pool.total))
    if plan.others:
        name = "front" if subject.kind == "worker" else "others"
        grid.add_row(name, "", "", "", "", "", format_size(plan.others))
    grid.add_row("needed", "", "", "", "", "", format_size(plan.needed))
    sign = "" if plan.fits else "  (too little)"
    return Group(grid, Text(f"free: {format_size(plan.free)}{sign}"))


def print_report(
    console: Console,
    findings: list[Finding],
    plans: list[MemoryPlan],
    subject: DoctorSubject,
    seconds: float,
) -> None:
    """Print the whole report of `baton doctor`."""
    console.print(table(findings))
    if plans:
        console.print()
        console.print(memory_lines(plans, subject))
    console.print()
    style = "bold red" if problems(findings) else "green"
    console.print(Text(summary(findings, seconds), style=style))


def run_doctor(subject: DoctorSubject, *, as_json: bool) -> int:
    """Run all checks and print the report; return 0 when a start would succeed, else 1."""
    began = time.monotonic()
    results = run_checks(checks.all_checks(), subject)
    plans = memory.memory_plans(results.facts.get(checks.MEMORY.name), subject)
    findings, seconds = results.findings, time.monotonic() - began
    if as_json:
        print(findings_as_json(findings, plans, seconds))
    else:
        print_report(Console(highlight=False), findings, plans, subject, seconds)
    return int(bool(problems(findings)))
