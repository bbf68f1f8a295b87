"""How long a request will wait in the router's queue, and whether the overload lasts.

One rate decides, in expected weighted tokens per second: what is ``served``, by the requests
dispatched while others wait, so that it is what the pool can do. It is a mean that fades within a
quarter of the objective, and at least within ``LEAST_FADE_S``: where prompts may take half a
minute, none may be dispatched for seconds without the pool being slow. What is observed long before
a request waits again says little about the pool, which may have grown: see ``FORGET_FADES``.

A burst is served late: it waits up to the deadline of admission, because it may be over before that
costs anything. While an overload lasts, a queue that deep makes every request miss the objective,
so requests are admitted only while their turn comes within half the objective (``bound_s``), and
early enough for their own prompt to be computed within ``IN_TIME_SHARE`` of the objective.

An overload lasts when the queue takes longer than ``bound_s``, and ``PROOF_S`` after it has become
so long still grows, by ``GROWTH_S`` of service. All of a burst has come by then, and clients that
send again when they are answered do not let the queue grow. The requests that have come before that
was known and will miss the objective are refused then. It is over when no request has waited for
``bound_s``.

CoDel (Nichols and Jacobson, "Controlling Queue Delay", ACM Queue 2012) tells bursts from standing
queues by time, too; it drops at the head what has waited. Here the wait is predicted, and requests
are refused as they arrive, so that their clients know at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from router.fairness.fair_queue import FairQueue, WaitingRequest
from router.placement.admission import QUEUE_SHARE, AdmissionLimits
from router.tenants.tenant import Tenant

IN_TIME_SHARE = 0.8
"""Share of the objective within which the first token of an admitted request is predicted."""

LEAST_QUEUE_S = 0.1
"""Seconds that a request may wait for its turn however long its prompt takes; workers would be idle
with less."""

PROOF_S = 0.08
"""From a queue that has become too long to the time from which it must grow: a burst comes within
it."""

GROWTH_S = 0.5
"""Growth of the queue, in seconds of what the pool serves, that shows an overload."""

FADE_SHARE = 0.25
"""Share of the objective after which what was served counts 1/e."""
LEAST_FADE_S = 2.0
FORGET_FADES = 5.0
"""Times to fade without a waiting request after which the rate is forgotten: what was served would
count less than 1% by then if requests had waited. Between two storms that are closer together than
that, the rate lasts, so that the second one is known at once."""
_LEAST_BUSY_S = 0.05  # of observation before the served rate is used


class FadingRate:
    """Mean of an amount per second; what happened ``fade_s`` ago counts 1/e."""

    def __init__(self, fade_s: float) -> None:
        self._fade_s = fade_s
        self._sum = 0.0
        self._seconds = 0.0  # weighted, the time that has been observed

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        if seconds > 0:
            fade = math.exp(-seconds / self._fade_s)
            self._sum *= fade
            self._seconds = self._seconds * fade + self._fade_s * (1 - fade)

    def add(self, amount: float) -> None:
        self._sum += amount

    def clear(self) -> None:
        """Forget what has been observed."""
        self._sum = self._seconds = 0.0

    @property
    def value(self) -> float | None:
        """Return the amount per second; None while too little has been observed."""
        return self._sum / self._seconds if self._seconds >= _LEAST_BUSY_S else None


class OverloadMonitor:
    """Watches the queue of one router. ``FairDispatcher`` asks it at every arrival and dispatch.

    ``goal_s``: the TTFT objective.
    """

    def __init__(self, queue: FairQueue, goal_s: float, clock: Callable[[], float]) -> None:
        self.bound_s = QUEUE_SHARE * goal_s
        self.lasting = False
        self._queue = queue
        self._goal_s = goal_s
        self._clock = clock
        fade_s = max(LEAST_FADE_S, FADE_SHARE * goal_s)
        self._forget_s = FORGET_FADES * fade_s
        self._served = FadingRate(fade_s)
        self._at = clock()
        self._waited_at = self._at  # when a request last waited
        self._long_since = math.inf  # since when the queue has taken longer than the bound
        self._grew_from = 0.0  # service queued when that was PROOF_S ago

    def on_dispatch(self, service: float) -> None:
        """Count a request that leaves the queue for a worker, while it is still in the queue."""
        self._advance()
        self._served.add(service)

    def wait_s(self, tenant: Tenant) -> float:
        """Return the predicted seconds until a new request of this tenant has its turn, at most
        those for all that waits."""
        rate = self._served.value
        if not rate:
            return 0.0  # not known yet
        return min(self._queue.service_before(tenant), self._queue.service) / rate

    def limits_now(self, limits: AdmissionLimits, alone_s: float = 0.0) -> AdmissionLimits:
        """Return the limits that hold now for a request whose first token takes ``alone_s`` without
        any queue."""
        if not self.lasting:
            return limits
        bound_s = min(limits.queue_s, self._turn_limit_s(limits, alone_s))
        return limits._replace(queue_s=bound_s)

    def update(self) -> list[WaitingRequest]:
        """Decide whether an overload lasts. Return the requests to refuse because it begins: they
        will miss the objective. Call it at an arrival, before the request is queued."""
        self._advance()
        if self.lasting:
            self.lasting = not self._is_over()
        elif self._begins():
            self.lasting = True
            return self._late_requests()
        return []

    def _begins(self) -> bool:
        served, service = self._served.value, self._queue.service
        if self._is_over():
            self._long_since = math.inf
        if not served or service <= self.bound_s * served:
            return False
        self._long_since = min(self._long_since, self._at)
        if self._at - self._long_since <= PROOF_S:
            self._grew_from = service
        return service > self._grew_from + GROWTH_S * served

    def _is_over(self) -> bool:
        return self._at - self._waited_at >= self.bound_s

    def _late_requests(self) -> list[WaitingRequest]:
        """Return those that bound themselves by the objective and will miss it."""
        rate = self._served.value
        assert rate

        def is_late(request: WaitingRequest, before: float) -> bool:
            turn_s = self._at - request.arrived + before / rate
            return turn_s > self._turn_limit_s(request.limits, request.alone_s)

        return self._queue.late_requests(is_late)

    def _turn_limit_s(self, limits: AdmissionLimits, alone_s: float) -> float:
        """Return within which time a request must have its turn while an overload lasts; infinite
        where it is not bound by the objective."""
        if math.isinf(limits.lasting_queue_s):
            return math.inf
        left_s = IN_TIME_SHARE * self._goal_s - alone_s
        return min(limits.lasting_queue_s, max(LEAST_QUEUE_S, left_s))

    def _advance(self) -> None:
        """Let time pass. What waits now has waited since the last call: ``update`` precedes each
        request that is queued."""
        now = self._clock()
        if self._queue.length:
            self._served.advance(now - self._at)
            self._waited_at = now
        elif now - self._waited_at > self._forget_s:
            self._served.clear()
        self._at = now
