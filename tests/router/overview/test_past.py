from __future__ import annotations

from router.overview.prometheus_text import Moment, parse
from router.overview.rates import APART_S, WINDOW_S, Past


def test_a_window_is_half_a_minute_at_most() -> None:
    past, spans = Past(), []
    for tenth in range(1000):
        now = Moment(tenth / 10)
        before = past.take(now)
        spans.append(None if before is None else now.at - before.at)
    assert spans[:2] == [None, 0.1]
    assert all(WINDOW_S - APART_S <= s <= WINDOW_S for s in spans[301:] if s is not None)
    assert past.kept <= WINDOW_S / APART_S + 1


def test_looks_that_are_far_apart_make_a_window_each() -> None:
    """`baton status` looks once a minute, too."""
    past, far = Past(), 2 * WINDOW_S
    assert past.take(Moment(0.0)) is None
    for i in range(1, 4):
        assert past.take(Moment(i * far)) == Moment((i - 1) * far)
    assert past.kept <= 2
    past.clear()
    assert past.take(Moment(4 * far)) is None


def test_a_process_that_missed_the_first_look_begins_with_the_next_it_is_in() -> None:
    past = Past()
    one, two = parse("a 1"), parse("a 2")
    past.take(Moment(0.0, {"x": one}, frozenset({"y", "z"})))
    past.take(Moment(3.0, {"x": two, "y": one}, frozenset({"z"})))
    past.take(Moment(6.0, {"y": two, "new": one}, frozenset({"x", "z"})))
    assert past.take(Moment(9.0)) == Moment(
        0.0, {"x": one, "y": one, "new": one}, frozenset({"y", "z"}), {"y": 3.0, "new": 6.0}
    )
