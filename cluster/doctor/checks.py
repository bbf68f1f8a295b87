"""Lists the checks, and runs those that a start depends on before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cluster.doctor import draft, gpus, leftovers, machine, memory, model, packages, ports, redis
from cluster.doctor.finding import Check, Finding, problem, problems, run_checks
from cluster.doctor.memory import MemoryPlan
from cluster.doctor.subject import DoctorSubject
from protocol.errors import StartupError, UsageError

MODEL = Check("model", model.collect, model.judge)
MEMORY = Check("memory", memory.collect, memory.judge)
_DRAFT = Check("draft", draft.collect, draft.judge)
_PACKAGES = Check("packages", packages.collect, packages.judge)
_MACHINE = Check("machine", machine.collect, machine.judge)
_GPU = Check("gpu", gpus.collect, gpus.judge)
_PORT = Check("port", ports.collect, ports.judge)
_REDIS = Check("redis", redis.collect, redis.judge)
_LEFTOVERS = Check("leftovers", leftovers.collect, leftovers.judge)


def all_checks() -> list[Check[Any]]:
    """Return the checks of `baton doctor`."""
    return [_PACKAGES, _MACHINE, _GPU, _PORT, _REDIS, _LEFTOVERS, MODEL, _DRAFT, MEMORY]


def start_checks(subject: DoctorSubject) -> list[Check[Any]]:
    """Return the checks that a start of the subject depends on."""
    if subject.kind == "router":
        return [_PACKAGES, _PORT, _REDIS, MODEL]
    return [_PACKAGES, _MACHINE, _GPU, _PORT, _REDIS, MODEL, _DRAFT, MEMORY]


def node_checks(subject: DoctorSubject, *, memory: bool) -> list[Check[Any]]:
    """Return the checks of a node of a Ray cluster. With ``memory`` the engines must fit into what
    is free; where workers run that a deployment replaces, that says nothing."""
    if subject.kind == "router":
        return [MODEL]
    return [_GPU, MODEL, _DRAFT, *([MEMORY] if memory else [])]


def update_checks() -> list[Check[Any]]:
    """Return the checks of an update: the cluster itself holds the port and much of the memory."""
    return [_PACKAGES, _MACHINE, _GPU, _REDIS, MODEL, _DRAFT]


_INDENT = "\n         "


class PreflightFailed(StartupError):
    """A start would fail because of ``findings``; the message lists them with their remedies."""

    def __init__(self, findings: list[Finding]) -> None:
        self.findings = findings
        lines = [f"{len(findings)} problem{'s' * (len(findings) != 1)}"]
        for finding in findings:
            lines.append(f"{finding.check}: {finding.text}")
            lines += [f"-> {finding.remedy}"] if finding.remedy else []
        super().__init__(_INDENT.join(lines))


class WrongModelOption(PreflightFailed, UsageError):
    """A start would fail only because the option names no model."""


def preflight(
    subject: DoctorSubject,
    settings: Iterable[Callable[[], object]] = (),
    *,
    only: Sequence[Check[Any]] | None = None,
) -> tuple[list[Finding], list[MemoryPlan]]:
    """Run the checks of a start; return the notes and the memory plans.

    ``settings`` are functions that raise StartupError for invalid settings; their errors are
    reported with the other problems. ``only``: run these checks in their place. Raises
    PreflightFailed with all problems."""
    failures = [finding for call in settings for finding in _setting_problems(call)]
    chosen = start_checks(subject) if only is None else only
    results = run_checks(chosen, subject)
    if failures := failures + problems(results.findings):
        found = results.facts.get(MODEL.name)
        unnamed = found is not None and found.unnamed
        raise (WrongModelOption if unnamed and len(failures) == 1 else PreflightFailed)(failures)
    plans = memory.memory_plans(results.facts.get(MEMORY.name), subject)
    return [f for f in results.findings if f.level == "note"], plans


def _setting_problems(call: Callable[[], object]) -> list[Finding]:
    try:
        call()
    except StartupError as error:
        return [problem("options", str(error), "")]
    return []
