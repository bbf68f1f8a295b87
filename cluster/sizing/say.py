"""A decision in words. Pure."""

from __future__ import annotations

from cluster.sizing.decision import Need, Reason
from cluster.sizing.snapshot import Counts
from protocol.roles import ROLES, Role

_BECAUSE: dict[Reason, str] = {
    "steady": "as it should be",
    "settling": "less would do; not for long enough yet, or a step down was just now",
    "demand": "more is needed",
    "loan": "one pool can spare what the other needs",
    "surplus": "less has done for long enough",
    "limit": "more is needed than may be had",
}


def say(reason: Reason, have: Counts, target: Counts, found: dict[Role, Need]) -> str:
    """For a reader: what is there, what is wanted, and what for."""
    parts = [
        f"{role} {have.of(role)} -> {target.of(role)} ({_load(role, found[role])})"
        if have.of(role) != target.of(role)
        else f"{role} {have.of(role)} ({_load(role, found[role])})"
        for role in ROLES
    ]
    return f"{', '.join(parts)}: {_because(reason, have, target)}"


def _because(reason: Reason, have: Counts, target: Counts) -> str:
    if reason == "settling" and all(have.of(role) <= target.of(role) for role in ROLES):
        return "lent workers are quicker here and do for the rest"
    return _BECAUSE[reason]


def _load(role: Role, need: Need) -> str:
    if role == "prefill":
        said = f"{need.load:.2f} busy at {need.each * 1e3:.0f} ms a prompt"
    else:
        said = f"{need.load:.1f} sequences, {need.each:.0f} a worker"
    if need.link_floor and need.workers == need.link_floor:
        said += ", by the network"
    return said + (", no number meets the objective" if need.infeasible else "")
