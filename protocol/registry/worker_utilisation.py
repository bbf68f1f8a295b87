"""How far from its ceilings a worker was over the last seconds, as its record tells it.

    compute     FLOPs done, of those that the machine could have done while steps ran
    bandwidth   bytes moved in memory, likewise
    capacity    pages of the KV pool in use, of all the time; all of them while a sequence that is
                next waits for pages
    network     KV received, of what the link could have brought in all the time

The first two are of the time in which steps ran: they say what bounds a step. How much of the time
that was is ``busy``: who is idle is bound by nothing, however slow its steps.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, get_args

import msgspec

Wall: TypeAlias = Literal["compute", "bandwidth", "capacity", "network"]
WALLS: tuple[Wall, ...] = get_args(Wall)


class Walls(msgspec.Struct, frozen=True, kw_only=True):
    """Of one worker. Shares are 0 .. 1."""

    seconds: float  # that this is of
    busy: float  # share of them in which a step ran
    compute: float
    bandwidth: float
    capacity: float
    network: float
    starved: float  # share of the time in which the next sequence waited for pages
    kv_wait: float  # sequences, on average, that waited for nothing but KV on its way
    batch: float  # sequences that decoded, of the steps in which any did
    kv_share: float  # of the bytes moved: KV; the rest is weights
    element_bytes: int  # of a weight
    kv_shrink: float  # what KV of the pool would be divided by in fp8; 1: it is
    wire_shrink: float  # the same of KV on the wire
    gpu: bool
    drafts: bool  # speculates

    def of(self, wall: Wall) -> float:
        """Utilisation of the wall's ceiling."""
        return float(getattr(self, wall))

    @property
    def sane(self) -> bool:
        """Whether these can be a worker's own figures: what a directory holds may be garbage."""
        shares = (self.busy, self.starved, self.kv_share, *(self.of(wall) for wall in WALLS))
        others = (self.seconds, self.kv_wait, self.batch)
        return (
            all(0.0 <= share <= 1.0 for share in shares)
            and all(value >= 0.0 and math.isfinite(value) for value in others)
            and 1 <= self.element_bytes <= 8
            and all(1.0 <= shrink <= 16.0 for shrink in (self.kv_shrink, self.wire_shrink))
        )
