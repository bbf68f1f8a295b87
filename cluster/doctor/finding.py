"""What a check has found."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import msgspec

from cluster.doctor.subject import Wanted

Level: TypeAlias = Literal["ok", "note", "problem"]
"""ok: as it should be; note: works, but worth knowing; problem: a start would fail."""


class Finding(msgspec.Struct, frozen=True):
    """One line of the report. ``remedy``: what to do about it, where there is anything to do."""

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


# MERGED cluster.doctor.run
# Runs checks side by side, against one deadline.

DEADLINE_S = 2.5
F = TypeVar("F")


class Check(Generic[F]):
    """Facts from ``collect``, which may wait for the world; findings from ``judge``, pure."""

    def __init__(
        self,
        name: str,
        collect: Callable[[Wanted], F],
        judge: Callable[[F, Wanted], list[Finding]],
    ) -> None:
        self.name = name
        self.collect = collect
        self.judge = judge

    def run(self, wanted: Wanted) -> Examined:
        try:
            facts = self.collect(wanted)
            return Examined(self.judge(facts, wanted), {self.name: facts})
        except Exception as error:  # a check that fails says so; the others still count
            first = str(error).strip().partition("\n")[0]
            text = f"could not be checked: {type(error).__name__}: {first}"
            return Examined([problem(self.name, text, "please report this")], {})


@dataclass(frozen=True)
class Examined:
    """Findings in the order of the checks, and the facts of each by its name."""

    findings: list[Finding]
    facts: dict[str, Any]


def examine(
    checks: Sequence[Check[Any]], wanted: Wanted, deadline_s: float = DEADLINE_S
) -> Examined:
    """One that is late is a problem of its own. Its thread is left behind: it ends with the
    process."""
    found: dict[int, Examined] = {}

    def work(index: int) -> None:
        found[index] = checks[index].run(wanted)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(checks))]
    end = time.monotonic() + deadline_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    all_of_it = Examined([], {})
    for index, check in enumerate(checks):
        text = f"no answer within {deadline_s:g} s"
        late = Examined([problem(check.name, text, "what it looks at hangs; try again")], {})
        examined = found.get(index, late)
        all_of_it.findings.extend(examined.findings)
        all_of_it.facts.update(examined.facts)
    return all_of_it
