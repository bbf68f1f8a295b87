"""One look a turn, with whatever fails."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from cluster.local.redis_server import EmbeddedRedis
from cluster.observation.reader import ClusterReader
from cluster.observation.reading import TrafficReading
from cluster.sizing.snapshot import (
    ObservedLatency,
    PoolLimits,
    RequestMix,
    ScalingTuning,
    SizingMemory,
    SloTargets,
    WorkerCounts,
)
from protocol.errors import Unavailable
from protocol.registry.directory import Directory, RouterRecord, WorkerRecord
from protocol.registry.redis_client import connect
from tests.cluster.observation.records import router, worker

LOOK = TrafficReading(
    RequestMix(rate=3.0, window_s=60.0, samples=(), backlog_tokens=500.0),
    ObservedLatency(ttft_s=0.2),
    100.0,
)


class Told:
    """Counts as they are told. ``error``: why there are none now."""

    stale_s = 15.0

    def __init__(self) -> None:
        self.now = LOOK
        self.error: str | None = None
        self.routers: list[RouterRecord] = []

    async def read_traffic(self, routers: Sequence[RouterRecord]) -> TrafficReading:
        self.routers = list(routers)
        if self.error is not None:
            raise Unavailable(self.error)
        return self.now

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *gone: object) -> None:
        pass


class Case:
    """A reader at 100 s, over a Redis of its own."""

    def __init__(self, client: Any) -> None:
        self.directory = Directory(client, "c")
        self.counts = Told()
        self.now = 100.0
        self.reader = ClusterReader(
            self.directory, self.counts, warm_up_s=30.0, clock=lambda: self.now
        )

    async def register(self, *records: WorkerRecord) -> None:
        for record in records:
            await self.directory.workers.renew(record)


@pytest.fixture
def redis(tmp_path: Path) -> Any:
    (tmp_path / "redis").mkdir()
    server = EmbeddedRedis(tmp_path / "redis")
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def case(redis: EmbeddedRedis) -> Any:
    client = connect(redis.url)
    made = Case(client)
    await made.register(worker("p", "prefill", queued_tokens=70), worker("d", "decode", running=3))
    async with made.reader:
        yield made
    await client.aclose()


async def test_a_reading(case: Case) -> None:
    await case.directory.routers.renew(router("r", "127.0.0.1:1"))
    case.now = 103.0
    reading = await case.reader.read()
    assert reading.mix == RequestMix(
        rate=3.0, window_s=60.0, samples=(), backlog_tokens=570.0, residents=3.0
    )
    assert {w.instance: (w.home, w.state) for w in reading.workers} == {
        "d": ("decode", "serving"),
        "p": ("prefill", "serving"),
    }
    assert set(reading.machines) == {"prefill", "decode"}
    assert (reading.at_s, reading.age_s, reading.why) == (103.0, 3.0, "")
    assert reading.observed == LOOK.observed
    assert [r.instance for r in case.counts.routers] == ["r"]


async def test_the_snapshot_has_all_of_it(case: Case) -> None:
    reading = await case.reader.read()
    none, goals = WorkerCounts(prefill=1, decode=1), SloTargets(ttft_s=1.0, tpot_s=0.1)
    limits, tuning = PoolLimits(least=none, most=none), ScalingTuning()
    snapshot = reading.snapshot(
        goals=goals, targets=none, limits=limits, tuning=tuning, memory=SizingMemory()
    )
    assert (snapshot.mix, snapshot.workers) == (reading.mix, reading.workers)
    assert (snapshot.machines, snapshot.at_s) == (reading.machines, 100.0)


async def test_those_that_come_later_warm_up(case: Case) -> None:
    await case.reader.read()
    await case.register(worker("new", "decode"))
    for case.now, state in ((110.0, "warming"), (139.9, "warming"), (140.1, "serving")):
        reading = await case.reader.read()
        found = {w.instance: w.state for w in reading.workers}
        assert found["new"] == state
        assert found["d"] == "serving"


async def test_old_metrics_are_no_ground_for_a_decision(case: Case) -> None:
    await case.reader.read()
    case.counts.error = "no router shows its metrics"
    case.now = 114.0
    assert (await case.reader.read()).mix is not None
    case.now = 116.0
    reading = await case.reader.read()
    assert (reading.mix, reading.why, reading.age_s) == (None, "no router shows its metrics", 16.0)
    assert len(reading.workers) == 2
    case.counts.error, case.now = None, 117.0  # it answers with what it has, which is old
    assert (await case.reader.read()).why == "metrics are old"


async def test_never_any_metrics(case: Case) -> None:
    case.counts.error = "no router is registered"
    reading = await case.reader.read()
    assert (reading.mix, reading.age_s) == (None, None)
    assert reading.observed == ObservedLatency()


async def test_redis_goes_and_comes(case: Case, redis: EmbeddedRedis) -> None:
    await case.reader.read()
    redis.stop()
    reading = await case.reader.read()
    assert (reading.mix, reading.why) == (None, "Redis does not answer")
    assert len(reading.workers) == 2
    redis.start()
    await case.register(worker("p", "prefill"), worker("d", "decode"))
    reading = await case.reader.read()
    assert reading.mix is not None
    assert {w.state for w in reading.workers} == {"serving"}


async def test_an_emptied_directory_is_no_ground_for_a_decision(case: Case) -> None:
    await case.reader.read()
    for instance in ("p", "d"):
        await case.directory.workers.remove(instance)
    case.now = 101.0
    reading = await case.reader.read()
    assert reading.mix is None
    assert "emptied" in reading.why
    assert len(reading.workers) == 2
    await case.register(worker("d", "decode"))
    case.now = 102.0
    reading = await case.reader.read()
    assert [(w.instance, w.state) for w in reading.workers] == [("d", "serving")]
    assert set(reading.machines) == {"prefill", "decode"}  # as last known


async def test_pools_may_be_empty(case: Case) -> None:
    await case.reader.read()
    for instance in ("p", "d"):
        await case.directory.workers.remove(instance)
    case.now, case.counts.now = 130.0, LOOK._replace(at_s=130.0)
    reading = await case.reader.read()
    assert reading.mix is not None
    assert reading.workers == ()
