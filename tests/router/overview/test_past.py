from __future__ import annotations

from router.overview.figures import Moment
from router.overview.past import APART_S, WINDOW_S, Past


def test_a_window_is_half_a_minute_at_most() -> None:
    past, spans = Past(), []
    for tenth in range(1000):
        now = Moment(tenth / 10)
        before = past.take(now)
        spans.append(None if before is None else now.at - before.at)
    assert spans[:2] == [None, 0.1]
    assert all(WINDOW_S - APART_S <= s <= WINDOW_S for s in spans[301:] if s is not None)
    assert past.kept <= WINDOW_S / APART_S + 1


def test_after_a_pause_it_begins_anew() -> None:
    past = Past()
    past.take(Moment(0.0))
    assert past.take(Moment(WINDOW_S + 1)) is None
    assert past.take(Moment(WINDOW_S + 2)) == Moment(WINDOW_S + 1)
    past.clear()
    assert past.take(Moment(WINDOW_S + 3)) is None
