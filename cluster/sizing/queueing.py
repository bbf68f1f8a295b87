"""Service times of prompts and waits in the queue of a prefill pool. Pure.

M/G/c is approximated by M/M/c with the wait scaled by (1 + k)/2, where k is the squared coefficient
of variation of the service time (Allen, "Probability, Statistics, and Queueing Theory", 2nd
edition, section 5.3: the Allen-Cunneen approximation). The wait of requests that wait at all has an
exponential tail with that mean.
"""

from __future__ import annotations

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
    total = sum(s.weight for s in mix.samples)
    tokens = sum(s.weight * (s.uncached + s.cached) for s in mix.samples)
    return tokens / total if total > 0 else 0.0


LARGEST_LOAD = 100_000.0
"""Erlangs; more than any limit of workers, whatever figures a worker reports."""


def erlang_c(servers: int, load: float) -> float:
    """Return the share of requests that wait, with ``load`` servers busy on average (Erlang, 1917),
    by the recursion of Erlang B; 1 where the load is at least the number of servers."""
    if load <= 0:
        return 0.0
    if load >= servers:
        return 1.0
    blocked = 1.0
    for n in range(1, servers + 1):
        blocked = load * blocked / (n + load * blocked)
    return servers * blocked / (servers - load * (1.0 - blocked))


def mean_wait_s(servers: int, load: float, service: ServiceTime) -> float:
    """Return the mean wait of all requests in seconds; infinite under overload."""
    if load >= servers:
        return math.inf
    return erlang_c(servers, load) * _waiters_s(servers, load, service)


def late_share(
    servers: int, load: float, service: ServiceTime, ttft_s: float, delay_s: float = 0.0
) -> float:
    """Return the share of prompts that their wait makes late: sum of w_i P(W > |T - S_i|).

    A prompt that takes longer than T = ``ttft_s`` by itself is late with any number of servers. The
    later it is, the longer it may wait: so the share has no jump where S_i passes T. ``delay_s``:
    further wait of every prompt.
    """
    if load >= servers:
        return 1.0
    slack_s = np.abs(ttft_s - service.seconds) - delay_s
    mean_s = max(_waiters_s(servers, load, service), 1e-12)
    waits = erlang_c(servers, load) * np.exp(-np.maximum(slack_s, 0.0) / mean_s)
    return float(service.weights @ np.where(slack_s < 0, 1.0, waits))


def _waiters_s(servers: int, load: float, service: ServiceTime) -> float:
    """Return the mean wait of the requests that wait at all."""
    return service.mean_s * (1.0 + service.spread) / (2.0 * (servers - load))


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
