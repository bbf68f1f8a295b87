"""The workers' directory records as the sizing policy sees them. Pure.

A record is whatever was written into Redis: figures that no worker can have count as unknown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

from cluster.sizing.snapshot import MachineModel, WorkerPhase, WorkerSnapshot
from protocol.performance.speculation_profile import SpeculationProfile, parse_speculation
from protocol.performance.step_model import (
    DEFAULT_CHUNK,
    complete_step_model,
    mean_step_model,
    parse_step_model,
)
from protocol.registry.directory import WorkerRecord
from protocol.roles import ROLES, Role, parse_role

MAX_TOKENS = 10**10
"""No worker's cache or queue has more tokens."""
MAX_BATCH = 10**6
_KV_BYTES = 1e9
"""No token's KV has more bytes."""


def home_role(record: WorkerRecord) -> Role:
    return parse_role(record.home or record.role)


def worker_snapshot(record: WorkerRecord, *, young: bool) -> WorkerSnapshot:
    """Return one worker; ``young``: it may not have its full speed yet."""
    role = parse_role(record.role)
    if record.changing:
        role = ROLES[1 - ROLES.index(role)]
    walls = record.walls
    used = record.kv_tokens_total - record.kv_tokens_free
    return WorkerSnapshot(
        instance=record.instance,
        home=home_role(record),
        role=role,
        state=_state(record, young),
        kv_tokens=max(0, min(used, MAX_TOKENS)),
        busy=0.0 if walls is None else walls.busy,
        prompt_tokens_s=0.0 if walls is None else walls.prompt_tokens_s,
    )


def _state(record: WorkerRecord, young: bool) -> WorkerPhase:
    if record.changing:
        return "changing"
    if record.draining:
        return "leaving"
    return "warming" if young or record.engine_pid <= 0 else "serving"


def machine_models(records: Sequence[WorkerRecord]) -> dict[Role, MachineModel]:
    """Return for each home pool the median of what its workers report. A pool without step
    coefficients is left out, unless the other pool has some."""
    models = [parse_step_model(record.step_model) for record in records]
    known = [model for model in models if model is not None]
    if not known:
        return {}
    others = mean_step_model(known)
    found: dict[Role, MachineModel] = {}
    for role in ROLES:
        pool = [r for r in records if home_role(r) == role and r.engine_pid > 0]
        if pool:
            fitted = [m for r in pool if (m := parse_step_model(r.step_model)) is not None]
            steps = [complete_step_model(model, others) for model in fitted] or [others]
            found[role] = _machine(pool, [median(c) for c in zip(*steps, strict=True)])
    return found


def _machine(pool: Sequence[WorkerRecord], step: Sequence[float]) -> MachineModel:
    return MachineModel(
        step=tuple(step) if math.isfinite(max(step)) else tuple(step[:5]),
        chunk=int(_typical((r.prefill_chunk for r in pool), MAX_TOKENS) or DEFAULT_CHUNK),
        max_batch=int(_typical((r.max_batch for r in pool), MAX_BATCH) or 1),
        kv_tokens=int(_typical((r.kv_tokens_total for r in pool), MAX_TOKENS)),
        kv_bytes=_typical((_wire_bytes(r) for r in pool), _KV_BYTES),
        link_bytes_s=_typical((r.link_bytes_s for r in pool), math.inf),
        speculation=typical_speculation(pool),
    )


def _wire_bytes(record: WorkerRecord) -> float:
    """Return the bytes of a token's KV on the wire; the pool may store it in another size."""
    nominal, walls = float(record.model.kv_bytes_per_token), record.walls
    return nominal if walls is None else nominal / walls.kv_shrink * walls.wire_shrink


def _typical(values: Iterable[float], most: float) -> float:
    """Return the median of the plausible values; 0 where there is none."""
    sane = [value for value in values if 0 < value <= most and math.isfinite(value)]
    return median(sane) if sane else 0.0


def typical_speculation(records: Iterable[WorkerRecord]) -> SpeculationProfile | None:
    """Return the median of the workers' profiles, figure by figure; None where most draft
    nothing."""
    told = [parse_speculation(record.speculation) for record in records]
    profiles = [profile for profile in told if profile is not None]
    if 2 * len(profiles) <= len(told):
        return None
    medians = {
        name: median(getattr(profile, name) for profile in profiles)
        for name in SpeculationProfile.__struct_fields__
        if name != "accept"
    }
    places = zip(*(profile.accept for profile in profiles), strict=False)
    medians["most_nodes"] = int(medians["most_nodes"])
    return SpeculationProfile(accept=tuple(median(rates) for rates in places), **medians)


def resident_count(records: Iterable[WorkerRecord]) -> float:
    """Return the number of sequences on decode workers."""
    running = (r.running for r in records if r.role == "decode")
    return float(sum(n for n in running if 0 < n <= MAX_BATCH))


def backlog_tokens(records: Iterable[WorkerRecord]) -> float:
    """Return the prompt tokens that wait at workers of either role."""
    return float(sum(r.queued_tokens for r in records if 0 < r.queued_tokens <= MAX_TOKENS))
