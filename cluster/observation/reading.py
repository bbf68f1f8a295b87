"""One observation of a cluster, and the interfaces of the sources that it comes from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol, Self

import msgspec

from cluster.observation.request_mix import TrafficCounts
from cluster.sizing.snapshot import (
    MachineModel,
    ObservedLatency,
    PoolLimits,
    RequestMix,
    ScalingTuning,
    SizingMemory,
    SizingSnapshot,
    SloTargets,
    WorkerCounts,
    WorkerSnapshot,
)
from protocol.registry.directory import RouterRecord
from protocol.roles import Role


class ClusterReading(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster at one time. ``at_s``: monotonic.

    ``mix`` is None when metrics are missing or old, or Redis is unreachable: then nothing should
    change, and the rest is as last known. ``age_s``: age of the metrics, None before the first.
    ``why``: why the mix is None.
    """

    at_s: float
    mix: RequestMix | None = None
    observed: ObservedLatency = ObservedLatency()
    workers: tuple[WorkerSnapshot, ...] = ()
    machines: dict[Role, MachineModel] = {}
    age_s: float | None = None
    why: str = ""

    def snapshot(
        self,
        *,
        goals: SloTargets,
        targets: WorkerCounts,
        limits: PoolLimits,
        tuning: ScalingTuning,
        memory: SizingMemory,
    ) -> SizingSnapshot:
        return SizingSnapshot(
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


class ReadingSource(Protocol):
    """Use with ``async with``, then call ``read`` again and again."""

    async def read(self) -> ClusterReading:
        """Return a reading within a few seconds; failures of other services are in it and not
        raised."""
        ...


MAX_REQUEST_RATE = 1e7
"""Requests/s; a higher figure is garbage."""


MAX_QUEUED_TOKENS = 1e12
"""Prompt tokens in routers' queues; a higher figure is garbage."""


class TrafficReading(NamedTuple):
    """``mix``: without the figures that only workers report. Its backlog is that of the routers'
    queues. ``at_s``: monotonic time of the metrics."""

    mix: RequestMix
    observed: ObservedLatency
    at_s: float


class TrafficSource(Protocol):
    """Counts requests; use with ``async with``. Metrics older than ``stale_s`` do not suffice for a
    decision."""

    stale_s: float

    async def read_traffic(self, routers: Sequence[RouterRecord]) -> TrafficReading:
        """Read the traffic within a few seconds. Raises Unavailable."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *gone: object) -> None: ...


def plausible_queue(tokens: float) -> float:
    """Return the prompt tokens in queues; 0 for a figure that cannot be one."""
    return tokens if 0 <= tokens <= MAX_QUEUED_TOKENS else 0.0


def is_plausible(counted: TrafficCounts) -> bool:
    """Return whether the counts can be those of real requests."""
    most = MAX_REQUEST_RATE * max(1.0, counted.seconds)
    counts = (counted.arrivals, counted.ttft.count, counted.tpot.count)
    histograms = (counted.prompts, counted.uncached, counted.outputs)
    edges = len(counted.passed.edges)
    sums = (
        *(counted.ttft.total, counted.tpot.total, counted.answered_tokens, counted.cached_pairs),
        *(counted.ended_tokens, counted.output_pairs),
    )
    return (
        all(0 <= count <= most for count in (*counts, *(h.count for h in histograms)))
        and 0 <= counted.passed.count <= edges * most
        and all(0 <= total < math.inf for total in sums)
        and all(0 <= h.total < math.inf for h in histograms)
    )
