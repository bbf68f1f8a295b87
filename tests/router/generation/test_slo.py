"""Which requests count for objectives, and how."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.generation.metrics import ChoiceMetrics, RouterMetrics
from router.generation.submission import RequestTimes, slo_verdicts
from router.placement.snapshot import Objectives

GOALS = Objectives(ttft_s=2.0, tpot_s=0.1)
MET_ALL = {"ttft": True, "tpot": True, "all": True}
NO_TOKEN, GIVEN_UP_LATE = RequestTimes(0.5), RequestTimes(30.0)


@pytest.mark.parametrize(
    ("status", "times", "expected"),
    [
        ("ok", RequestTimes(9.0, 1.0, 0.05), MET_ALL),
        ("ok", RequestTimes(9.0, 3.0, 0.05), {"ttft": False, "tpot": True, "all": False}),
        ("ok", RequestTimes(9.0, 1.0, 0.2), {"ttft": True, "tpot": False, "all": False}),
        ("ok", RequestTimes(1.0, 1.0), {"ttft": True, "all": True}),
        ("ok", GIVEN_UP_LATE, {}),  # only the prompt was wanted
        # Failed after some tokens, however quick these were.
        ("500", RequestTimes(9.0, 1.0, 0.05), MET_ALL | {"all": False}),
        ("503", RequestTimes(1.0, 1.0), {"ttft": True, "all": False}),
        # Hung up after some tokens: nobody knows what would have become of it, or it had missed.
        ("cancelled", RequestTimes(9.0, 1.0, 0.05), {"ttft": True, "tpot": True}),
        ("cancelled", RequestTimes(9.0, 3.0), {"ttft": False, "all": False}),
        # Without a token.
        ("cancelled", NO_TOKEN, {}),
        ("cancelled", GIVEN_UP_LATE, {"ttft": False, "all": False}),
        ("503", NO_TOKEN, {"all": False}),
        ("503", GIVEN_UP_LATE, {"ttft": False, "all": False}),
        ("504", NO_TOKEN, {"ttft": False, "all": False}),
        ("429", NO_TOKEN, {}),
        ("429", GIVEN_UP_LATE, {"ttft": False, "all": False}),
        ("400", GIVEN_UP_LATE, {}),
        ("408", GIVEN_UP_LATE, {}),
    ],
)
def test_what_counts(status: str, times: RequestTimes, expected: dict[str, bool]) -> None:
    assert slo_verdicts(status, times, GOALS) == expected


class Case:
    """A request on a clock of its own; it arrives at 0."""

    def __init__(self) -> None:
        self.now = 0.0
        self._metrics = RouterMetrics("m", GOALS)
        self.meter = ChoiceMetrics(self._metrics, 0.0, 10, lambda: self.now)

    def tokens(self, at: float, count: int = 1) -> None:
        self.now = at
        self.meter.record_tokens(count, 0)

    def ended(self, status: str, at: float) -> dict[str, bool]:
        """Objectives that it was weighed by, and whether they were met."""
        self.now = at
        self.meter.record_end(status, [])
        count: dict[str, dict[str, float]] = {
            "baton_slo_requests_total": {},
            "baton_slo_met_total": {},
        }
        for family in text_string_to_metric_families(self._metrics.page().decode()):
            for sample in family.samples:
                if sample.name in count:
                    count[sample.name][sample.labels["slo"]] = sample.value
        of, met = count.values()
        return {slo: bool(met[slo]) for slo in of if of[slo]}


def test_a_client_that_waits_in_vain_is_counted() -> None:
    assert Case().ended("cancelled", at=30.0) == {"ttft": False, "all": False}
    assert Case().ended("cancelled", at=1.0) == {}


def test_a_pool_that_is_stuck_after_the_first_token_is_counted() -> None:
    case = Case()
    case.tokens(at=1.0)
    assert case.ended("cancelled", at=30.0) == {"ttft": True, "tpot": False, "all": False}


def test_who_hangs_up_between_two_tokens_has_not_waited() -> None:
    case = Case()
    case.tokens(at=1.0)
    case.tokens(at=1.05)
    assert case.ended("cancelled", at=1.1) == {"ttft": True, "tpot": True}


def test_a_choice_that_is_complete_waits_for_nothing() -> None:
    """Another one of the same request goes on for long, and is given up."""
    case = Case()
    case.tokens(at=1.0)
    case.tokens(at=1.2, count=4)
    case.meter.record_completion()
    assert case.ended("cancelled", at=30.0) == {"ttft": True, "tpot": True}


def test_an_answer_that_breaks_off_is_no_goodput() -> None:
    case = Case()
    case.tokens(at=1.0)
    case.tokens(at=1.2, count=3)
    assert case.ended("500", at=1.25) == {"ttft": True, "tpot": True, "all": False}
