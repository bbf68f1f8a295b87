"""Admission control: the router refuses requests (429) by their number and by their predicted wait.

The number of requests of one priority is bounded, so that memory is bounded and less urgent
requests cannot keep urgent ones out. A request whose first token is predicted to miss its deadline
is refused at once instead of being served too late.

Under a lasting overload the queue stays at its bound, and every request in it waits that long, so
with a deadline above the objective no request meets the objective. For goodput, bound the queue
below the objective; then bursts are refused, too, that would have been served a little late. A long
prompt on an idle pool takes its time, but does not count as queue.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from router.common.errors import overloaded
from router.placement.cost import Placement


class AdmissionLimits(NamedTuple):
    """Bounds in seconds on the predicted TTFT and on the predicted time in a queue."""

    ttft_s: float
    queue_s: float = math.inf


class AdmissionController:
    """Counts the requests in one router; ``on_refusal`` is called with the reason of each
    refusal."""

    def __init__(self, limit: int, on_refusal: Callable[[str], None] = lambda reason: None) -> None:
        self._limit = limit
        self._on_refusal = on_refusal
        self.inside: Counter[int] = Counter()  # requests by priority

    def check(self, priority: int, count: int = 1) -> None:
        """Raise ApiError (429) if ``count`` more requests of this priority exceed the limit."""
        if self.inside[priority] + count > self._limit:
            self._on_refusal("requests")
            raise overloaded(
                f"{self.inside[priority]} requests of priority {priority} are being served, of at"
                f" most {self._limit}; {count} more came",
                1.0,
            )

    def enter(self, priority: int) -> Callable[[], None]:
        """Count one request in. Return the function that counts it out; further calls do
        nothing."""
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

    def check_limits(self, placement: Placement, limits: AdmissionLimits, waited_s: float) -> None:
        """Raise ApiError (429), see ``check_admission_limits``."""
        check_admission_limits(placement, limits, waited_s, self._on_refusal)


def check_admission_limits(
    placement: Placement,
    limits: AdmissionLimits,
    waited_s: float,
    on_refusal: Callable[[str], None] = lambda reason: None,
) -> None:
    """Raise ApiError (429) if a request that arrived ``waited_s`` ago is predicted to exceed its
    limits at this placement."""
    queue_s = max(placement.p.correction * placement.p.queue_s, placement.d.wait_s)
    predicted_s = max(placement.ttft_s, placement.d.wait_s) + waited_s
    if predicted_s > limits.ttft_s:
        on_refusal("ttft")
        raise overloaded(
            f"the first token is predicted to take {predicted_s:.1f} s, and is due within"
            f" {limits.ttft_s:g} s",
            predicted_s - limits.ttft_s,
        )
    if queue_s > limits.queue_s:
        on_refusal("queue")
        raise overloaded(
            f"the queue is predicted to take {queue_s:.1f} s, and new requests are let in up to"
            f" {limits.queue_s:g} s; a deadline of your own (x-baton-ttft-deadline-ms) counts"
            " instead",
            queue_s - limits.queue_s,
        )
