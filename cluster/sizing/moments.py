"""What a mix of requests asks of a machine: moments, rates, times. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from cluster.sizing.snapshot import Machine, Mix
from router.placement.step_model import StepModel

SIGNIFICANT = 2.5
"""Standard deviations above the window's rate that make more arrivals a burst, not chance."""


class Service(NamedTuple):
    """Seconds that prompts take of a prefill worker."""

    mean_s: float
    spread: float  # k: variance over the mean squared
    q90_s: float


class Residents(NamedTuple):
    """What sequences that decode are like."""

    output: float  # tokens that a request is answered with
    kv_tokens: float  # that a resident holds on average, the longer it stays the more it counts
    transit: float  # of those, as a share: held while KV is on its way
    spread: float  # of those, variance over the mean squared


def rate_of(mix: Mix, patience_s: float = 0.0) -> float:
    """Requests a second to size for: the window's, or a burst that is no chance and longer than
    those who wait have patience for."""
    if mix.burst_s <= 0 or patience_s >= mix.burst_s:
        return mix.rate
    chance = SIGNIFICANT * math.sqrt(mix.burst_rate / mix.burst_s)
    return max(mix.rate, mix.burst_rate - chance)


def service(mix: Mix, machine: Machine) -> Service:
    """Zeros where no request is known."""
    model = StepModel(*machine.step)
    seconds = [
        model.prefill_s(round(s.cached), max(1, round(s.uncached)), machine.chunk)
        for s in mix.samples
    ]
    weights = [s.weight for s in mix.samples]
    total = sum(weights)
    if total <= 0:
        return Service(0.0, 0.0, 0.0)
    mean_s = mean(seconds, weights)
    variance = mean([(s - mean_s) ** 2 for s in seconds], weights)
    spread = variance / mean_s**2 if mean_s > 0 else 0.0
    return Service(mean_s, spread, quantile(seconds, weights, 0.9))


def corrected(of: Service, by: float) -> Service:
    """Every prompt takes ``by`` times as long."""
    return of._replace(mean_s=of.mean_s * by, q90_s=of.q90_s * by)


def residents(mix: Mix, machine: Machine, kv: float = 1.0) -> Residents:
    """Zeros where no request is known. ``kv``: observed to expected KV of a resident."""
    weights = [s.weight for s in mix.samples]
    if sum(weights) <= 0:
        return Residents(0.0, 0.0, 0.0, 0.0)
    output = mean([s.output for s in mix.samples], weights)
    stays = [s.weight * max(1.0, s.output) for s in mix.samples]
    held = [s.uncached + s.cached + s.output / 2 for s in mix.samples]
    mean_kv = mean(held, stays)
    variance = mean([(tokens - mean_kv) ** 2 for tokens in held], stays)
    spread = variance / mean_kv**2 if mean_kv > 0 else 0.0
    return Residents(output, mean_kv * kv, _transit(mix, machine, output), spread)


def _transit(mix: Mix, machine: Machine, output: float) -> float:
    """Time of KV on the wire to the time that a sequence decodes on an idle worker."""
    if not machine.link_bytes_s:
        return 0.0
    prompt = prompt_tokens(mix)
    wire_s = prompt * machine.kv_bytes / machine.link_bytes_s
    step_s = StepModel(*machine.step).decode_s(1, prompt + output / 2) / mix.pace
    return min(1.0, wire_s / (max(1.0, output) * step_s)) if step_s > 0 else 0.0


def prompt_tokens(mix: Mix) -> float:
    """Of a prompt on average; ``mix`` has samples."""
    return mean([s.uncached + s.cached for s in mix.samples], [s.weight for s in mix.samples])


def mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """0 where nothing has a weight."""
    total = sum(weights)
    return sum(v * w for v, w in zip(values, weights, strict=True)) / total if total > 0 else 0.0


def quantile(values: Sequence[float], weights: Sequence[float], share: float) -> float:
    """The least value that ``share`` of the weight does not exceed."""
    due = share * sum(weights)
    seen = 0.0
    for value, weight in sorted(zip(values, weights, strict=True)):
        seen += weight
        if seen >= due - 1e-12:
            return value
    return max(values)


# MERGED cluster.sizing.queueing
# Waiting in a queue with several servers. Seconds; pure.
#
# M/G/c is taken as M/M/c with the wait scaled by (1 + k)/2, where k is the squared coefficient of
# variation of the service time (Allen, "Probability, Statistics, and Queueing Theory", 2nd edition,
# section 5.3: the Allen-Cunneen approximation), and an exponential tail of that mean for those who
# wait at all.

LARGEST = 100_000.0
"""Erlangs: more than any limit of workers, whatever a device says of itself."""


def erlang_c(servers: int, load: float) -> float:
    """The share of customers that wait, with ``load`` servers busy on average (Erlang, 1917), by
    the recursion of Erlang's B formula. 1 where the load is the servers' or more."""
    if load <= 0:
        return 0.0
    return 1.0 if load >= servers else _waiting(servers, load, _blocked(servers, load))


def _blocked(servers: int, load: float) -> float:
    """Erlang's B: the share that a system without a queue turns away."""
    blocked = 1.0
    for n in range(1, servers + 1):
        blocked = load * blocked / (n + load * blocked)
    return blocked


def _waiting(servers: int, load: float, blocked: float) -> float:
    """C from B."""
    return servers * blocked / (servers - load * (1.0 - blocked))


def mean_wait_s(servers: int, load: float, service_s: float, spread: float) -> float:
    """Mean wait of all; infinite where the load is the servers' or more. ``spread``: k."""
    if load >= servers:
        return math.inf
    return erlang_c(servers, load) * _waiters_s(servers, load, service_s, spread)


def late_share(
    servers: int, load: float, service_s: float, spread: float, patience_s: float
) -> float:
    """The share of customers that wait longer than ``patience_s``."""
    if load >= servers:
        return 1.0
    return erlang_c(servers, load) * _longer(servers, load, service_s, spread, patience_s)


def _longer(servers: int, load: float, service_s: float, spread: float, patience_s: float) -> float:
    """Of those who wait, the share that does so for longer than ``patience_s``."""
    mean_s = _waiters_s(servers, load, service_s, spread)
    return math.exp(-max(0.0, patience_s) / mean_s) if mean_s else 0.0


def _waiters_s(servers: int, load: float, service_s: float, spread: float) -> float:
    """Mean wait of those who wait."""
    return service_s * (1.0 + spread) / (2.0 * (servers - load))


def least_servers(
    load: float, service_s: float, spread: float, patience_s: float, late: float
) -> int:
    """The least number with which at most a share ``late`` waits longer than ``patience_s``; above
    LARGEST that with which the queue has an end."""
    servers = max(1, math.floor(load) + 1)
    if load > LARGEST:
        return servers
    blocked = _blocked(servers, load)  # one server more is one step more of the recursion
    while (
        _waiting(servers, load, blocked) * _longer(servers, load, service_s, spread, patience_s)
        > late
    ):
        servers += 1
        blocked = load * blocked / (servers + load * blocked)
    return servers
