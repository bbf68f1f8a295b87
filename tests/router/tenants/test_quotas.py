"""Requests, tokens and concurrency of a tenant, on a clock of the test."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from router.common.errors import ApiError
from router.tenants.quotas import TenantQuotas, format_reset
from router.tenants.rate_bucket import RateBucket
from router.tenants.tenant import Tenant, TenantLimits
from router.tenants.usage import TenantUsage


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def tenant(**limits: int) -> Tenant:
    return Tenant("acme", limits=TenantLimits(**limits))


def refused(error: pytest.ExceptionInfo[ApiError]) -> tuple[int, str | None, str]:
    return error.value.status, error.value.code, error.value.headers.get("retry-after", "")


def test_bucket_gives_its_limit_in_a_minute_whatever_is_asked() -> None:
    rng = random.Random(1)
    for _ in range(50):
        limit, now, taken = rng.randint(1, 100_000), 5.0, 0.0
        bucket = RateBucket(limit, now)
        while now < 605.0:
            now += rng.expovariate(3)
            if bucket.level(now) >= 1:
                amount = rng.uniform(0, limit / 20)
                bucket.take(amount, now)
                taken += amount
        minutes = (now - 5.0) / 60
        assert 0.9 * minutes * limit < taken <= (1 + minutes) * limit + limit / 20


def test_time_that_runs_backwards_gives_nothing() -> None:
    bucket = RateBucket(60, 100.0)
    bucket.take(60, 100.0)
    assert bucket.level(50.0) == 0
    assert bucket.level(100.0) == 0
    assert bucket.level(101.0) == pytest.approx(1)


def test_debt_of_ones_own_is_paid_and_that_of_reports_is_bounded() -> None:
    own, reported = RateBucket(60, 0.0), RateBucket(60, 0.0)
    own.take(6000, 0.0)
    reported.take_reported(1e300, 0.0)
    reported.take_reported(1e300, 0.0)
    assert own.wait_s(1, 0.0) == pytest.approx(99 * 60 + 1)
    assert reported.wait_s(1, 0.0) == pytest.approx(10 * 60 + 1)
    own.take_reported(60, 0.0)
    assert own.level(0.0) == -5940, "a report pays no debt off"


def test_another_limit_keeps_what_was_used() -> None:
    bucket = RateBucket(60, 0.0)
    bucket.take(50, 0.0)
    bucket.change_limit(120, 0.0)
    assert bucket.level(0.0) == 70
    bucket.change_limit(20, 0.0)
    assert bucket.level(0.0) == -30


def test_requests_per_minute(clock: Clock) -> None:
    quotas, acme = TenantQuotas(clock), tenant(requests_per_minute=3)
    for _ in range(3):
        quotas.check_rates(acme)
    for _ in range(5):  # refused ones take nothing
        with pytest.raises(ApiError, match=r"3 requests per minute .* try again in 20s") as error:
            quotas.check_rates(acme)
        assert refused(error) == (429, "rate_limit_exceeded", "20")
    clock.now += 20
    quotas.check_rates(acme)
    with pytest.raises(ApiError):
        quotas.check_rates(acme)


def test_tokens_are_taken_as_they_come_and_debt_is_waited_for(clock: Clock) -> None:
    quotas, acme = TenantQuotas(clock), tenant(tokens_per_minute=600)
    quotas.check_rates(acme)
    quotas.take_prompt(acme, 500)
    quotas.check_rates(acme)  # 100 are left
    quotas.take_prompt(acme, 500)
    quotas.take_tokens(acme, 200)
    calls: list[Callable[[], None]] = [
        lambda: quotas.check_rates(acme),
        lambda: quotas.take_prompt(acme, 1),
    ]
    for call in calls:
        with pytest.raises(ApiError, match=r"600 tokens per minute .* try again in 1m1s") as error:
            call()
        assert refused(error) == (429, "rate_limit_exceeded", "61")
    quotas.take_tokens(acme, -500)  # of a request that no worker has computed
    assert quotas.headers(acme)["x-ratelimit-reset-tokens"] == "1m10s"
    clock.now += 10.1
    quotas.check_rates(acme)


def test_a_prompt_longer_than_a_minutes_tokens_is_refused_for_good(clock: Clock) -> None:
    quotas, acme = TenantQuotas(clock), tenant(tokens_per_minute=600)
    with pytest.raises(ApiError, match="601 tokens, more than the 600") as error:
        quotas.take_prompt(acme, 601)
    assert error.value.status == 400
    assert quotas.headers(acme)["x-ratelimit-remaining-tokens"] == "600"


def test_a_refusal_for_tokens_takes_no_request(clock: Clock) -> None:
    quotas, acme = TenantQuotas(clock), tenant(requests_per_minute=2, tokens_per_minute=60)
    quotas.check_rates(acme)
    quotas.take_prompt(acme, 60)
    for _ in range(4):
        with pytest.raises(ApiError, match="tokens per minute"):
            quotas.check_rates(acme)
    assert quotas.headers(acme)["x-ratelimit-remaining-requests"] == "1"


def test_concurrency_counts_choices_here_and_elsewhere(clock: Clock) -> None:
    quotas, acme = TenantQuotas(clock), tenant(concurrency=4)
    with pytest.raises(ApiError, match="5 choices at once are more than the 4") as error:
        quotas.check_concurrency(acme, 5)
    assert error.value.status == 400, "waiting would not help"
    quotas.enter(acme, 2)
    quotas.set_running_elsewhere({"acme": 1, "other": 7})
    with pytest.raises(ApiError, match="3 choices are running, at most 4") as error:
        quotas.enter(acme, 2)
    assert refused(error) == (429, "rate_limit_exceeded", "1")
    quotas.enter(acme, 1)
    assert quotas.running() == {"acme": 3}
    quotas.leave(acme, 3)
    quotas.set_running_elsewhere({})
    assert quotas.running() == {}
    quotas.enter(acme, 4)


def test_what_others_served_is_taken_from_the_first_report_on(clock: Clock) -> None:
    quotas = TenantQuotas(clock)
    acme = tenant(requests_per_minute=10, tokens_per_minute=100)
    quotas.on_others("acme", TenantUsage(5, 50, 20))  # before it is known
    quotas.set_tenants([acme, Tenant("unlimited")])
    quotas.on_others("acme", TenantUsage(4, 30, 20))
    quotas.on_others("unlimited", TenantUsage(10**6, 10**9, 10**9))
    headers = quotas.headers(acme)
    assert headers["x-ratelimit-remaining-requests"] == "6"
    assert headers["x-ratelimit-remaining-tokens"] == "50"
    quotas.check_rates(Tenant("unlimited"))


def test_headers_are_openais(clock: Clock) -> None:
    quotas, acme = TenantQuotas(clock), tenant(requests_per_minute=60, tokens_per_minute=6000)
    quotas.check_rates(acme)
    quotas.take_prompt(acme, 40)
    assert quotas.headers(acme) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "5960",
        "x-ratelimit-reset-tokens": "400ms",
    }
    assert quotas.headers(Tenant("unlimited")) == {}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ms"),
        (0.0171, "17ms"),
        (0.9999, "1s"),
        (8.64, "8.64s"),
        (59.9999, "1m0s"),
        (360, "6m0s"),
        (360.2, "6m1s"),
        (3690, "1h1m30s"),
    ],
)
def test_resets_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert format_reset(seconds) == text


def test_limits_that_change_in_the_file_hold_for_the_next_request(clock: Clock) -> None:
    quotas = TenantQuotas(clock)
    quotas.check_rates(tenant(requests_per_minute=1))
    with pytest.raises(ApiError):
        quotas.check_rates(tenant(requests_per_minute=1))
    quotas.check_rates(tenant(requests_per_minute=2))
    with pytest.raises(ApiError):
        quotas.check_rates(tenant(requests_per_minute=2))
    quotas.check_rates(tenant())


def test_request_from_before_a_change_does_not_bring_its_limits_back(clock: Clock) -> None:
    quotas, before, now = TenantQuotas(clock), tenant(), tenant(requests_per_minute=1)
    quotas.enter(before, 2)
    quotas.set_tenants([now])
    quotas.check_rates(now)
    quotas.leave(before, 2)
    quotas.take_tokens(before, 100)
    with pytest.raises(ApiError):
        quotas.check_rates(now)
    assert not quotas.running()


def test_tenants_that_are_gone_are_forgotten(clock: Clock) -> None:
    quotas = TenantQuotas(clock)
    for number in range(100):
        quotas.check_rates(Tenant(f"t{number}"))
    quotas.enter(Tenant("t7"), 1)
    quotas.set_tenants([Tenant("t1")])
    assert set(quotas._quotas) == {"t1", "t7"}
    quotas.leave(Tenant("t7"), 1)
    quotas.set_tenants([Tenant("t1")])
    assert set(quotas._quotas) == {"t1"}
