"""Admission control: what a router lets in, by the number of requests and by their predicted wait.

**Number.** A tenant has at most ``limit`` requests in a router, and no more than there are places
left for all tenants (``TENANT_PLACES`` times ``limit`` in all): the dynamic threshold of Choudhury
and Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches" (IEEE/ACM ToN 1998).
So memory is bounded, and ``n`` tenants that send all they can leave 1 / (n + 1) of the places free:
one that has few requests still gets in. Priorities make no difference, or a tenant would have as
many places as there are priorities.

**Wait.** A request whose first token is predicted to miss its deadline is refused at once instead
of being served too late. A deadline that the operator or the client has set is exact; the default
one (``default_ttft_limit_s``) leaves room for the error of the prediction, so that a server that is
only busy refuses nothing that may come in time. A long prompt on an idle pool takes its time, but
does not count as queue. While an overload lasts (``router/fairness/overload.py``), the queue is
bounded below the objective.

``has_room`` says when the router's queue sends the next request to a worker.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from router.common.errors import invalid, overloaded
from router.placement.cost import Placement
from router.placement.estimates import CORRECTION_RANGE

TENANT_PLACES = 4
"""Requests in a router, as a multiple of those that one tenant may have."""

LATE_OBJECTIVES = 10
"""TTFT, in objectives, from which an answer is of no use where neither the operator nor the client
says when that is."""

PREDICTION_ERROR = CORRECTION_RANGE[1]
"""Predicted over real TTFT that a deadline leaves room for. A worker's predictions follow what is
observed up to this factor, and before anything was observed they may be off by as much; in the
median they are off by some 40% at 90% load on engines that share cores (docs/benchmarks.md). The
second factor of ``TtftCorrections``, for busy engines beside the worker, has the same bound, so
that both together reach its square; no room is left for that one, which stays near 1 on GPUs."""

QUEUE_SHARE = 0.5
"""Share of the TTFT objective that a request may wait for its turn while an overload lasts; the
rest is for the queue of the workers and the prompt itself."""

ROOM_S = 0.05
"""Seconds of prompts that a prefill worker has in store beside the one that it computes: more than
the way from its first token through the router to the next prompt, and as little as possible, as no
fair order holds in a worker."""


def default_ttft_limit_s(goal_s: float) -> float:
    """Return the bound on the predicted TTFT for an objective of ``goal_s``: beyond it, the first
    token comes too late even if the prediction is too high by PREDICTION_ERROR."""
    return PREDICTION_ERROR * LATE_OBJECTIVES * goal_s


class AdmissionLimits(NamedTuple):
    """Bounds in seconds on the predicted TTFT and on the predicted time in a queue."""

    ttft_s: float
    queue_s: float = math.inf
    lasting_queue_s: float = math.inf  # on the time in a queue while an overload lasts


def admission_limits(
    goal_s: float, ttft_s: float | None = None, queue_s: float | None = None
) -> AdmissionLimits:
    """Return the limits for a TTFT objective of ``goal_s``. Where the operator bounds neither TTFT
    nor queue, the queue is bounded by the objective while an overload lasts."""
    deadline_s = default_ttft_limit_s(goal_s) if ttft_s is None else ttft_s
    if queue_s is not None:
        return AdmissionLimits(deadline_s, queue_s)
    if ttft_s is not None:
        return AdmissionLimits(deadline_s)
    return AdmissionLimits(deadline_s, lasting_queue_s=QUEUE_SHARE * goal_s)


class AdmissionController:
    """Counts the requests in one router; ``on_refusal`` is called with the reason of each
    refusal."""

    def __init__(self, limit: int, on_refusal: Callable[[str], None] = lambda reason: None) -> None:
        self._limit = limit
        self._on_refusal = on_refusal
        self.inside: Counter[str] = Counter()  # requests by tenant
        self._total = 0

    def check_choices(self, count: int) -> None:
        """Raise ApiError (400) for a request of more choices than a tenant may ever have."""
        if count > self._limit:
            raise invalid(
                f"the request has {count} choices in all, and a tenant may have {self._limit} at a"
                " time in this router (limits.max_requests)"
            )

    def check(self, tenant: str, count: int = 1) -> None:
        """Raise ApiError (429) if ``count`` more requests of this tenant exceed its places."""
        places = min(self._limit, TENANT_PLACES * self._limit - self._total)
        if self.inside[tenant] + count > places:
            self._on_refusal("requests")
            raise overloaded(
                f"{self.inside[tenant]} of your requests are being served here, at most"
                f" {max(places, self.inside[tenant])} are allowed now, and {count} more arrived",
                1.0,
            )

    def enter(self, tenant: str) -> Callable[[], None]:
        """Count one request in. Return the function that counts it out; further calls do
        nothing."""
        self.check(tenant)
        self.inside[tenant] += 1
        self._total += 1
        left = False

        def leave() -> None:
            nonlocal left
            if not left:
                left = True
                self._total -= 1
                self.inside[tenant] -= 1
                if not self.inside[tenant]:
                    del self.inside[tenant]

        return leave


def check_admission_limits(
    placement: Placement,
    limits: AdmissionLimits,
    waited_s: float,
    on_refusal: Callable[[str], None] = lambda reason: None,
    wait_s: float = 0.0,
) -> None:
    """Raise ApiError (429) for a request that is predicted to exceed its limits at this placement.
    It arrived ``waited_s`` ago, and its turn comes in ``wait_s``."""
    queue_s = wait_s + max(placement.p.correction * placement.p.queue_s, placement.d.wait_s)
    predicted_s = waited_s + wait_s + max(placement.ttft_s, placement.d.wait_s)
    if predicted_s > limits.ttft_s:
        on_refusal("ttft")
        raise overloaded(
            f"the first token is predicted to take {predicted_s:.1f} s, but must be ready within"
            f" {limits.ttft_s:g} s",
            predicted_s - limits.ttft_s,
        )
    if queue_s > limits.queue_s:
        on_refusal("queue")
        raise overloaded(
            f"the queue is predicted to take {queue_s:.1f} s, and new requests are accepted up to"
            f" {limits.queue_s:g} s",
            queue_s - limits.queue_s,
        )


def check_turn(
    wait_s: float,
    limits: AdmissionLimits,
    waited_s: float,
    on_refusal: Callable[[str], None] = lambda reason: None,
) -> None:
    """Raise ApiError (429) for a request that would exceed its limits at any placement, because its
    turn comes in ``wait_s``."""
    over_s = max(wait_s - limits.queue_s, waited_s + wait_s - limits.ttft_s)
    if over_s > 0:
        on_refusal("queue")
        raise overloaded(
            f"the request's turn is predicted to come in {wait_s:.1f} s, after its deadline or the"
            " bound of the queue",
            over_s,
        )


def has_room(placement: Placement, batched_s: float = math.inf) -> bool:
    """Return whether the workers of this placement should get the request now; see the functions
    for each of them."""
    return placed_queue_s(placement, batched_s) <= ROOM_S and has_decode_room(placement)


def placed_queue_s(placement: Placement, batched_s: float = math.inf) -> float:
    """Return the seconds of the queue at P, which has room while these are at most ROOM_S.

    ``batched_s``: seconds of the prompts queued at P if as many as fit share each step. Many short
    prompts take little more than one, which the sum of their predictions does not show."""
    return min(placement.p.correction * placement.p.queue_s, batched_s)


def has_decode_room(placement: Placement) -> bool:
    """Return whether D has room. It may be short of a row or of pages for as long as the prompt
    takes to be computed: by Little's law the requests that leave it meanwhile are those whose
    prompts are being computed for it."""
    p = placement.p
    return placement.d.wait_s <= ROOM_S + p.queue_s + p.prefill_s
