"""Dispatch by room on a virtual clock: what goes at once, what waits, and what ends the waiting."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cluster.simulator.devices.clock import SimulatedClock
from cluster.simulator.devices.router_queue import SimulatedTimer
from router.common.errors import ApiError
from router.fairness.dispatcher import (
    CANDIDATES,
    MAX_SPREAD_S,
    RENEWED,
    FairDispatcher,
    TimerHandle,
    look_spread_s,
)
from router.fairness.fair_queue import FairQueue, RoutedWork, WaitingRequest
from router.fairness.overload import OverloadMonitor
from router.fairness.virtual_counters import BURST, VirtualCounters
from router.placement.admission import AdmissionLimits
from router.placement.cost import Placement
from router.placement.ledger import WorkLedger
from router.tenants.tenant import Tenant
from tests.router.fairness.works import FakeWork, placement

A, B, C, D = (Tenant(name) for name in "abcd")
FREE, BUSY = placement(), placement(queue_s=3.0)
NO_ROW = placement(wait_s=5.0)


class Router:
    """A dispatcher, a ledger that wakes it, and requests."""

    def __init__(self) -> None:
        self.clock = clock = SimulatedClock()
        self.refusals: list[str] = []
        self.waited: list[float] = []
        self.queue = FairQueue(VirtualCounters(lambda: clock.now))
        self.dispatcher = FairDispatcher(
            self.queue,
            OverloadMonitor(self.queue, 2.0, lambda: clock.now),
            lambda: clock.now,
            self.call_later,
            self.refusals.append,
            self.waited.append,
        )
        self.ledger = WorkLedger(lambda: clock.now)
        self.ledger.on_less_work = self.dispatcher.wake
        self.ledger.on_report = self.dispatcher.look_soon

    def call_later(self, delay_s: float, call: Callable[[], None]) -> TimerHandle:
        timer = SimulatedTimer(call)
        self.clock.at(self.clock.now + delay_s, timer.run)
        return timer

    def submit(
        self, work: FakeWork, tenant: Tenant = A, ttft_s: float = 20.0, priority: int = 0
    ) -> WaitingRequest | None:
        limits = AdmissionLimits(ttft_s)
        return self.dispatcher.submit(tenant, priority, self.clock.now, limits, work)

    def filled(self, count: int, at: Placement = BUSY, tenant: Tenant = A) -> list[FakeWork]:
        """Let so many requests wait."""
        works = [FakeWork(at) for _ in range(count)]
        for work in works:
            assert self.submit(work, tenant) is not None
        return works

    def wait(self, seconds: float) -> None:
        self.clock.run_before(self.clock.now + seconds)


def test_request_with_room_goes_at_once_without_any_timer() -> None:
    router, work = Router(), FakeWork(FREE)
    assert router.submit(work) is None
    assert work.dispatched is False and work.placed == 1
    assert router.clock.events == 0, "no task switch, no timer"


def test_request_without_room_waits_until_a_worker_reports() -> None:
    router = Router()
    [work] = router.filled(1)
    router.wait(0.004)
    assert not work.was_sent()
    work.now = FREE
    router.ledger.report("p", 0)
    router.wait(0.0051)
    assert work.dispatched is False and router.waited == [pytest.approx(0.009)]


def test_several_routers_do_not_look_at_one_moment() -> None:
    """All of them once sent a prompt by the same report, before any heard of the others'."""
    looks = []
    for _ in range(40):
        router = Router()
        router.dispatcher.spread_s = lambda: 0.1
        [work] = router.filled(1)
        router.wait(0.004)
        work.now = FREE
        for _ in range(30):  # later reports do not bring the look forward
            router.ledger.report("p", 0)
            router.wait(0.005)
        [waited_s] = router.waited
        looks.append(waited_s)
    assert min(looks) >= 0.009 and max(looks) <= 0.11
    assert max(looks) - min(looks) > 0.05


def test_looks_are_spread_over_the_routers_that_one_worker_has() -> None:
    assert look_spread_s(1, 4) == 0.0
    assert look_spread_s(4, 4) < look_spread_s(8, 4) < look_spread_s(8, 2)
    assert look_spread_s(1000, 1) == look_spread_s(1000, 0) == MAX_SPREAD_S


@pytest.mark.parametrize("event", ["first token", "release"])
def test_ticket_events_wake_the_queue(event: str) -> None:
    router = Router()
    ticket = router.ledger.open("p", "d", tokens=1, seconds=1.0, kv_tokens=1, priority=0)
    [work] = router.filled(1)
    router.wait(0.004)
    work.now = FREE
    ticket.on_tokens() if event == "first token" else ticket.release()
    router.wait(1e-6)
    assert work.dispatched is False


def test_many_reports_without_room_cost_few_looks() -> None:
    """Reports of many workers once took the router's whole core while requests waited."""
    router = Router()
    works = router.filled(5)
    placed = sum(work.placed for work in works)
    for _ in range(1000):
        router.ledger.report("p", 0)
        router.wait(0.0001)
    looks = sum(work.placed for work in works) - placed
    assert 0 < looks <= (CANDIDATES + RENEWED) * (0.1 / 0.005 + 1)
    works[0].now = FREE
    router.ledger.report("p", 0)
    router.wait(0.006)
    assert works[0].was_sent(), "room is found soon"


def test_looks_in_vain_take_a_tenth_of_the_time_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """A placement among hundreds of workers takes milliseconds, and streams wait meanwhile."""
    router = Router()
    ticket = router.ledger.open("p", "d", tokens=1, seconds=1.0, kv_tokens=1, priority=0)
    [work] = router.filled(1)
    place = work.place

    def slow_place(*, ahead: bool = False) -> RoutedWork | None:
        router.clock.now += 0.002
        return place(ahead=ahead)

    monkeypatch.setattr(work, "place", slow_place)
    router.wait(0.001)
    before = work.placed
    for _ in range(500):
        router.dispatcher.wake()
        router.wait(0.001)
    assert 15 <= work.placed - before <= 27, "0.5 s of waiting, 0.02 s from one look to the next"
    work.now = FREE
    ticket.on_tokens()
    router.wait(0.025)
    assert work.was_sent()


def test_room_that_no_event_tells_is_found_by_the_timer() -> None:
    router = Router()
    [work] = router.filled(1)
    router.wait(1.0)
    work.now = FREE
    router.wait(0.11)
    assert work.dispatched is False


def test_all_that_has_room_is_dispatched_at_one_event() -> None:
    router = Router()
    works = router.filled(100)
    router.wait(0.004)
    for work in works:
        work.now = FREE
    router.dispatcher.wake()
    router.wait(1e-3)
    assert all(work.dispatched is False for work in works)


def test_arrival_with_room_does_not_overtake_those_that_wait() -> None:
    router = Router()
    [first] = router.filled(1, NO_ROW)
    later = FakeWork(FREE)
    assert router.submit(later) is not None
    router.wait(1.0)
    assert not first.was_sent() and not later.was_sent()


def test_head_that_waits_for_its_prefill_worker_lets_others_go_elsewhere() -> None:
    router = Router()
    [holder] = router.filled(1, placement("holds the prefix", queue_s=3.0))
    same, other = (
        FakeWork(placement("holds the prefix")),
        FakeWork(placement("idle")),
    )
    router.submit(same)
    router.submit(other)
    router.wait(1.0)
    assert other.dispatched is False
    assert not holder.was_sent() and not same.was_sent()


def test_prompt_of_a_decode_worker_does_not_wait_for_prefill_workers() -> None:
    """Behind a few long prompts, hundreds of short ones once were refused by idle decode
    workers."""
    router = Router()
    waiting = router.filled(30)
    local = placement("d", local=True)
    short = FakeWork(local)
    assert router.submit(short) is None and short.dispatched is False
    full = FakeWork(placement("d", queue_s=3.0, local=True))
    assert router.submit(full) is not None
    later = FakeWork(local)
    assert router.submit(later) is not None, "it does not overtake"
    elsewhere = FakeWork(placement("other", local=True))
    assert router.submit(elsewhere) is None and elsewhere.dispatched is False
    router.wait(0.2)
    assert not later.was_sent()
    full.now = local
    router.wait(0.2)
    assert full.was_sent() and later.was_sent()
    assert not any(work.was_sent() for work in waiting)
    [no_row] = router.filled(1, NO_ROW)
    assert router.submit(FakeWork(local)) is not None
    assert not no_row.was_sent()


def test_a_short_prompt_goes_beside_longer_ones_while_there_is_room() -> None:
    router = Router()
    waiting = [*router.filled(30), *router.filled(3, placement("d", queue_s=3.0, local=True))]
    for local in (False, True):
        assert router.submit(FakeWork(placement("d", local=local, is_short=True))) is None
    full = FakeWork(placement("p", queue_s=0.2, is_short=True))
    assert router.submit(full) is not None
    assert router.submit(FakeWork(placement("d", is_short=True))) is not None, "one waits already"
    full.now = placement("p", is_short=True)
    router.wait(0.2)
    assert full.was_sent() and not any(work.was_sent() for work in waiting)


def test_an_overload_of_prefill_workers_refuses_no_prompt_of_a_decode_worker() -> None:
    router, limits = Router(), AdmissionLimits(20.0, lasting_queue_s=1.0)

    def submit(work: FakeWork) -> WaitingRequest | None:
        return router.dispatcher.submit(A, 0, router.clock.now, limits, work)

    served = FakeWork(BUSY)
    submit(served)
    router.wait(0.2)
    served.now = FREE
    router.wait(0.2)  # the rate is known: 100 tokens in some tenths of a second
    refused = 0
    for _ in range(40):
        router.wait(0.02)
        try:
            submit(FakeWork(BUSY))
        except ApiError:
            refused += 1
    assert refused > 0
    with pytest.raises(ApiError):
        router.dispatcher.check_tenant(A, limits, 0.0, is_short=False)
    router.dispatcher.check_tenant(A, limits, 0.0, is_short=True)
    assert submit(FakeWork(placement("d", local=True))) is None


def taken_in_an_overload_of_decode_workers(routers: int, worker: str) -> tuple[int, bool]:
    """Return how many of 200 prompts that wait for one decode worker are let in by one of several
    routers, and whether another one is that goes to ``worker``."""
    router, limits = Router(), AdmissionLimits(20.0, lasting_queue_s=1.0)
    router.dispatcher.routers = lambda: routers
    busy, free = (placement("d", queue_s=queue_s, local=True) for queue_s in (0.2, 0.0))
    busy = busy._replace(p=busy.p._replace(prefill_s=0.02))

    def is_taken(at: Placement) -> bool:
        router.wait(0.02)
        try:
            router.dispatcher.submit(A, 0, router.clock.now, limits, FakeWork(at))
        except ApiError:
            return False
        return True

    served = FakeWork(busy)
    router.dispatcher.submit(A, 0, 0.0, limits, served)
    router.wait(0.2)
    served.now = free
    router.wait(0.2)
    taken = sum(is_taken(busy) for _ in range(200))
    return taken, is_taken(placement(worker, local=True))


@pytest.mark.parametrize(("worker", "is_refused"), [("d", True), ("idle", False)])
def test_an_overload_of_decode_workers_refuses_prompts_that_wait_for_them(
    worker: str, is_refused: bool
) -> None:
    taken, another = taken_in_an_overload_of_decode_workers(1, worker)
    assert taken < 200
    assert another is not is_refused


def test_requests_that_wait_for_a_decode_worker_in_other_routers_are_counted() -> None:
    alone, shared = (taken_in_an_overload_of_decode_workers(n, "d")[0] for n in (1, 4))
    assert 0 < shared < alone / 2


def test_any_request_behind_those_that_wait_for_one_worker_may_go_elsewhere() -> None:
    router = Router()
    holders = router.filled(10, placement("holds the prefix", queue_s=3.0))
    other = FakeWork(placement("idle"))
    router.submit(other)
    router.wait(0.2)
    assert other.dispatched is False
    assert not any(work.was_sent() for work in holders)
    assert sum(work.placed for work in holders) < 40, "looks at many requests would cost too much"


def test_prefill_worker_that_gets_idle_is_used_whatever_waits_ahead() -> None:
    """Only the first requests were once looked at, and it idled until the others had gone."""
    router = Router()
    holders = router.filled(10, placement("holds the prefix", queue_s=3.0))
    [other] = router.filled(1, placement("other", queue_s=1.0))
    router.wait(0.2)
    other.now = placement("other")
    router.ledger.report("other", 0)
    router.wait(0.006)
    assert other.was_sent() and not any(work.was_sent() for work in holders)


@pytest.mark.parametrize(("tenant", "is_sent"), [(A, True), (B, False)])
def test_an_urgent_request_sees_room_before_those_of_its_own_tenant_alone(
    tenant: Tenant, is_sent: bool
) -> None:
    """It once took each worker from tenants before its own that had to wait for less urgent
    prompts there."""
    router = Router()
    router.filled(2)
    urgent = FakeWork(BUSY)
    router.submit(urgent, tenant, priority=-1)
    router.wait(0.2)
    router.dispatcher.counters.charge("b", 1000.0)
    urgent.now, urgent.batched_s = placement("q"), 3.0
    router.ledger.report("q", 0)
    router.wait(0.2)
    assert urgent.was_sent() is is_sent
    urgent.batched_s = 0.0
    router.wait(0.2)
    assert urgent.was_sent()


def test_each_prefill_worker_that_is_awaited_is_looked_at() -> None:
    router = Router()
    works = [router.filled(5, placement(f"p{i}", queue_s=3.0)) for i in range(4)]
    router.wait(0.2)
    works[3][0].now = placement("p3")
    router.wait(0.2)
    assert [work.was_sent() for batch in works for work in batch].index(True) == 15


def test_requests_that_would_go_elsewhere_by_now_are_found() -> None:
    """When it arrived, the worker that all wait for was the best one for this request, too."""
    router = Router()
    works = router.filled(20, placement("holds the prefix", queue_s=3.0))
    works[15].now = placement("idle")
    router.wait(2.0)
    assert [work.was_sent() for work in works].index(True) == 15


def test_many_waiting_requests_cost_no_more_placements_than_few() -> None:
    placed = []
    for count in (20, 2000):
        router = Router()
        works = router.filled(count)
        router.wait(0.001)
        before = sum(work.placed for work in works)
        router.wait(1.0)
        placed.append(sum(work.placed for work in works) - before)
    assert placed[0] == placed[1] > 0


def test_hang_up_removes_a_request_at_once() -> None:
    router, work = Router(), FakeWork(BUSY)
    request = router.submit(work)
    assert request is not None
    router.dispatcher.leave(request)
    router.dispatcher.leave(request)
    work.now = FREE
    router.wait(30.0)
    assert not router.queue.length
    assert not work.was_sent() and work.error is None


def test_request_is_refused_as_soon_as_it_cannot_meet_its_deadline() -> None:
    router, work = Router(), FakeWork(BUSY)
    router.submit(work, ttft_s=5.0)  # its prompt takes 1 s
    router.wait(3.9)
    assert not router.refusals
    router.wait(0.2)
    assert work.error is not None and work.error.status == 429
    assert 1 <= int(work.error.headers["retry-after"]) <= 60
    assert router.refusals == ["ttft"] and router.queue.length == 0


def test_request_that_would_be_late_where_there_is_room_is_refused() -> None:
    router, work = Router(), FakeWork(BUSY)
    router.submit(work, ttft_s=5.0)
    router.wait(1.0)
    work.now = placement(wait_s=0.2)._replace(ttft_s=4.5)
    router.wait(0.2)
    assert work.error is not None and not work.was_sent()


def test_request_that_cannot_be_submitted_does_not_stop_the_queue() -> None:
    router = Router()
    broken, next_one = router.filled(2)
    broken.fails = True
    broken.now = next_one.now = FREE
    router.wait(0.2)
    assert broken.error is not None and broken.error.status == 500
    assert next_one.dispatched is False


def test_request_that_cannot_be_placed_does_not_stop_the_queue() -> None:
    router = Router()
    broken, next_one = router.filled(2)

    def fail(*, ahead: bool = False) -> None:
        raise KeyError("a worker")

    broken.place = fail  # type: ignore[method-assign]
    next_one.now = FREE
    router.wait(0.2)
    assert broken.error is not None and broken.error.status == 500
    assert next_one.dispatched is False and router.queue.length == 0


def test_no_decode_worker_is_a_503_at_arrival_and_a_pause_in_the_queue() -> None:
    router = Router()
    with pytest.raises(ApiError, match="no decode worker") as refusal:
        router.submit(FakeWork(None))
    assert refusal.value.status == 503
    [work] = router.filled(1)
    work.now = None
    router.wait(1.0)
    work.now = FREE
    router.wait(0.2)
    assert work.dispatched is False


def test_tenant_with_less_than_its_share_goes_ahead_of_a_flood() -> None:
    router = Router()
    router.filled(50)
    work = FakeWork(BUSY)
    work.ahead_now = FREE
    assert router.submit(work, B) is None
    assert work.dispatched is True


@pytest.mark.parametrize(("count", "goes_ahead"), [(1, False), (BURST, False), (BURST + 1, True)])
def test_newcomer_does_not_overtake_another_one_that_has_had_as_little(
    count: int, goes_ahead: bool
) -> None:
    router = Router()
    router.filled(count, tenant=B)
    work = FakeWork(BUSY)
    work.ahead_now = FREE
    assert (router.submit(work, C) is None) is goes_ahead


def test_newcomer_waits_behind_a_newcomer_that_waits_beside_a_flood() -> None:
    router = Router()
    for _ in range(10):
        router.submit(FakeWork(FREE))
        router.queue.counters.charge("a", 100.0)
    router.filled(50)
    [waits] = router.filled(1, tenant=B)
    work = FakeWork(BUSY)
    work.ahead_now = FREE
    assert router.submit(work, C) is not None
    waits.now = FREE
    router.wait(0.2)
    later = FakeWork(BUSY)
    later.ahead_now = FREE
    assert waits.was_sent() and router.submit(later, D) is not None, "the other one is next"


def test_deadline_holds_for_requests_that_go_ahead() -> None:
    router = Router()
    router.filled(50)
    work = FakeWork(BUSY)
    work.ahead_now = FREE  # its prompt takes 1 s
    with pytest.raises(ApiError, match="first token is predicted"):
        router.submit(work, B, ttft_s=0.5)
    assert not work.was_sent()


def test_request_without_room_ahead_of_others_goes_where_it_has_room() -> None:
    """It once went as one that goes ahead, to the prefill worker that had no room for it."""
    router = Router()
    router.filled(50)
    work = FakeWork(placement("d", local=True))
    work.ahead_now = BUSY
    assert router.submit(work, B) is None
    assert work.dispatched is False


def test_last_decode_worker_may_leave_while_a_request_looks_ahead() -> None:
    router = Router()
    router.filled(50)
    work = FakeWork(BUSY)
    place = work.place

    def place_ahead_last(*, ahead: bool = False) -> RoutedWork | None:
        routed = place(ahead=ahead)
        work.now = None
        return routed

    work.place = place_ahead_last  # type: ignore[method-assign]
    with pytest.raises(ApiError, match="no decode worker"):
        router.submit(work, B)
    assert router.queue.length == 50


def test_flooding_tenant_does_not_go_ahead_of_itself() -> None:
    router = Router()
    router.filled(50)
    work = FakeWork(BUSY)
    work.ahead_now = FREE
    assert router.submit(work, A) is not None


def test_alone_no_tenant_goes_ahead() -> None:
    router, work = Router(), FakeWork(BUSY)
    work.ahead_now = FREE
    assert router.submit(work) is not None


def test_closed_dispatcher_leaves_no_timer_that_acts() -> None:
    router = Router()
    [work] = router.filled(1)
    router.wait(0.01)
    router.dispatcher.close()
    work.now = FREE
    router.wait(60.0)
    assert not work.was_sent() and work.error is None


def test_a_request_that_expires_without_any_worker_is_told_so() -> None:
    router = Router()
    served, alone = router.filled(2)
    alone.now = None  # its decode worker has left, and no other is attached
    router.wait(60.0)
    assert served.error is not None and served.error.status == 429
    assert alone.error is not None and alone.error.status == 503
    assert not router.queue.length
