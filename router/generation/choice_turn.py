"""``ChoiceTurn``: one choice's place in the router's queue, and what it is charged.

    enter --room--> submit(placed, age)     the first submission of its ``ChoiceStream``
      |---waits--> submit(placed, age) | on_refused(error)
      +---leave--> forgotten

Created and closed by a ``ChoiceStream``. Resubmissions skip the queue: what has been accepted goes
first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from protocol.requests import Request
from router.common.errors import ApiError
from router.fairness.dispatcher import FairDispatcher
from router.fairness.fair_queue import RoutedWork, WaitingRequest
from router.fairness.virtual_counters import ExpectedCost, RequestCharge
from router.generation.placer import PlacedRequest, Placer
from router.placement.admission import AdmissionLimits
from router.placement.snapshot import RequestOrigin
from router.tenants.tenant import Tenant

UNBOUNDED = AdmissionLimits(math.inf)

AHEAD_S = 60.0
"""How much older workers take a request for that goes ahead: more than prompts take."""


class RequestEntry:
    """The admission limits of one HTTP request, which its choices share: all are let in, or none.

    The limits hold for the choice that enters first. Once it has entered, the others are neither
    refused nor expire; and once any choice has been dispatched, neither does the first one.
    """

    def __init__(self, limits: AdmissionLimits) -> None:
        self.limits = limits  # of the choice that enters next
        self._first: WaitingRequest | None = None

    def on_entered(self, waiting: WaitingRequest | None) -> None:
        """A choice has been let in; None: it has been dispatched at once."""
        if self.limits is not UNBOUNDED:
            self.limits, self._first = UNBOUNDED, waiting

    def on_dispatched(self) -> None:
        """A choice has gone to its workers."""
        if self._first is not None:
            self._first.limits, self._first = UNBOUNDED, None


class ChoiceTurn:
    """The ``QueuedWork`` of one choice. ``charge`` is told what the choice really costs.

    ``submit`` is called with the workers and the seconds by which they take the request for older.
    """

    def __init__(
        self,
        dispatcher: FairDispatcher,
        placer: Placer,
        request: Request,
        keys: Sequence[bytes],
        tenant: Tenant,
        origin: RequestOrigin,
        submit: Callable[[PlacedRequest, float], None],
        on_refused: Callable[[ApiError], None],
    ) -> None:
        self.charge = RequestCharge(dispatcher.counters, tenant.name)
        self._dispatcher = dispatcher
        self._placer = placer
        self._request = request
        self._keys = keys
        self._tenant = tenant
        self._origin = origin
        self._submit = submit
        self._on_refused = on_refused
        self._placed: PlacedRequest | None = None
        self._older_s = 0.0  # by which workers take it for older, as it was placed last
        self._waiting: WaitingRequest | None = None
        self._entry: RequestEntry | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self._request.prompt)

    def enter(self, arrived: float, entry: RequestEntry) -> None:
        """Submit at once or wait for the turn. Raises ApiError: 429 or 503."""
        self._entry = entry
        self._waiting = self._dispatcher.submit(
            self._tenant, self._request.priority, arrived, entry.limits, self
        )
        entry.on_entered(self._waiting)

    def leave(self) -> None:
        """Stop waiting, if it still does. May be called again."""
        if self._waiting is not None:
            self._dispatcher.leave(self._waiting)
            self._waiting = None

    def place(self, *, ahead: bool = False) -> RoutedWork | None:
        """Choose workers for the request as the router sees them now."""
        self._older_s = AHEAD_S if ahead else 0.0
        placed = self._placed = self._placer.place(
            self._request, self._keys, origin=self._origin, ahead=ahead
        )
        if placed is None:
            return None
        chosen, query = placed.choice.chosen, placed.query
        cost = ExpectedCost(query.tokens - chosen.p.cached, query.output)
        return RoutedWork(chosen, placed.batched_s, cost)

    def dispatch(self) -> None:
        """Submit to the workers that were chosen last, and charge what is expected."""
        placed, self._waiting, self._placed = self._placed, None, None
        assert placed is not None
        chosen, query = placed.choice.chosen, placed.query
        self.charge.on_dispatch(ExpectedCost(query.tokens - chosen.p.cached, query.output))
        self._submit(placed, self._older_s)
        if self._entry is not None:
            self._entry.on_dispatched()

    def refuse(self, error: ApiError) -> None:
        """The request has waited in vain."""
        self._waiting = None
        self._on_refused(error)
