"""Requests counted on the pages of routers that listen."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from cluster.observation.reading import TrafficReading
from cluster.observation.router_pages import RouterScraper, keep_counted_metrics
from protocol.endpoints.metrics_server import MetricsServer
from protocol.errors import Unavailable
from protocol.registry.directory import RouterRecord
from router.generation.metrics import ChoiceMetrics, RouterMetrics
from router.placement.snapshot import Objectives
from tests.cluster.observation.records import router

GONE = router("gone", "127.0.0.1:1")


class Router:
    """Its metrics, and a port. ``page``: what it shows in their place."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.metrics = RouterMetrics("m", Objectives(2.0, 0.1), name)
        self.page: bytes | None = None
        self.server = MetricsServer(lambda: self.page or self.metrics.page())
        self.record: RouterRecord = GONE

    async def start(self) -> None:
        self.record = router(self.name, await self.server.start("127.0.0.1", 0))

    def serve(self, requests: int, prompt: int = 100, cached: int = 20, output: int = 5) -> None:
        for _ in range(requests):
            self.metrics.demand.count_arrived([prompt], 1)
            meter = ChoiceMetrics(self.metrics, 0.0, prompt, lambda: 1.0)
            meter.record_tokens(output, cached)
            meter.record_end("ok", [])


@asynccontextmanager
async def routers(*names: str) -> AsyncIterator[list[Router]]:
    made = [Router(name) for name in names]
    for each in made:
        await each.start()
    try:
        yield made
    finally:
        for each in made:
            await each.server.close()


class Clock:
    """Seconds that only the test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def scraper(clock: Callable[[], float] = time.monotonic) -> RouterScraper:
    made = RouterScraper("c", None, interval_s=5.0, window_s=60.0, clock=clock)
    made._sliding._is_full = True  # test_sliding.py tests when it is
    return made


async def begun(of: RouterScraper, *there: RouterRecord) -> None:
    with pytest.raises(Unavailable, match="from now on"):
        await of.read_traffic(there)


def arrivals(look: TrafficReading) -> float:
    return look.mix.rate * look.mix.window_s


def test_only_what_is_counted_is_parsed() -> None:
    metrics = RouterMetrics("m", Objectives(2.0, 0.1), "r")
    lines = keep_counted_metrics(metrics.page().decode()).split("\n")
    assert len(lines) < 140
    assert not any("inter_token" in line or line.startswith("#") for line in lines)


async def test_increases_of_all_routers() -> None:
    async with routers("a", "b") as (a, b):
        of = scraper()
        a.serve(50)  # before anybody looked
        await begun(of, a.record, b.record)
        a.serve(3)
        b.serve(1, prompt=500, cached=100)
        b.metrics.demand.count_refused(2)
        look = await of.read_traffic([a.record, b.record])
    assert arrivals(look) == pytest.approx(6)
    prompt = sum((s.cached + s.uncached) * s.weight for s in look.mix.samples)
    cached = sum(s.cached * s.weight for s in look.mix.samples)
    assert (prompt, cached) == pytest.approx((200, 40))
    pairs = sum(s.cached * s.uncached * s.weight for s in look.mix.samples)
    assert pairs == pytest.approx((3 * 80 * 20 + 400 * 100) / 4)
    assert sum(s.output * s.weight for s in look.mix.samples) == pytest.approx(5)
    assert look.observed.ttft_s == pytest.approx(1.0)
    assert look.observed.tpot_s == pytest.approx(0.0)


async def test_prompts_that_wait_in_routers_are_backlog() -> None:
    async with routers("a", "b", "c") as (a, b, c):
        of = scraper()
        there = [r.record for r in (a, b, c)]
        await begun(of, *there)
        a.metrics.queue.read(lambda: 2, lambda: 3000)
        b.metrics.queue.read(lambda: 1, lambda: 500)
        c.page = b"baton_router_queue_prompt_tokens 1e30\n"
        assert (await of.read_traffic(there)).mix.backlog_tokens == 3500


async def test_a_router_that_started_anew() -> None:
    async with routers("a") as (a,):
        of = scraper()
        a.serve(50)
        await begun(of, a.record)
        a.metrics = RouterMetrics("m", Objectives(2.0, 0.1), "a")
        a.serve(4)
        assert arrivals(await of.read_traffic([a.record])) == pytest.approx(4)


async def test_a_router_that_does_not_answer_is_made_up_for() -> None:
    async with routers("a", "b") as (a, b):
        of = scraper()
        await begun(of, a.record, b.record)
        b.page = b"no page of metrics"
        a.serve(2)
        b.serve(3)
        assert arrivals(await of.read_traffic([a.record, b.record])) == pytest.approx(2)
        b.page = None
        assert arrivals(await of.read_traffic([a.record, b.record])) == pytest.approx(5)


async def test_those_that_are_silent_for_long_are_as_the_others() -> None:
    async with routers("a") as (a,):
        of = scraper(clock := Clock())
        await begun(of, a.record, GONE)
        clock.now += 10.0
        await of.read_traffic([a.record, GONE])
        clock.now += 10.0
        a.serve(2)
        assert arrivals(await of.read_traffic([a.record, GONE])) == pytest.approx(4)
        clock.now += 5.0
        a.serve(3)
        assert arrivals(await of.read_traffic([a.record])) == pytest.approx(7)


async def test_one_that_was_silent_for_long_is_not_counted_twice() -> None:
    """The other one represented it meanwhile, so that what its next page adds has been counted."""
    async with routers("a", "b") as (a, b):
        of = scraper(clock := Clock())
        there = [a.record, b.record]
        await begun(of, *there)
        for page in (None, *[b"baton_requests_received_total ?\n"] * 3, None, None):
            clock.now += 9.0
            b.page = page
            a.serve(2)
            b.serve(2)
            await of.read_traffic(there)
    counted = [interval.arrivals for interval in reversed(of._sliding._counted)]
    assert counted == [4, 2, 4, 4, 2, 4]  # silent for long from the second missing page on


async def test_nothing_is_known_before_the_first_window_is_full_or_after_a_gap() -> None:
    async with routers("a") as (a,):
        of = scraper(clock := Clock())
        await begun(of, a.record)
        clock.now += 5.0
        assert arrivals(await of.read_traffic([a.record])) == 0
        clock.now += 20.0
        a.serve(400)
        with pytest.raises(Unavailable, match="the first window is not full"):
            await of.read_traffic([a.record])


async def test_nobody_answers() -> None:
    of = scraper()
    with pytest.raises(Unavailable, match="no router is registered"):
        await of.read_traffic([])
    with pytest.raises(Unavailable, match="Connection refused"):
        await of.read_traffic([GONE])


@pytest.mark.parametrize(
    "value", ["NaN", "-5", "1e29", "+Inf", "many", "9" * 5000], ids=lambda value: value[:5]
)
async def test_what_no_router_has_is_left_out(value: str) -> None:
    async with routers("a", "b") as (a, b):
        of = scraper()
        labels = '{model="m",role="router"}'
        b.page = f"baton_requests_received_total{labels} 0\n".encode()
        await begun(of, a.record, b.record)
        b.page = f"baton_requests_received_total{labels} {value}\n".encode()
        a.serve(2)
        look = await of.read_traffic([a.record, b.record])
    assert arrivals(look) == pytest.approx(2)


async def test_beyond_this_machine_nobody_is_asked_without_tls() -> None:
    with pytest.raises(Unavailable, match="must use https"):
        await scraper().read_traffic([router("a", "192.0.2.1:9000")])
