"""Service times of prompts and waits in the queue of a prefill pool. Pure.

M/G/c is approximated by M/M/c with the wait scaled by (1 + k)/2, where k is the squared coefficient
of variation of the service time (Allen, "Probability, Statistics, and Queueing Theory", 2nd
edition, section 5.3: the Allen-Cunneen approximation). The wait of requests that wait at all has an
exponential tail with that mean.

That is the queue after a long time. A pool that is to be scaled has to last only until more workers
can serve. The work in a queue that has not settled is a Brownian motion that is reflected at zero,
whose tail is known at any time, also where the load exceeds the servers (Harrison, "Brownian Motion
and Stochastic Flow Systems", 1985, section 3.6). After a long time both tails are the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cluster.sizing.snapshot import MachineModel, RequestMix
from protocol.performance.step_model import StepModel

SampleVector: TypeAlias = NDArray[np.float64]

CHANCE_DEVIATIONS = 2.0
"""Standard deviations of a number that count as chance, which covers 98% of a normal distribution.
Decode pools have room for so many sequences: with 90%, a full pool now and then keeps prompts on
prefill workers."""


class ServiceTime(NamedTuple):
    """Seconds that prompts take on a prefill worker; zeros where no request is known."""

    seconds: SampleVector  # [samples]
    weights: SampleVector  # [samples], of sum 1
    mean_s: float
    spread: float  # k: variance over the mean squared

    def quantile_s(self, share: float) -> float:
        """Return the least time that ``share`` of the prompts do not exceed; 0 without prompts."""
        if not len(self.seconds):
            return 0.0
        order = np.argsort(self.seconds)
        reached = np.cumsum(self.weights[order]) >= share - 1e-12
        return float(self.seconds[order][int(reached.argmax()) if reached.any() else -1])


def service_time(seconds: Sequence[float], weights: Sequence[float]) -> ServiceTime:
    """Return the statistics of service times with these weights."""
    times, shares = np.asarray(seconds, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    total = float(shares.sum())
    if total <= 0:
        return ServiceTime(times[:0], shares[:0], 0.0, 0.0)
    shares = shares / total
    mean_s = float(shares @ times)
    spread = float(shares @ (times - mean_s) ** 2) / mean_s**2 if mean_s > 0 else 0.0
    return ServiceTime(times, shares, mean_s, spread)


def prefill_service(mix: RequestMix, machine: MachineModel, correction: float = 1.0) -> ServiceTime:
    """Return the service time of the mix. ``correction``: observed over predicted time."""
    model = StepModel(*machine.step)
    seconds = [
        correction * model.prefill_s(round(s.cached), max(1, round(s.uncached)), machine.chunk)
        for s in mix.samples
    ]
    return service_time(seconds, [s.weight for s in mix.samples])


def mean_prompt_tokens(mix: RequestMix) -> float:
    """Return the mean prompt length; 0 where no request is known."""
    return service_time([s.uncached + s.cached for s in mix.samples], _weights(mix)).mean_s


def mean_uncached_tokens(mix: RequestMix) -> float:
    """Return the mean number of uncached prompt tokens; 0 where no request is known."""
    return service_time([s.uncached for s in mix.samples], _weights(mix)).mean_s


def _weights(mix: RequestMix) -> list[float]:
    return [s.weight for s in mix.samples]


LARGEST_LOAD = 20_000.0
"""Erlangs; more than any limit of workers, whatever figures a worker reports."""


def erlang_c(servers: int, load: float) -> float:
    """Return the share of requests that wait, with ``load`` servers busy on average (Erlang, 1917);
    1 where the load is at least the number of servers.

    It follows from Erlang B, the share that servers without a queue would lose: one over the sum
    of ``servers``!/(``servers`` - k)!/``load``**k over all k."""
    if load <= 0:
        return 0.0
    if load >= servers:
        return 1.0
    with np.errstate(over="ignore"):  # then hardly any request waits
        lost = 1.0 / (1.0 + float(np.cumprod(np.arange(servers, 0, -1) / load).sum()))
    return servers * lost / (servers - load * (1.0 - lost))


def mean_wait_s(servers: int, load: float, service: ServiceTime) -> float:
    """Return the mean wait of all requests in seconds; infinite under overload."""
    if load >= servers:
        return math.inf
    waiters_s = service.mean_s * (1.0 + service.spread) / (2.0 * (servers - load))
    return erlang_c(servers, load) * waiters_s


class PrefillOutlook(NamedTuple):
    """The work of a prefill pool until more workers can serve."""

    load: float  # erlangs
    seconds: float = math.inf  # until then; inf: the pool stays as it is
    error: float = 0.0  # standard error of the load, as a share of it
    growth: tuple[tuple[float, float], ...] = ((0.0, 1.0),)  # of the load; how likely it is
    queued_s: float = 0.0  # seconds of work that wait now


def late_share(servers: int, outlook: PrefillOutlook, service: ServiceTime, ttft_s: float) -> float:
    """Return the share of prompts that their wait makes late at the end of ``outlook``: sum of
    w_i P(W > |T - S_i|), on average over what the load may be (Gauss-Hermite quadrature) and how it
    may grow.

    A prompt that takes longer than T = ``ttft_s`` by itself is late with any number of servers. The
    later it is, the longer it may wait: so the share has no jump where S_i passes T.
    """
    if outlook.load <= 0 and outlook.queued_s <= 0:
        return 0.0
    work_s = np.abs(ttft_s - service.seconds) * servers  # that may wait before each prompt
    late = 0.0
    errors = _QUADRATURE if outlook.error > 0 else ((0.0, 1.0),)
    for (deviations, weight), (growth, share) in itertools.product(errors, outlook.growth):
        load = outlook.load * max(0.0, 1.0 + deviations * outlook.error)
        each = _late_probabilities(servers, load, growth, outlook, service, work_s)
        late += weight * share * float(service.weights @ each)
    return late


def _late_probabilities(
    servers: int,
    load: float,
    growth: float,
    outlook: PrefillOutlook,
    service: ServiceTime,
    work_s: SampleVector,
) -> SampleVector:
    """Return for each prompt the probability that more than ``work_s`` waits at the end."""
    grown, seconds = load * (1.0 + growth), outlook.seconds
    mean = (load + grown) / 2.0 if seconds < math.inf else grown
    drift = mean - servers
    variance = service.mean_s * (1.0 + service.spread)  # of the work of 1 s, for each erlang
    # Of the prompts that find all servers busy, the wait has the mean of Allen-Cunneen only if work
    # varies as that of busy servers does.
    busy = max(load, servers) * variance
    empty = _reflected_tail(work_s, 0.0, drift, busy, seconds)
    late = erlang_c(servers, mean) * empty
    if seconds == math.inf:
        return late
    if outlook.queued_s > 0:
        lasting = _reflected_tail(work_s, outlook.queued_s, drift, load * variance, seconds)
        late = late + np.maximum(lasting - empty, 0.0)
    if load < servers < grown:
        # All prompts have waited since the load exceeded the servers.
        since_s = seconds * (grown - servers) / (grown - load)
        exceeded = _reflected_tail(work_s, 0.0, (grown - servers) / 2.0, busy, since_s)
        late = np.maximum(late, exceeded)
    return late


_QUADRATURE = ((-math.sqrt(3.0), 1 / 6), (0.0, 2 / 3), (math.sqrt(3.0), 1 / 6))
"""Deviations and weights, exact for polynomials of degree 5."""


def _reflected_tail(
    level: SampleVector, start: float, drift: float, variance: float, seconds: float
) -> SampleVector:
    """Return for each ``level`` the probability that a Brownian motion, reflected at zero, is above
    it after ``seconds``. It begins at ``start``; ``drift`` and ``variance`` are those of 1 s."""
    slope = 2.0 * drift / max(variance, 1e-12)
    if seconds == math.inf:
        return np.exp(np.minimum(slope * level, 0.0)) if drift < 0 else np.ones_like(level)
    deviation = math.sqrt(max(variance * seconds, 1e-12))
    end = start + drift * seconds
    direct = _normal_tail((level - end) / deviation)
    reflected = np.exp(np.minimum(slope * level, _LARGEST_EXPONENT))
    return np.minimum(direct + reflected * _normal_tail((level + end) / deviation), 1.0)


_LARGEST_EXPONENT = 700.0  # of a float


def _normal_tail(deviations: SampleVector) -> SampleVector:
    """Return the probability that a normal variable exceeds its mean by so many deviations."""
    return np.array([0.5 * math.erfc(x * math.sqrt(0.5)) for x in deviations])


def least_number(suffices: Callable[[int], bool], low: int) -> int:
    """Return the least number from ``low`` on that ``suffices``, by doubling steps and bisection.
    Larger numbers must suffice as well."""
    step, high = 1, low
    while not suffices(high):
        low, high, step = high + 1, high + step, 2 * step
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle + 1, high)
    return low
