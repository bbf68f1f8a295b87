"""What the interference benchmark draws and how it sums up."""

from __future__ import annotations

import msgspec

from bench.interference import UNSPLIT, Bench, Plan, Subject, pool
from bench.mixed_load import Goal, Mix, Seen, arrivals, figures
from cluster.models import demo_path


def test_every_fourth_request_is_long() -> None:
    load = arrivals(Mix(short=5, long=50, output=3), rate=10.0, count=400, seed=1, model="m")
    sizes = [len(msgspec.json.decode(due.body)["prompt"]) for due in load]
    assert sizes == [5, 5, 5, 50] * 100
    assert [due.long for due in load[:4]] == [False, False, False, True]
    assert 32.0 < load[-1].at < 48.0  # 400 at 10 per second, give or take four deviations
    again = arrivals(Mix(short=5, long=50, output=3), rate=10.0, count=400, seed=1, model="m")
    assert again == load


def test_only_what_meets_both_objectives_is_good() -> None:
    good = Seen(False, True, 0.1, 0.01, [0.01] * 98)
    slow = Seen(True, True, 0.1, 0.03, [0.02, 0.5])
    late = Seen(True, True, 2.0, 0.01, [])
    lost = Seen(False, False, float("inf"), float("inf"), [])
    f = figures([good, slow, late, lost], 2.0, Goal(ttft=1.0, tpot=0.02))
    assert (f.goodput, f.answered) == (0.5, 1.5)
    assert (f.itl_p50, f.itl_p99) == (0.01, 0.5)
    assert f.ttft_p99 == float("inf")


async def test_a_pool_that_does_not_split_answers() -> None:
    bench = Bench(Subject("demo", demo_path(), Mix(16, 64, 4)), Plan((), (), (), 1, 8, 1))
    goal = Goal(10.0, 1.0)
    async with pool(bench.subject, UNSPLIT, 32, goal) as running:
        found = await bench.segment(running.url, bench.load(20.0), goal)
    assert found.goodput == found.answered > 0
