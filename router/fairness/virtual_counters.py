"""Virtual counters: how much weighted service each tenant has had, divided by its weight.

The Virtual Token Counter (VTC) of Sheng et al., "Fairness in Serving Large Language Models" (OSDI
2024), algorithms 1 and 2 with weights. Among the tenants that wait, the one with the least counter
is served next. A tenant that begins to wait is lifted, so that little is saved up by sending
nothing: to the counter that the tenant dispatched last had before it was charged, if others wait,
and at most to theirs. That is the virtual time of Goyal, Vin and Cheng, "Start-Time Fair Queueing"
(SIGCOMM 1996), from which ``BURST`` requests are subtracted. The paper lifts to the least counter
of those that wait; a tenant whose short queue is empty now and then would lose what it is behind
each time. What has been subtracted from a counter does not lower the virtual time: of many tenants
that come together, each would be lifted to less than the one before it. Where none waits, it is
lifted to the least counter of those that other routers serve now or have served last, or to that of
the tenant dispatched last.

What differs from the paper:

    dispatch      the expected cost is charged: uncached prompt tokens by the prefix index, output
                  tokens by the mean of recent requests. Otherwise a tenant with many requests in
                  flight would look as if it had not been served, until their first tokens come.
    first token   the expected prompt tokens are replaced by those that were really computed
    end           the expected output tokens are replaced by those that were really sent

A request that ends before its first token has paid for the prompt, because a worker may have
computed most of it; of the output, nothing. An output longer than expected is charged at its end.

Other routers' service is charged when ``UsageBook`` passes it on. Service is exchanged once it is
known, at the first token and at the end, so counters of several routers agree within the interval
of the exchange and the requests in flight.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection
from typing import NamedTuple

from router.tenants.tenant import Tenant
from router.tenants.usage import TenantUsage, UsageBook

PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
"""Cost of an uncached prompt token and of an output token, as in section 4.1 of the paper."""

BURST = 6
"""Requests that a tenant may be behind when it is lifted. They may come together from a tenant that
seldom sends any; and one whose queue is empty for a moment does not lose what it is behind."""

ELSEWHERE_S = 2.0
"""How long a tenant competes here after another router has served it: some exchanges of usage."""

LOOK_S = 0.1

MAX_COUNTERS = 4096
"""Counters kept; beyond them those of tenants that would be lifted anyway are forgotten."""

Clock = Callable[[], float]


def service_of(uncached: float, output: float) -> float:
    """Return the weighted tokens of a request."""
    return PROMPT_WEIGHT * uncached + OUTPUT_WEIGHT * output


class _Counter:
    """One tenant's counter. ``value``: service / weight."""

    __slots__ = ("computing", "elsewhere_at", "start", "value", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.value = 0.0
        self.start = 0.0  # the virtual time to which it was lifted last
        self.computing = 0  # requests before their first token, those that wait left out
        self.elsewhere_at = -math.inf  # when another router last served this tenant

    @property
    def virtual_time(self) -> float:
        """Return the counter without what ``BURST`` subtracts."""
        return max(self.value, self.start)


class VirtualCounters:
    """The counters of one router. Created with its state; ``FairQueue`` chooses by them."""

    def __init__(self, clock: Clock, usage: UsageBook | None = None) -> None:
        self._clock = clock
        self._usage = usage
        self._counters: dict[str, _Counter] = {}
        self._last = 0.0  # counter of the tenant that was dispatched last, before it was charged
        self._computing = 0  # of all tenants
        self._elsewhere: set[_Counter] = set()  # of tenants that other routers serve
        self._least: list[_Counter] = []  # two of these, looked for
        self._look_at = -math.inf  # the next time
        self.on_change: Callable[[str], None] = lambda tenant: None  # of a counter; ``FairQueue``
        if usage is not None:
            usage.listen(self.charge_elsewhere)

    def value(self, tenant: str) -> float:
        """Return service / weight; 0 for a tenant that has not been served."""
        counter = self._counters.get(tenant)
        return 0.0 if counter is None else counter.value

    def virtual_time(self, tenant: str) -> float:
        """Return the counter without what ``BURST`` subtracts. The tenant must have one."""
        return self._counters[tenant].virtual_time

    def lift(
        self,
        tenant: Tenant,
        waiting: Collection[str],
        service: float,
        least: float | None = None,
    ) -> None:
        """Let a tenant compete that has not waited so far. ``waiting``: the tenants that do;
        ``service``: of its next request; ``least``: virtual time of those that wait, if the caller
        knows it."""
        counter = self._counters.get(tenant.name)
        if counter is None:
            self._forget_some(waiting)
            counter = self._counters[tenant.name] = _Counter(tenant.weight)
        counter.weight = tenant.weight  # a changed file of keys changes it
        if waiting and least is None:
            least = min(self._counters[name].virtual_time for name in waiting)
        counter.start = self._virtual_time(counter, least)
        counter.value = max(counter.value, counter.start - BURST * service / counter.weight)
        self.on_change(tenant.name)

    def lifted_value(self, tenant: Tenant, service: float, least: float) -> float:
        """Return the counter that a tenant that has not waited has once it is lifted, while others
        wait. ``service``: of its next request; ``least``: virtual time of those that wait."""
        counter, start = self._counters.get(tenant.name), min(self._last, least)
        if counter is not None and counter.start == start:
            return counter.value  # it has been lifted already, by the service of its own request
        return max(self.value(tenant.name), start - BURST * service / tenant.weight)

    def _virtual_time(self, counter: _Counter, least: float | None) -> float:
        """Return the counter from which a tenant starts that has not waited. ``least``: the virtual
        time of those that wait; None: there are none."""
        if least is not None:
            return min(self._last, least)
        rivals = [other.virtual_time for other in self._least_elsewhere() if other is not counter]
        return min(rivals, default=self._last)

    def _least_elsewhere(self) -> list[_Counter]:
        """Return the two tenants with the least counters that other routers serve now. They are
        looked for now and then only, because there may be thousands of tenants.

        Those that were served elsewhere last move the virtual time on: a tenant that comes when
        they have paused must not get first all that they had while it sent nothing."""
        now = self._clock()
        if self._elsewhere and now >= self._look_at:
            self._look_at = now + LOOK_S
            newest = max(c.elsewhere_at for c in self._elsewhere)
            latest = [c for c in self._elsewhere if c.elsewhere_at > newest - ELSEWHERE_S]
            self._last = max(self._last, min(c.virtual_time for c in latest))
            served = [c for c in latest if c.elsewhere_at > now - ELSEWHERE_S]
            self._elsewhere = set(served)
            self._least = heapq.nsmallest(2, served, key=lambda c: c.virtual_time)
        return self._least

    def is_behind(self, tenant: str, share: float) -> bool:
        """Return whether a tenant that has just been lifted has had less than the others, and less
        than its ``share`` (0 .. 1) of the prompts that workers compute now, or none of them."""
        counter = self._counters[tenant]
        most = max(1.0, share * self._computing)
        return counter.value <= self._last and counter.computing < most

    def begin(self, tenant: str, borrowed: float) -> None:
        """Record that a request of this tenant is dispatched. Called before it is charged.

        ``borrowed``: how far its urgency moved it forward, which newcomers must not pay for.
        """
        counter = self._counters.get(tenant)
        self._last = (0.0 if counter is None else counter.virtual_time) - borrowed

    def on_computing(self, tenant: str) -> None:
        """Record that the prompt of a dispatched request is being computed."""
        self._count_computing(tenant, 1)

    def on_computed(self, tenant: str) -> None:
        """Record that the prompt of a dispatched request is computed, or will never be."""
        self._count_computing(tenant, -1)

    def _count_computing(self, tenant: str, change: int) -> None:
        self._computing += change
        if tenant in self._counters:
            self._counters[tenant].computing += change

    def charge(self, tenant: str, service: float) -> None:
        """Add service, or take back (negative) what had been charged too much."""
        counter = self._counters.get(tenant)
        if counter is not None:  # else it was forgotten, and will be lifted
            counter.value += service / counter.weight
            self.on_change(tenant)

    def report(self, tenant: str, service: float) -> None:
        """Tell other routers about service that is certain."""
        if self._usage is not None and service > 0:
            self._usage.add(tenant, TenantUsage(service=service))

    def charge_elsewhere(self, tenant: str, usage: TenantUsage) -> None:
        """Charge what other routers have served. A tenant not seen here has no weight yet; it will
        be lifted when it comes."""
        counter = self._counters.get(tenant)
        if counter is not None and 0 < usage.service < math.inf:
            counter.value += usage.service / counter.weight
            counter.elsewhere_at = self._clock()
            self._elsewhere.add(counter)
            self.on_change(tenant)

    def _forget_some(self, waiting: Collection[str]) -> None:
        """Forget tenants that would be lifted to at least their counter, when there are many."""
        if len(self._counters) >= MAX_COUNTERS:
            self._counters = {
                name: counter
                for name, counter in self._counters.items()
                if counter.value > self._last or counter.computing or name in waiting
            }


class ExpectedCost(NamedTuple):
    """Tokens that a request is expected to cost."""

    uncached: float
    output: float


class RequestCharge:
    """What one request has been charged: expected at its dispatch, corrected by what is measured.

    Created by a ``ChoiceTurn``, which calls ``on_dispatch``. Its ``ChoiceStream`` calls the others,
    in this order.
    """

    def __init__(self, counters: VirtualCounters, tenant: str) -> None:
        self._counters = counters
        self._tenant = tenant
        self._prompt = self._output = 0.0  # service that is charged so far
        self._is_computing = self._ended = False

    def on_dispatch(self, cost: ExpectedCost) -> None:
        """Charge the expected cost."""
        self._prompt, self._output = service_of(cost.uncached, 0), service_of(0, cost.output)
        self._is_computing = True
        self._counters.on_computing(self._tenant)
        self._counters.charge(self._tenant, self._prompt + self._output)

    def on_first_token(self, uncached: int) -> None:
        """Charge the prompt tokens that were really computed."""
        service = service_of(uncached, 0)
        self._counters.charge(self._tenant, service - self._prompt)
        self._counters.report(self._tenant, service)
        self._prompt = 0.0  # reported
        self._leave_computing()

    def on_end(self, output: int) -> None:
        """Charge the output tokens that were really sent; further calls do nothing."""
        if not self._ended:
            self._ended = True
            service = service_of(0, output)
            self._counters.charge(self._tenant, service - self._output)
            self._counters.report(self._tenant, service + self._prompt)
            self._leave_computing()

    def _leave_computing(self) -> None:
        if self._is_computing:
            self._is_computing = False
            self._counters.on_computed(self._tenant)
