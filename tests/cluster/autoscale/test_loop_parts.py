"""What a turn is made of: who acts, how long starts take, calls that block, lines for people."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio as redis
from msgspec.structs import replace

from bench.lib.settings import autoscaler_settings
from cluster.autoscale.acting_lease import ActingLease
from cluster.autoscale.decision_log import describe_turn
from cluster.autoscale.loop import AutoscalerTurn
from cluster.autoscale.metrics import AutoscalerFigures
from cluster.autoscale.process import AutoscalerService
from cluster.autoscale.replica_counts import BlockingCall, FixedReplicas, ReplicaController
from cluster.autoscale.start_times import StartTimeEstimate
from cluster.local.redis_server import EmbeddedRedis
from cluster.observation.reading import ClusterReading
from cluster.sizing.decision import DecisionRecord, Loan
from cluster.sizing.policy import decide
from cluster.sizing.snapshot import RequestMix, WorkerCounts
from protocol.errors import StartupError, Unavailable
from protocol.registry.redis_client import connect
from tests.cluster.autoscale.scaling import SETTINGS, Asked
from tests.cluster.sizing.worlds import mix, snapshot, workers


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[redis.Redis]:
    server = EmbeddedRedis(tmp_path)
    server.start()
    made = connect(server.url)
    yield made
    server.stop()
    await made.aclose()


async def test_one_acts(client: redis.Redis) -> None:
    one, two, other = (ActingLease(client, cluster, 5.0) for cluster in ("c", "c", "d"))
    assert await one.take()
    assert not await two.take()
    assert await other.take()
    assert await one.take(), "it keeps it"
    await two.release()
    assert not await two.take(), "what is another's is not given back"
    await one.release()
    assert await two.take()


async def test_a_lease_ends_with_its_holder(client: redis.Redis) -> None:
    dead, other = (ActingLease(client, "c", ttl_s) for ttl_s in (0.05, 5.0))
    assert await dead.take()
    async with asyncio.timeout(5):
        while not await other.take():
            await asyncio.sleep(0.01)
    assert not await dead.take()


async def test_what_is_no_lease_ends_like_one(client: redis.Redis) -> None:
    """Somebody's value without an end, or a key of another kind, kept all autoscalers away."""
    key = "baton:c:autoscaler:acting"
    for poison in (
        client.set(key, b"x" * 100_000),
        client.set(key, b"x", px=10**12),
    ):
        await poison
        assert not await ActingLease(client, "c", 0.05).take(), "it may be another's"
        async with asyncio.timeout(5):
            while not await ActingLease(client, "c", 5.0).take():
                await asyncio.sleep(0.01)
        await client.delete(key)
    await client.lpush(key, b"x")
    lease = ActingLease(client, "c", 5.0)
    await lease.release()
    assert await lease.take()


async def test_a_full_redis_keeps_the_lease_of_the_one_that_acts(client: redis.Redis) -> None:
    lease = ActingLease(client, "c", 5.0)
    assert await lease.take()
    await client.config_set("maxmemory", "1")
    assert await lease.take()
    await lease.release()
    with pytest.raises(Unavailable):
        await lease.take()


async def test_without_redis_nobody_acts(tmp_path: Path) -> None:
    client = connect(f"unix://{tmp_path}/nobody")
    with pytest.raises(Unavailable, match="Redis does not tell which autoscaler acts"):
        await ActingLease(client, "c", 5.0).take()
    await client.aclose()


def counts(prefill: int, decode: int) -> WorkerCounts:
    return WorkerCounts(prefill=prefill, decode=decode)


def test_starts_are_timed() -> None:
    starts = StartTimeEstimate(60.0)
    starts.observe(workers(1, 1), 0.0)
    starts.record_request(counts(1, 1), counts(1, 3), 10.0)
    starts.observe(workers(1, 2), 18.0)
    assert starts.seconds == 8.0, "the first one counts alone"
    starts.observe(workers(1, 3), 28.0)
    assert starts.seconds == pytest.approx(8.0 + 0.3 * 10.0)
    starts.observe(workers(3, 5), 30.0)  # nobody asked for these
    assert starts.seconds == pytest.approx(11.0)


def test_the_replacement_of_a_dead_worker_is_not_the_start_that_is_awaited() -> None:
    """There is no room for the third decode worker. In an hour, others are replaced."""
    starts = StartTimeEstimate(60.0)
    first, second, third, fourth = workers(0, 4)
    starts.observe((first, second), 0.0)
    starts.record_request(counts(0, 2), counts(0, 3), 10.0)
    starts.observe((first,), 3000.0)
    starts.observe((first, third), 3040.0)
    starts.observe((first, replace(third, state="leaving"), fourth), 3080.0)
    assert starts.seconds == 60.0


def test_who_is_no_longer_asked_for_is_not_awaited() -> None:
    starts = StartTimeEstimate(60.0)
    starts.observe(workers(1, 1), 0.0)
    starts.record_request(counts(1, 1), counts(3, 1), 1.0)
    starts.record_request(counts(3, 1), counts(1, 1), 2.0)
    starts.observe(workers(2, 1), 50.0)
    assert starts.seconds == 60.0
    starts.record_request(counts(1, 1), counts(0, 1), 60.0)  # fewer than were awaited
    starts.record_request(counts(0, 1), counts(1, 1), 100.0)
    starts.observe(workers(3, 1), 9000.0)  # it has never come: this is another one
    assert starts.seconds == 60.0


def test_workers_that_are_gone_for_long_are_forgotten() -> None:
    starts = StartTimeEstimate(60.0)
    first, *others = workers(0, 1000)
    for second, other in enumerate(others):
        starts.observe((first, other), 5.0 * second)
    assert starts._known is not None and len(starts._known) < 200


def test_a_worker_that_the_directory_lost_for_a_while_is_not_new() -> None:
    starts = StartTimeEstimate(60.0)
    starts.observe(workers(0, 2), 0.0)
    starts.record_request(counts(0, 2), counts(0, 3), 10.0)
    starts.observe(workers(0, 1), 20.0)
    starts.observe(workers(0, 2), 320.0)
    starts.observe(workers(0, 3), 330.0)
    assert starts.seconds == 320.0, "the third one"


async def test_a_call_that_blocks_is_left_behind() -> None:
    aside = BlockingCall("somebody")
    assert await aside(lambda: 3, 1.0) == 3
    answers = threading.Event()
    with pytest.raises(Unavailable, match=r"somebody does not answer within 0\.02 s"):
        await aside(answers.wait, 0.02)
    with pytest.raises(Unavailable, match="has not answered an earlier call"):
        await aside(lambda: 3, 1.0)
    answers.set()  # the call has blocked up to here
    async with asyncio.timeout(5):
        while aside._busy:
            await asyncio.sleep(0.01)
    assert await aside(lambda: 4, 1.0) == 4


async def test_what_a_call_raises() -> None:
    aside = BlockingCall("somebody")
    for error in (OSError("full"), TimeoutError("theirs")):

        def fail(error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error), match=str(error)):
            await aside(fail, 1.0)


async def test_without_serve_who_is_there_was_asked_for() -> None:
    there = workers(2, 3)
    gone = replace(there[0], state="leaving")
    lent = replace(there[1], role="decode")
    assert await FixedReplicas().targets((gone, lent, *there[2:])) == counts(1, 3)


def told(
    load: RequestMix | None, before: DecisionRecord | None = None, *, acted: bool = True
) -> DecisionRecord:
    seen = snapshot(1, 1, load)
    return DecisionRecord(
        run="r", number=1, time_s=0.0, acted=acted, snapshot=seen, decision=decide(seen)
    )


def test_lines_for_people() -> None:
    busy = told(mix(40.0))
    said = describe_turn(busy, None)
    assert said is not None and said.startswith("P 1->") and "(demand: " in said
    advised = describe_turn(told(mix(40.0), acted=False), None)
    assert advised == f"{said} [not carried out]"
    assert describe_turn(busy, busy) is None, "it was said, and nobody has done it"
    done = replace(busy, snapshot=replace(busy.snapshot, targets=busy.decision.targets))
    assert describe_turn(busy, done) is not None
    blind = told(None)
    said = describe_turn(blind, None, "no router answers")
    assert said is not None and "wanted: P 1, D 1 (no_metrics: " in said
    assert "(no router answers)" in said
    assert describe_turn(blind, blind) is None
    steady = told(mix(0.01))
    assert describe_turn(steady, blind) is not None
    assert describe_turn(steady, steady) is None


def test_a_line_names_what_is_not_done() -> None:
    """Loans are made without Ray, too; starts and ends are not."""
    busy = told(mix(40.0))
    after = busy.decision.targets
    numbers = f"P 1->{after.prefill}, D 1->{after.decode}"
    said = describe_turn(busy, None, held="nobody starts any")
    assert said is not None
    assert said.endswith(f" [not carried out: {numbers}; nobody starts any]")
    assert describe_turn(busy, None) == said.partition(" [")[0]
    loan = Loan(instance="p0", role="decode")
    lent = replace(busy, decision=replace(busy.decision, loans=(loan,)))
    said = describe_turn(lent, None, held="nobody starts any")
    assert said is not None and said.startswith(f"{numbers}, p0 prefill->decode (")
    assert said.endswith(f" [not carried out: {numbers}; nobody starts any]")
    same = replace(lent, decision=replace(lent.decision, targets=busy.snapshot.targets))
    said = describe_turn(same, None, held="nobody starts any")
    assert said is not None and "not carried out" not in said
    advised = describe_turn(replace(lent, acted=False), None, held="nobody starts any")
    assert advised is not None and advised.endswith(" [not carried out]")


@pytest.mark.parametrize(
    ("replicas", "known", "says"),
    [
        (FixedReplicas(), True, "without Ray the autoscaler cannot start or stop workers"),
        (Asked(1, 1), False, "the number of requested workers is unknown"),
        (Asked(1, 1), True, ""),
    ],
)
def test_an_autoscaler_says_why_nobody_starts(
    replicas: ReplicaController, known: bool, says: str
) -> None:
    said: list[str] = []
    settings = replace(SETTINGS, redis_url="redis://localhost:1")
    scaler = AutoscalerService(settings, replicas, said.append)
    scaler._figures = AutoscalerFigures(lambda: "m", "i", Counter())
    scaler._on_turn(AutoscalerTurn(told(mix(40.0)), ClusterReading(at_s=0.0), known))
    [text] = said
    assert text.endswith(f"; {says}]") if says else "not carried out" not in text, text


def test_settings() -> None:
    settings = autoscaler_settings(
        cluster="c",
        redis_url="redis://:hunter2@localhost:1",
        token="s3cret",
        prometheus_url="http://u:hunter2@h:9090",
    )
    settings.check()
    assert "hunter2" not in repr(settings) and "s3cret" not in repr(settings)
    assert settings.limits.most.total == 16
    assert settings.tuning(9.0).start_s == 9.0
    assert settings.tuning(9.0).down_after_s is None
    with pytest.raises(StartupError, match="BATON_TOKEN"):
        replace(settings, token="").check()
    with pytest.raises(StartupError, match=r"0\.0\.0\.0"):
        replace(settings, metrics_host="0.0.0.0").check()
