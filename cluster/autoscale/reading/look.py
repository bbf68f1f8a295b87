"""What both ways of counting requests bring: one value, or why there is none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol, Self

from cluster.autoscale.reading.mix import Counted
from cluster.sizing.snapshot import Mix, Observed
from protocol.directory import RouterRecord

MOST_PER_S = 1e7
"""Requests. More is garbage."""


class Look(NamedTuple):
    """``mix``: without what only workers tell. ``at_s``: monotonic, of the metrics."""

    mix: Mix
    observed: Observed
    at_s: float


class RequestCounts(Protocol):
    """``async with``. ``stale_s``: older metrics are no ground for a decision."""

    stale_s: float

    async def look(self, routers: Sequence[RouterRecord]) -> Look:
        """Raises Unavailable, within a few seconds."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *gone: object) -> None: ...


def sane(counted: Counted) -> bool:
    """Whether requests can have been like that."""
    most = MOST_PER_S * max(1.0, counted.seconds)
    counts = (counted.arrivals, counted.ttft.count, counted.tpot.count)
    histograms = (counted.prompts, counted.uncached, counted.outputs)
    sums = (counted.ttft.total, counted.tpot.total, counted.answered_tokens)
    return (
        all(0 <= count <= most for count in (*counts, *(h.count for h in histograms)))
        and all(0 <= total < math.inf for total in sums)
        and all(0 <= h.total < math.inf for h in histograms)
    )
