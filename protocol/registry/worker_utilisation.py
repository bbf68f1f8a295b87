"""How close a worker came to each ceiling ("wall") of its machine over the last seconds.

    compute     FLOPs done, as a share of what the machine could have done while steps ran
    bandwidth   bytes moved in memory, likewise
    capacity    pages of the KV pool in use, over the whole time; counted as all pages while the
                next sequence waits for pages
    network     KV received, as a share of what the link could have carried in the whole time

Compute and bandwidth refer to the time in which steps ran, so they show what bounds a step.
``busy`` is the share of that time in the whole: an idle worker is bound by nothing, however slow
its steps. cluster/worker/utilisation.py measures it; router/walls and the planner read it.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, get_args

import msgspec

Wall: TypeAlias = Literal["compute", "bandwidth", "capacity", "network"]
WALLS: tuple[Wall, ...] = get_args(Wall)


class WorkerUtilisation(msgspec.Struct, frozen=True, kw_only=True):
    """Utilisation of one worker, part of its record. Shares are 0 .. 1."""

    seconds: float  # that were measured
    busy: float  # share of the time in which a step ran
    compute: float
    bandwidth: float
    capacity: float
    network: float
    starved: float  # share of the time in which the next sequence waited for pages
    kv_wait: float  # sequences, on average, that waited only for KV on its way
    batch: float  # sequences that decoded, on average over steps in which any did
    kv_share: float  # share of KV in the bytes moved; the rest is weights
    element_bytes: int  # of a weight
    kv_shrink: float  # factor by which fp8 would shrink the KV pool; 1: it is fp8
    wire_shrink: float  # the same for KV on the wire
    gpu: bool
    drafts: bool  # it speculates

    def share_of(self, wall: Wall) -> float:
        """Return the utilisation of one ceiling, 0 .. 1."""
        return float(getattr(self, wall))

    @property
    def is_valid(self) -> bool:
        """Whether a worker can have measured this; records from Redis are not trusted."""
        shares = (self.busy, self.starved, self.kv_share, *(self.share_of(wall) for wall in WALLS))
        others = (self.seconds, self.kv_wait, self.batch)
        return (
            all(0.0 <= share <= 1.0 for share in shares)
            and all(value >= 0.0 and math.isfinite(value) for value in others)
            and 1 <= self.element_bytes <= 8
            and all(1.0 <= shrink <= 16.0 for shrink in (self.kv_shrink, self.wire_shrink))
        )
