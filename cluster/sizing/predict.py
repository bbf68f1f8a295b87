"""What workers bring: in the other role, and in time to tokens. Pure."""

from __future__ import annotations

import math

from cluster.sizing.decision import Predicted
from cluster.sizing.demand import batch, machine_of
from cluster.sizing.moments import mean_wait_s, prompt_tokens, residents, service
from cluster.sizing.snapshot import Corrections, Goals, Machine, Mix, Pair
from protocol.roles import Role
from router.placement.step_model import StepModel

PATH_S = 0.01
"""To workers and back, where the prompt itself takes next to nothing."""


CALM = 0.3
"""Mean wait of prompts, in their own mean time, up to which they hardly wait for each other."""
ALIKE = 1.5
"""Machines whose speeds are within this factor count as the same."""
SPEEDS = (0.25, 4.0)
"""Bounds of what a worker of one pool may count in the other."""


def speed(role: Role, home: Role, mix: Mix, machines: dict[Role, Machine], goals: Goals) -> float:
    """What a worker of the pool ``home`` does in ``role``, beside one of that role's own pool. Two
    fits of one machine differ: what is within ALIKE is 1."""
    own, lent = machine_of(role, machines), machine_of(home, machines)
    if role == home or own == lent or not mix.samples:
        return 1.0
    if role == "prefill":
        mine, theirs = (1.0 / max(1e-9, service(mix, each).mean_s) for each in (own, lent))
    else:
        mine, theirs = (max(1e-9, _tokens_s(mix, each, goals)) for each in (own, lent))
    ratio = theirs / mine
    return 1.0 if 1 / ALIKE <= ratio <= ALIKE else min(SPEEDS[1], max(SPEEDS[0], ratio))


def _tokens_s(mix: Mix, machine: Machine, goals: Goals) -> float:
    """Tokens a second of a worker with a full batch."""
    together = batch(mix, machine, goals).size
    kv = together * residents(mix, machine).kv_tokens
    seconds = StepModel(*machine.step).decode_s(together, kv)
    return together * mix.pace / seconds if seconds > 0 else 0.0


def predicted(
    mix: Mix, machines: dict[Role, Machine], servers: Pair, corrections: Corrections
) -> Predicted:
    """Mean TTFT and TPOT with so many workers (of the role's own kind); None where the load is more
    than they can take, or nobody asks."""
    if not mix.samples:
        return Predicted()
    return Predicted(
        ttft_s=_ttft_s(mix, machine_of("prefill", machines), servers.prefill, corrections.prefill),
        tpot_s=_tpot_s(mix, machine_of("decode", machines), servers.decode, corrections),
        kv_tokens=residents(mix, machine_of("decode", machines), corrections.kv).kv_tokens,
    )


def is_queueing(mix: Mix, machines: dict[Role, Machine], servers: Pair, corrections: Pair) -> bool:
    """Whether prompts are so many for these workers that the wait outweighs the work."""
    of = service(mix, machine_of("prefill", machines))
    tokens = prompt_tokens(mix) if mix.samples else 0.0
    queued = mix.backlog_tokens / tokens if tokens > 0 else 0.0
    mean_s = of.mean_s * corrections.prefill
    load = mix.rate * mean_s
    wait_s = mean_wait_s(math.floor(servers.prefill), load, mean_s, of.spread)
    under_way = load * (1.0 + of.spread) / 2.0
    return wait_s > CALM * mean_s or queued > 2.0 * max(1.0, under_way)


def _ttft_s(mix: Mix, machine: Machine, servers: float, correction: float) -> float | None:
    of = service(mix, machine)
    load = mix.rate * of.mean_s * correction
    if load >= math.floor(servers):
        return None
    wait_s = mean_wait_s(math.floor(servers), load, of.mean_s * correction, of.spread)
    return PATH_S + of.mean_s * correction + wait_s


def _tpot_s(mix: Mix, machine: Machine, servers: float, corrections: Corrections) -> float | None:
    """Little's law on each worker: b = r*t(b), with t(b) = s0 + b*s and r tokens a second to a
    worker, so b = r*s0/(1 - r*s)."""
    model, of = StepModel(*machine.step), residents(mix, machine, corrections.kv)
    correction = corrections.decode
    if servers <= 0:
        return None
    each_s = (model.row + model.kv_token * of.kv_tokens) * correction / mix.pace
    alone_s = model.step * correction / mix.pace
    asked = mix.rate * of.output / servers
    if asked * each_s >= 1.0:
        return None
    together = max(1.0, asked * alone_s / (1.0 - asked * each_s))
    return alone_s + together * each_s
