"""Whether a request is taken in at all: pure counting and one comparison.

Two bounds. By count: so many requests of one priority, whatever they are, so that memory is
bounded and less urgent ones cannot keep urgent ones out. By time: a request whose first token is
predicted to miss its deadline is refused now, not served too late; so what queues at the workers
is bounded by how long it takes, and those who are admitted are still served in time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from router.errors import ApiError, overloaded
from router.terms import Placement


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


def check_deadline(placement: Placement, deadline_s: float, waited_s: float) -> None:
    """Raises ApiError (429) when the placement's first token, or its place among those that decode,
    would come later than ``deadline_s`` after the request's arrival, ``waited_s`` ago."""
    predicted = max(placement.ttft_s, placement.d.wait_s) + waited_s
    if predicted > deadline_s:
        late: ApiError = overloaded(
            f"the first token is predicted to take {predicted:.1f} s, and is due within"
            f" {deadline_s:g} s",
            predicted - deadline_s,
        )
        raise late
