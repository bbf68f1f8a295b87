"""The number of workers that each role needs for a mix of requests. Pure.

    prefill   S: seconds of a prompt; a = rate*E[S]; k = Var(S)/E[S]^2; B = TTFT objective - S_q90
              least c with ErlangC(c, a)*exp(-2(c - a)B/(E[S](1 + k))) <= MAX_LATE_SHARE
              and c >= a*(1 + x), where the headroom x covers growth while a worker starts
    decode    b*: the batch that the TPOT objective, the KV pool and the worker's own limit allow
              A = rate*E[o]*t_step(b*)/tau;  D = (A + 2*sqrt(A*(1 + k)))/b*, rounded up,
              k of the KV that resident sequences hold
    network   floors both: KV of all prompts over 80% of the links

Headroom: a load that grows evenly from a to a*(1 + g) within s seconds exceeds c = a*(1 + x) from
s*x/g on; the prompts that then wait keep c workers busy for s*(g - x)^2/(2g). Half of the patience
B may go to that: x = g - sqrt(g*B/s).

Where a single request on an idle worker misses an objective, no number of workers helps: the role
is sized for 80% utilisation then.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from cluster.sizing.decision import RoleDemand
from cluster.sizing.queueing import (
    ServiceTime,
    least_servers,
    mean_prompt_tokens,
    prefill_service,
    resident_sequences,
    scaled_service,
    sizing_rate,
)
from cluster.sizing.snapshot import Corrections, MachineModel, RequestMix, ScalingTuning, SloTargets
from protocol.performance.step_model import StepModel
from protocol.roles import Role

MAX_LATE_SHARE = 0.1
"""Share of requests that may wait longer than the TTFT objective allows."""
LOAD_GROWTH = 0.25
"""g. In 6 of the 58 minutes of Azure's conversation trace, prompt tokens exceed those of the minute
before by more than a quarter."""
MIN_HEADROOM = 0.03
"""Least x, because the load is known with an error."""
TARGET_UTILISATION = 0.8
"""Utilisation of workers whose objective cannot be met, and of links always."""


def prefill_workers(load: float, service: ServiceTime, patience_s: float, start_s: float) -> int:
    """Return the least number of workers for ``load`` erlangs."""
    if load <= 0:
        return 0
    if patience_s <= 0:
        return math.ceil(load / TARGET_UTILISATION)
    least = least_servers(load, service.mean_s, service.spread, patience_s, MAX_LATE_SHARE)
    return max(least, math.ceil(load * (1.0 + headroom(patience_s, start_s))))


def headroom(patience_s: float, start_s: float) -> float:
    """Return x; it falls with the patience of prompts and with the speed of starts."""
    if start_s <= 0:
        return MIN_HEADROOM
    return max(MIN_HEADROOM, LOAD_GROWTH - math.sqrt(LOAD_GROWTH * max(0.0, patience_s) / start_s))


NO_CORRECTIONS = Corrections(prefill=1.0, decode=1.0)
DEFAULT_START_S = ScalingTuning().start_s
RESIDENT_DEVIATIONS = 2.0
"""Standard deviations of the number of sequences that room is made for, which covers 98% of a
normal distribution. With 90%, a full pool now and then keeps prompts on prefill workers
(``bench.simulator.pools``)."""
BACKLOG_DRAIN_S = 30.0
"""A backlog of prompts is to be computed within this time, or within the TTFT objective if that is
longer."""
TOLERATED_QUEUE_SHARE = 0.15
"""Share of the patience that a queue may take without counting as a backlog."""


def prefill_demand(
    mix: RequestMix,
    machine: MachineModel,
    goals: SloTargets,
    correction: float,
    queued: float = 0.0,
    start_s: float = DEFAULT_START_S,
) -> RoleDemand:
    """Return the demand for prefill workers; ``queued`` is the number of requests in a backlog."""
    service = scaled_service(prefill_service(mix, machine), correction)
    patience_s = goals.ttft_s - service.q90_s
    load = (sizing_rate(mix, patience_s) + queued / _drain_s(goals)) * service.mean_s
    floor = _link_floor(mix, machine)
    return RoleDemand(
        workers=max(prefill_workers(load, service, patience_s, start_s), floor),
        load=load,
        each=service.mean_s,
        link_floor=floor,
        infeasible=load > 0 and patience_s <= 0,
    )


def backlog_requests(
    mix: RequestMix,
    machine: MachineModel,
    goals: SloTargets,
    correction: float,
    start_s: float = DEFAULT_START_S,
) -> float:
    """Return how many requests have queued up: more than are in progress at this rate (M/G/c: a
    load of (1 + k)/2 mean prompts), and more than patience allows for. Both roles are to serve
    them."""
    service = scaled_service(prefill_service(mix, machine), correction)
    tokens = mean_prompt_tokens(mix) if mix.samples else 0.0
    if tokens <= 0 or service.mean_s <= 0:
        return 0.0
    patience_s = goals.ttft_s - service.q90_s
    load = sizing_rate(mix, patience_s) * service.mean_s
    workers = max(1, prefill_workers(load, service, patience_s, start_s))
    tolerated = TOLERATED_QUEUE_SHARE * max(0.0, patience_s) * workers / service.mean_s
    under_way = load * (1.0 + service.spread) / 2.0
    excess = mix.backlog_tokens / tokens - under_way - tolerated
    return max(0.0, excess)


def _drain_s(goals: SloTargets) -> float:
    return max(BACKLOG_DRAIN_S, goals.ttft_s)


class DecodeBatchLimits(NamedTuple):
    """The most sequences that a worker decodes together, by each limit."""

    by_tpot: int  # 0: even one sequence is too slow
    by_kv: int
    by_limit: int

    @property
    def size(self) -> int:
        """b*; where even one sequence is too slow, the size that the other limits allow."""
        return max(1, min(self.by_tpot or self.by_limit, self.by_kv, self.by_limit))


def decode_batch_limits(
    mix: RequestMix,
    machine: MachineModel,
    goals: SloTargets,
    corrections: Corrections = NO_CORRECTIONS,
) -> DecodeBatchLimits:
    model, resident = StepModel(*machine.step), resident_sequences(mix, machine, corrections.kv)
    left_s = goals.tpot_s * mix.pace / corrections.decode - model.step
    each_s = model.row + model.kv_token * resident.kv_tokens
    most = machine.max_batch
    by_tpot = max(0, math.floor(left_s / each_s)) if each_s > 0 else (most if left_s > 0 else 0)
    held = resident.kv_tokens * (1.0 + resident.transit)
    by_kv = math.floor(machine.kv_tokens / held) if machine.kv_tokens and held > 0 else most
    return DecodeBatchLimits(min(by_tpot, most), min(by_kv, most), most)


def decode_demand(
    mix: RequestMix,
    machine: MachineModel,
    goals: SloTargets,
    corrections: Corrections,
    queued: float = 0.0,
) -> RoleDemand:
    """Return the demand for decode workers.

    ``queued``: requests of a backlog. All of them may decode at a time, but not more than all:
    those of a worker that stopped come together. Room is made for at least the sequences that
    decode now, because output lengths are known only when requests have ended.
    """
    model, resident = StepModel(*machine.step), resident_sequences(mix, machine, corrections.kv)
    allowed = decode_batch_limits(mix, machine, goals, corrections)
    batch = allowed.size
    step_s = model.decode_s(batch, batch * resident.kv_tokens) * corrections.decode
    lasts_s = resident.output * step_s / mix.pace
    load = sizing_rate(mix) * lasts_s + queued * min(1.0, lasts_s / _drain_s(goals))
    floor = _link_floor(mix, machine)
    # A Poisson number of sequences holds KV with a variance of load*E[kv^2].
    headroom_sequences = RESIDENT_DEVIATIONS * math.sqrt(load * (1.0 + resident.spread))
    sequences = max(
        load / TARGET_UTILISATION if not allowed.by_tpot else load + headroom_sequences,
        mix.residents,
    )
    return RoleDemand(
        workers=max(math.ceil(sequences / batch), floor),
        load=load,
        each=float(batch),
        link_floor=floor,
        infeasible=not allowed.by_tpot,
    )


def _link_floor(mix: RequestMix, machine: MachineModel) -> int:
    """Return the number of workers whose links carry the KV of all prompts."""
    if not machine.link_bytes_s or not mix.samples:
        return 0
    wanted = sizing_rate(mix) * mean_prompt_tokens(mix) * machine.kv_bytes
    return math.ceil(wanted / (TARGET_UTILISATION * machine.link_bytes_s))


def demand_by_role(
    mix: RequestMix,
    machines: dict[Role, MachineModel],
    goals: SloTargets,
    corrections: Corrections,
    start_s: float = DEFAULT_START_S,
) -> dict[Role, RoleDemand]:
    """Return the demand of both roles, in workers of the role's own pool.

    ``machines`` holds at least one; a pool whose machine is unknown is taken to be like the other.
    ``start_s``: seconds of a worker's start.
    """
    computing, decoding = (
        machine_for_role("prefill", machines),
        machine_for_role("decode", machines),
    )
    queued = backlog_requests(mix, computing, goals, corrections.prefill, start_s)
    return {
        "prefill": prefill_demand(mix, computing, goals, corrections.prefill, queued, start_s),
        "decode": decode_demand(mix, decoding, goals, corrections, queued),
    }


def machine_for_role(role: Role, machines: dict[Role, MachineModel]) -> MachineModel:
    """Return the machine of the role's own pool, or of the other pool where it is unknown."""
    return machines.get(role) or next(iter(machines.values()))
