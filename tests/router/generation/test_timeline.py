from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from router.generation.submission import event_timeline, ttft_stages

MARKS = {
    "prefill_queued": 0.01,
    "prefill_started": 0.03,
    "first_token": 0.10,
    "kv_ready": 0.15,
    "decode_started": 0.16,
    "finished": 0.5,
}


def attempt(submitted: float, first_s: float | None, **marks: float) -> Any:
    return SimpleNamespace(submitted=submitted, first_token_s=first_s, timeline=marks)


def test_stages_of_a_hand_over() -> None:
    found = ttft_stages(100.0, 0.125, [attempt(100.02, 0.104, **MARKS)])
    expected = {"route": 0.02, "queue": 0.03, "prefill": 0.07, "first_emit": 0.005}
    after = {"wire": 0.05, "scatter": 0.01}
    assert found == pytest.approx(expected | after)
    assert sum(expected.values()) == pytest.approx(0.125)


def test_what_failed_before_counts_as_routing() -> None:
    dead = attempt(100.0, None, prefill_queued=0.01)
    second = attempt(103.0, 0.2, prefill_started=0.05, first_token=0.15)
    resumed = attempt(110.0, 0.1, prefill_started=0.01, first_token=0.05)
    found = ttft_stages(100.0, 3.2, [dead, second, resumed])
    assert found == pytest.approx({"route": 3, "queue": 0.05, "prefill": 0.1, "first_emit": 0.05})


@pytest.mark.parametrize("tried", [[], [attempt(1.0, None)], [attempt(1.0, 0.5)]])
def test_a_worker_that_did_not_tell(tried: list[Any]) -> None:
    assert ttft_stages(1.0, 0.5, tried) == {}


def test_a_timeline_is_in_order() -> None:
    found = event_timeline(100.0, [attempt(100.02, 0.104, **MARKS)])
    assert list(found) == ["arrived", "routed", *MARKS]
    assert found["finished"] == pytest.approx(0.52)
    assert event_timeline(1.0, []) == {"arrived": 0.0}
