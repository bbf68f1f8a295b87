"""Defines a check and its findings, and runs checks in parallel against one deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import msgspec

from cluster.doctor.subject import DoctorSubject

Level: TypeAlias = Literal["ok", "note", "problem"]
"""ok: as it should be; note: works, but worth knowing; problem: a start would fail."""


class Finding(msgspec.Struct, frozen=True):
    """One line of the report. ``remedy``: what to do about it; empty if nothing is to be done."""

    check: str
    level: Level
    text: str
    remedy: str = ""


def ok(check: str, text: str) -> Finding:
    return Finding(check, "ok", text)


def note(check: str, text: str, remedy: str = "") -> Finding:
    return Finding(check, "note", text, remedy)


def problem(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, "problem", text, remedy)


def problems(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level == "problem"]


DEADLINE_S = 2.5
F = TypeVar("F")


class Check(Generic[F]):
    """One check. ``collect`` returns facts and may block; ``judge`` turns them into findings."""

    def __init__(
        self,
        name: str,
        collect: Callable[[DoctorSubject], F],
        judge: Callable[[F, DoctorSubject], list[Finding]],
    ) -> None:
        self.name = name
        self.collect = collect
        self.judge = judge

    def run(self, subject: DoctorSubject) -> CheckResults:
        try:
            facts = self.collect(subject)
            return CheckResults(self.judge(facts, subject), {self.name: facts})
        except Exception as error:  # a broken check is reported; the others still count
            first = str(error).strip().partition("\n")[0]
            text = f"could not be checked: {type(error).__name__}: {first}"
            return CheckResults([problem(self.name, text, "please report this")], {})


@dataclass(frozen=True)
class CheckResults:
    """The findings in the order of the checks, and each check's facts by its name."""

    findings: list[Finding]
    facts: dict[str, Any]


def run_checks(
    checks: Sequence[Check[Any]], subject: DoctorSubject, deadline_s: float = DEADLINE_S
) -> CheckResults:
    """Run all checks, each in a thread, and return their findings and facts.

    A check that misses the deadline is reported as a problem. Its daemon thread keeps running and
    ends with the process."""
    found: dict[int, CheckResults] = {}

    def work(index: int) -> None:
        found[index] = checks[index].run(subject)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(checks))]
    end = time.monotonic() + deadline_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    merged = CheckResults([], {})
    for index, check in enumerate(checks):
        text = f"no answer within {deadline_s:g} s"
        late = CheckResults([problem(check.name, text, "the check hangs; try again")], {})
        results = found.get(index, late)
        merged.findings.extend(results.findings)
        merged.facts.update(results.facts)
    return merged
