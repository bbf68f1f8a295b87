"""`baton doctor`: every check, and the report."""

from __future__ import annotations

import time

from rich.console import Console

from cluster.doctor import checks, memory, show
from cluster.doctor.finding import problems
from cluster.doctor.run import examine
from cluster.doctor.wanted import Wanted


def run(wanted: Wanted, *, as_json: bool) -> int:
    """Exit status: 0 when nothing would keep it from starting, else 1."""
    began = time.monotonic()
    examined = examine(checks.everything(), wanted)
    plans = memory.plans(examined.facts.get(checks.MEMORY.name), wanted)
    findings, seconds = examined.findings, time.monotonic() - began
    if as_json:
        print(show.as_json(findings, plans, seconds))
    else:
        show.print_report(Console(highlight=False), findings, plans, wanted, seconds)
    return int(bool(problems(findings)))
