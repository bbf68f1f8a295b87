"""All checks, and which of them concern what is started."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from cluster.doctor import draft, gpus, leftovers, machine, memory, model, packages, ports, redis
from cluster.doctor.finding import Check, Finding, examine, problem, problems
from cluster.doctor.memory import Plan
from cluster.doctor.subject import Wanted
from protocol.errors import StartupError

MODEL = Check("model", model.collect, model.judge)
MEMORY = Check("memory", memory.collect, memory.judge)
_DRAFT = Check("draft", draft.collect, draft.judge)
_PACKAGES = Check("packages", packages.collect, packages.judge)
_MACHINE = Check("machine", machine.collect, machine.judge)
_GPU = Check("gpu", gpus.collect, gpus.judge)
_PORT = Check("port", ports.collect, ports.judge)
_REDIS = Check("redis", redis.collect, redis.judge)
_LEFTOVERS = Check("leftovers", leftovers.collect, leftovers.judge)


def everything() -> list[Check[Any]]:
    """For `baton doctor`."""
    return [_PACKAGES, _MACHINE, _GPU, _PORT, _REDIS, _LEFTOVERS, MODEL, _DRAFT, MEMORY]


def before_start(wanted: Wanted) -> list[Check[Any]]:
    """What a start of this kind depends on."""
    if wanted.what == "router":
        return [_PACKAGES, _PORT, _REDIS, MODEL]
    return [_PACKAGES, _MACHINE, _GPU, _PORT, _REDIS, MODEL, _DRAFT, MEMORY]


# MERGED cluster.doctor.preflight
# The checks of a start, before anything loads: every problem at once, or nothing.

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
    of_model: list[Check[Any]] = [MODEL, MEMORY]
    which = of_model if model_only else before_start(wanted)
    examined = examine(which, wanted)
    if wrong := wrong + problems(examined.findings):
        raise NotReady(wrong)
    plans = memory.plans(examined.facts.get(MEMORY.name), wanted)
    return [f for f in examined.findings if f.level == "note"], plans


def _complaint(call: Callable[[], object]) -> list[Finding]:
    try:
        call()
    except StartupError as error:
        return [problem("options", str(error), "")]
    return []
