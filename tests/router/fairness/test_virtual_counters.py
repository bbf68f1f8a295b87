"""Virtual counters: lifting, charges and their corrections, other routers, weights."""

from __future__ import annotations

import math

from router.fairness.virtual_counters import (
    BURST,
    ELSEWHERE_S,
    MAX_COUNTERS,
    ExpectedCost,
    RequestCharge,
    VirtualCounters,
    service_of,
)
from router.tenants.tenant import Tenant
from router.tenants.usage import TenantUsage, UsageBook

A, B, HEAVY = Tenant("a"), Tenant("b"), Tenant("heavy", weight=3.0)


class Books:
    """Counters with a clock that tests set, and the book that they report to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.book = UsageBook()
        self.counters = VirtualCounters(lambda: self.now, self.book)

    def serve(self, tenant: Tenant, uncached: int, output: int) -> RequestCharge:
        self.counters.lift(tenant, (), 0.0)
        self.counters.begin(tenant.name, 0.0)
        charge = RequestCharge(self.counters, tenant.name)
        charge.on_dispatch(ExpectedCost(uncached, output))
        return charge

    def reported(self, tenant: Tenant) -> float:
        found = self.book.own().get(tenant.name)
        return 0.0 if found is None else found.service


def test_expected_cost_is_replaced_by_the_real_one() -> None:
    books = Books()
    charge = books.serve(A, uncached=100, output=50)
    assert books.counters.value("a") == service_of(100, 50)
    charge.on_first_token(20)  # most was cached
    assert books.counters.value("a") == service_of(20, 50)
    charge.on_end(400)
    charge.on_end(400)
    assert books.counters.value("a") == books.reported(A) == service_of(20, 400)


def test_request_that_ends_before_its_first_token_has_paid_for_its_prompt() -> None:
    books = Books()
    books.serve(A, uncached=100, output=50).on_end(0)
    assert books.counters.value("a") == books.reported(A) == service_of(100, 0)


def test_request_that_was_never_dispatched_costs_nothing() -> None:
    books = Books()
    RequestCharge(books.counters, "a").on_end(0)
    assert books.counters.value("a") == books.reported(A) == 0


def test_charges_are_divided_by_the_weight() -> None:
    books = Books()
    books.serve(HEAVY, uncached=300, output=0)
    assert books.counters.value("heavy") == 100


def test_idling_saves_nothing_up() -> None:
    books = Books()
    for _ in range(10):
        books.serve(A, uncached=100, output=0)
    books.counters.lift(B, ["a"], 0.0)
    assert books.counters.value("b") == 900, "as the last dispatched one before its charge"


def test_tenant_that_had_more_keeps_its_counter() -> None:
    books = Books()
    books.serve(A, uncached=1000, output=0)
    books.counters.lift(B, (), 0.0)
    books.serve(B, uncached=10, output=0)
    books.counters.lift(A, ["b"], 0.0)
    assert books.counters.value("a") == 1000


def test_lift_does_not_exceed_those_that_wait() -> None:
    books = Books()
    books.serve(A, uncached=100, output=0)
    books.serve(B, uncached=5000, output=0)
    books.serve(B, uncached=5000, output=0)  # urgent, say
    books.counters.lift(Tenant("c"), ["a", "b"], 0.0)
    assert books.counters.value("c") == 100


def test_service_elsewhere_counts_by_weight_and_lifts_others() -> None:
    books = Books()
    books.counters.lift(HEAVY, (), 0.0)
    books.book.on_others("heavy", TenantUsage(service=3000.0))
    assert books.counters.value("heavy") == 1000
    books.counters.lift(A, (), 0.0)
    assert books.counters.value("a") == 1000, "it competes with what others serve now"


def test_tenant_served_elsewhere_alone_does_not_pay_for_it_later() -> None:
    books = Books()
    books.counters.lift(A, (), 0.0)
    for _ in range(3600):  # an hour in which no other tenant sends anything
        books.now += 1.0
        books.book.on_others("a", TenantUsage(service=1000.0))
    books.now += ELSEWHERE_S + 1.0  # a pause in which another tenant comes
    books.counters.lift(B, (), 0.0)
    books.counters.lift(A, ["b"], 0.0)
    assert books.counters.value("b") == books.counters.value("a")


def test_reports_of_others_that_make_no_sense_are_ignored() -> None:
    books = Books()
    books.counters.lift(A, (), 0.0)
    for service in (-5.0, math.inf, math.nan):
        books.book.on_others("a", TenantUsage(service=service))
    books.book.on_others("never seen here", TenantUsage(service=1.0))
    assert books.counters.value("a") == 0
    assert books.counters.value("never seen here") == 0


def test_tenant_is_behind_until_it_has_its_share_of_what_is_computed() -> None:
    books = Books()
    running = [books.serve(A, uncached=100, output=0) for _ in range(6)]
    books.counters.lift(B, ["a"], 0.0)
    taken = 0
    while books.counters.is_behind("b", 0.5):
        running.append(books.serve(B, uncached=0, output=0))
        taken += 1
    assert taken == 6, "half of what is computed"
    for charge in running:
        charge.on_first_token(0)
        charge.on_end(0)


def test_tenant_that_seldom_sends_may_send_a_burst() -> None:
    books = Books()
    for _ in range(100):
        books.serve(A, uncached=100, output=0).on_first_token(100)
    books.counters.lift(B, ["a"], 100.0)
    sent = 0
    while books.counters.is_behind("b", 0.5):
        RequestCharge(books.counters, "b").on_dispatch(ExpectedCost(100, 0))
        books.counters.on_computed("b")
        sent += 1
        assert sent < 10
    assert sent == BURST + 1


def test_tenants_that_come_together_are_lifted_alike() -> None:
    books = Books()
    for _ in range(100):
        books.serve(A, uncached=100, output=0).on_first_token(100)
    waiting: list[str] = []
    for number in range(20):
        books.counters.lift(Tenant(f"t{number}"), waiting, 100.0)
        waiting.append(f"t{number}")
    assert {books.counters.value(name) for name in waiting} == {9900.0 - BURST * 100.0}
    books.counters.begin("t0", 0.0)
    books.counters.charge("t0", 100.0)
    books.counters.lift(B, waiting, 100.0)
    assert books.counters.value("b") == books.counters.value("t1"), "one after another, too"


def test_counters_are_bounded() -> None:
    books = Books()
    for number in range(2 * MAX_COUNTERS):
        books.serve(Tenant(f"t{number}"), uncached=1, output=0).on_end(0)
        books.serve(A, uncached=1, output=0).on_end(0)
    assert len(books.counters._counters) <= MAX_COUNTERS + 1
