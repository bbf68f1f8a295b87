"""Several routers that share workers serve about as well as one."""

from __future__ import annotations

from bench.router.many_routers import SharedPool, SharedPoolPlan


def test_eight_routers_place_as_well_as_one() -> None:
    plan = SharedPoolPlan(1, rate=20.0, seconds=10.0)
    one, eight = SharedPool(plan).run(), SharedPool(plan._replace(routers=8)).run()
    assert one.goodput > 25 and one.hit_rate > 0.4
    assert eight.goodput > 0.97 * one.goodput
    assert eight.hit_rate > 0.97 * one.hit_rate
    assert eight.ttft_p90_s < 2 * one.ttft_p90_s
