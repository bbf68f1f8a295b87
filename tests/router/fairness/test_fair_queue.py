"""The order of the queue: counters between tenants, priorities that age within one."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from protocol.requests import Request
from router.fairness.fair_queue import (
    AGE_S,
    MOST_COUNTED,
    TOKENS_PER_LEVEL,
    FairQueue,
    WaitingRequest,
)
from router.fairness.virtual_counters import ExpectedCost, VirtualCounters
from router.placement.admission import AdmissionLimits
from router.tenants.tenant import Tenant
from tests.router.conftest import Start
from tests.router.fairness.works import UnusedWork
from tests.router.fake_worker import outputs

A, B = Tenant("a"), Tenant("b")
LIMITS = AdmissionLimits(10.0)


def waiting(
    tenant: Tenant, arrived: float = 0.0, priority: int = 0, tokens: float = 100.0
) -> WaitingRequest:
    cost = ExpectedCost(tokens, 0)
    return WaitingRequest(tenant, priority, arrived, LIMITS, cost, UnusedWork())


def new_queue(*requests: WaitingRequest) -> FairQueue:
    queue = FairQueue(VirtualCounters(lambda: 0.0))
    for request in requests:
        queue.push(request)
    return queue


def serve_next(queue: FairQueue) -> WaitingRequest:
    [request, *_] = queue.candidates(1)
    queue.remove(request)
    queue.begin(request)
    queue.counters.charge(request.tenant.name, request.service)
    return request


def served(queue: FairQueue, count: int) -> Counter[str]:
    return Counter(serve_next(queue).tenant.name for _ in range(count))


def test_tenants_share_by_weight_however_many_requests_wait() -> None:
    heavy = Tenant("heavy", weight=3.0)
    queue = new_queue(*(waiting(A) for _ in range(1000)), *(waiting(heavy) for _ in range(100)))
    assert served(queue, 100) == {"a": 25, "heavy": 75}


def test_share_is_of_tokens_and_not_of_requests() -> None:
    queue = new_queue(
        *(waiting(A, tokens=1000) for _ in range(100)), *(waiting(B) for _ in range(100))
    )
    assert served(queue, 44) == {"a": 4, "b": 40}


def test_newcomer_does_not_wait_for_a_backlog() -> None:
    queue = new_queue(*(waiting(A) for _ in range(100)))
    served(queue, 20)
    queue.push(waiting(B, arrived=5.0))
    assert serve_next(queue).tenant is B


def test_more_urgent_priorities_go_first_within_a_tenant() -> None:
    queue = new_queue(waiting(A, priority=5), waiting(A, priority=-5), waiting(A, priority=0))
    assert [serve_next(queue).priority for _ in range(3)] == [-5, 0, 5]


def test_waiting_raises_urgency() -> None:
    old = waiting(A, arrived=0.0, priority=10)
    queue = new_queue(old, waiting(A, arrived=10 * AGE_S - 0.01, priority=0))
    queue.push(waiting(A, arrived=10 * AGE_S + 0.01, priority=0))
    assert serve_next(queue).priority == 0
    assert serve_next(queue) is old, "a level for each AGE_S"


def test_least_urgent_request_advances_under_a_flood_of_urgent_ones() -> None:
    queue = new_queue(waiting(A, arrived=0.0, priority=100))
    for turn in range(1000):
        queue.push(waiting(A, arrived=turn * AGE_S, priority=-100))
        if serve_next(queue).priority == 100:
            break
    assert turn in (200, 201), "after as many times AGE_S as there are levels"


def test_urgency_gains_no_share_over_other_tenants() -> None:
    queue = new_queue(*(waiting(A, priority=-100) for _ in range(400)))
    for _ in range(400):
        queue.push(waiting(B, priority=0))
    first = served(queue, 400)
    gained = first["a"] - first["b"]
    assert gained * 100 <= 2 * 100 * TOKENS_PER_LEVEL, "it is served earlier, by so many tokens"
    assert served(queue, 200) == {"a": 100, "b": 100}, "and not more often"


def test_removed_requests_leave_nothing_behind() -> None:
    queue = new_queue(waiting(A))
    for turn in range(5000):
        request = waiting(A, arrived=1.0 + turn)
        queue.push(request)
        queue.remove(request)
        queue.remove(request)
    assert queue.length == 1
    assert len(queue._tenants["a"].requests._heap) < 100
    assert len(queue._tenants["a"].awaiting[None]._heap) < 100
    serve_next(queue)
    assert (queue.length, queue.service) == (0, 0.0)
    assert not queue.tenants and not queue.candidates(3)


def test_candidates_are_heads_of_tenants_and_then_those_behind() -> None:
    first, second, other = waiting(A, 0.0), waiting(A, 1.0), waiting(B, 2.0)
    queue = new_queue(first, second, other)
    assert set(queue.candidates(2)) == {first, other}
    assert set(queue.candidates(3)) == {first, second, other}


def test_candidates_are_requests_that_still_wait() -> None:
    """Two clients that had hung up once hid the requests behind theirs."""
    first, *gone, last = (waiting(A, float(arrived)) for arrived in range(4))
    queue = new_queue(first, *gone, last)
    for request in gone:
        queue.remove(request)
    assert queue.candidates(3) == [first, last]


def test_first_of_those_that_await_none_of_the_blocked_workers() -> None:
    first, second, other = waiting(A, 0.0), waiting(A, 1.0), waiting(B, 2.0)
    first.awaits = "p"
    queue = new_queue(first, second, other)
    queue.set_awaits(other, "q")
    assert queue.first_beside(()) is first and queue.first_beside({"p"}) is second
    assert not new_queue(waiting(A)).all_await_compute
    queue.set_awaits(second, "p")
    assert queue.all_await_compute and queue.first_beside({"p"}) is other
    assert queue.first_beside({"p", "q"}) is None
    queue.counters.charge("a", 1000.0)
    assert queue.first_beside(()) is other, "its tenant is next now"
    for _ in range(500):
        queue.set_awaits(first, "q")
        queue.set_awaits(first, "p")
    assert len(queue._tenants["a"].awaiting["p"]._heap) < 100
    for request in (first, second, other):
        queue.remove(request)
        queue.remove(request)
    assert queue.all_await_compute and queue.first_beside(()) is None and not queue._awaited


def test_others_that_await_a_worker_are_those_here_and_as_many_elsewhere() -> None:
    requests = [waiting(A) for _ in range(5)]
    queue, pool = new_queue(*requests), {"p0", "p1"}
    for request, worker in zip(requests, ("p0", "p0", "p0", "d0", None), strict=True):
        queue.set_awaits(request, worker)
    alone, shared = (queue.awaiting_each(pool, routers) for routers in (1, 9))
    assert (alone("p0"), alone("p1")) == (2, 0), "one of three may be the request that asks"
    assert (shared("p0"), shared("p1")) == (2 + 8 * 1.5, 8 * 1.5)
    assert queue.awaiting_each({"d0"}, 1)("d0") == 0


async def test_a_placement_knows_what_waits_in_all_routers(start: Start) -> None:
    cluster = await start(outputs())
    state, [worker] = cluster.app.state.router, cluster.workers
    for link in state.pool.links.values():
        link.routers = 4
    for _ in range(3):
        request = waiting(A)
        state.dispatcher.queue.push(request)
        state.dispatcher.queue.set_awaits(request, worker.instance)
    chosen = state.placer.place(Request(id="r", prompt=(5,) * 40), []).choice.chosen
    share = chosen.p.prefill_s / state.settings.goals.ttft_s
    assert chosen.p.congestion == pytest.approx((2 + 3 * 3) * share)
    assert share > 0 and state.dispatcher.routers() == 4


def test_requests_in_the_order_in_which_they_were_placed() -> None:
    requests = [waiting(A, float(arrived)) for arrived in range(3)]
    queue = new_queue(*requests)
    queue.set_awaits(requests[0], None)
    assert queue.placed_longest_ago(5) == [requests[1], requests[2], requests[0]]
    queue.remove(requests[1])
    assert queue.placed_longest_ago(1) == [requests[2]]


def served_before(queue: FairQueue, tenant: Tenant) -> float:
    """Push a request and return what is really served before it."""
    last = waiting(tenant, arrived=1e6)
    queue.push(last)
    before = 0.0
    while (request := serve_next(queue)) is not last:
        before += request.service
    return before


@pytest.mark.parametrize("tenants", [3, 30, 10 * MOST_COUNTED])
@pytest.mark.parametrize("asks", ["newcomer", "has had more", "waits"])
def test_predicted_service_is_what_is_served_before_a_new_request(tenants: int, asks: str) -> None:
    random = Random(tenants)
    names = [Tenant(f"t{i}", weight=random.choice((1.0, 1.0, 2.0))) for i in range(tenants)]
    queue = new_queue(*(waiting(t) for t in names for _ in range(random.randint(3, 6))))
    served(queue, round(1.5 * queue.length / 4))
    tenant = A
    if asks == "has had more":
        queue.counters.lift(A, queue.tenants, 100.0)
        queue.counters.charge("a", 250.0)
    elif asks == "waits":
        tenant = next(t for t in names if t.name in queue.tenants)
        queue.push(waiting(tenant, arrived=1.0))
    predicted = queue.service_before(tenant)
    really = served_before(queue, tenant)
    assert predicted == pytest.approx(really, rel=0.15, abs=100.0 * min(tenants, 3))


def test_prediction_of_a_wait_changes_no_counter() -> None:
    queue = new_queue(*(waiting(A) for _ in range(9)))
    served(queue, 8)
    queue.service_before(B)
    assert queue.counters.value("b") == 0.0


def test_requests_are_judged_in_the_order_in_which_they_would_be_served() -> None:
    heavy = Tenant("heavy", weight=2.0)
    tenants = [*[A] * 8, *[B] * 3, *[heavy] * 8]
    queue = new_queue(*(waiting(t, i, priority=-(i % 2)) for i, t in enumerate(tenants)))
    judged: list[WaitingRequest] = []

    def is_late(request: WaitingRequest, before: float) -> bool:
        assert before == 100.0 * len(judged)
        judged.append(request)
        return False

    assert not queue.late_requests(is_late)
    assert judged == [serve_next(queue) for _ in tenants]


def test_late_requests_cost_their_tenant_no_turn() -> None:
    queue = new_queue(*(waiting(A, i) for i in range(6)), *(waiting(B, 6 + i) for i in range(6)))
    late = queue.late_requests(lambda request, before: before >= 300 or request.arrived < 3)
    kept = [r for r in queue.requests() if r not in late]
    assert [r.arrived for r in kept] == [3, 6, 7] or [r.arrived for r in kept] == [3, 4, 6]
