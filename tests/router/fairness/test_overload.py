"""When an overload lasts: storms, bursts and closed loops, with prompts that take long or short."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from bench.lib.report import percentile
from bench.simulator import fair_simulation
from bench.simulator.fair_simulation import GOALS, FairSimulation, TenantResult, TenantTraffic
from protocol.performance.step_model import StepModel
from router.fairness.fair_queue import FairQueue, WaitingRequest
from router.fairness.overload import (
    FORGET_FADES,
    LEAST_FADE_S,
    LEAST_QUEUE_S,
    OverloadMonitor,
)
from router.fairness.virtual_counters import ExpectedCost, VirtualCounters
from router.placement.admission import QUEUE_SHARE, AdmissionLimits
from router.tenants.tenant import Tenant
from tests.router.fairness.works import UnusedWork

A = Tenant("a")
PROMPT = 512
STORM_S = 8.0
LIMITS = AdmissionLimits(10.0, lasting_queue_s=QUEUE_SHARE)


@pytest.fixture
def long_prompts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers on which a prompt takes half of the objective, and the queue is few requests."""
    monkeypatch.setattr(fair_simulation, "STEP", StepModel(0.012, 1e-5, 0.0, 9.6e-4, 0.0))
    yield


def storm(times: float, seed: int) -> TenantResult:
    """Return what a storm gets after a time at the load that the pool can serve."""
    simulation = FairSimulation(seed=seed)
    rate = simulation.capacity / PROMPT
    traffic = [
        TenantTraffic(A, 1.05 * rate, ends=8.0),
        TenantTraffic(A, times * rate, begins=12.0, ends=12.0 + STORM_S),
    ]
    return simulation.run(traffic, 32.0, warm_up_s=12.0)["a"]


def good(result: TenantResult) -> int:
    return sum(ttft_s <= GOALS.ttft_s for ttft_s in result.ttft)


@pytest.mark.usefixtures("long_prompts")
def test_goodput_lasts_when_prompts_take_half_the_objective() -> None:
    peak = max(good(storm(times, seed)) for times in (1.0, 3.0) for seed in (1, 2))
    for seed in (1, 2):
        assert good(storm(10.0, seed)) > 0.9 * peak


@pytest.mark.parametrize("seed", [1, 2])
def test_refusals_come_at_once_also_when_the_storm_is_over(seed: int) -> None:
    refused = storm(10.0, seed).refused
    assert len(refused) > 300
    assert percentile(refused, 0.9) < 0.01 and percentile(refused, 0.99) < 0.2
    assert max(refused) < GOALS.ttft_s, "none waits for its deadline in vain"


class Watched:
    """A monitor and its queue, from which a pool takes 100 tokens every 10 ms."""

    def __init__(self, goal_s: float = 1.0) -> None:
        self.now = 0.0
        self.queue = FairQueue(VirtualCounters(lambda: self.now))
        self.monitor = OverloadMonitor(self.queue, goal_s, lambda: self.now)
        self.refused: list[WaitingRequest] = []
        self.tenants: Iterator[Tenant] = itertools.repeat(A)  # of the requests that arrive

    def arrive(self, count: int, alone_s: float = 0.0) -> None:
        for _ in range(count):
            self.refused += self.look()
            cost = ExpectedCost(100.0, 0)
            request = WaitingRequest(next(self.tenants), 0, self.now, LIMITS, cost, UnusedWork())
            request.alone_s = alone_s
            self.queue.push(request)

    def look(self) -> list[WaitingRequest]:
        found = self.monitor.update()
        for request in found:
            self.queue.remove(request)
        return found

    def serve(self, seconds: float, arrivals: int = 0, alone_s: float = 0.0) -> None:
        """Serve for so long, while so many requests arrive with each that is served."""
        for _ in range(round(seconds / 0.01)):
            self.now += 0.01
            if self.queue.length:
                [first, *_] = self.queue.candidates(1)
                self.monitor.on_dispatch(first.service)
                self.queue.remove(first)
                self.queue.begin(first)
                self.queue.counters.charge(first.tenant.name, first.service)
            self.refused += self.look()
            self.arrive(arrivals, alone_s)


def test_overload_lasts_while_the_queue_is_empty_for_an_instant() -> None:
    watched = Watched()
    watched.serve(0.5, arrivals=10)
    assert watched.monitor.lasting and watched.refused
    for request in list(watched.queue.requests()):
        watched.queue.remove(request)
    watched.serve(0.2)
    assert watched.monitor.lasting, "admission keeps the queue short"
    watched.serve(0.5)
    assert not watched.monitor.lasting


def test_overload_is_known_within_a_few_hundredths_of_a_second_of_a_burst() -> None:
    watched = Watched()
    watched.arrive(30)
    watched.serve(0.1)
    began = watched.now
    while not watched.monitor.lasting:
        watched.serve(0.01, arrivals=10)
    assert watched.now - began < 0.2
    assert max(r.arrived for r in watched.refused) <= watched.now


@pytest.mark.parametrize("tenants", [1, 20, 1000])
def test_overload_is_refused_however_many_tenants_share_it(tenants: int) -> None:
    watched = Watched()
    watched.tenants = itertools.cycle([Tenant(f"t{i}") for i in range(tenants)])
    while not watched.monitor.lasting:
        watched.serve(0.01, arrivals=10)
    kept = watched.queue.length * 0.01
    assert watched.refused and 0.6 * QUEUE_SHARE < kept <= QUEUE_SHARE + 0.1


def test_overload_refuses_none_of_a_tenant_that_is_served_before_the_others() -> None:
    watched = Watched()
    watched.serve(0.1, arrivals=3)
    watched.tenants = itertools.cycle([A] * 49 + [Tenant("b")])
    while not watched.monitor.lasting:
        watched.serve(0.01, arrivals=10)
    assert {request.tenant.name for request in watched.refused} == {"a"}


def test_queue_that_does_not_grow_is_no_overload() -> None:
    watched = Watched()
    watched.arrive(200)
    watched.serve(5.0, arrivals=1)
    assert watched.queue.length > 190 and not watched.monitor.lasting and not watched.refused


@pytest.mark.parametrize("goal_s", [1.0, 30.0])
def test_pause_is_no_overload_where_the_objective_is_long(goal_s: float) -> None:
    watched = Watched(goal_s)
    watched.arrive(220)
    watched.serve(4.0, arrivals=1)
    for _ in range(6):  # all workers compute long prompts, or have no room for KV
        watched.now += 1.0
        watched.arrive(10)
    assert watched.monitor.lasting is bool(watched.refused) is (goal_s == 1.0)


def test_rate_counts_the_time_since_a_request_was_queued() -> None:
    watched = Watched()
    for _ in range(50):
        watched.arrive(1)
        watched.serve(0.02)
    watched.arrive(10)
    assert watched.monitor.wait_s(A) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize(("pause", "wait_s"), [(0.9, 0.1), (1.1, 0.0)])
def test_rate_is_forgotten_when_none_has_waited_for_some_fade_times(
    pause: float, wait_s: float
) -> None:
    watched = Watched()
    watched.arrive(100)
    watched.serve(1.0)
    watched.now += pause * FORGET_FADES * LEAST_FADE_S
    watched.arrive(10)
    assert watched.monitor.wait_s(A) == pytest.approx(wait_s, rel=0.1)


def test_burst_on_a_pool_that_has_grown_while_idle_is_no_overload() -> None:
    simulation = FairSimulation(prefill=8)
    grown = list(simulation.prefill)
    small_rate, grown_rate = (n * simulation.capacity / 8 / PROMPT for n in (1, 8))
    del simulation.prefill[1:]
    simulation.clock.at(3000.0, simulation.prefill.extend, grown[1:])
    traffic = [
        TenantTraffic(A, 1.05 * small_rate, ends=10.0),
        TenantTraffic(A, 3.0 * grown_rate, begins=3600.0, ends=3600.3),
    ]
    result = simulation.run(traffic, 3610.0, warm_up_s=3600.0)["a"]
    assert len(result.ttft) > 35 and not result.refused


def test_requests_whose_prompt_takes_long_wait_less() -> None:
    watched = Watched()
    assert watched.monitor.limits_now(LIMITS, 0.6) == LIMITS, "before an overload"
    watched.serve(0.5, arrivals=10)
    bounds = [watched.monitor.limits_now(LIMITS, s).queue_s for s in (0.0, 0.6, 5.0)]
    assert bounds == pytest.approx([QUEUE_SHARE, 0.2, LEAST_QUEUE_S])
    own = AdmissionLimits(30.0)
    assert watched.monitor.limits_now(own) == own, "its own deadline binds it, and no objective"


@pytest.mark.usefixtures("long_prompts")
def test_clients_that_send_again_when_answered_are_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = FairSimulation()
    source = TenantTraffic(A, 0.0, burst=16)
    on_end = fair_simulation.SimulatedChoice._on_end

    def end_and_send(choice: fair_simulation.SimulatedChoice) -> None:
        on_end(choice)
        simulation._arrive_once(source)

    monkeypatch.setattr(fair_simulation.SimulatedChoice, "_on_end", end_and_send)
    result = simulation.run([source], 24.0)["a"]
    assert len(result.ttft) > 24 * 6.5 and not result.refused
