"""The queue of a simulated router: the product's (``router/fairness``), with one tenant.

enter --room--> on_dispatch
  |---waits--> on_dispatch | on_refused
  +---refused at once--> on_refused
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from cluster.simulator.devices.clock import SimulatedClock
from cluster.simulator.devices.request import SimulatedRequest
from router.common.errors import ApiError
from router.fairness.dispatcher import FairDispatcher, TimerHandle, look_spread_s
from router.fairness.fair_queue import FairQueue, RoutedWork
from router.fairness.overload import OverloadMonitor
from router.fairness.virtual_counters import VirtualCounters
from router.placement.admission import AdmissionLimits
from router.placement.cost import Placement
from router.placement.ledger import WorkLedger
from router.tenants.tenant import Tenant

TENANT = Tenant("simulated")
PRIORITY = 0
"""Priority of every simulated request."""
PLACEMENT_S = 0.0003
"""Seconds that a router takes to choose workers (``python -m bench.router``). What it dispatches is
not late by them, but it makes the fewer looks at its queue, the longer these take."""

Route = Callable[[SimulatedRequest], RoutedWork | None]
"""Chooses workers for a request; None: there is no decode worker."""
OnDispatch = Callable[[SimulatedRequest, Placement], None]
OnRefused = Callable[[SimulatedRequest], None]


class SimulatedTimer:
    """A call that may be cancelled, like the handle of ``loop.call_later``."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self._call = None

    def run(self) -> None:
        if self._call is not None:
            self._call()


class RouterQueue:
    """The queue of one router. It looks for room when ``ledger`` says that there is less work."""

    def __init__(
        self, clock: SimulatedClock, ledger: WorkLedger, route: Route, ttft_s: float, rng: Random
    ) -> None:
        self._clock = clock
        self._route = route
        self._busy_until = 0.0
        self._queue = FairQueue(VirtualCounters(self._now))
        self.awaiting_each = self._queue.awaiting_each
        monitor = OverloadMonitor(self._queue, ttft_s, self._now)
        self._dispatcher = FairDispatcher(
            self._queue, monitor, self._now, self._call_later, rng=rng
        )
        ledger.on_less_work = self._dispatcher.wake
        ledger.on_report = self._dispatcher.look_soon

    @property
    def prompt_tokens(self) -> int:
        """Return the prompt tokens that wait, cached ones included."""
        return self._queue.prompt_tokens

    def share_workers(self, routers: int, prefill: int) -> None:
        """Be one of ``routers`` that look for room on so many prefill workers."""
        self._dispatcher.routers = lambda: routers
        spread_s = look_spread_s(routers, prefill)
        self._dispatcher.spread_s = lambda: spread_s

    def enter(
        self,
        request: SimulatedRequest,
        limits: AdmissionLimits,
        on_dispatch: OnDispatch,
        on_refused: OnRefused,
    ) -> None:
        """Dispatch a request at once, let it wait, or refuse it, as without a decode worker."""
        turn = _Turn(request, self._place, on_dispatch, on_refused)
        try:
            self._dispatcher.submit(TENANT, PRIORITY, self._clock.now, limits, turn)
        except ApiError:
            on_refused(request)

    def _now(self) -> float:
        """Return the router's time, which is later than the clock's while it chooses workers."""
        return max(self._clock.now, self._busy_until)

    def _place(self, request: SimulatedRequest) -> RoutedWork | None:
        self._busy_until = self._now() + PLACEMENT_S
        return self._route(request)

    def _call_later(self, delay_s: float, call: Callable[[], None]) -> TimerHandle:
        timer = SimulatedTimer(call)
        self._clock.at(self._now() + delay_s, timer.run)
        return timer


class _Turn:
    """The ``QueuedWork`` of one request."""

    def __init__(
        self,
        request: SimulatedRequest,
        route: Route,
        on_dispatch: OnDispatch,
        on_refused: OnRefused,
    ) -> None:
        self.prompt_tokens = request.context
        self._request = request
        self._route = route
        self._on_dispatch = on_dispatch
        self._on_refused = on_refused
        self._routed: RoutedWork | None = None

    def place(self, *, ahead: bool = False) -> RoutedWork | None:
        assert not ahead  # there is one tenant, and it is never behind another one
        self._routed = self._route(self._request)
        return self._routed

    def dispatch(self) -> None:
        assert self._routed is not None
        self._on_dispatch(self._request, self._routed.placement)

    def refuse(self, error: ApiError) -> None:
        self._on_refused(self._request)
