"""The work that an engine has done, and how its time went by. Torch-free."""

from __future__ import annotations

import msgspec


class WorkDone(msgspec.Struct, array_like=True):
    """Sums over all steps, and over the time of the loop that runs them."""

    flops: float = 0.0
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    decode_steps: int = 0  # in which anybody decoded
    seconds: float = 0.0  # of the loop, idle or not
    kv_seconds: float = 0.0  # times the share of the pool in use; all of it while it lacks pages
    starved_seconds: float = 0.0  # in which the first in the queue waited for pages

    def passed(self, seconds: float, kv_used: float, *, starved: bool) -> None:
        """Time in which the share ``kv_used`` of the pool was in use."""
        self.seconds += seconds
        self.kv_seconds += seconds * (1.0 if starved else kv_used)
        self.starved_seconds += seconds * starved

    def plus(self, other: WorkDone) -> WorkDone:
        return WorkDone(*(getattr(self, f) + getattr(other, f) for f in self.__struct_fields__))
