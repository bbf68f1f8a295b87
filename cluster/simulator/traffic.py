"""Requests of a scenario, in the order of time: of a trace, of mixes, of bursts. Seeded.

Arrivals of a rate that changes: gaps of rate 1 are drawn, and the integral of the rate maps them to
time (Cinlar, "Introduction to Stochastic Processes", 1975); the rate is taken to be constant for
GRID_S.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np

from cluster.simulator.devices.cache import BLOCK
from cluster.simulator.devices.job import Job
from cluster.simulator.devices.routing import Floats
from cluster.simulator.scenario import EventSection, MixSection, Scenario, TrafficSection
from cluster.workloads.arrivals import gap
from cluster.workloads.traces import BLOCK_TOKENS, read_trace

GRID_S = 1.0
assert BLOCK == BLOCK_TOKENS


def requests(scenario: Scenario) -> list[Job]:
    """All of them. Raises StartupError for a trace that cannot be read."""
    found: list[Job] = []
    traffic = scenario.traffic
    until = math.inf if scenario.seconds is None else scenario.seconds
    if traffic.trace is not None:
        found += _of_trace(traffic, until)
        until = min(until, max(job.at for job in found))  # mixes beside it end with it
    for number, mix in enumerate(traffic.mixes):
        draw = Random(f"{scenario.seed} mix {number}")
        found += _of_mix(mix, number, draw, until)
    bursts = [e for e in scenario.events if e.kind == "burst"]
    found += [job for burst in bursts for job in _of_burst(burst, found, scenario.seed)]
    found.sort(key=lambda job: job.at)
    for number, job in enumerate(found):
        job.number = number
    return found


def _of_trace(of: TrafficSection, until: float) -> Iterator[Job]:
    """Copies share no prefix with each other: they are other people's. Each plays the trace from
    a moment of its own, and what it left out at the end."""
    assert of.trace is not None
    lines = read_trace(Path(of.trace))
    began, length = lines[0].at, (lines[-1].at - lines[0].at) / of.speed
    turn = min(until, length * (1 + 1 / max(1, len(lines) - 1)))
    for line in lines:
        at = (line.at - began) / of.speed
        if at >= until:
            break
        prompt, output = (max(1, round(n * of.scale)) for n in (line.prompt, line.output))
        whole = prompt // BLOCK
        for copy in range(of.copies):
            when = at + of.spread_s * copy / of.copies
            blocks = tuple(_key(copy, number) for number in line.blocks[:whole])
            yield Job(0, when % turn if turn > 0 else 0.0, prompt, output, blocks)


def _key(space: int, number: int) -> bytes:
    """Little-endian: an index shards by the first byte."""
    return (number * 1_000_003 + space).to_bytes(16, "little")


def _of_mix(mix: MixSection, number: int, draw: Random, until: float) -> Iterator[Job]:
    until = min(until, math.inf if mix.for_s is None else mix.from_s + mix.for_s)
    for at in _arrivals(mix, draw, until):
        prompt, output = mix.prompt.draw(draw), mix.output.draw(draw)
        blocks: tuple[bytes, ...] = ()
        if mix.prefix is not None:
            group = draw.randrange(mix.groups)
            shared = min(prompt, mix.prefix.draw(Random(f"{number} {group}"))) // BLOCK
            first = (group * 100_000) << 8
            blocks = tuple(_key(-1 - number & 0xFFFF, first + i) for i in range(shared))
        yield Job(0, at, prompt, output, blocks)


def _arrivals(mix: MixSection, draw: Random, until: float) -> Iterator[float]:
    assert math.isfinite(until)
    if until <= mix.from_s:
        return
    edges = np.arange(mix.from_s, until + GRID_S, GRID_S)
    passed = np.concatenate([[0.0], np.cumsum(_rates(mix, edges[:-1])) * GRID_S])
    arrived = 0.0
    chunk: list[float] = []
    while arrived < passed[-1]:
        chunk.append(arrived)
        arrived += gap(mix.arrivals, 1.0, mix.burstiness, draw)
    for at in np.interp(chunk, passed, edges).tolist():
        if at < until:
            yield at


def _rates(mix: MixSection, at: Floats) -> Floats:
    if mix.rates:
        steps = np.searchsorted([r.at_s for r in mix.rates], at, side="right")
        rates = np.array([0.0, *(r.rate for r in mix.rates)])[steps]
    else:
        rates = np.full(len(at), mix.rate)
    if mix.sine is not None:
        turn = 2 * math.pi * (at / mix.sine.period_s - mix.sine.phase - 0.25)
        rates = rates * (1 + mix.sine.amplitude * np.sin(turn))
    found: Floats = rates
    return found


def _of_burst(burst: EventSection, jobs: list[Job], seed: int) -> Iterator[Job]:
    draw = Random(f"{seed} burst {burst.at_s}")
    until = burst.at_s + burst.for_s
    for job in jobs:
        if burst.at_s <= job.at < until:
            for _ in range(burst.times - 1):
                at = draw.uniform(burst.at_s, until)
                yield Job(0, at, job.prompt, job.output, job.blocks)
