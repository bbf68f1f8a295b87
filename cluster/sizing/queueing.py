"""Service times of prompts, statistics of resident sequences, and waiting times in a queue. Pure.

M/G/c is approximated by M/M/c with the wait scaled by (1 + k)/2, where k is the squared coefficient
of variation of the service time (Allen, "Probability, Statistics, and Queueing Theory", 2nd
edition, section 5.3: the Allen-Cunneen approximation). The wait of requests that wait at all has an
exponential tail with that mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from cluster.sizing.snapshot import MachineModel, RequestMix
from protocol.performance.step_model import StepModel

BURST_DEVIATIONS = 2.5
"""Standard deviations above the window's rate from which on more arrivals count as a burst."""


class ServiceTime(NamedTuple):
    """Seconds that prompts take on a prefill worker."""

    mean_s: float
    spread: float  # k: variance over the mean squared
    q90_s: float


class ResidentSequences(NamedTuple):
    """Statistics of sequences while they decode."""

    output: float  # mean output tokens of a request
    kv_tokens: float  # mean KV tokens, weighted by how long a sequence decodes
    transit: float  # further KV, as a share of it, that is held during the transfer
    spread: float  # of the KV tokens: variance over the mean squared


def sizing_rate(mix: RequestMix, patience_s: float = 0.0) -> float:
    """Return the requests/s to size for: the window's rate, or that of a significant burst that
    lasts longer than the patience."""
    if mix.burst_s <= 0 or patience_s >= mix.burst_s:
        return mix.rate
    noise = BURST_DEVIATIONS * math.sqrt(mix.burst_rate / mix.burst_s)
    return max(mix.rate, mix.burst_rate - noise)


def prefill_service(mix: RequestMix, machine: MachineModel) -> ServiceTime:
    """Return the service time of the mix; zeros where no request is known."""
    model = StepModel(*machine.step)
    seconds = [
        model.prefill_s(round(s.cached), max(1, round(s.uncached)), machine.chunk)
        for s in mix.samples
    ]
    weights = [s.weight for s in mix.samples]
    total = sum(weights)
    if total <= 0:
        return ServiceTime(0.0, 0.0, 0.0)
    mean_s = weighted_mean(seconds, weights)
    variance = weighted_mean([(s - mean_s) ** 2 for s in seconds], weights)
    spread = variance / mean_s**2 if mean_s > 0 else 0.0
    return ServiceTime(mean_s, spread, weighted_quantile(seconds, weights, 0.9))


def scaled_service(service: ServiceTime, by: float) -> ServiceTime:
    """Return the service time with every prompt ``by`` times as long."""
    return service._replace(mean_s=service.mean_s * by, q90_s=service.q90_s * by)


def resident_sequences(
    mix: RequestMix, machine: MachineModel, kv: float = 1.0
) -> ResidentSequences:
    """Return the statistics of resident sequences; zeros where no request is known. ``kv``:
    observed to expected KV of a sequence."""
    weights = [s.weight for s in mix.samples]
    if sum(weights) <= 0:
        return ResidentSequences(0.0, 0.0, 0.0, 0.0)
    output = weighted_mean([s.output for s in mix.samples], weights)
    stays = [s.weight * max(1.0, s.output) for s in mix.samples]
    held = [s.uncached + s.cached + s.output / 2 for s in mix.samples]
    mean_kv = weighted_mean(held, stays)
    variance = weighted_mean([(tokens - mean_kv) ** 2 for tokens in held], stays)
    spread = variance / mean_kv**2 if mean_kv > 0 else 0.0
    return ResidentSequences(output, mean_kv * kv, _transit(mix, machine, output), spread)


def _transit(mix: RequestMix, machine: MachineModel, output: float) -> float:
    """Return the transfer time over the time that a sequence decodes on an idle worker."""
    if not machine.link_bytes_s:
        return 0.0
    prompt = mean_prompt_tokens(mix)
    wire_s = prompt * machine.kv_bytes / machine.link_bytes_s
    step_s = StepModel(*machine.step).decode_s(1, prompt + output / 2) / mix.pace
    return min(1.0, wire_s / (max(1.0, output) * step_s)) if step_s > 0 else 0.0


def mean_prompt_tokens(mix: RequestMix) -> float:
    """Return the mean prompt length; ``mix`` must have samples."""
    return weighted_mean(
        [s.uncached + s.cached for s in mix.samples], [s.weight for s in mix.samples]
    )


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weighted mean; 0 where the weights sum to 0."""
    total = sum(weights)
    return sum(v * w for v, w in zip(values, weights, strict=True)) / total if total > 0 else 0.0


def weighted_quantile(values: Sequence[float], weights: Sequence[float], share: float) -> float:
    """Return the least value that ``share`` of the weight does not exceed."""
    due = share * sum(weights)
    seen = 0.0
    for value, weight in sorted(zip(values, weights, strict=True)):
        seen += weight
        if seen >= due - 1e-12:
            return value
    return max(values)


LARGEST_LOAD = 100_000.0
"""Erlangs; more than any limit of workers, whatever figures a worker reports."""


def erlang_c(servers: int, load: float) -> float:
    """Return the share of requests that wait, with ``load`` servers busy on average (Erlang, 1917),
    by the recursion of Erlang B; 1 where the load is at least the number of servers."""
    if load <= 0:
        return 0.0
    return 1.0 if load >= servers else _waiting(servers, load, _blocked(servers, load))


def _blocked(servers: int, load: float) -> float:
    """Return Erlang B: the share that a system without a queue turns away."""
    blocked = 1.0
    for n in range(1, servers + 1):
        blocked = load * blocked / (n + load * blocked)
    return blocked


def _waiting(servers: int, load: float, blocked: float) -> float:
    """Return Erlang C (probability of waiting) from Erlang B (probability of blocking)."""
    return servers * blocked / (servers - load * (1.0 - blocked))


def mean_wait_s(servers: int, load: float, service_s: float, spread: float) -> float:
    """Return the mean wait of all requests in seconds; infinite under overload. ``spread``: k."""
    if load >= servers:
        return math.inf
    return erlang_c(servers, load) * _waiters_s(servers, load, service_s, spread)


def late_share(
    servers: int, load: float, service_s: float, spread: float, patience_s: float
) -> float:
    """Return the share of requests that wait longer than ``patience_s``."""
    if load >= servers:
        return 1.0
    return erlang_c(servers, load) * _longer(servers, load, service_s, spread, patience_s)


def _longer(servers: int, load: float, service_s: float, spread: float, patience_s: float) -> float:
    """Return the share of waiting requests that wait longer than ``patience_s``."""
    mean_s = _waiters_s(servers, load, service_s, spread)
    return math.exp(-max(0.0, patience_s) / mean_s) if mean_s else 0.0


def _waiters_s(servers: int, load: float, service_s: float, spread: float) -> float:
    """Return the mean wait of the requests that wait at all."""
    return service_s * (1.0 + spread) / (2.0 * (servers - load))


def least_servers(
    load: float, service_s: float, spread: float, patience_s: float, late: float
) -> int:
    """Return the least number of servers with which at most a share ``late`` waits longer than
    ``patience_s``; above LARGEST_LOAD, the least with which the queue is finite."""
    servers = max(1, math.floor(load) + 1)
    if load > LARGEST_LOAD:
        return servers
    blocked = _blocked(servers, load)  # each further server is one more step of the recursion
    while (
        _waiting(servers, load, blocked) * _longer(servers, load, service_s, spread, patience_s)
        > late
    ):
        servers += 1
        blocked = load * blocked / (servers + load * blocked)
    return servers
