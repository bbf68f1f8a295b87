"""Whether a request is taken in at all: pure counting and two comparisons.

By count: so many requests of one priority, whatever they are, so that memory is bounded and less
urgent ones cannot keep urgent ones out. By time: a request whose first token is predicted to miss
its deadline is refused now, not served too late.

Under a lasting overload a queue stands at its bound, and everybody in it waits that long: a
deadline above the objective leaves nobody within it. Who wants goodput bounds the queue below the
objective; bursts are then refused, too, that would have been served a little late. A long prompt on
an idle pool takes its time, but no queue.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from router.errors import overloaded
from router.terms import Placement


class Patience(NamedTuple):
    """How late a request may come, in seconds."""

    ttft_s: float
    queue_s: float = math.inf


class Admission:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.inside: Counter[int] = Counter()  # requests by priority

    def check(self, priority: int) -> None:
        """Raises ApiError (429) when a request of this priority would be one too many."""
        if self.inside[priority] >= self._limit:
            raise overloaded(
                f"{self._limit} requests of priority {priority} are being served already", 1.0
            )

    def enter(self, priority: int) -> Callable[[], None]:
        """Count one in. Returns how to count it out: once, however often called."""
        self.check(priority)
        self.inside[priority] += 1
        left = False

        def leave() -> None:
            nonlocal left
            if not left:
                left = True
                self.inside[priority] -= 1
                if not self.inside[priority]:
                    del self.inside[priority]

        return leave


def check_patience(placement: Placement, patience: Patience, waited_s: float) -> None:
    """Raises ApiError (429) when the request, which arrived ``waited_s`` ago, would come too late
    where it is to be placed."""
    queue_s = max(placement.p.correction * placement.p.queue_s, placement.d.wait_s)
    predicted_s = max(placement.ttft_s, placement.d.wait_s) + waited_s
    if predicted_s > patience.ttft_s:
        raise overloaded(
            f"the first token is predicted to take {predicted_s:.1f} s, and is due within"
            f" {patience.ttft_s:g} s",
            predicted_s - patience.ttft_s,
        )
    if queue_s > patience.queue_s:
        raise overloaded(
            f"the queue is predicted to take {queue_s:.1f} s, and new requests are let in up to"
            f" {patience.queue_s:g} s; a deadline of your own (x-baton-ttft-deadline-ms) counts"
            " instead",
            queue_s - patience.queue_s,
        )
