"""``FairDispatcher``: requests wait in the router until a worker has room for them.

    submit --no queue, room; or its tenant is behind--> dispatched at once
       |   --429: its turn is predicted to come too late
       +--> waiting --turn and room (pump)--> dispatched
               |------deadline cannot be met, or an overload begins--> refused (429)
               +------leave (hang-up, time-out)--> forgotten

Workers hold little more than they compute, so that the fair order decides when a prompt is computed
and not the order of arrival. ``wake`` is called by every event of this router that may make room: a
first token, the end of a request. Workers' reports, which come far more often, bring one look in
some milliseconds (``look_soon``); workers have a little work in store. A timer covers the rest.

A prompt that a worker computes cannot be taken back, and may take seconds. So a request whose
tenant has none waiting and has had less than its share, and than the tenant that is next, does not
wait for room. It is sent ahead: workers take it for an older one, and compute it between two chunks
of other prompts. Its tenant is charged as always, and has no more such requests than its share of
those that are computed.

When the head of the queue waits for a prefill worker (one that has its prefix, say), requests
behind it may go to other prefill workers. Each look goes on with the first request that awaits none
of the workers that it has found without room, and places some others again, which may have been
placed when another worker was the best. Short prompts need none: workers compute them beside longer
ones, in up to a quarter of each step. While all that wait lack a worker's time for a longer prompt,
a short one goes at once, as one does that a decode worker computes itself, unless others wait for
this worker's time, too. Nothing overtakes one that waits for room in a decode worker. An urgent
request, which workers would compute before others, overtakes no tenant that is before its own
where that one would have to wait for the others.

Several routers would find room by the same report, and each send a prompt there before any of them
hears of the others'. So a router that looks because of a report, or of the time, waits for a random
part of ``spread_s`` first. One whose own request ended need not: the others do not know it yet.
One per router; ``ChoiceTurn`` submits.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections.abc import Callable, Collection, Iterator
from typing import Protocol

from router.common.errors import ApiError, internal_error, overloaded, unavailable
from router.fairness.fair_queue import FairQueue, QueuedWork, RoutedWork, WaitingRequest
from router.fairness.overload import OverloadMonitor
from router.placement.admission import (
    ROOM_S,
    AdmissionLimits,
    check_admission_limits,
    check_turn,
    has_decode_room,
    has_room,
    placed_queue_s,
)
from router.placement.cost import Placement
from router.tenants.tenant import Tenant

log = logging.getLogger(__name__)

CANDIDATES = 3
"""Requests that are looked at when the first one waits for its prefill worker."""
OTHER_CANDIDATES = 5
"""Requests that are looked at beside these, each for a prefill worker that the others do not await.
No more, as each takes a placement, and streams wait meanwhile."""
RENEWED = 2
"""Requests that are looked at because they were placed the longest ago."""

_BATCH = 16  # requests dispatched before streams go on
_LOOK_S = (0.005, 0.1)  # least and most seconds to the next look at a queue that waits for room
_LOOK_SHARE = 0.1  # of the time, at most, for looks in vain: among many workers they take longer


REPORT_S = 0.05
"""Seconds until a worker has told all routers of a prompt that one of them has sent, with up to
eight routers: ``push_interval_s`` of decode_worker/service.py, and the way."""
MAX_SPREAD_S = 0.2
"""Room is left unused meanwhile: workers have ROOM_S of work in store."""


def look_spread_s(routers: int, workers: int) -> float:
    """Return the seconds over which so many routers spread their looks, so that about one of them
    finds the room on each of the ``workers``."""
    return min(MAX_SPREAD_S, REPORT_S * max(0, routers - 1) / max(1, workers))


class TimerHandle(Protocol):
    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], TimerHandle]
"""``loop.call_later``, or that of a simulation."""

OnDispatch = Callable[[float], None]
"""Called with the seconds that a dispatched request has waited."""


class FairDispatcher:
    """Dispatches the requests of one router. Created with its state, used within its loop.

    ``on_refusal`` is called with the reason of each refusal.
    """

    def __init__(
        self,
        queue: FairQueue,
        monitor: OverloadMonitor,
        clock: Callable[[], float],
        call_later: CallLater,
        on_refusal: Callable[[str], None] = lambda reason: None,
        on_dispatch: OnDispatch = lambda waited_s: None,
        *,
        rng: random.Random | None = None,
    ) -> None:
        self.queue = queue
        self.counters = queue.counters
        self._monitor = monitor
        self._clock = clock
        self._call_later = call_later
        self._on_refusal = on_refusal
        self._on_dispatch = on_dispatch
        self.routers: Callable[[], int] = lambda: 1  # that send to the same workers
        self.spread_s: Callable[[], float] = lambda: 0.0
        self._rng = rng or random.Random()
        self._look: TimerHandle | None = None  # at a queue that waits for room
        self._look_at = math.inf  # when that is
        self._soon_at = -math.inf  # of the last look that a report has brought
        self._rests_until = -math.inf  # after a look in vain
        self._is_woken = False
        self._expiry: dict[WaitingRequest, TimerHandle] = {}

    def check_tenant(
        self, tenant: Tenant, limits: AdmissionLimits, waited_s: float, *, is_short: bool
    ) -> None:
        """Raise ApiError (429) for a request that would be refused whatever its prompt is.
        ``is_short``: a decode worker may compute the prompt."""
        if is_short and self.queue.all_await_compute:
            return
        wait_s = self._monitor.wait_s(tenant)
        if wait_s:
            check_turn(wait_s, self._monitor.limits_now(limits), waited_s, self._on_refusal)

    def submit(
        self,
        tenant: Tenant,
        priority: int,
        arrived: float,
        limits: AdmissionLimits,
        work: QueuedWork,
    ) -> WaitingRequest | None:
        """Dispatch a request at once, or return it waiting.

        Raises ApiError: 503 without a decode worker, 429 where it is predicted to miss its limits.
        ``arrived``: on the dispatcher's clock.
        """
        routed = _place_arrival(work)
        request = WaitingRequest(tenant, priority, arrived, limits, routed.cost, work)
        self._refuse_late()
        self.queue.lift(request)
        if self.queue.is_behind(tenant):
            left_s = limits.ttft_s - (self._clock() - arrived)
            if self._has_room_ahead(work, left_s):
                self.queue.begin(request)
                work.dispatch()
                return None
            routed = _place_arrival(work)  # ``dispatch`` uses the workers that were chosen last
        request.alone_s = _alone_s(routed.placement)
        needs_no_turn = not self.queue.length or self._needs_no_turn(routed.placement)
        wait_s = self._wait_s(tenant, routed.placement, needs_no_turn=needs_no_turn)
        waited_s = self._clock() - arrived
        now = self._monitor.limits_now(limits, request.alone_s)
        check_admission_limits(routed.placement, now, waited_s, self._on_refusal, wait_s)
        overtakes = self._is_awaited(routed.placement)
        if needs_no_turn and not overtakes and has_room(routed.placement, routed.batched_s):
            self.queue.begin(request)
            work.dispatch()
            return None
        self._enqueue(request, routed)
        return request

    def _needs_no_turn(self, placement: Placement) -> bool:
        """Return whether none of the waiting requests needs what this one does: its decode worker
        computes the prompt, or it is short, and they wait until a worker can compute theirs."""
        needs_none = placement.prefill is None or placement.p.is_short
        return needs_none and self.queue.all_await_compute

    def _wait_s(self, tenant: Tenant, placement: Placement, *, needs_no_turn: bool) -> float:
        """Return the predicted seconds until a request's turn. One that needs no turn waits for
        those alone that await the same worker, which are taken to be as long as it is, and as
        many in each router."""
        wait_s = self._monitor.wait_s(tenant) if self.queue.length else 0.0
        if not needs_no_turn or not wait_s:
            return wait_s
        p = placement.p
        ahead = 0 if p.is_short else self.routers() * self.queue.awaiting(p.instance)
        return min(wait_s, ahead * p.correction * p.prefill_s)

    def _is_awaited(self, placement: Placement) -> bool:
        """Return whether others wait for the worker that computes this prompt. A short one is
        computed beside theirs."""
        return not placement.p.is_short and self.queue.awaiting(placement.p.instance) > 0

    def _has_room_ahead(self, work: QueuedWork, left_s: float) -> bool:
        """Place a request ahead of others; return whether its workers have room for it there, and
        are predicted to answer within ``left_s``. If not, it must be placed again."""
        routed = work.place(ahead=True)
        if routed is None or not has_room(routed.placement):
            return False
        return routed.placement.ttft_s <= left_s

    def leave(self, request: WaitingRequest) -> None:
        """Forget a request, if it still waits: its client is gone, or its time is over."""
        if request.is_waiting:
            self._remove(request)
            self.wake()  # the next one may have room where this one had none

    def close(self) -> None:
        """Stop all timers. Requests that still wait are left to their streams."""
        for timer in (*self._expiry.values(), *([self._look] if self._look else [])):
            timer.cancel()

    def wake(self) -> None:
        """Look at the queue soon: there may be room. Costs nothing while no request waits."""
        if self.queue.length and not self._is_woken:
            self._is_woken = True
            self._call_later(max(0.0, self._rests_until - self._clock()), self._pump)

    def look_soon(self) -> None:
        """Look at the queue in some milliseconds: a worker has reported its load."""
        now = self._clock()
        is_due = now < self._soon_at  # a second draw would make the first one shorter
        if self.queue.length and not (
            self._is_woken or is_due or now + _LOOK_S[0] >= self._look_at
        ):
            look_s = _LOOK_S[0] + self._random_delay_s()
            self._soon_at = now + look_s
            self._look_after(min(look_s, self._look_at - now))

    # ---- dispatch ---------------------------------------------------------------------------

    def _look_after(self, seconds: float) -> None:
        self._cancel_look()
        self._look = self._call_later(seconds, self.wake)
        self._look_at = self._clock() + seconds

    def _random_delay_s(self) -> float:
        spread_s = self.spread_s()
        return self._rng.uniform(0.0, spread_s) if spread_s else 0.0

    def _cancel_look(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look, self._look_at = None, math.inf

    def _pump(self) -> None:
        self._is_woken = False
        self._cancel_look()
        for _ in range(_BATCH):
            began = self._clock()
            look_s = self._dispatch_next()
            if look_s is not None:
                now = self._clock()
                self._rests_until = now + min(_LOOK_S[1], (now - began) / _LOOK_SHARE)
                if self.queue.length:
                    self._look_after(look_s + self._random_delay_s())
                return
        self.wake()

    def _dispatch_next(self) -> float | None:
        """Dispatch or refuse one request; if none has room, return the seconds to the next look."""
        self._refuse_late()
        look_s = _LOOK_S[1]
        blocked: set[str] = set()
        in_vain: dict[str, int] = {}  # least urgent priority looked at, by tenant in their turns
        for request in self._looked_at(blocked):
            try:
                routed = request.work.place()
            except Exception:  # it would be the first one again and again
                self._fail(request)
                return None
            if routed is None:
                return look_s  # no decode worker is attached
            placement = routed.placement
            is_blocked = placement.p.instance in blocked
            queue_s = placed_queue_s(placement, routed.batched_s)
            # A more urgent request sees room where tenants before its own see none, and would take
            # it from them for ever.
            name, priority = request.tenant.name, request.priority
            before = itertools.takewhile(name.__ne__, in_vain)
            if not placement.p.is_short and any(in_vain[tenant] > priority for tenant in before):
                queue_s = max(queue_s, placement.p.correction * routed.batched_s)
            in_vain[name] = max(priority, in_vain.get(name, priority))
            lacks_time = is_blocked or queue_s > ROOM_S
            self.queue.set_awaits(request, _awaited_worker(placement, lacks_time=lacks_time))
            if is_blocked and not placement.p.is_short:
                continue
            if queue_s <= ROOM_S:
                if not has_decode_room(placement):
                    return look_s  # nothing overtakes one that waits for its decode worker
                self._dispatch(request, routed)
                return None
            blocked.add(placement.p.instance)
            look_s = max(_LOOK_S[0], min(look_s, queue_s - ROOM_S))
        return look_s

    def _looked_at(self, blocked: Collection[str]) -> Iterator[WaitingRequest]:
        """Yield the requests that may be dispatched now: the first ones, then the first ones that
        await none of the ``blocked`` prefill workers, which become more meanwhile. Where there are
        none, go on with those that were placed the longest ago."""
        looked_at = set[WaitingRequest]()
        for request in self.queue.candidates(CANDIDATES):
            looked_at.add(request)
            yield request
        for _ in range(OTHER_CANDIDATES):
            other = self.queue.first_beside(blocked)
            if other is None:
                break
            if other in looked_at:  # it lacks a decode worker, too, and may not be overtaken
                return
            looked_at.add(other)
            yield other
        else:
            return
        for request in self.queue.placed_longest_ago(RENEWED):
            if request not in looked_at:
                yield request

    def _dispatch(self, request: WaitingRequest, routed: RoutedWork) -> None:
        waited_s = self._clock() - request.arrived
        deadline = AdmissionLimits(request.limits.ttft_s)
        try:
            check_admission_limits(routed.placement, deadline, waited_s, self._on_refusal)
        except ApiError as error:
            self._remove(request)
            request.work.refuse(error)
            return
        self._monitor.on_dispatch(request.service)
        self._remove(request)
        self._on_dispatch(waited_s)
        self.queue.begin(request)
        try:
            request.work.dispatch()
        except Exception:  # the other requests must not wait for ever
            self._fail(request)

    def _fail(self, request: WaitingRequest) -> None:
        """End a request that raised. Call it where the exception is handled."""
        log.exception("a waiting request could not be placed or submitted")
        if request.is_waiting:
            self._remove(request)
        request.work.refuse(internal_error("the router failed on this request"))

    def _enqueue(self, request: WaitingRequest, routed: RoutedWork) -> None:
        p = routed.placement.p
        alone_s = routed.placement.ttft_s - p.correction * p.queue_s
        due = request.arrived + request.limits.ttft_s - max(0.0, alone_s)
        queue_s = placed_queue_s(routed.placement, routed.batched_s)
        lacks_time = queue_s > ROOM_S or self._is_awaited(routed.placement)
        request.awaits = _awaited_worker(routed.placement, lacks_time=lacks_time)
        self.queue.push(request)
        left_s = max(0.0, due - self._clock())
        self._expiry[request] = self._call_later(left_s, lambda: self._expire(request))
        self.wake()

    def _expire(self, request: WaitingRequest) -> None:
        if request.limits.ttft_s == math.inf:
            return  # its limits have been lifted since
        try:
            is_served = request.work.place() is not None
        except Exception:
            self._fail(request)
            return
        if not is_served:
            self._remove(request)
            request.work.refuse(unavailable("no decode worker is connected; try again shortly"))
            return
        waited_s = self._clock() - request.arrived
        wait_s = self._monitor.wait_s(request.tenant)
        self._remove(request)
        self._on_refusal("ttft")
        request.work.refuse(
            overloaded(
                f"the request has waited {waited_s:.1f} s for its turn, and its first token, due"
                f" within {request.limits.ttft_s:g} s, cannot be generated in time any more",
                wait_s,
            )
        )

    def _remove(self, request: WaitingRequest) -> None:
        self.queue.remove(request)
        self._expiry.pop(request).cancel()

    def _refuse_late(self) -> None:
        """Refuse the requests that will miss the objective, when an overload begins."""
        for request in self._monitor.update():
            waited_s = self._clock() - request.arrived
            self._remove(request)
            self._on_refusal("queue")
            request.work.refuse(
                overloaded(
                    f"more requests arrive than can be served, and this one, which has waited"
                    f" {waited_s:.1f} s, would get its first token after the objective",
                    self._monitor.wait_s(request.tenant),
                )
            )


def _place_arrival(work: QueuedWork) -> RoutedWork:
    """Choose workers for a request that arrives. Raises ApiError (503) without a decode worker."""
    routed = work.place()
    if routed is None:
        raise unavailable("no decode worker is connected; try again shortly")
    return routed


def _awaited_worker(placement: Placement, *, lacks_time: bool) -> str | None:
    """Return the worker whose time for a longer prompt is all that a request lacks; None: it lacks
    something else, or nothing."""
    awaits = lacks_time and has_decode_room(placement) and not placement.p.is_short
    return placement.p.instance if awaits else None


def _alone_s(placement: Placement) -> float:
    """Return the seconds to the first token without any queue; not less than the model of the step
    predicts, however much sooner the worker has been of late."""
    p = placement.p
    return max(1.0, p.correction) * max(0.0, placement.ttft_s / p.correction - p.queue_s)
