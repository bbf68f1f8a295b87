"""What workers say of themselves in the directory, as the policy sees it. Pure.

A record is what somebody wrote into Redis: figures that no worker has are taken for unknown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

from cluster.sizing.snapshot import Machine, State, Worker
from protocol.registry.directory import WorkerRecord
from protocol.roles import ROLES, Role, as_role
from router.placement.step_model import CHUNK, completed, pace, parse, pooled

MOST_TOKENS = 10**10
"""No worker's cache or queue has more."""
MOST_BATCH = 10**6
_KV_BYTES = 1e9
"""No token's KV has more."""


def home(record: WorkerRecord) -> Role:
    return as_role(record.home or record.role)


def worker(record: WorkerRecord, *, young: bool) -> Worker:
    """``young``: it may not be quick yet."""
    role = as_role(record.role)
    if record.changing:
        role = ROLES[1 - ROLES.index(role)]
    used = record.kv_tokens_total - record.kv_tokens_free
    return Worker(
        instance=record.instance,
        home=home(record),
        role=role,
        state=_state(record, young),
        kv_tokens=max(0, min(used, MOST_TOKENS)),
    )


def _state(record: WorkerRecord, young: bool) -> State:
    if record.changing:
        return "changing"
    if record.draining:
        return "leaving"
    return "warming" if young or record.engine_pid <= 0 else "serving"


def machines(records: Sequence[WorkerRecord]) -> dict[Role, Machine]:
    """By home, the median of what its workers say. A pool of which nobody has steps to tell of is
    left out, unless the other pool has."""
    models = [parse(record.step_model) for record in records]
    known = [model for model in models if model is not None]
    if not known:
        return {}
    others = pooled(known)
    found: dict[Role, Machine] = {}
    for role in ROLES:
        of = [r for r in records if home(r) == role and r.engine_pid > 0]
        if of:
            fitted = [m for r in of if (m := parse(r.step_model)) is not None]
            steps = [completed(model, others) for model in fitted] or [others]
            found[role] = _machine(of, [median(c) for c in zip(*steps, strict=True)])
    return found


def _machine(of: Sequence[WorkerRecord], step: Sequence[float]) -> Machine:
    c0, c1, c2, c3, c4 = step
    return Machine(
        step=(c0, c1, c2, c3, c4),
        chunk=int(_typical((r.prefill_chunk for r in of), MOST_TOKENS) or CHUNK),
        max_batch=int(_typical((r.max_batch for r in of), MOST_BATCH) or 1),
        kv_tokens=int(_typical((r.kv_tokens_total for r in of), MOST_TOKENS)),
        kv_bytes=_typical((_wire_bytes(r) for r in of), _KV_BYTES),
        link_bytes_s=_typical((r.link_bytes_s for r in of), math.inf),
    )


def _wire_bytes(record: WorkerRecord) -> float:
    """Of a token's KV as it is sent: what the pool holds may have another size."""
    nominal, said = float(record.model.kv_bytes_per_token), record.walls
    return nominal if said is None else nominal / said.kv_shrink * said.wire_shrink


def _typical(values: Iterable[float], most: float) -> float:
    """The median of those that can be; 0 where there is none."""
    sane = [value for value in values if 0 < value <= most and math.isfinite(value)]
    return median(sane) if sane else 0.0


def typical_pace(records: Iterable[WorkerRecord]) -> float:
    """Tokens of a sequence in the time of a plain step: of those that decode now, or might."""
    decoding = [(pace(r.pace), max(0, r.running)) for r in records if r.role == "decode"]
    running = sum(weight for _, weight in decoding)
    if running:
        return sum(tokens * weight for tokens, weight in decoding) / running
    return sum(tokens for tokens, _ in decoding) / len(decoding) if decoding else 1.0


def residents(records: Iterable[WorkerRecord]) -> float:
    """Sequences that decode on workers of that role."""
    running = (r.running for r in records if r.role == "decode")
    return float(sum(n for n in running if 0 < n <= MOST_BATCH))


def backlog_tokens(records: Iterable[WorkerRecord]) -> float:
    """Prompt tokens that wait at workers of either role."""
    return float(sum(r.queued_tokens for r in records if 0 < r.queued_tokens <= MOST_TOKENS))
