"""What is known of a cluster at one moment, and how it becomes the policy's snapshot."""

from __future__ import annotations

from typing import Protocol

import msgspec

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
