"""A decision in one line, for people; none where it changes nothing."""

from __future__ import annotations

from cluster.sizing.decision import Record
from protocol.roles import ROLES

_SHOWN = {"prefill": "P", "decode": "D"}


def line(record: Record, before: Record | None, why: str = "", held: str = "") -> str | None:
    """``before``: the last one that was told; ``why``: nothing is known, if so; ``held``: why
    nobody is started or ended, if so (loans may be made all the same)."""
    made = record.decision
    numbers = _numbers(record)
    moves = list(numbers)
    for loan in made.loans:
        other = "decode" if loan.role == "prefill" else "prefill"
        moves.append(f"{loan.instance[:8]} {other}->{loan.role}")
    if before is not None and not _news(record, before) and (not moves or _asked(record, before)):
        return None
    wanted = ", ".join(f"{_SHOWN[role]} {made.wanted.of(role)}" for role in ROLES)
    said = ", ".join(moves) or f"wanted: {wanted}"
    missed = "".join(f"; no number of workers meets {slo}" for slo in made.slo_infeasible)
    undone = ""
    if not record.acted:
        undone = " [not carried out]"
    elif held and numbers:
        undone = f" [not carried out: {', '.join(numbers)}; {held}]"
    unknown = f" ({why})" if why and made.reason == "no_metrics" else ""
    return f"{said} ({made.reason}: {made.text}{unknown}){missed}{undone}"


def _numbers(record: Record) -> list[str]:
    """Workers to ask for, of the pools for which that is another number."""
    before, after = record.snapshot.targets, record.decision.targets
    changed = [role for role in ROLES if before.of(role) != after.of(role)]
    return [f"{_SHOWN[role]} {before.of(role)}->{after.of(role)}" for role in changed]


def _news(record: Record, before: Record) -> bool:
    """Something else than figures is another: the reason, who acts, what cannot be met."""
    now, then = record.decision, before.decision
    return (record.acted, now.reason, now.wanted, now.slo_infeasible) != (
        before.acted,
        then.reason,
        then.wanted,
        then.slo_infeasible,
    )


def _asked(record: Record, before: Record) -> bool:
    """The same was said before, and nobody has done it."""
    return (record.snapshot.targets, record.decision.targets, record.decision.loans) == (
        before.snapshot.targets,
        before.decision.targets,
        before.decision.loans,
    )
