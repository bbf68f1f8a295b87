"""What is known of a cluster at one moment, and how it becomes the policy's snapshot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol, Self

import msgspec

from cluster.observation.request_mix import Counted
from cluster.sizing.snapshot import (
    Counts,
    Goals,
    Limits,
    Machine,
    Memory,
    Mix,
    Observed,
    Snapshot,
    Tuning,
    Worker,
)
from protocol.registry.directory import RouterRecord
from protocol.roles import Role


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """``at_s``: monotonic. ``mix``: None when metrics are missing or old, or Redis is away: then
    nothing should be changed, and the rest is as last known. ``age_s``: of the metrics; None: there
    have never been any. ``why``: the mix is None, for people."""

    at_s: float
    mix: Mix | None = None
    observed: Observed = Observed()
    workers: tuple[Worker, ...] = ()
    machines: dict[Role, Machine] = {}
    age_s: float | None = None
    why: str = ""

    def snapshot(
        self, *, goals: Goals, targets: Counts, limits: Limits, tuning: Tuning, memory: Memory
    ) -> Snapshot:
        return Snapshot(
            at_s=self.at_s,
            mix=self.mix,
            goals=goals,
            machines=self.machines,
            workers=self.workers,
            targets=targets,
            limits=limits,
            tuning=tuning,
            observed=self.observed,
            memory=memory,
        )


class Source(Protocol):
    """Where readings come from: ``async with``, then ``read`` again and again."""

    async def read(self) -> Reading:
        """Within a few seconds. What the world does wrong is in the Reading, never raised."""
        ...


# MERGED cluster.autoscale.reading.look
# What both ways of counting requests bring: one value, or why there is none.

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
