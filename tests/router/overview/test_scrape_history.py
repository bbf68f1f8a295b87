from __future__ import annotations

from router.overview.prometheus_text import MetricsSnapshot, parse_page
from router.overview.rates import MIN_SPACING_S, WINDOW_S, ScrapeHistory


def test_a_window_is_half_a_minute_at_most() -> None:
    past, spans = ScrapeHistory(), []
    for tenth in range(1000):
        now = MetricsSnapshot(tenth / 10)
        before = past.add(now)
        spans.append(None if before is None else now.at - before.at)
    assert spans[:2] == [None, 0.1]
    assert all(WINDOW_S - MIN_SPACING_S <= s <= WINDOW_S for s in spans[301:] if s is not None)
    assert len(past) <= WINDOW_S / MIN_SPACING_S + 1


def test_looks_that_are_far_apart_make_a_window_each() -> None:
    """`baton status` looks once a minute, too."""
    past, far = ScrapeHistory(), 2 * WINDOW_S
    assert past.add(MetricsSnapshot(0.0)) is None
    for i in range(1, 4):
        assert past.add(MetricsSnapshot(i * far)) == MetricsSnapshot((i - 1) * far)
    assert len(past) <= 2
    past.clear()
    assert past.add(MetricsSnapshot(4 * far)) is None


def test_a_process_that_missed_the_first_look_begins_with_the_next_it_is_in() -> None:
    past = ScrapeHistory()
    one, two = parse_page("a 1"), parse_page("a 2")
    past.add(MetricsSnapshot(0.0, {"x": one}, frozenset({"y", "z"})))
    past.add(MetricsSnapshot(3.0, {"x": two, "y": one}, frozenset({"z"})))
    past.add(MetricsSnapshot(6.0, {"y": two, "new": one}, frozenset({"x", "z"})))
    assert past.add(MetricsSnapshot(9.0)) == MetricsSnapshot(
        0.0, {"x": one, "y": one, "new": one}, frozenset({"y", "z"}), {"y": 3.0, "new": 6.0}
    )
