"""The router's queue over simulated workers on a virtual clock: the product's queue, placement and
ledger decide, only the workers are made up.

    TenantTraffic --arrivals--> SimulatedFairRouter (1..n) --dispatch--> prefill workers, in order
                                       ^                                      | first token
                                       +---- usage of the others, late ----+  decode rows

``bench.fairness --simulated`` and tests run it. One run of 60 s takes about a second.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from cluster.simulator.devices.clock import SimulatedClock
from cluster.simulator.devices.router_queue import SimulatedTimer
from protocol.performance.step_model import StepModel
from router.common.errors import ApiError
from router.fairness.dispatcher import FairDispatcher, TimerHandle
from router.fairness.fair_queue import FairQueue, RoutedWork, WaitingRequest
from router.fairness.overload import OverloadMonitor
from router.fairness.virtual_counters import (
    ExpectedCost,
    RequestCharge,
    VirtualCounters,
    service_of,
)
from router.generation.choice_turn import AHEAD_S
from router.placement.admission import QUEUE_SHARE, AdmissionLimits
from router.placement.choose import choose_placement
from router.placement.estimates import RoutingEstimates
from router.placement.ledger import AHEAD_LEVEL, PlacementTicket, WorkLedger
from router.placement.snapshot import (
    DecodeState,
    Objectives,
    PlacementQuery,
    PlacementSnapshot,
    PrefillState,
)
from router.tenants.tenant import Tenant
from router.tenants.usage import TenantUsage, UsageBook

STEP = StepModel(0.005, 1e-5, 0.0, 4e-4, 0.0)
CHUNK = 128
GOALS = Objectives(1.0, 0.05)
EXCHANGE_S = 0.5  # from one exchange of usage to the next, and the age of what it brings
REPORT_S = 0.5  # between two reports of a worker's queue
PATH_S = 0.004
KV_TOKENS = 10_000_000
ROWS = 256


class TenantTraffic(NamedTuple):
    """Poisson arrivals of one tenant; ``shares``: of them at each router."""

    tenant: Tenant
    rate: float  # requests per second
    prompt: int = 512
    output: int = 64
    shares: tuple[float, ...] = (1.0,)
    priority: int = 0
    begins: float = 0.0
    ends: float = math.inf
    burst: int = 0  # requests that come together at the beginning
    even: bool = False  # evenly spaced instead


class TenantResult(NamedTuple):
    """What one tenant got."""

    service: float  # weighted tokens whose prompts were computed in the measured time
    ttft: list[float]  # seconds from arrival, in the order of the first tokens
    refused: list[float]  # seconds from arrival


class SimulatedChoice:
    """One request. Implements ``QueuedWork``."""

    def __init__(
        self, simulation: FairSimulation, router: SimulatedFairRouter, traffic: TenantTraffic
    ) -> None:
        self.arrived = simulation.clock.now
        self.traffic = traffic
        self.prompt_tokens = traffic.prompt
        self.waiting: WaitingRequest | None = None
        self._simulation = simulation
        self._router = router
        self._charge = RequestCharge(router.counters, traffic.tenant.name)
        self._routed: RoutedWork | None = None
        self._level: float = traffic.priority
        self._ticket: PlacementTicket | None = None
        self._predicted = ("", 0.0, 0.0)  # worker, predicted TTFT, when it was submitted

    def place(self, *, ahead: bool = False) -> RoutedWork | None:
        self._level = self.traffic.priority - (AHEAD_LEVEL if ahead else 0)
        self._routed = self._router.place(self.traffic, self._level)
        return self._routed

    def dispatch(self) -> None:
        assert self._routed is not None
        chosen, cost = self._routed.placement, self._routed.cost
        self._charge.on_dispatch(cost)
        computing = chosen.prefill or chosen.decode
        self._ticket = self._router.ledger.open(
            chosen.prefill,
            chosen.decode,
            tokens=self.traffic.prompt,
            seconds=chosen.p.prefill_s,
            kv_tokens=self.traffic.prompt + self.traffic.output,
            priority=self._level,
        )
        self._simulation.rows[chosen.decode] += 1
        predicted_s = chosen.ttft_s / chosen.p.correction
        self._predicted = computing, predicted_s, self._simulation.clock.now
        self._simulation.compute(computing, self, ahead=self._level < self.traffic.priority)

    def refuse(self, error: ApiError) -> None:
        self._simulation.on_refused(self)

    def on_first_token(self) -> None:
        assert self._ticket is not None
        self._ticket.on_tokens()
        self._charge.on_first_token(self.traffic.prompt)
        self._simulation.on_first_token(self)
        clock = self._simulation.clock
        worker, predicted_s, submitted = self._predicted
        self._router.estimates.record_first_token(worker, predicted_s, clock.now - submitted)
        clock.at(clock.now + self.traffic.output * STEP.step, self._on_end)

    def _on_end(self) -> None:
        assert self._ticket is not None and self._routed is not None
        self._simulation.rows[self._routed.placement.decode] -= 1
        self._ticket.release()
        self._charge.on_end(self.traffic.output)
        self._router.estimates.outputs.record("", 0, self.traffic.output)


class _Prompt:
    """A prompt at a worker; sorted as ``engine/scheduling/scheduler.py`` does within a class."""

    def __init__(self, choice: SimulatedChoice, submitted: float) -> None:
        self.choice = choice
        self.submitted = submitted
        self.left = choice.traffic.prompt


class SimulatedFairRouter:
    """The product's queue, ledger and placement of one router."""

    def __init__(self, simulation: FairSimulation, number: int) -> None:
        clock = simulation.clock
        self.book = UsageBook()
        self.counters = VirtualCounters(lambda: clock.now, self.book)
        self.ledger = WorkLedger(lambda: clock.now)
        self.estimates = RoutingEstimates()
        queue = FairQueue(self.counters)
        monitor = OverloadMonitor(queue, GOALS.ttft_s, lambda: clock.now)
        self.dispatcher = FairDispatcher(queue, monitor, lambda: clock.now, simulation.call_later)
        self.dispatcher.routers = lambda: len(simulation.routers)
        self.ledger.on_less_work = self.dispatcher.wake
        self.ledger.on_report = self.dispatcher.look_soon
        self.exchanged: dict[str, TenantUsage] = {}
        self._simulation = simulation
        self._rng = Random(f"router {number}")

    def place(self, traffic: TenantTraffic, level: float) -> RoutedWork | None:
        simulation = self._simulation
        query = PlacementQuery(traffic.prompt, max(2.0, self.estimates.outputs.mean), 1.0)
        waiting, routers = self.dispatcher.queue, len(simulation.routers)
        awaiting = waiting.awaiting_each(simulation.prefill, routers)
        prefill = [self._state(name, level, awaiting(name)) for name in simulation.prefill]
        awaiting = waiting.awaiting_each(simulation.decode, routers)
        decode = [
            DecodeState(
                self._state(name, level, awaiting(name)),
                simulation.rows[name],
                ROWS,
                1,
                KV_TOKENS - 1,
                KV_TOKENS,
            )
            for name in simulation.decode
        ]
        snapshot = PlacementSnapshot(
            prefill, decode, self.estimates.network(self.ledger.active), self.estimates.outputs.mean
        )
        choice = choose_placement(query, snapshot, GOALS, self._rng)
        assert choice is not None
        chosen = choice.chosen
        queue = self.ledger.queue(chosen.p.instance)
        batched_s = STEP.prefill_s(0, queue.tokens + queue.others, CHUNK)
        return RoutedWork(chosen, batched_s, ExpectedCost(traffic.prompt, query.output))

    def _state(self, name: str, level: float, awaiting: float) -> PrefillState:
        queue = self.ledger.queue(name)
        others_s = STEP.prefill_s(0, queue.others, CHUNK) if queue.others else 0.0
        queue_s = queue.seconds(level, others_s, STEP.prefill_s(0, CHUNK, CHUNK))
        correction = self.estimates.correction(name)
        return PrefillState(name, STEP, CHUNK, queue_s, correction, 0, awaiting=awaiting)


class FairSimulation:
    """Routers over ``prefill`` prefill workers and two decode workers with rows to spare. Time for
    prompts is the bottleneck: decode workers compute some, too, once requests wait."""

    def __init__(self, routers: int = 1, prefill: int = 2, seed: int = 1) -> None:
        self.clock = SimulatedClock()
        self.prefill = [f"p{i}" for i in range(prefill)]
        self.decode = ["d0", "d1"]
        self.rows: Counter[str] = Counter()
        self.busy_s = 0.0  # of all workers, computing prompts
        self._random = Random(seed)
        self._queues: dict[str, list[_Prompt]] = {
            name: [] for name in (*self.prefill, *self.decode)
        }
        self._computing: set[str] = set()
        self._results: dict[str, TenantResult] = {}
        self._measured = (0.0, math.inf)
        self.routers = [SimulatedFairRouter(self, number) for number in range(routers)]

    @property
    def capacity(self) -> float:
        """Prompt tokens per second that all workers compute in full chunks."""
        return len(self._queues) * CHUNK / STEP.prefill_s(0, CHUNK, CHUNK)

    def run(
        self, traffic: Sequence[TenantTraffic], seconds: float, warm_up_s: float = 0.0
    ) -> dict[str, TenantResult]:
        """Return what each tenant got from ``warm_up_s`` to ``seconds``."""
        self._measured = (warm_up_s, seconds)
        self._results = {t.tenant.name: TenantResult(0.0, [], []) for t in traffic}
        for source in traffic:
            for _ in range(source.burst):
                self.clock.at(source.begins, self._arrive_once, source)
            if source.rate:
                self._plan_next(source, source.begins)
        self.clock.at(REPORT_S, self._report)
        self.clock.at(EXCHANGE_S, self._exchange, {})
        self.clock.run_before(seconds)
        return self._results

    def call_later(self, delay_s: float, call: Callable[[], None]) -> TimerHandle:
        """``loop.call_later`` on the virtual clock."""
        timer = SimulatedTimer(call)
        self.clock.at(self.clock.now + delay_s, timer.run)
        return timer

    # ---- traffic ----------------------------------------------------------------------------

    def _plan_next(self, source: TenantTraffic, after: float) -> None:
        gap_s = 1 / source.rate if source.even else self._random.expovariate(source.rate)
        at = after + gap_s
        if at < source.ends:
            self.clock.at(at, self._arrive, source)

    def _arrive(self, source: TenantTraffic) -> None:
        self._plan_next(source, self.clock.now)
        self._arrive_once(source)

    def _arrive_once(self, source: TenantTraffic) -> None:
        router = self._random.choices(self.routers[: len(source.shares)], source.shares)[0]
        choice = SimulatedChoice(self, router, source)
        limits = AdmissionLimits(10 * GOALS.ttft_s, lasting_queue_s=QUEUE_SHARE * GOALS.ttft_s)
        try:
            router.dispatcher.check_tenant(source.tenant, limits, 0.0, is_short=False)
            choice.waiting = router.dispatcher.submit(
                source.tenant, source.priority, self.clock.now, limits, choice
            )
        except ApiError:
            self.on_refused(choice)

    # ---- workers ----------------------------------------------------------------------------

    def compute(self, worker: str, choice: SimulatedChoice, *, ahead: bool) -> None:
        """Let a worker compute a prompt after those that are older, or ``ahead`` of them."""
        submitted = self.clock.now - (AHEAD_S if ahead else 0.0)
        self._queues[worker].append(_Prompt(choice, submitted))
        self._step(worker)

    def _step(self, worker: str) -> None:
        """Compute a chunk of the prompts, the oldest first."""
        waiting = self._queues[worker]
        if worker in self._computing or not waiting:
            return
        waiting.sort(key=lambda prompt: prompt.submitted)
        room, done = CHUNK, []
        for prompt in waiting:
            taken = min(room, prompt.left)
            prompt.left -= taken
            room -= taken
            if not prompt.left:
                done.append(prompt.choice)
            if not room:
                break
        self._queues[worker] = [prompt for prompt in waiting if prompt.left]
        self._computing.add(worker)
        seconds = STEP.prefill_s(0, CHUNK - room, CHUNK)
        self.busy_s += seconds
        self.clock.at(self.clock.now + seconds, self._on_computed, worker, done)

    def _on_computed(self, worker: str, done: list[SimulatedChoice]) -> None:
        self._computing.remove(worker)
        for choice in done:
            self.clock.at(self.clock.now + PATH_S / 2, choice.on_first_token)
        self._step(worker)

    def _report(self) -> None:
        for worker, waiting in self._queues.items():
            tokens = sum(prompt.left for prompt in waiting)
            for router in self.routers:
                router.ledger.report(worker, tokens)
        self.clock.at(self.clock.now + REPORT_S, self._report)

    def _exchange(self, seen: dict[int, dict[str, TenantUsage]]) -> None:
        """Pass on what had been served when the last exchange took place."""
        for number, router in enumerate(self.routers):
            for tenant, usage in seen.get(number, {}).items():
                before = router.exchanged.get(tenant, TenantUsage())
                router.exchanged[tenant] = usage
                more = TenantUsage(service=usage.service - before.service)
                for other in self.routers:
                    if other is not router:
                        other.book.on_others(tenant, more)
        now = {number: dict(router.book.own()) for number, router in enumerate(self.routers)}
        self.clock.at(self.clock.now + EXCHANGE_S, self._exchange, now)

    # ---- results ----------------------------------------------------------------------------

    def on_first_token(self, choice: SimulatedChoice) -> None:
        """Record the time to first token of a request, and its service."""
        traffic, (begin, end) = choice.traffic, self._measured
        if begin <= self.clock.now < end:
            name = traffic.tenant.name
            found = self._results[name]
            found.ttft.append(self.clock.now + PATH_S / 2 - choice.arrived)
            service = found.service + service_of(traffic.prompt, traffic.output)
            self._results[name] = found._replace(service=service)

    def on_refused(self, choice: SimulatedChoice) -> None:
        """Record that a request was refused, at once or after it has waited."""
        if self._measured[0] <= self.clock.now < self._measured[1]:
            waited_s = self.clock.now - choice.arrived
            self._results[choice.traffic.tenant.name].refused.append(waited_s)
