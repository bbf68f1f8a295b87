"""A run as its log of decisions has it: workers over time, and how long they took to come."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.autoscale_figures import Look
from cluster.settings import ROLES, Role
from cluster.sizing.decision import Record, from_line
from cluster.sizing.snapshot import Counts, Snapshot


class Took(NamedTuple):
    """Seconds, to the next turn of the loop: from a loan's decision until the worker serves the
    other role, and from the asking for a worker until it serves."""

    loans: list[float]
    starts: list[float]


def read(path: Path) -> list[Record]:
    return [from_line(line) for line in path.read_bytes().splitlines()]


def looks(records: Sequence[Record], began: float) -> list[Look]:
    """``began``: on time.monotonic."""
    return [_look(record, began) for record in records]


def _look(record: Record, began: float) -> Look:
    seen = record.snapshot
    asked = record.decision.targets if record.acted else seen.targets
    leaving = sum(worker.state == "leaving" for worker in seen.workers)
    serving = _serving(seen)
    return Look(
        seen.at_s - began,
        max(asked.total + leaving, len(seen.workers)),
        sum(role == "prefill" for role in serving.values()),
        sum(role == "decode" for role in serving.values()),
    )


def _serving(seen: Snapshot) -> dict[str, Role]:
    return {w.instance: w.role for w in seen.workers if w.state in ("serving", "warming")}


def took(records: Sequence[Record]) -> Took:
    """Who comes is taken for the one that was asked for first."""
    found = Took([], [])
    lent: dict[str, tuple[float, Role]] = {}
    waits: dict[Role, list[float]] = {role: [] for role in ROLES}
    known: set[str] = set()
    for record in records:
        seen, at = record.snapshot, record.snapshot.at_s
        serving = _serving(seen)
        for worker in seen.workers:
            if known and worker.instance not in known and waits[worker.home]:
                found.starts.append(at - waits[worker.home].pop(0))
        known |= {worker.instance for worker in seen.workers}
        for instance, (began, role) in list(lent.items()):
            if serving.get(instance) == role:
                found.loans.append(at - began)
                del lent[instance]
        if record.acted:
            lent |= {loan.instance: (at, loan.role) for loan in record.decision.loans}
            _ask(waits, seen.targets, record.decision.targets, at)
    return found


def _ask(waits: dict[Role, list[float]], before: Counts, after: Counts, at: float) -> None:
    for role, waiting in waits.items():
        more = after.of(role) - before.of(role)
        if more > 0:
            waiting += [at] * more
        elif more < 0:
            del waiting[max(0, len(waiting) + more) :]
