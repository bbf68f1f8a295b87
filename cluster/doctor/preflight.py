"""The checks of a start, before anything loads: every problem at once, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from cluster.doctor import checks, memory
from cluster.doctor.finding import Finding, problem, problems
from cluster.doctor.fitting import Plan
from cluster.doctor.run import Check, examine
from cluster.doctor.wanted import Wanted
from protocol.errors import StartupError

_INDENT = "\n         "


class NotReady(StartupError):
    """A start would fail; ``findings`` are its problems, each with its remedy."""

    def __init__(self, findings: list[Finding]) -> None:
        self.findings = findings
        lines = [f"{len(findings)} problem{'s' * (len(findings) != 1)}"]
        for finding in findings:
            lines.append(f"{finding.check}: {finding.text}")
            lines += [f"-> {finding.remedy}"] if finding.remedy else []
        super().__init__(_INDENT.join(lines))


def check(
    wanted: Wanted, settings: Iterable[Callable[[], object]] = (), *, model_only: bool = False
) -> tuple[list[Finding], list[Plan]]:
    """What is worth saying, and the memory that it takes. ``settings`` raise StartupError for
    options that make no sense; they are reported with the rest. Raises NotReady."""
    wrong = [finding for call in settings for finding in _complaint(call)]
    of_model: list[Check[Any]] = [checks.MODEL, checks.MEMORY]
    which = of_model if model_only else checks.before_start(wanted)
    examined = examine(which, wanted)
    if wrong := wrong + problems(examined.findings):
        raise NotReady(wrong)
    plans = memory.plans(examined.facts.get(checks.MEMORY.name), wanted)
    return [f for f in examined.findings if f.level == "note"], plans


def _complaint(call: Callable[[], object]) -> list[Finding]:
    try:
        call()
    except StartupError as error:
        return [problem("options", str(error), "")]
    return []
