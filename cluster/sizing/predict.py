"""Predictions for a number of workers: their speed in the other role, and latencies. Pure."""

from __future__ import annotations

import math

from cluster.sizing.decision import PredictedLatency
from cluster.sizing.demand import machine_for_role
from cluster.sizing.queueing import ServiceTime, mean_wait_s, prefill_service
from cluster.sizing.residency import ResidentSequences, decode_batch_limits, resident_sequences
from cluster.sizing.snapshot import (
    NO_CORRECTIONS,
    Corrections,
    MachineModel,
    RequestMix,
    RoleValues,
    SloTargets,
)
from protocol.roles import Role

PATH_S = 0.01
"""Seconds to a worker and back, beside the prompt's computation."""
SAME_SPEED_FACTOR = 1.5
"""Machines whose speeds are within this factor count as equally fast, because two fits of one
machine differ."""
SPEED_BOUNDS = (0.25, 4.0)
"""Bounds of a worker's relative speed in the other pool."""


def relative_speed(
    role: Role, home: Role, mix: RequestMix, machines: dict[Role, MachineModel], goals: SloTargets
) -> float:
    """Return the speed of a worker of the pool ``home`` in ``role``, relative to that role's own
    workers."""
    own, lent = machine_for_role(role, machines), machine_for_role(home, machines)
    if role == home or own == lent or not mix.samples:
        return 1.0
    own_s, lent_s = (
        prefill_service(mix, each).mean_s if role == "prefill" else _token_s(mix, each, goals)
        for each in (own, lent)
    )
    ratio = max(1e-9, own_s) / max(1e-9, lent_s)
    if 1 / SAME_SPEED_FACTOR <= ratio <= SAME_SPEED_FACTOR:
        return 1.0
    return min(SPEED_BOUNDS[1], max(SPEED_BOUNDS[0], ratio))


def _token_s(mix: RequestMix, machine: MachineModel, goals: SloTargets) -> float:
    """Return the seconds in which a worker with a full batch emits a token."""
    resident = resident_sequences(mix, machine)
    batch = decode_batch_limits(resident, goals).size
    return resident.tpot_s(batch) / batch


def predict_latency(
    mix: RequestMix,
    machines: dict[Role, MachineModel],
    servers: RoleValues,
    corrections: Corrections = NO_CORRECTIONS,
) -> PredictedLatency:
    """Return the predicted mean TTFT and TPOT of so many workers of each role's own kind; None
    where the load exceeds them or there are no requests."""
    if not mix.samples:
        return PredictedLatency()
    computing = machine_for_role("prefill", machines)
    decoding = machine_for_role("decode", machines)
    service = prefill_service(mix, computing, corrections.prefill)
    resident = resident_sequences(mix, decoding, corrections, computing)
    batch = _mean_batch(mix, resident, servers.decode)
    return PredictedLatency(
        ttft_s=_ttft_s(mix, service, servers.prefill),
        tpot_s=None if batch is None else resident.tpot_s(batch),
        kv_tokens=resident.kv_tokens if batch is None else resident.held_tokens(batch),
    )


def _ttft_s(mix: RequestMix, service: ServiceTime, servers: float) -> float | None:
    wait_s = mean_wait_s(math.floor(servers), mix.rate * service.mean_s, service)
    return PATH_S + service.mean_s + wait_s if wait_s < math.inf else None


def _mean_batch(mix: RequestMix, resident: ResidentSequences, workers: float) -> float | None:
    """Return the mean batch of a worker while it decodes; None where the load exceeds all."""
    most = float(max(1, resident.machine.max_batch))
    tokens_s = mix.rate * resident.output / workers if workers > 0 else math.inf
    batch = resident.mean_batch(tokens_s, most)
    return max(1.0, batch) if batch < most else None
