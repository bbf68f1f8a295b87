"""The number of requests that a router lets in, by tenant and in all."""

from __future__ import annotations

from contextlib import suppress

import pytest

from bench.lib.settings import router_settings
from router.common.errors import ApiError
from router.placement.admission import (
    TENANT_PLACES,
    AdmissionController,
    AdmissionLimits,
    check_admission_limits,
    check_turn,
)
from tests.router.fairness.works import placement


def flood(admission: AdmissionController, tenant: str, requests: int) -> int:
    """Let in as many of ``requests`` as possible; return their number."""
    entered = 0
    for _ in range(requests):
        with suppress(ApiError):
            admission.enter(tenant)
            entered += 1
    return entered


def test_a_flood_gets_the_places_of_one_tenant_and_another_tenant_still_gets_in() -> None:
    admission = AdmissionController(100)
    assert flood(admission, "flood", 205_824 // 100) == 100
    assert flood(admission, "other", 5) == 5


@pytest.mark.parametrize("tenants", [3, 10, 90])
def test_many_floods_leave_places_to_a_tenant_that_has_none(tenants: int) -> None:
    admission = AdmissionController(100)
    for turn in range(400):  # they take turns, each as long as it gets in
        flood(admission, f"flood {turn % tenants}", 1)
    assert sum(admission.inside.values()) < TENANT_PLACES * 100
    assert flood(admission, "other", 1) == 1


def test_all_tenants_together_are_bounded() -> None:
    admission = AdmissionController(10)
    entered = sum(flood(admission, f"tenant {number}", 100) for number in range(1000))
    assert entered <= TENANT_PLACES * 10


def test_choices_of_one_request_enter_together_or_not_at_all() -> None:
    admission = AdmissionController(3)
    leave = admission.enter("tenant")
    with pytest.raises(ApiError) as refusal:
        admission.check("tenant", 3)
    assert refusal.value.status == 429
    leave()
    admission.check("tenant", 3)


def test_more_choices_than_there_are_places_are_the_mistake_of_the_request() -> None:
    """To try again later would be of no use."""
    with pytest.raises(ApiError, match="has 4 choices in all, and a tenant may have 3") as refusal:
        AdmissionController(3).check_choices(4)
    assert refusal.value.status == 400


def test_places_are_free_again_once() -> None:
    admission = AdmissionController(1)
    leave = admission.enter("tenant")
    leave()
    leave()
    assert not admission.inside
    assert flood(admission, "tenant", 2) == 1


def is_refused(limits: AdmissionLimits, predicted_s: float) -> bool:
    """Whether a request is refused by its turn or by its placement; both decide alike."""
    refused, no_prompt = [], placement()._replace(ttft_s=0.0)
    for check in (
        lambda: check_turn(predicted_s, limits, 0.0),
        lambda: check_admission_limits(no_prompt, limits, 0.0, wait_s=predicted_s),
    ):
        try:
            check()
        except ApiError as error:
            refused.append(error.status)
    assert refused in ([], [429, 429])
    return bool(refused)


def test_default_refuses_only_what_is_too_late_whatever_the_prediction_is_worth() -> None:
    """A burst of long requests on two cores was refused at 20.1 s, with an objective of 2 s."""
    limits = router_settings(ttft_slo_s=2.0).admission_limits
    assert [is_refused(limits, s) for s in (20.1, 39.0, 40.1)] == [False, False, True]


def test_a_deadline_of_the_operator_is_exact() -> None:
    limits = router_settings(ttft_slo_s=2.0, admission_ttft_ms=20_000.0).admission_limits
    assert [is_refused(limits, s) for s in (19.9, 20.1)] == [False, True]


def test_a_bound_of_the_queue_is_exact() -> None:
    limits = router_settings(ttft_slo_s=2.0, admission_queue_ms=1500.0).admission_limits
    assert [is_refused(limits, s) for s in (1.49, 1.51)] == [False, True]
