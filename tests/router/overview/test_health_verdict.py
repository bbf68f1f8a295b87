"""Whether all is fine, and what is said if not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from router.generation.metrics import RouterMetrics
from router.overview.overview import health_verdict
from router.overview.prometheus_text import MetricsSnapshot, drop_unused_lines, parse_page
from router.overview.rates import RateWindow
from router.overview.router_view import HistogramSummary, RouterView, router_view
from router.overview.worker_view import WorkerView
from router.placement.snapshot import Objectives

NOTHING = HistogramSummary(0, None, None, None, None)
HEALTHY = ("prefill ready", "decode ready")
REACHED = {"ready": {"prefill": 1, "decode": 1}}
NOTHING_ANSWERED = "no decode worker is ready, so no request can be answered"
UNSEEN = "1 decode worker cannot be reached for metrics"
UNSEEN_PREFILL = "1 prefill worker cannot be reached for metrics"


def router(**changes: Any) -> RouterView:
    seen: dict[str, Any] = {
        "replicas": 1,
        "silent": 0,
        "uptime_s": 1.0,
        "running": 0,
        "waiting": 0,
        "requests": {},
        "requests_per_s": 0.0,
        "output_tokens_per_s": 0.0,
        "refusals": {},
        "ttft": NOTHING,
        "tpot": NOTHING,
        "itl": NOTHING,
        "stages": {},
        "hit_ratio": None,
        "objectives": {},
        "slo": {},
        "goodput_per_s": 0.0,
    }
    return RouterView(**{**seen, **changes})


def workers(*wanted: str) -> list[WorkerView]:
    """Of "role state" each."""
    pairs = [each.split() for each in wanted]
    return [
        msgspec.convert({"instance": "i", "target": "t", "role": r, "state": s}, WorkerView)
        for r, s in pairs
    ]


@pytest.mark.parametrize(
    ("there", "seen", "level", "reasons"),
    [
        (HEALTHY, {}, "fine", []),
        (("decode ready",), {}, "fine", []),  # a cluster without prefill workers
        ((*HEALTHY, "decode draining"), {}, "fine", []),
        (HEALTHY, {"requests": {"ok": 9, "cancelled": 3, "400": 2}}, "fine", []),
        (HEALTHY, {"slo": {"ttft": 0.995, "tpot": 1.0, "all": 0.995}}, "fine", []),
        (
            HEALTHY,  # in time, but not whole
            {"slo": {"ttft": 1.0, "tpot": 1.0, "all": 0.9}, "requests": {"ok": 9, "500": 1}},
            "strained",
            ["1 request failed (1 with 500)"],
        ),
        ((), {}, "down", [NOTHING_ANSWERED]),
        (("decode down",), {}, "down", [NOTHING_ANSWERED, "1 decode worker without an engine"]),
        # Routers answer with workers whose pages nobody has.
        (("prefill ready", "decode silent"), REACHED, "strained", [UNSEEN]),
        (("prefill ready", "decode silent"), {}, "strained", [UNSEEN]),
        (("prefill silent", "decode ready"), REACHED, "strained", [UNSEEN_PREFILL]),
        # And not with workers that look well, and that they do not reach.
        (HEALTHY, {"ready": {"prefill": 1, "decode": 0}}, "down", [NOTHING_ANSWERED]),
        (HEALTHY, {**REACHED, "cut_off": 1}, "strained", ["1 router without a decode worker"]),
        (
            ("prefill draining", "decode ready"),
            {},
            "strained",
            ["no prefill worker is ready, so decode workers compute prompts"],
        ),
        (
            (*HEALTHY, "decode down", "decode down"),
            {},
            "strained",
            ["2 decode workers without an engine"],
        ),
        (HEALTHY, {"silent": 2}, "strained", ["2 routers cannot be reached for metrics"]),
        (
            HEALTHY,
            {"requests": {"ok": 5, "500": 1, "503": 2}},
            "strained",
            ["3 requests failed (1 with 500, 2 with 503)"],
        ),
        (
            HEALTHY,
            {"refusals": {"queue": 2, "ttft": 1}},
            "strained",
            ["3 requests refused because of overload"],
        ),
        (
            HEALTHY,
            {"slo": {"ttft": 0.8, "tpot": 0.96, "all": 0.76}},
            "strained",
            ["requests: 20% over the TTFT objective, 4.0% over the TPOT objective"],
        ),
    ],
)
def test_the_reasons(
    there: tuple[str, ...], seen: dict[str, Any], level: str, reasons: list[str]
) -> None:
    found = health_verdict(router(**seen), workers(*there), 30.0)
    assert (found.level, found.reasons) == (level, reasons)


def test_what_went_wrong_before_the_window_is_over() -> None:
    seen = router(requests={"500": 1}, refusals={"queue": 1}, slo={"ttft": 0.0, "all": 0.0})
    assert health_verdict(seen, workers(*HEALTHY), None).level == "fine"
    assert health_verdict(seen, workers(*HEALTHY), 30.0).level == "strained"


def told(*decode: int) -> RouterView:
    """Of routers that say how many decode workers they reach; the last one is silent."""
    metrics = [RouterMetrics("m", Objectives(2.0, 0.1), "r") for _ in decode]
    for each, ready in zip(metrics, decode, strict=True):
        each.set_replicas(
            {("decode", "ready"): ready, ("decode", "down"): 5, ("prefill", "ready"): 3}
        )
    pages = {
        str(i): parse_page(drop_unused_lines(each.page().decode()))
        for i, each in enumerate(metrics)
    }
    now = MetricsSnapshot(0.0, pages)
    return router_view([*pages, "silent"], now, RateWindow(now, None), 1e9)


def test_whom_routers_reach() -> None:
    assert (told(2, 4).ready, told(2, 4).cut_off) == ({"prefill": 3, "decode": 4}, 0)
    assert (told(0, 4).ready["decode"], told(0, 4).cut_off) == (4, 1)
    assert (told(0, 0).ready["decode"], told(0, 0).cut_off) == (0, 0)
    assert told().ready == {}
