"""Predictions for a number of workers: their speed in the other role, and latencies. Pure."""

from __future__ import annotations

import math

from cluster.sizing.decision import PredictedLatency
from cluster.sizing.demand import decode_batch_limits, machine_for_role
from cluster.sizing.queueing import (
    mean_prompt_tokens,
    mean_wait_s,
    prefill_service,
    resident_sequences,
)
from cluster.sizing.snapshot import Corrections, MachineModel, RequestMix, RoleValues, SloTargets
from protocol.performance.step_model import StepModel
from protocol.roles import Role

PATH_S = 0.01
"""Seconds to a worker and back, beside the prompt's computation."""


MAX_WAIT_SHARE = 0.3
"""Mean wait over the mean time of prompts up to which prompts hardly wait for each other."""
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
    if role == "prefill":
        own_speed, lent_speed = (
            1.0 / max(1e-9, prefill_service(mix, each).mean_s) for each in (own, lent)
        )
    else:
        own_speed, lent_speed = (max(1e-9, _tokens_s(mix, each, goals)) for each in (own, lent))
    ratio = lent_speed / own_speed
    return (
        1.0
        if 1 / SAME_SPEED_FACTOR <= ratio <= SAME_SPEED_FACTOR
        else min(SPEED_BOUNDS[1], max(SPEED_BOUNDS[0], ratio))
    )


def _prompts_s(mix: RequestMix, machine: MachineModel) -> float:
    return 1.0 / max(1e-9, prefill_service(mix, machine).mean_s)


def _tokens_s(mix: RequestMix, machine: MachineModel, goals: SloTargets) -> float:
    """Return the output tokens/s of a worker with a full batch."""
    batch = decode_batch_limits(mix, machine, goals).size
    kv = batch * resident_sequences(mix, machine).kv_tokens
    seconds = StepModel(*machine.step).decode_s(batch, kv)
    return batch * mix.pace / seconds if seconds > 0 else 0.0


def predict_latency(
    mix: RequestMix,
    machines: dict[Role, MachineModel],
    servers: RoleValues,
    corrections: Corrections,
) -> PredictedLatency:
    """Return the predicted mean TTFT and TPOT of so many workers of each role's own kind; None
    where the load exceeds them or there are no requests."""
    if not mix.samples:
        return PredictedLatency()
    return PredictedLatency(
        ttft_s=_ttft_s(
            mix, machine_for_role("prefill", machines), servers.prefill, corrections.prefill
        ),
        tpot_s=_tpot_s(mix, machine_for_role("decode", machines), servers.decode, corrections),
        kv_tokens=resident_sequences(
            mix, machine_for_role("decode", machines), corrections.kv
        ).kv_tokens,
    )


def is_queueing(
    mix: RequestMix,
    machines: dict[Role, MachineModel],
    servers: RoleValues,
    corrections: RoleValues,
) -> bool:
    """Return whether prompts wait longer than they take."""
    service = prefill_service(mix, machine_for_role("prefill", machines))
    tokens = mean_prompt_tokens(mix) if mix.samples else 0.0
    queued = mix.backlog_tokens / tokens if tokens > 0 else 0.0
    mean_s = service.mean_s * corrections.prefill
    load = mix.rate * mean_s
    wait_s = mean_wait_s(math.floor(servers.prefill), load, mean_s, service.spread)
    under_way = load * (1.0 + service.spread) / 2.0
    return wait_s > MAX_WAIT_SHARE * mean_s or queued > 2.0 * max(1.0, under_way)


def _ttft_s(
    mix: RequestMix, machine: MachineModel, servers: float, correction: float
) -> float | None:
    service = prefill_service(mix, machine)
    load = mix.rate * service.mean_s * correction
    if load >= math.floor(servers):
        return None
    wait_s = mean_wait_s(math.floor(servers), load, service.mean_s * correction, service.spread)
    return PATH_S + service.mean_s * correction + wait_s


def _tpot_s(
    mix: RequestMix, machine: MachineModel, servers: float, corrections: Corrections
) -> float | None:
    """Return TPOT by Little's law on each worker: b = r*t(b), with t(b) = s0 + b*s and r tokens/s
    per worker, so that b = r*s0/(1 - r*s)."""
    model, resident = StepModel(*machine.step), resident_sequences(mix, machine, corrections.kv)
    correction = corrections.decode
    if servers <= 0:
        return None
    each_s = (model.row + model.kv_token * resident.kv_tokens) * correction / mix.pace
    alone_s = model.step * correction / mix.pace
    asked = mix.rate * resident.output / servers
    if asked * each_s >= 1.0:
        return None
    batch = max(1.0, asked * alone_s / (1.0 - asked * each_s))
    return alone_s + batch * each_s
