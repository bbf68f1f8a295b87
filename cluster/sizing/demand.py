"""The number of workers that each role needs for a mix of requests. Pure.

prefill   the least c >= floor(a) of which P(late) <= MAX_LATE_SHARE, a = rate*E[S]
          P(late) = sum of w_i P(W > |T - S_i|); S_i: seconds of a prompt, W: the wait in a queue
          of c servers when a worker that is asked for now serves (queueing.py)
decode    b*: the batch that the TPOT objective, the KV pool and the worker's own limit allow
          N(D): sequences on D workers, by Little's law on each (residency.py)
          the least D of which N(D) + sqrt(4*N(D)*(I + k) + (D*e)^2*(1 - 1/D)) <= D*b*, k of the
          KV of sequences, I the index of dispersion of arrivals (burstiness.py), and e of sequences
          that one worker has more than the others (residency.py). Of N(D), only what can have taken
          the place of the present sequences when a worker that is asked for now serves
network   floors both: KV of all prompts over 80% of the links
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
from msgspec.structs import replace

from cluster.sizing.burstiness import (
    LONGEST_S,
    NO_ARRIVAL_RATES,
    ArrivalRates,
    burst_waits,
    burstiness,
    usual_bursts,
)
from cluster.sizing.decision import RoleDemand
from cluster.sizing.growth import growth_shares, high_growth
from cluster.sizing.queueing import (
    CHANCE_DEVIATIONS,
    LARGEST_LOAD,
    PrefillOutlook,
    ServiceTime,
    late_share,
    least_number,
    mean_prompt_tokens,
    prefill_service,
)
from cluster.sizing.residency import (
    DecodeBatchLimits,
    ResidentSequences,
    decode_batch_limits,
    resident_sequences,
)
from cluster.sizing.snapshot import Corrections, MachineModel, RequestMix, SloTargets
from protocol.roles import Role

MAX_LATE_SHARE = 0.1
"""Share of requests that may miss the TTFT objective by their wait."""
TARGET_UTILISATION = 0.8
"""Utilisation of links."""
MAX_ERROR = 0.5
"""Standard error of a load that is hardly known, as a share of it."""
HORIZON = 2.0
"""Starts of a worker, after which sequences must have room: a lack that may be chance is not
acted upon for as long as a start takes."""


def queued_work_s(mix: RequestMix, service: ServiceTime) -> float:
    """Return the seconds of work in the queue. ``mix.backlog_tokens`` also holds what is still to
    compute of the prompts that are computed: a Poisson number of each length by Little's law, and
    any part of its uncached tokens u. So rate*E[S*u/2] tokens with a variance of rate*E[S*u^2/3]
    are no queue."""
    tokens = mean_prompt_tokens(mix)
    if tokens <= 0:
        return 0.0
    uncached = np.array([s.uncached for s in mix.samples])
    computed = mix.rate * float(service.weights @ (service.seconds * uncached)) / 2.0
    variance = mix.rate * float(service.weights @ (service.seconds * uncached**2)) / 3.0
    most = computed + CHANCE_DEVIATIONS * math.sqrt(variance)
    return max(0.0, mix.backlog_tokens - most) / tokens * service.mean_s


def load_error(mix: RequestMix, service: ServiceTime) -> float:
    """Return the standard error of the load as a share of it, after as many requests as the window
    had, which may have come in bursts; 0 where the mix is declared."""
    requests = mix.rate * mix.window_s
    if requests <= 0:
        return 0.0
    variance = 1.0 + burstiness(mix.arrivals, LONGEST_S) + service.spread
    return min(MAX_ERROR, math.sqrt(variance / requests))


def prefill_workers(
    outlook: PrefillOutlook,
    service: ServiceTime,
    ttft_s: float,
    arrivals: ArrivalRates = NO_ARRIVAL_RATES,
) -> int:
    """Return the least number of workers for a load, a queue, and usual bursts; at least as many as
    are busy on average, rounded down."""
    load = outlook.load
    if load + outlook.queued_s <= 0:
        return 0
    queued = outlook.queued_s / (outlook.seconds + ttft_s)  # erlangs
    if load + queued > LARGEST_LOAD:
        grown = load * sum(share * (1.0 + growth) for growth, share in outlook.growth)
        return math.ceil(grown + queued)

    def suffices(servers: int) -> bool:
        # ``late_share`` knows of different lengths, and ``burst_waits`` of bursts.
        waiting = burst_waits(servers, service.mean_s, np.abs(ttft_s - service.seconds), arrivals)
        late = late_share(servers, outlook, service, ttft_s)
        return max(late, float(service.weights @ waiting)) <= MAX_LATE_SHARE

    return least_number(suffices, max(1, math.floor(load)))


def prefill_demand(
    mix: RequestMix,
    machine: MachineModel,
    goals: SloTargets,
    service: ServiceTime,
    start_s: float = math.inf,
) -> RoleDemand:
    outlook = PrefillOutlook(
        load=mix.rate * service.mean_s,
        seconds=start_s,
        error=load_error(mix, service),
        growth=growth_shares(mix.growth_samples),
        queued_s=queued_work_s(mix, service),
    )
    floor = _link_floor(mix, machine)
    bursts = usual_bursts(mix.arrivals, mix.rate)
    workers = prefill_workers(outlook, service, goals.ttft_s, bursts)
    return RoleDemand(
        workers=max(workers, floor),
        lasting=max(workers, floor),
        load=outlook.load,
        each=service.mean_s,
        link_floor=floor,
        infeasible=outlook.load > 0 and service.quantile_s(1.0 - MAX_LATE_SHARE) >= goals.ttft_s,
    )


def decode_demand(
    mix: RequestMix, goals: SloTargets, resident: ResidentSequences, start_s: float = math.inf
) -> RoleDemand:
    """Return the demand for decode workers, when those that are asked for now serve. Until then the
    sequences that decode are replaced by those of the mix only in part, and they need room. Queued
    prompts count as arrivals only: in simulations, room for all of them made larger pools and met
    the objectives no more often than as large a fixed pool (``bench.pools``)."""
    limits = decode_batch_limits(resident, goals)
    batch, tokens_s = limits.size, mix.rate * resident.output
    present = _present_limits(mix, goals, resident)
    lasts_s = resident.output * resident.tpot_s(batch)
    in_full_batches = mix.rate * lasts_s  # sequences, by Little's law
    # Pools that stay as they are must have room for all that comes.
    replaced = -math.expm1(-HORIZON * start_s / lasts_s) if lasts_s > 0 else 1.0
    together = 1.0 + burstiness(mix.arrivals, min(LONGEST_S, lasts_s))
    growth = high_growth(mix.growth_samples)

    def load(workers: int, replaced: float) -> float:
        """Return the sequences that ``workers`` would hold."""
        later, now = in_full_batches, mix.residents * batch / present.size
        if later <= workers * batch:
            later = workers * resident.mean_batch(tokens_s / workers, batch)
        return later if later <= now else now + replaced * (later - now)

    def suffices(replaced: float, workers: int) -> bool:
        # A Poisson number of sequences holds KV with a variance of n*E[kv^2]; in bursts, more come.
        # What one worker has more than the others does not depend on it: variances add up.
        n = load(workers, replaced)
        room = CHANCE_DEVIATIONS * math.sqrt(n * (together + resident.spread))
        excess = limits.excess_beside(workers)
        fits = n + math.hypot(room, workers * excess) <= workers * batch
        # The present sequences may be many by chance, and what grows is their mean.
        grows = n * (1.0 + growth) <= workers * (batch - excess)
        each = present.size - present.excess_beside(workers)
        return fits and grows and mix.residents <= workers * each

    workers, lasting = (least_number(partial(suffices, share), 1) for share in (replaced, 1.0))
    floor, needed = _link_floor(mix, resident.machine), tokens_s + mix.residents > 0
    return RoleDemand(
        workers=max(workers if needed else 0, floor),
        lasting=max(lasting if needed else 0, floor),
        load=load(workers, replaced),
        each=batch,
        link_floor=floor,
        infeasible=limits.infeasible,
    )


def decode_demand_with_prompts(
    mix: RequestMix, goals: SloTargets, resident: ResidentSequences, start_s: float, prompts: int
) -> RoleDemand:
    """Return the demand for decode workers that also compute prompts which would keep so many
    workers busy. On each of c workers these take the share prompts/c of the time, and steps are
    longer by it."""
    alone = decode_demand(mix, goals, resident, start_s)
    if alone.infeasible:  # TPOT says nothing of how many more are needed
        more = prompts + alone.workers
        return replace(alone, workers=more, lasting=prompts + alone.lasting)

    def beside_prompts(workers: int) -> RoleDemand:
        longer = 1.0 / (1.0 - prompts / workers)
        slower = resident._replace(correction=resident.correction * longer)
        return decode_demand(mix, goals, slower, start_s)

    def suffices(workers: int) -> bool:
        found = beside_prompts(workers)
        return found.workers <= workers and not found.infeasible

    workers = least_number(suffices, prompts + 1)
    found = beside_prompts(workers)
    return replace(found, workers=workers, lasting=max(workers, found.lasting))


def _present_limits(
    mix: RequestMix, goals: SloTargets, resident: ResidentSequences
) -> DecodeBatchLimits:
    """Return the limits of a worker's batch for the present sequences, with the KV that they
    hold."""
    if mix.residents > 0 and mix.resident_kv > 0:
        resident = resident._replace(kv_tokens=mix.resident_kv / mix.residents, early=0.0)
    return decode_batch_limits(resident, goals)


def _link_floor(mix: RequestMix, machine: MachineModel) -> int:
    """Return the number of workers whose links carry the KV of all prompts."""
    if not machine.link_bytes_s:
        return 0
    wanted = mix.rate * mean_prompt_tokens(mix) * machine.kv_bytes
    return math.ceil(min(wanted / (TARGET_UTILISATION * machine.link_bytes_s), LARGEST_LOAD))


def demand_by_role(
    mix: RequestMix,
    machines: dict[Role, MachineModel],
    goals: SloTargets,
    corrections: Corrections,
    start_s: float = math.inf,
    most_prefill: float = math.inf,
) -> dict[Role, RoleDemand]:
    """Return the demand of both roles, in workers of the role's own pool.

    ``machines`` holds at least one; a pool whose machine is unknown is taken to be like the other.
    ``start_s``: seconds of a worker's start; inf: the pools stay as they are. ``most_prefill``:
    what so many prefill workers cannot compute, decode workers have to.
    """
    computing = machine_for_role("prefill", machines)
    decoding = machine_for_role("decode", machines)
    service = prefill_service(mix, computing, corrections.prefill)
    prefill = prefill_demand(mix, computing, goals, service, start_s)
    resident = resident_sequences(mix, decoding, corrections, computing)
    if prefill.workers <= most_prefill:
        return {"prefill": prefill, "decode": decode_demand(mix, goals, resident, start_s)}
    unlinked = replace(computing, link_bytes_s=0.0)  # KV of these prompts crosses no link
    busy = prefill_demand(mix, unlinked, goals, service, start_s).workers
    beyond = max(0, busy - math.floor(most_prefill))
    if not most_prefill:
        resident = resident._replace(machine=replace(decoding, link_bytes_s=0.0))
    decode = decode_demand_with_prompts(mix, goals, resident, start_s, beyond)
    return {"prefill": prefill, "decode": decode}


def machine_for_role(role: Role, machines: dict[Role, MachineModel]) -> MachineModel:
    """Return the machine of the role's own pool, or of the other pool where it is unknown."""
    return machines.get(role) or next(iter(machines.values()))
