"""``FairQueue``: the order in which waiting requests are dispatched. It has no clock and no task.

    push --> [heap of tenant A: priority that ages, arrival] --+
             [heap of tenant B]                              --+--> candidates --> remove
                                   least virtual counter first

**Between tenants** the counter decides (``virtual_counters.py``). A more urgent priority moves a
tenant's request forward by ``TOKENS_PER_LEVEL`` for each level, as the "warp" of Duda and Cheriton,
"Borrowed-Virtual-Time Scheduling" (SOSP 1999): what is served earlier is charged all the same, so
the tenant waits longer afterwards, and its share stays that of its weight. So no tenant gains a
share by asking for urgency, and none can be starved by another one's urgency.

**Within a tenant** priorities are strict, but age: a request gains a level every ``AGE_S`` seconds.
As all gain at one rate, a request's place is fixed when it arrives: priority * AGE_S + arrival.

**Where the first ones lack prefill workers**, the first one that awaits another worker is sought.
The requests of each tenant are also kept by the worker that they await, and for each such worker
the tenants by their turn. So a look costs O(log n) for each worker that is awaited, however many
requests wait. Which worker that is changes with the load, so a few of those that were placed the
longest ago are placed again at each look.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple, Protocol

from router.common.errors import ApiError
from router.fairness.least_keys import LeastKeys
from router.fairness.ordered_items import OrderedItems
from router.fairness.virtual_counters import BURST, ExpectedCost, VirtualCounters, service_of
from router.placement.admission import AdmissionLimits
from router.placement.cost import Placement
from router.tenants.tenant import Tenant

AGE_S = 0.1
"""Seconds of waiting that raise a request by one level of priority: between the least and the most
urgent of the 201 levels lie 20 s."""

TOKENS_PER_LEVEL = 64.0
"""Service (weighted tokens) that a level of priority borrows."""

MOST_COUNTED = 100
"""Tenants that a prediction of a wait looks at, at most."""


class RoutedWork(NamedTuple):
    """Where a request would go now."""

    placement: Placement
    batched_s: float  # of the prompts queued at its P, if they share steps
    cost: ExpectedCost


class QueuedWork(Protocol):
    """What the queue dispatches; see ``ChoiceTurn``."""

    @property
    def prompt_tokens(self) -> int:
        """Return the prompt tokens, cached ones included."""

    def place(self, *, ahead: bool = False) -> RoutedWork | None:
        """Choose workers; None: no decode worker is attached. May be called often. ``ahead``: the
        workers will compute it before the other requests of its class that they have."""

    def dispatch(self) -> None:
        """Submit to the workers that ``place`` has chosen last, and charge the cost."""

    def refuse(self, error: ApiError) -> None:
        """The request has waited in vain."""


class WaitingRequest:
    """One request in the queue. Created by ``FairDispatcher``.

    ``arrived``: on the dispatcher's clock; ``cost``: expected.
    """

    __slots__ = (
        *("alone_s", "arrived", "awaits", "is_waiting", "limits", "priority", "service"),
        *("tenant", "work"),
    )

    def __init__(
        self,
        tenant: Tenant,
        priority: int,
        arrived: float,
        limits: AdmissionLimits,
        cost: ExpectedCost,
        work: QueuedWork,
    ) -> None:
        self.tenant = tenant
        self.priority = priority
        self.arrived = arrived
        self.limits = limits
        self.service = service_of(*cost)
        self.work = work
        self.is_waiting = False
        self.awaits: str | None = None  # prefill worker, all that it lacked when last placed
        self.alone_s = 0.0  # predicted time to its first token without any queue

    @property
    def place_in_tenant(self) -> float:
        """Return the sort key among requests of the tenant; less is sooner."""
        return self.priority * AGE_S + self.arrived

    @property
    def borrowed(self) -> float:
        """Return how far its urgency moves it forward; negative for less urgent ones."""
        return -self.priority * TOKENS_PER_LEVEL / self.tenant.weight


class _WaitingTenant:
    """The waiting requests of one tenant."""

    def __init__(self, name: str, weight: float, number: int) -> None:
        self.name = name
        self.weight = weight
        self.number = number  # tenants in the order in which they came
        self.requests: OrderedItems[WaitingRequest] = OrderedItems()
        # The same, by the worker that they await.
        self.awaiting: dict[str | None, OrderedItems[WaitingRequest]] = {}
        self.service = 0.0  # expected weighted tokens
        self.served = 0  # number of the tenant's last removal: breaks ties
        self.position = 0  # in ``FairQueue._sampled``


class FairQueue:
    """The waiting requests of one router, by tenant. Owned by ``FairDispatcher``."""

    def __init__(self, counters: VirtualCounters) -> None:
        self.counters = counters
        self._tenants: dict[str, _WaitingTenant] = {}  # those with waiting requests
        self._sampled: list[_WaitingTenant] = []  # the same in any order, to sample them
        self._weights = 0.0  # sum of theirs
        self._turns = LeastKeys(self._turn)
        self._virtual_times = LeastKeys(counters.virtual_time)
        self._awaited: dict[str | None, LeastKeys] = {}  # tenants, by the worker they await
        self._awaiting: Counter[str | None] = Counter()  # requests, by the same
        self._placed: OrderedDict[WaitingRequest, None] = OrderedDict()  # the last one at the end
        counters.on_change = self._touch
        self._numbers = itertools.count()
        self.length = 0
        self.service = 0.0  # expected weighted tokens
        self.prompt_tokens = 0  # cached ones included

    @property
    def tenants(self) -> Collection[str]:
        """Return the names of the tenants that wait."""
        return self._tenants.keys()

    def service_before(self, tenant: Tenant) -> float:
        """Return the expected service until a new request of this tenant has its turn, if no other
        request comes: the tenant's own waiting requests, and those of the other tenants that start
        at a counter up to the one at which the new request will. Priorities are left out.

        With more than ``MOST_COUNTED`` tenants every n-th represents all, because every arrival
        asks; the first one of them changes, so that no tenant is always left out.
        """
        if not self._tenants:
            return 0.0
        value_of, own = self.counters.value, self._tenants.get(tenant.name)
        if own is None:
            mean = self.service / self.length  # the new request may not be known yet
            mine, end = 0.0, self.counters.lifted_value(tenant, mean, self._least_virtual_time())
        else:
            mine = own.service
            end = value_of(tenant.name) + mine / own.weight
        every = math.ceil(len(self._sampled) / MOST_COUNTED)
        others = 0.0
        for other in self._sampled[next(self._numbers) % every :: every]:
            until_end = (end - value_of(other.name)) * other.weight
            if until_end >= 0 and other is not own:
                *_, head = other.requests.head()
                others += min(other.service, max(head.service, until_end))
        return mine + every * others

    def late_requests(
        self, is_late: Callable[[WaitingRequest, float], bool]
    ) -> list[WaitingRequest]:
        """Return the waiting requests for which ``is_late`` returns true. It is called in the fair
        order, with a request and the service of those before it that are not late."""
        turns = []
        for name, tenant in self._tenants.items():
            requests = tenant.requests.all()[::-1]
            turns.append((self._turn(name), self.counters.value(name), requests))
        heapq.heapify(turns)
        late, before = list[WaitingRequest](), 0.0
        while turns:
            (_, served, number), value, requests = heapq.heappop(turns)
            request = requests.pop()
            if is_late(request, before):
                late.append(request)
            else:
                before += request.service
                value += request.service / request.tenant.weight
                served = next(self._numbers)
            if requests:
                turn = (value - requests[-1].borrowed, served, number)
                heapq.heappush(turns, (turn, value, requests))
        return late

    def lift(self, request: WaitingRequest) -> None:
        """Let its tenant compete. Called before a request waits, or is dispatched at once."""
        if request.tenant.name not in self._tenants:
            least = self._least_virtual_time() if self._tenants else None
            self.counters.lift(request.tenant, self._tenants.keys(), request.service, least)

    def begin(self, request: WaitingRequest) -> None:
        """Record that a request is dispatched. Called before it is charged."""
        self.counters.begin(request.tenant.name, request.borrowed)

    def is_behind(self, tenant: Tenant) -> bool:
        """Return whether a tenant that has no request waiting, unlike others, has had less than its
        share, and would be next itself. Its counter must have been lifted.

        A tenant that is next by an equal counter is likely to have been lifted as well. It keeps
        its turn, unless more of its requests wait than a tenant that seldom sends has at once.
        """
        if not self._tenants or tenant.name in self._tenants:
            return False
        [name] = self._turns.least(1)
        value, (next_value, *_) = self.counters.value(tenant.name), self._turn(name)
        is_flood = len(self._tenants[name].requests) > BURST
        if value > next_value or (value == next_value and not is_flood):
            return False
        share = tenant.weight / (tenant.weight + self._weights)
        return self.counters.is_behind(tenant.name, share)

    def push(self, request: WaitingRequest) -> None:
        """Let a request wait."""
        self.lift(request)
        name = request.tenant.name
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = _WaitingTenant(name, request.tenant.weight, next(self._numbers))
            self._tenants[name] = tenant
            tenant.position = len(self._sampled)
            self._sampled.append(tenant)
            self._weights += tenant.weight
            self._turns.add(name)
            self._virtual_times.add(name)
        request.is_waiting = True
        tenant.requests.add(request, request.place_in_tenant, next(self._numbers))
        self._add_awaiting(request, tenant)
        self._placed[request] = None
        self.length += 1
        self.prompt_tokens += request.work.prompt_tokens
        tenant.service += request.service
        self.service += request.service
        self._touch_turn(name)

    def remove(self, request: WaitingRequest) -> None:
        """Take a request out, to dispatch it or to forget it. May be called again."""
        if not request.is_waiting:
            return
        request.is_waiting = False
        name = request.tenant.name
        tenant = self._tenants[name]
        tenant.requests.discard(request)
        self._discard_awaiting(request, tenant)
        del self._placed[request]
        tenant.served = next(self._numbers)
        self.length -= 1
        self.prompt_tokens -= request.work.prompt_tokens
        tenant.service -= request.service
        self.service -= request.service
        if len(tenant.requests):
            self._touch_turn(name)
        else:
            del self._tenants[name]
            last = self._sampled.pop()
            if last is not tenant:
                self._sampled[tenant.position], last.position = last, tenant.position
            self._weights -= tenant.weight
            self._turns.discard(name)
            self._virtual_times.discard(name)
        if not self.length:
            self.service = self._weights = 0.0  # sums of floats leave a remainder

    @property
    def all_await_compute(self) -> bool:
        """Return whether time of a worker to compute its prompt is all that any waiting request
        lacks, and none of them is short."""
        return None not in self._awaited

    def awaiting(self, worker: str) -> int:
        """Return how many waiting requests lack only this worker's time for their prompt."""
        return self._awaiting[worker]

    def awaiting_each(self, workers: Collection[str], routers: int) -> Callable[[str], float]:
        """Return the function that estimates how many other requests wait for the time of one of
        these ``workers`` in all routers: in each other router as many as here on average."""
        here = sum(n for worker, n in self._awaiting.items() if worker in workers)
        elsewhere = (routers - 1) * here / max(1, len(workers))
        # The request for which this is asked may be one of them. A new one is none, and sees too
        # few: with an exact count several routers send decode workers more than they have time for.
        return lambda worker: max(0, self._awaiting[worker] - 1) + elsewhere

    def set_awaits(self, request: WaitingRequest, worker: str | None) -> None:
        """Record the prefill worker that is all that a waiting request lacks, as it has been placed
        again; None: it lacks something else, or nothing."""
        self._placed.move_to_end(request)
        if worker != request.awaits:
            tenant = self._tenants[request.tenant.name]
            self._discard_awaiting(request, tenant)
            request.awaits = worker
            self._add_awaiting(request, tenant)

    def first_beside(self, blocked: Collection[str | None]) -> WaitingRequest | None:
        """Return the first request in the fair order that awaits none of the ``blocked`` prefill
        workers."""
        found = []
        for worker, turns in self._awaited.items():
            if worker not in blocked:
                [name] = turns.least(1)
                place, number, request = self._tenants[name].awaiting[worker].head()
                found.append((self._turn(name), place, number, request))
        return min(found)[-1] if found else None

    def placed_longest_ago(self, count: int) -> list[WaitingRequest]:
        """Return the requests that were placed the longest ago, at most ``count``."""
        return list(itertools.islice(self._placed, count))

    def candidates(self, count: int) -> list[WaitingRequest]:
        """Return the next request in the fair order, then others that may go where it cannot: at
        most ``count``. They are the heads of the next tenants; with few tenants, those behind the
        head."""
        names = self._turns.least(count)
        first = [self._tenants[name].requests.first(count) for name in names]
        heads = [requests[0] for requests in first]
        behind = [request for requests in first for request in requests[1:]]
        return (heads + behind)[:count]

    def requests(self) -> Iterator[WaitingRequest]:
        """Return the requests of every tenant in the order of that tenant."""
        for tenant in self._tenants.values():
            yield from tenant.requests.all()

    def _least_virtual_time(self) -> float:
        """Return the least one of the tenants that wait."""
        [name] = self._virtual_times.least(1)
        return self.counters.virtual_time(name)

    def _turn(self, name: str) -> tuple[float, int, int]:
        """Sort key of tenants. Equal counters take turns: one that was served last waits."""
        tenant = self._tenants[name]
        *_, head = tenant.requests.head()
        return self.counters.value(name) - head.borrowed, tenant.served, tenant.number

    def _touch(self, tenant: str) -> None:
        """The counter of a tenant has changed."""
        if tenant in self._tenants:
            self._touch_turn(tenant)
            self._virtual_times.touch(tenant)

    def _touch_turn(self, name: str) -> None:
        self._turns.touch(name)
        for worker in self._tenants[name].awaiting:
            self._awaited[worker].touch(name)

    def _add_awaiting(self, request: WaitingRequest, tenant: _WaitingTenant) -> None:
        worker, name = request.awaits, request.tenant.name
        if worker not in tenant.awaiting:
            tenant.awaiting[worker] = OrderedItems()
            if worker not in self._awaited:
                self._awaited[worker] = LeastKeys(self._turn)
            self._awaited[worker].add(name)
        tenant.awaiting[worker].add(request, request.place_in_tenant, next(self._numbers))
        self._awaiting[worker] += 1

    def _discard_awaiting(self, request: WaitingRequest, tenant: _WaitingTenant) -> None:
        worker = request.awaits
        tenant.awaiting[worker].discard(request)
        self._awaiting[worker] -= 1
        if not len(tenant.awaiting[worker]):
            del tenant.awaiting[worker]
            self._awaited[worker].discard(request.tenant.name)
            if not self._awaited[worker]:
                del self._awaited[worker], self._awaiting[worker]
