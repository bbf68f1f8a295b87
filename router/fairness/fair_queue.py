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
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterator
from typing import NamedTuple, Protocol

from router.common.errors import ApiError
from router.fairness.least_keys import LeastKeys
from router.fairness.virtual_counters import ExpectedCost, VirtualCounters, service_of
from router.placement.admission import AdmissionLimits
from router.placement.cost import Placement
from router.tenants.tenant import Tenant

AGE_S = 0.1
"""Seconds of waiting that raise a request by one level of priority: between the least and the most
urgent of the 201 levels lie 20 s."""

TOKENS_PER_LEVEL = 64.0
"""Service (weighted tokens) that a level of priority borrows."""

_SPARE = 32  # removed requests that a heap may hold beside half of its length


class RoutedWork(NamedTuple):
    """Where a request would go now."""

    placement: Placement
    batched_s: float  # of the prompts queued at its P, if they share steps
    cost: ExpectedCost


class QueuedWork(Protocol):
    """What the queue dispatches; see ``ChoiceStream``."""

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
        *("alone_s", "arrived", "awaits_prefill", "is_waiting", "limits", "priority", "service"),
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
        self.awaits_prefill = False  # a prefill worker is all that it lacked when last placed
        self.alone_s = 0.0  # predicted time to its first token without any queue

    @property
    def place_in_tenant(self) -> float:
        """Return the sort key among requests of the tenant; less is sooner."""
        return self.priority * AGE_S + self.arrived

    @property
    def borrowed(self) -> float:
        """Return how far its urgency moves it forward; negative for less urgent ones."""
        return -self.priority * TOKENS_PER_LEVEL / self.tenant.weight


_HeapItem = tuple[float, int, WaitingRequest]


class _TenantHeap:
    """The waiting requests of one tenant."""

    def __init__(self, weight: float, number: int) -> None:
        self.weight = weight
        self.number = number  # tenants in the order in which they came
        self.heap: list[_HeapItem] = []
        self.length = 0  # requests that have not been removed
        self.service = 0.0  # expected weighted tokens
        self.served = 0  # number of the tenant's last removal: breaks ties

    def head(self) -> WaitingRequest:
        heap = self.heap
        while not heap[0][2].is_waiting:
            heapq.heappop(heap)
        return heap[0][2]


class FairQueue:
    """The waiting requests of one router, by tenant. Owned by ``FairDispatcher``."""

    def __init__(self, counters: VirtualCounters) -> None:
        self.counters = counters
        self._tenants: dict[str, _TenantHeap] = {}  # those with waiting requests
        self._weights = 0.0  # sum of theirs
        self._turns = LeastKeys(self._turn)
        self._virtual_times = LeastKeys(counters.virtual_time)
        counters.on_change = self._touch
        self._numbers = itertools.count()
        self.length = 0
        self._awaiting_prefill = 0  # requests
        self.service = 0.0  # expected weighted tokens
        self.prompt_tokens = 0  # cached ones included

    @property
    def tenants(self) -> Collection[str]:
        """Return the names of the tenants that wait."""
        return self._tenants.keys()

    def service_at_full_rate(self, tenant: Tenant) -> float:
        """Return what is served to all tenants while the waiting requests of this one are: these
        alone until the tenant has caught up with the next one, then those of all by weight."""
        found = self._tenants.get(tenant.name)
        if found is None:
            return 0.0
        others = [name for name in self._turns.least(2) if name != tenant.name]
        gaps = [self.counters.value(name) - self.counters.value(tenant.name) for name in others[:1]]
        first = min(found.service, max([0.0, *gaps]) * tenant.weight)
        return first + (found.service - first) * self._weights / tenant.weight

    def lift(self, request: WaitingRequest) -> None:
        """Let its tenant compete. Called before a request waits, or is dispatched at once."""
        if request.tenant.name not in self._tenants:
            least = None
            if self._tenants:
                [name] = self._virtual_times.least(1)
                least = self.counters.virtual_time(name)
            self.counters.lift(request.tenant, self._tenants.keys(), request.service, least)

    def begin(self, request: WaitingRequest) -> None:
        """Record that a request is dispatched. Called before it is charged."""
        self.counters.begin(request.tenant.name, request.borrowed)

    def is_behind(self, tenant: Tenant) -> bool:
        """Return whether a tenant that has no request waiting, unlike others, has had less than its
        share. Its counter must have been lifted."""
        if not self._tenants or tenant.name in self._tenants:
            return False
        share = tenant.weight / (tenant.weight + self._weights)
        return self.counters.is_behind(tenant.name, share)

    def push(self, request: WaitingRequest) -> None:
        """Let a request wait."""
        self.lift(request)
        name = request.tenant.name
        heap = self._tenants.get(name)
        if heap is None:
            heap = self._tenants[name] = _TenantHeap(request.tenant.weight, next(self._numbers))
            self._weights += heap.weight
            self._turns.add(name)
            self._virtual_times.add(name)
        request.is_waiting = True
        heapq.heappush(heap.heap, (request.place_in_tenant, next(self._numbers), request))
        heap.length += 1
        self.length += 1
        self._awaiting_prefill += request.awaits_prefill
        self.prompt_tokens += request.work.prompt_tokens
        heap.service += request.service
        self.service += request.service
        self._turns.touch(name)

    def remove(self, request: WaitingRequest) -> None:
        """Take a request out, to dispatch it or to forget it. May be called again."""
        if not request.is_waiting:
            return
        request.is_waiting = False
        name = request.tenant.name
        heap = self._tenants[name]
        heap.length -= 1
        heap.served = next(self._numbers)
        self.length -= 1
        self._awaiting_prefill -= request.awaits_prefill
        self.prompt_tokens -= request.work.prompt_tokens
        heap.service -= request.service
        self.service -= request.service
        if not heap.length:
            del self._tenants[name]
            self._weights -= heap.weight
            self._turns.discard(name)
            self._virtual_times.discard(name)
        elif len(heap.heap) > 2 * heap.length + _SPARE:
            heap.heap = [item for item in heap.heap if item[2].is_waiting]
            heapq.heapify(heap.heap)
        self._turns.touch(name)
        if not self.length:
            self.service = self._weights = 0.0  # sums of floats leave a remainder

    @property
    def all_await_prefill(self) -> bool:
        """Return whether a prefill worker is all that any waiting request lacks."""
        return self._awaiting_prefill == self.length

    def set_awaits_prefill(self, request: WaitingRequest, awaits: bool) -> None:
        """Record what a waiting request lacks, as it has been placed again."""
        self._awaiting_prefill += awaits - request.awaits_prefill
        request.awaits_prefill = awaits

    def first_with_prefill(self) -> WaitingRequest | None:
        """Return the first request in the fair order that did not lack a prefill worker."""
        if self.all_await_prefill:
            return None
        for name in self._turns.least(len(self._tenants)):
            behind = (i for i in self._tenants[name].heap if i[2].is_waiting)
            found = min((i for i in behind if not i[2].awaits_prefill), default=None)
            if found is not None:
                return found[2]
        return None

    def candidates(self, count: int) -> list[WaitingRequest]:
        """Return the next request in the fair order, then others that may go where it cannot: at
        most ``count``. They are the heads of the next tenants; with few tenants, those behind the
        head."""
        heaps = [self._tenants[name] for name in self._turns.least(count)]
        found = [heap.head() for heap in heaps]
        for heap in heaps:
            behind = (item[2] for item in heap.heap[1:3])  # one of them is the second
            found += [request for request in behind if request.is_waiting]
        return found[:count]

    def requests(self) -> Iterator[WaitingRequest]:
        """Return the requests of every tenant in the order of that tenant."""
        for heap in self._tenants.values():
            for *_, request in sorted(heap.heap):
                if request.is_waiting:
                    yield request

    def _turn(self, name: str) -> tuple[float, int, int]:
        """Sort key of tenants. Equal counters take turns: one that was served last waits."""
        heap = self._tenants[name]
        head, value = heap.head(), self.counters.value(name)
        return value - head.borrowed, heap.served, heap.number

    def _touch(self, tenant: str) -> None:
        """The counter of a tenant has changed."""
        if tenant in self._tenants:
            self._turns.touch(tenant)
            self._virtual_times.touch(tenant)
