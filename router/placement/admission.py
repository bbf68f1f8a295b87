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

from router.common.errors import overloaded
from router.placement.cost import Placement


class Patience(NamedTuple):
    """How late a request may come, in seconds."""

    ttft_s: float
    queue_s: float = math.inf


class Admission:
    """``on_refusal`` is told why, for each request that is not let in."""

    def __init__(self, limit: int, on_refusal: Callable[[str], None] = lambda reason: None) -> None:
        self._limit = limit
        self._on_refusal = on_refusal
        self.inside: Counter[int] = Counter()  # requests by priority

    def check(self, priority: int, count: int = 1) -> None:
        """Raises ApiError (429) when so many requests of this priority would be too many."""
        if self.inside[priority] + count > self._limit:
            self._on_refusal("requests")
            raise overloaded(
                f"{self.inside[priority]} requests of priority {priority} are being served, of at"
                f" most {self._limit}; {count} more came",
                1.0,
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

    def check_patience(self, placement: Placement, patience: Patience, waited_s: float) -> None:
        """Raises ApiError (429), see ``check_patience``."""
        check_patience(placement, patience, waited_s, self._on_refusal)


def check_patience(
    placement: Placement,
    patience: Patience,
    waited_s: float,
    on_refusal: Callable[[str], None] = lambda reason: None,
) -> None:
    """Raises ApiError (429) when the request, which arrived ``waited_s`` ago, would come too late
    where it is to be placed."""
    queue_s = max(placement.p.correction * placement.p.queue_s, placement.d.wait_s)
    predicted_s = max(placement.ttft_s, placement.d.wait_s) + waited_s
    if predicted_s > patience.ttft_s:
        on_refusal("ttft")
        raise overloaded(
            f"the first token is predicted to take {predicted_s:.1f} s, and is due within"
            f" {patience.ttft_s:g} s",
            predicted_s - patience.ttft_s,
        )
    if queue_s > patience.queue_s:
        on_refusal("queue")
        raise overloaded(
            f"the queue is predicted to take {queue_s:.1f} s, and new requests are let in up to"
            f" {patience.queue_s:g} s; a deadline of your own (x-baton-ttft-deadline-ms) counts"
            " instead",
            queue_s - patience.queue_s,
        )
