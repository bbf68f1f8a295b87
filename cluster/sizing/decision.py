"""The decision of the sizing policy, its record in the decision log (JSON lines), and its text."""

from __future__ import annotations

from typing import Literal

import msgspec

from cluster.sizing.snapshot import SizingMemory, SizingSnapshot, WorkerCounts
from protocol.roles import ROLES, Role

Slo = Literal["ttft", "tpot"]

ScalingReason = Literal[
    "no_metrics",  # nothing is known: change nothing
    "steady",  # the pools have the size that the load needs
    "settling",  # fewer would do, or a few more are needed, but not for long enough yet
    "demand",  # more workers are needed
    "surplus",  # fewer have sufficed for long enough
    "loan",  # one pool lends workers to the other
    "limit",  # more are needed than the limits or the budget allow
]


class RoleDemand(msgspec.Struct, frozen=True, kw_only=True):
    """The workers that one role needs, and why. ``workers``: the number before limits. ``lasting``:
    the number once the load has lasted; more than ``workers`` while the sequences that will need
    them come. None of them is spare."""

    workers: int
    lasting: int = 0
    load: float  # prefill: busy workers (erlangs); decode: sequences at a time
    each: float  # prefill: seconds per prompt; decode: sequences in a batch (b*)
    link_floor: int  # workers that the network alone needs
    infeasible: bool = False  # no number of workers meets the objective


def infeasible_slos(demand: dict[Role, RoleDemand]) -> tuple[Slo, ...]:
    """Return the objectives that no number of workers meets."""
    slos: tuple[tuple[Slo, Role], ...] = (("ttft", "prefill"), ("tpot", "decode"))
    return tuple(slo for slo, role in slos if demand[role].infeasible)


class PredictedLatency(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted latency of the workers that serve now, at this load; None: the queue would grow
    without end."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    kv_tokens: float | None = None  # KV tokens of a sequence while it decodes


class LoadForecast(msgspec.Struct, frozen=True, kw_only=True):
    """Requests/s, and the workers that they need, FORECAST_S from now; or the relative errors of
    the forecast that was made so long ago: what came over what was forecast, less 1."""

    rate: float
    prefill: float
    decode: float


class Loan(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that serves the other role from now on."""

    instance: str
    role: Role


class ScalingDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the policy. ``wanted``: workers by role, within the limits. ``targets``:
    workers to ask for, by home pool. ``loans``: role changes, in this order. ``reason``: the
    strongest of those that apply."""

    wanted: WorkerCounts
    targets: WorkerCounts
    reason: ScalingReason
    text: str  # the reason in words, with figures
    memory: SizingMemory
    loans: tuple[Loan, ...] = ()
    prefill: RoleDemand | None = None
    decode: RoleDemand | None = None
    predicted: PredictedLatency = PredictedLatency()
    slo_infeasible: tuple[Slo, ...] = ()
    forecast: LoadForecast | None = None
    forecast_error: LoadForecast | None = None  # None: there was none a minute ago


class DecisionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a decision log. ``run``: identifier of the autoscaler process. ``time_s``:
    seconds since the epoch, for readers. ``acted``: whether the decision was to be carried out (not
    in advisory mode)."""

    run: str
    number: int
    time_s: float
    acted: bool
    snapshot: SizingSnapshot
    decision: ScalingDecision


def encode_record(record: DecisionRecord) -> bytes:
    """Return the record as a JSON line without the newline."""
    return msgspec.json.encode(record)


def decode_record(line: bytes) -> DecisionRecord:
    """Parse a line. Raises msgspec.DecodeError (msgspec.ValidationError included)."""
    return msgspec.json.decode(line, type=DecisionRecord)


_REASON_TEXT: dict[ScalingReason, str] = {
    "steady": "the sizes are right",
    "settling": "fewer workers would be enough, but not for long enough yet, or the last"
    " reduction was a moment ago",
    "demand": "more workers are needed",
    "loan": "one pool can spare a worker that the other needs",
    "surplus": "fewer workers have been enough for long enough",
    "limit": "more workers are needed than the limits allow",
}


def describe_decision(
    reason: ScalingReason, have: WorkerCounts, target: WorkerCounts, found: dict[Role, RoleDemand]
) -> str:
    """Return the decision in words: workers that exist, workers that are wanted, and the load."""
    parts = [
        f"{role} {have.of(role)} -> {target.of(role)} ({_load_text(role, found[role])})"
        if have.of(role) != target.of(role)
        else f"{role} {have.of(role)} ({_load_text(role, found[role])})"
        for role in ROLES
    ]
    return f"{', '.join(parts)}: {_reason_text(reason, have, target)}"


def _reason_text(reason: ScalingReason, have: WorkerCounts, target: WorkerCounts) -> str:
    if reason == "settling" and all(have.of(role) <= target.of(role) for role in ROLES):
        return "some more are needed, but not yet for so long that it is no chance"
    return _REASON_TEXT[reason]


def _load_text(role: Role, need: RoleDemand) -> str:
    if role == "prefill":
        text = f"{need.load:.2f} busy at {need.each * 1e3:.0f} ms a prompt"
    else:
        text = f"{need.load:.1f} sequences, {need.each:.0f} a worker"
    if need.link_floor and need.workers == need.link_floor:
        text += ", by the network"
    return text + (", no number of workers meets the objective" if need.infeasible else "")
