"""What the policy says: values that a JSON line holds."""

from __future__ import annotations

from typing import Literal

import msgspec

from cluster.sizing.snapshot import Counts, Memory, Snapshot
from protocol.roles import ROLES, Role

Reason = Literal[
    "no_metrics",  # nothing is known: hold
    "steady",  # as it should be
    "settling",  # less would do, but not for long enough, or one went just now
    "demand",  # more is needed
    "surplus",  # less has done for long enough
    "loan",  # one pool lends to the other
    "limit",  # more is needed than the limits or the budget allow
]


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """What one role needs, and why. ``workers``: before limits."""

    workers: int
    load: float  # prefill: busy workers (erlangs); decode: sequences at a time
    each: float  # prefill: seconds of a prompt; decode: sequences in a batch (b*)
    link_floor: int  # of the workers: as many as the network alone wants
    infeasible: bool = False  # no number of workers meets the objective


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """With the workers that serve now, at this load; None: it would grow without end."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    kv_tokens: float | None = None  # that a sequence holds while it decodes


class Loan(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that is to serve the other role from now on."""

    instance: str
    role: Role


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """``wanted``: workers by role, within the limits; ``targets``: workers to ask for, by home;
    ``loans``: in this order. ``reason``: the strongest of those that apply."""

    wanted: Counts
    targets: Counts
    reason: Reason
    text: str  # the reason for a reader, with figures
    memory: Memory
    loans: tuple[Loan, ...] = ()
    prefill: Need | None = None
    decode: Need | None = None
    predicted: Predicted = Predicted()
    slo_infeasible: tuple[Literal["ttft", "tpot"], ...] = ()


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a decision log. ``run``: of which process; ``time_s``: since the epoch, for
    people; ``acted``: whether it was to be
    carried out (not in advisory mode)."""

    run: str
    number: int
    time_s: float
    acted: bool
    snapshot: Snapshot
    decision: Decision


def to_line(record: Record) -> bytes:
    """Without the newline."""
    return msgspec.json.encode(record)


def from_line(line: bytes) -> Record:
    """Raises msgspec.DecodeError (msgspec.ValidationError among them)."""
    return msgspec.json.decode(line, type=Record)


# MERGED cluster.sizing.say
# A decision in words. Pure.

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
