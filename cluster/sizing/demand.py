"""Workers that each role needs for a mix of requests, and what they would bring. Pure.

    prefill   S: seconds of a prompt; a = rate*E[S]; k = Var(S)/E[S]^2; B = TTFT objective - S_q90
              least P for these, as in servers.py
    decode    b*: the batch that the TPOT objective, the KV pool and the worker's own limit allow
              A = rate*E[o]*t_step(b*)/tau;  D = (A + 2*sqrt(A*(1 + k)))/b*, rounded up,
              k of the KV that residents hold
    network   floors both: KV of all prompts over 80% of the links

Where an objective is missed by a single request on an idle worker no number of workers helps: the
role is sized for 80% utilisation then.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from cluster.sizing.decision import Need
from cluster.sizing.moments import (
    Service,
    corrected,
    least_servers,
    prompt_tokens,
    rate_of,
    residents,
    service,
)
from cluster.sizing.snapshot import Corrections, Goals, Machine, Mix, Tuning
from protocol.roles import Role
from router.placement.step_model import StepModel

# MERGED cluster.sizing.servers
# Prefill workers for a load of prompts. Seconds; pure.
#
#     c   least with ErlangC(c, a)*exp(-2(c - a)B/(E[S](1 + k))) <= LATE, and c >= a*(1 + x)
#     x   what is to spare, since load grows by GROWTH while a worker starts
#
# Load that grows evenly from a to a*(1 + g) within s exceeds c = a*(1 + x) from s*x/g on; what then
# waits takes c workers s*(g - x)^2/(2g). Half of the patience B may go to that: x = g -
# sqrt(g*B/s).

LATE = 0.1
"""Share of requests that may wait longer than the objective leaves time for."""
GROWTH = 0.25
"""g. Of the 58 minutes of Azure's trace of conversations six bring more than a quarter more prompt
tokens than the minute before."""
ERROR = 0.03
"""Least x: the load is known with an error."""
UTILISATION = 0.8
"""Of workers where the objective cannot be met, and of links always."""


def servers(load: float, of: Service, patience_s: float, start_s: float) -> int:
    """Least workers for ``load`` erlangs."""
    if load <= 0:
        return 0
    if patience_s <= 0:
        return math.ceil(load / UTILISATION)
    least = least_servers(load, of.mean_s, of.spread, patience_s, LATE)
    return max(least, math.ceil(load * (1.0 + spare(patience_s, start_s))))


def spare(patience_s: float, start_s: float) -> float:
    """x. The longer prompts may wait and the quicker workers start, the less."""
    if start_s <= 0:
        return ERROR
    return max(ERROR, GROWTH - math.sqrt(GROWTH * max(0.0, patience_s) / start_s))


AS_TOLD = Corrections(prefill=1.0, decode=1.0)
"""Nothing has been observed."""
START_S = Tuning().start_s
TAIL = 2.0
"""Standard deviations of the number of sequences that are made room for: 98% of a normal one. With
90% a full pool now and then keeps prompts on prefill workers
(``bench.simulator.pools``)."""
DRAIN_S = 30.0
"""A backlog of prompts is to be worked off in so long, or in the TTFT objective if that is more."""
QUEUE = 0.15
"""Share of the patience of those who wait that a queue may take and be no backlog."""


def prefill_need(
    mix: Mix,
    machine: Machine,
    goals: Goals,
    correction: float,
    queued: float = 0.0,
    start_s: float = START_S,
) -> Need:
    """``queued``: requests of a backlog."""
    of = corrected(service(mix, machine), correction)
    patience_s = goals.ttft_s - of.q90_s
    load = (rate_of(mix, patience_s) + queued / _drain_s(goals)) * of.mean_s
    floor = _link_floor(mix, machine)
    return Need(
        workers=max(servers(load, of, patience_s, start_s), floor),
        load=load,
        each=of.mean_s,
        link_floor=floor,
        infeasible=load > 0 and patience_s <= 0,
    )


def backlog(
    mix: Mix, machine: Machine, goals: Goals, correction: float, start_s: float = START_S
) -> float:
    """Requests that have queued up: more than are under way at this rate (M/G/c: a load of
    (1 + k)/2 mean prompts), and more than those who wait have patience for. Both roles are to serve
    them."""
    of = corrected(service(mix, machine), correction)
    tokens = prompt_tokens(mix) if mix.samples else 0.0
    if tokens <= 0 or of.mean_s <= 0:
        return 0.0
    patience_s = goals.ttft_s - of.q90_s
    load = rate_of(mix, patience_s) * of.mean_s
    there = max(1, servers(load, of, patience_s, start_s))
    bearable = QUEUE * max(0.0, patience_s) * there / of.mean_s
    under_way = load * (1.0 + of.spread) / 2.0
    excess = mix.backlog_tokens / tokens - under_way - bearable
    return max(0.0, excess)


def _drain_s(goals: Goals) -> float:
    return max(DRAIN_S, goals.ttft_s)


class Batch(NamedTuple):
    """Sequences that a worker decodes together at most, by what allows no more."""

    by_tpot: int  # 0: not even one is quick enough
    by_kv: int
    by_limit: int

    @property
    def size(self) -> int:
        """b*: where even one sequence is too slow, what the others allow."""
        return max(1, min(self.by_tpot or self.by_limit, self.by_kv, self.by_limit))


def batch(mix: Mix, machine: Machine, goals: Goals, corrections: Corrections = AS_TOLD) -> Batch:
    model, of = StepModel(*machine.step), residents(mix, machine, corrections.kv)
    left_s = goals.tpot_s * mix.pace / corrections.decode - model.step
    each_s = model.row + model.kv_token * of.kv_tokens
    most = machine.max_batch
    by_tpot = max(0, math.floor(left_s / each_s)) if each_s > 0 else (most if left_s > 0 else 0)
    held = of.kv_tokens * (1.0 + of.transit)
    by_kv = math.floor(machine.kv_tokens / held) if machine.kv_tokens and held > 0 else most
    return Batch(min(by_tpot, most), min(by_kv, most), most)


def decode_need(
    mix: Mix, machine: Machine, goals: Goals, corrections: Corrections, queued: float = 0.0
) -> Need:
    """``queued``: requests of a backlog, all of which may decode at a time, but not more than all:
    those of a worker that went come together. Room is made for those at least that decode now: how
    long answers are shows when they have ended."""
    model, of = StepModel(*machine.step), residents(mix, machine, corrections.kv)
    allowed = batch(mix, machine, goals, corrections)
    together = allowed.size
    step_s = model.decode_s(together, together * of.kv_tokens) * corrections.decode
    lasts_s = of.output * step_s / mix.pace
    load = rate_of(mix) * lasts_s + queued * min(1.0, lasts_s / _drain_s(goals))
    floor = _link_floor(mix, machine)
    # So many sequences at a time, Poisson, hold KV with a variance of load*E[kv^2].
    over = TAIL * math.sqrt(load * (1.0 + of.spread))
    room = max(load / UTILISATION if not allowed.by_tpot else load + over, mix.residents)
    return Need(
        workers=max(math.ceil(room / together), floor),
        load=load,
        each=float(together),
        link_floor=floor,
        infeasible=not allowed.by_tpot,
    )


def _link_floor(mix: Mix, machine: Machine) -> int:
    """Workers whose links carry the KV of all prompts."""
    if not machine.link_bytes_s or not mix.samples:
        return 0
    wanted = rate_of(mix) * prompt_tokens(mix) * machine.kv_bytes
    return math.ceil(wanted / (UTILISATION * machine.link_bytes_s))


def needs(
    mix: Mix,
    machines: dict[Role, Machine],
    goals: Goals,
    corrections: Corrections,
    start_s: float = START_S,
) -> dict[Role, Need]:
    """Of both roles, in workers of the role's own pool; a pool whose machine is not known is taken
    for the other's. ``machines`` holds one at least. ``start_s``: of a worker."""
    computing, decoding = machine_of("prefill", machines), machine_of("decode", machines)
    queued = backlog(mix, computing, goals, corrections.prefill, start_s)
    return {
        "prefill": prefill_need(mix, computing, goals, corrections.prefill, queued, start_s),
        "decode": decode_need(mix, decoding, goals, corrections, queued),
    }


def machine_of(role: Role, machines: dict[Role, Machine]) -> Machine:
    """That of the role's own pool; of the other where nothing is known of it."""
    return machines.get(role) or next(iter(machines.values()))
