"""The requests of a scenario in time order, from a trace, mixes and bursts; seeded.

Arrivals at a changing rate: gaps of rate 1 are drawn, and the integral of the rate maps them to
time (Cinlar, "Introduction to Stochastic Processes", 1975). The rate counts as constant for GRID_S.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray

from cluster.simulator.devices.cache import CACHE_BLOCK_TOKENS
from cluster.simulator.devices.request import SimulatedRequest
from cluster.simulator.scenario import EventSection, MixSection, Scenario, TrafficSection
from cluster.workloads.distributions import draw_gap
from cluster.workloads.traces import BLOCK_TOKENS, read_trace

GRID_S = 1.0
assert CACHE_BLOCK_TOKENS == BLOCK_TOKENS


def scenario_requests(scenario: Scenario) -> list[SimulatedRequest]:
    """Return all requests. Raises UsageError for a trace that cannot be read."""
    found: list[SimulatedRequest] = []
    traffic = scenario.traffic
    until = math.inf if scenario.seconds is None else scenario.seconds
    if traffic.trace is not None:
        found += _trace_requests(traffic, until)
        until = min(until, max(request.at for request in found))  # mixes and bursts end with it
    for number, mix in enumerate(traffic.mixes):
        rng = Random(f"{scenario.seed} mix {number}")
        found += _mix_requests(mix, number, rng, until)
    bursts = [e for e in scenario.events if e.kind == "burst"]
    found += [r for burst in bursts for r in _burst_requests(burst, found, scenario.seed, until)]
    found.sort(key=lambda request: request.at)
    for number, request in enumerate(found):
        request.number = number
    return found


def _trace_requests(traffic: TrafficSection, until: float) -> Iterator[SimulatedRequest]:
    """Yield the copies of a trace, which share no prefix with each other.

    Each copy begins at another moment of the trace and plays what it left out at the end.
    """
    assert traffic.trace is not None
    lines = read_trace(Path(traffic.trace))
    began, length = lines[0].at, (lines[-1].at - lines[0].at) / traffic.speed
    period = min(until, length * (1 + 1 / max(1, len(lines) - 1)))
    for line in lines:
        at = (line.at - began) / traffic.speed
        if at >= until:
            break
        prompt, output = (max(1, round(n * traffic.scale)) for n in (line.prompt, line.output))
        whole = prompt // CACHE_BLOCK_TOKENS
        for copy in range(traffic.copies):
            when = at + traffic.spread_s * copy / traffic.copies
            blocks = tuple(_block_key(copy, number) for number in line.blocks[:whole])
            arrival_s = when % period if period > 0 else 0.0
            yield SimulatedRequest(0, arrival_s, prompt, output, blocks)


def _block_key(space: int, number: int) -> bytes:
    """Return a key in little-endian order, because the index shards by the first byte."""
    return (number * 1_000_003 + space).to_bytes(16, "little")


def _mix_requests(
    mix: MixSection, number: int, rng: Random, until: float
) -> Iterator[SimulatedRequest]:
    until = min(until, math.inf if mix.for_s is None else mix.from_s + mix.for_s)
    for at in _arrivals(mix, rng, until):
        prompt, output = mix.prompt.draw(rng), mix.output.draw(rng)
        blocks: tuple[bytes, ...] = ()
        if mix.prefix is not None:
            group = rng.randrange(mix.groups)
            prefix = min(prompt, mix.prefix.draw(Random(f"{number} {group}")))
            first, space = (group * 100_000) << 8, -1 - number & 0xFFFF
            shared = range(prefix // CACHE_BLOCK_TOKENS)
            blocks = tuple(_block_key(space, first + i) for i in shared)
        yield SimulatedRequest(0, at, prompt, output, blocks)


def _arrivals(mix: MixSection, rng: Random, until: float) -> Iterator[float]:
    assert math.isfinite(until)
    if until <= mix.from_s:
        return
    edges = np.arange(mix.from_s, until + GRID_S, GRID_S)
    passed = np.concatenate([[0.0], np.cumsum(_rates(mix, edges[:-1])) * GRID_S])
    arrived = 0.0
    drawn: list[float] = []
    while arrived < passed[-1]:
        drawn.append(arrived)
        arrived += draw_gap(mix.arrivals, 1.0, mix.burstiness, rng)
    for at in np.interp(drawn, passed, edges).tolist():
        if at < until:
            yield at


def _rates(mix: MixSection, at: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the requests/s at each time ``at`` [times]."""
    if mix.rates:
        steps = np.searchsorted([r.at_s for r in mix.rates], at, side="right")
        rates = np.array([0.0, *(r.rate for r in mix.rates)])[steps]
    else:
        rates = np.full(len(at), mix.rate)
    if mix.sine is not None:
        phase = 2 * math.pi * (at / mix.sine.period_s - mix.sine.phase - 0.25)
        rates = rates * (1 + mix.sine.amplitude * np.sin(phase))
    found: NDArray[np.float64] = rates
    return found


def _burst_requests(
    burst: EventSection, requests: list[SimulatedRequest], seed: int, until: float
) -> Iterator[SimulatedRequest]:
    """Yield the requests that a burst adds, which ends with the traffic, ``until``."""
    rng = Random(f"{seed} burst {burst.at_s}")
    until = min(until, burst.at_s + burst.for_s)
    for request in requests:
        if burst.at_s <= request.at < until:
            for _ in range(burst.times - 1):
                at = rng.uniform(burst.at_s, until)
                yield SimulatedRequest(0, at, request.prompt, request.output, request.blocks)
