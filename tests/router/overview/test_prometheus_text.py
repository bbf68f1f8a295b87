from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from router.generation.metrics import RouterMetrics
from router.overview.prometheus_text import (
    QUANTILE_HISTOGRAMS,
    MetricsPage,
    MetricsSnapshot,
    drop_unused_lines,
    histogram_quantile,
    parse_page,
    sum_samples,
)
from router.overview.rates import RateWindow
from router.placement.snapshot import Objectives

EDGES = (0.1, 0.2, 0.4, 0.8)


class Process:
    """A real registry, as a process has one."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.seconds = Histogram("s", "", ["model"], buckets=EDGES, registry=self.registry)
        self.ended = Counter("ended", "", ["status"], registry=self.registry)
        self.load = Gauge("load", "", ["replica"], registry=self.registry)

    def page(self) -> MetricsPage:
        return parse_page(generate_latest(self.registry).decode())


def test_a_window_counts_what_came_in_it() -> None:
    process = Process()
    process.ended.labels("ok").inc(3)
    before = MetricsSnapshot(10.0, {"a": process.page()})
    process.ended.labels("ok").inc(5)
    process.ended.labels("503").inc()
    now = MetricsSnapshot(12.0, {"a": process.page()})
    window = RateWindow(now, before)
    assert window.seconds == 2
    assert window.count(["a"], "ended_total") == 6
    assert window.rate(["a"], "ended_total", status="ok") == 2.5
    assert window.by(["a"], "ended_total", "status") == {"ok": 5, "503": 1}
    assert RateWindow(now, None).by(["a"], "ended_total", "status") == {"ok": 8, "503": 1}
    assert RateWindow(now, None).rate(["a"], "ended_total") is None


def test_a_process_that_started_anew_counts_from_zero() -> None:
    old, new = Process(), Process()
    old.ended.labels("ok").inc(100)
    new.ended.labels("ok").inc(4)
    window = RateWindow(
        MetricsSnapshot(1.0, {"a": new.page()}), MetricsSnapshot(0.0, {"a": old.page()})
    )
    assert window.count(["a"], "ended_total") == 4


def test_processes_add_up_and_strangers_do_not() -> None:
    one, two = Process(), Process()
    for process, value in ((one, 0.15), (two, 0.3)):
        process.seconds.labels("m").observe(value)
        process.load.labels("x").set(2)
    window = RateWindow(MetricsSnapshot(0.0, {"a": one.page(), "b": two.page()}), None)
    assert window.mean(["a", "b"], "s") == pytest.approx(0.225)
    assert window.mean(["a"], "s", model="other") is None
    assert [count for _, count in window.buckets(["a", "b", "gone"], "s")] == [0, 1, 2, 2, 2]
    assert window.ratio(["a"], "s_count", "s_count") == 1
    assert window.ratio(["a"], "s_count", "absent") is None
    assert sum_samples(one.page(), "load") == 2
    assert sum_samples(one.page(), "load", replica="y") == 0


@given(st.lists(st.floats(0, 0.79), min_size=1, max_size=50), st.floats(0.01, 1))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(values: list[float], q: float) -> None:
    process = Process()
    for value in values:
        process.seconds.labels("m").observe(value)
    found = histogram_quantile(
        RateWindow(MetricsSnapshot(0.0, {"a": process.page()}), None).buckets(["a"], "s"), q
    )
    true = sorted(values)[max(0, math.ceil(q * len(values) - 1e-9) - 1)]
    upper = next(edge for edge in EDGES if true <= edge)
    lower = max((edge for edge in (0.0, *EDGES) if edge < upper), default=0.0)
    assert found is not None
    assert lower - 1e-9 <= found <= upper + 1e-9


@pytest.mark.parametrize(
    ("buckets", "q", "expected"),
    [
        ([], 0.5, None),
        ([(1.0, 0.0), (math.inf, 0.0)], 0.5, None),
        ([(1.0, 10.0), (math.inf, 10.0)], 0.5, 0.5),
        ([(1.0, 0.0), (2.0, 4.0), (math.inf, 4.0)], 0.25, 1.25),
        ([(1.0, 1.0), (2.0, 2.0), (math.inf, 10.0)], 0.9, 2.0),  # above every edge
    ],
)
def test_quantiles(buckets: list[tuple[float, float]], q: float, expected: float | None) -> None:
    assert histogram_quantile(buckets, q) == expected


@pytest.mark.parametrize("text", ["<html>", "a b c d", "a 1\nb{"])
def test_what_is_no_page(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse_page(text)


def test_a_slim_page_has_all_but_some_buckets() -> None:
    metrics = RouterMetrics("m", Objectives(2.0, 0.1), "r")
    text = metrics.page().decode()
    whole, slimmed = parse_page(text), parse_page(drop_unused_lines(text))
    left_out = whole.keys() - slimmed.keys()
    assert left_out and all(name.endswith("_bucket") for name in left_out)
    assert not left_out & {f"{name}_bucket" for name in QUANTILE_HISTOGRAMS}
    assert slimmed == {name: samples for name, samples in whole.items() if name not in left_out}
