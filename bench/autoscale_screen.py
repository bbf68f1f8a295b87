"""Fixed splits, tried in the simulator, so that only the best need be measured."""

from __future__ import annotations

from collections.abc import Sequence

from bench.mooncake import Arrival
from bench.open_loop import Objective
from bench.paced_cluster import CHUNK, DEVICE, KV_TOKENS, MAX_BATCH
from bench.simulate_fit import Fit, Known, Segment, on_paper
from router.step_model import StepModel

KV_BYTES = 4096.0
"""Of a token on the wire; loopback has no bound that would matter."""


def met(split: tuple[int, int], arrivals: Sequence[Arrival], goal: Objective) -> float:
    """Share of the requests that meet both objectives with so many workers of each role."""
    prefill, decode = split
    known = Known(StepModel(*DEVICE), prefill, decode, CHUNK, MAX_BATCH, KV_TOKENS, KV_BYTES, goal)
    times = on_paper(Segment("", arrivals, ()), known, Fit())
    good = sum(ttft <= goal.ttft_s and tpot <= goal.tpot_s for ttft, tpot in times)
    return good / max(1, len(arrivals))


def best(
    size: int, count: int, arrivals: Sequence[Arrival], goal: Objective
) -> list[tuple[int, int]]:
    """The ``count`` splits of ``size`` workers that do best, the best first."""
    splits = [(p, size - p) for p in range(1, size)]
    ranked = sorted(splits, key=lambda split: -met(split, arrivals, goal))
    return ranked[:count]
