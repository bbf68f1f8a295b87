"""Traffic whose mix moves: phases, and the requests of one sequence of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from bench.mooncake import Arrival
from cluster.workloads.arrivals import gap

FIRST_ID, VOCAB = 3, 4096


class Phase(NamedTuple):
    """``rate`` in requests a second; lengths in tokens, each uniform from half to one and a half
    of the mean. ``burstiness``: of gamma arrivals; 1 is Poisson, less comes in bursts."""

    name: str
    seconds: float
    rate: float
    prompt: int
    output: int
    burstiness: float = 1.0


IDLE = Phase("idle", 40.0, 0.4, 200, 32)
MOVING = (
    IDLE,
    Phase("prompt-heavy", 100.0, 4.0, 600, 12),
    Phase("answer-heavy", 100.0, 3.0, 128, 120),
    Phase("burst", 100.0, 4.0, 300, 60, burstiness=0.3),
    IDLE._replace(seconds=100.0),
)
"""For the device of ``bench/paced_cluster.py`` and the objectives of ``bench/autoscale.py``: two
workers do when idle, five to seven are needed else, now most for prompts, now most for answers."""


def shortened(phases: Sequence[Phase], share: float) -> list[Phase]:
    return [phase._replace(seconds=share * phase.seconds) for phase in phases]


def arrivals(phases: Sequence[Phase], seed: int) -> list[Arrival]:
    """The same for the same seed; prompts of random tokens that share nothing."""
    draw = random.Random(seed)
    found, began = [], 0.0
    for phase in phases:
        at = 0.0
        while at < phase.seconds:
            prompt = [draw.randrange(FIRST_ID, VOCAB) for _ in range(_length(phase.prompt, draw))]
            found.append(Arrival(began + at, prompt, _length(phase.output, draw)))
            at += gap("gamma", phase.rate, phase.burstiness, draw)
        began += phase.seconds
    return found


def _length(mean: int, draw: random.Random) -> int:
    return max(2, draw.randint(mean // 2, mean + mean // 2))


class Span(NamedTuple):
    """Some time of a run; seconds after its beginning."""

    name: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def spans(phases: Sequence[Phase]) -> list[Span]:
    """When each phase is."""
    found, at = [], 0.0
    for phase in phases:
        found.append(Span(phase.name, at, at + phase.seconds))
        at += phase.seconds
    return found
