"""The real Prometheus over a real pool: every query of every panel and every rule answers with
data, nothing fires in calm, and each alert fires when its cause is brought about.

Windows of rules are SCALE of what they are in earnest, and so is what an alert waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest

from cluster.monitoring.rules import duration_seconds
from tests.e2e.prometheus_queries import marks, panels, rules
from tests.e2e.prometheus_server import Prometheus, Watch, every_alert, prometheus
from tests.e2e.watched_pool import STRICT, WELL, WatchedPool, load
from tests.system import needs

pytestmark = [pytest.mark.e2e, pytest.mark.system, pytest.mark.timeout(330)]

SCALE = 1 / 30
"""5 minutes are 10 s."""

MOST_DEATHS = 12
"""Of one kind, by which an alert must have fired: a slow machine takes its time between them."""

ENDS = {("BatonCertificateEnds", "ticket"), ("BatonCertificateEnds", "page")}
"""Of the pool's certificate, which is for a day."""

AT_BOUND = {("BatonCorrectionAtBound", "ticket")}
"""Predictions cannot be made wrong at will here, and on a slow machine they may be wrong by
themselves: tests/cluster/monitoring/test_monitoring_autoscaler.py has this alert."""

BEHIND = {("BatonScalingBehind", "ticket")}
"""A slow machine may want more workers than there are while nothing is wrong."""

# ---- what befalls the pool ----------------------------------------------------------------------


def engine_of(pool: WatchedPool, worker: int) -> psutil.Process:
    children = psutil.Process(pool.workers[worker].pid).children(recursive=True)
    return next(p for p in children if "cluster.worker.engine_main" in p.cmdline())


async def counts(server: Prometheus, expr: str, least: float, within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not [s for s in await server.query(expr) if float(s["value"][1]) >= least]:
            await asyncio.sleep(0.2)


@contextlib.contextmanager
def frozen(pid: int | None) -> Iterator[None]:
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def engines_die(pool: WatchedPool, server: Prometheus, watch: Watch) -> None:
    """Of the prefill worker, with prompts under way; Redis stands still meanwhile."""
    with frozen(pool.redis.pid):
        for deaths in range(1, MOST_DEATHS):
            await at_work(server)
            engine_of(pool, 0).kill()
            await counts(server, 'baton_engine_restarts_total{role="prefill"}', deaths)
            await watch.look()
            if watch.has_seen("BatonEngineRestarts", "BatonTransfersFail"):
                break
        await watch.fires("BatonEngineRestarts", "BatonTransfersFail", "BatonIndexStale")


async def workers_die(pool: WatchedPool, server: Prometheus) -> None:
    """The prefill worker; another one is started each time, until three in a row, the first not
    being one of them, came within the window of the alert. The last one stays dead."""
    came: list[float] = []
    while len(came) < 3 or time.time() - came[-3] > 0.7 * duration_seconds("30m") * SCALE:
        assert len(came) < MOST_DEATHS
        replicas = {s["metric"]["replica"] for s in await server.query('up{role="prefill"}')}
        pool.workers[0].kill()
        others = "|".join(replicas)
        await counts(server, f'up{{role="prefill",replica!~"{others}"}}', 1)
        came.append(time.time())
    await pool.mend_no_more()
    pool.workers[0].kill()


async def at_work(server: Prometheus) -> None:
    """Prompts are handed over, and more of them are under way."""
    done = "sum(baton_kv_transfer_seconds_count)"
    [before] = await server.query(done)
    await counts(server, done, float(before["value"][1]) + 2)


# ---- the test -----------------------------------------------------------------------------------


async def test_everything_answers_and_each_alert_fires(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needs("prometheus")
    pool = WatchedPool(tmp_path)
    print(f"\neverything listens on {pool.host}")
    watch_folder = tmp_path / "watch"
    try:
        with prometheus(pool, watch_folder, SCALE) as url:
            await pool.start()
            async with aiohttp.ClientSession() as plain, pool.client() as session:
                server = Prometheus(url, plain)
                shown, recorded, marked = panels(), rules(watch_folder), marks()
                watch = Watch(server, shown | recorded)
                await calm(pool, server, watch, session)
                watch.unanswered = dict(marked)
                await trouble(pool, server, watch, session)
                await the_end(pool, watch)
    finally:
        await pool.close()
    assert watch.fired | AT_BOUND == every_alert()
    assert not watch.unanswered, watch.unanswered
    with capsys.disabled():
        print(
            f"\nanswered: {len(shown)} queries of panels, {len(recorded)} recording rules,"
            f" {len(marked)} annotations; fired: {len(watch.fired)} alerts"
        )


async def calm(
    pool: WatchedPool, server: Prometheus, watch: Watch, session: aiohttp.ClientSession
) -> None:
    # It was there before the pool: what was missing at first is no longer about to be told.
    async with asyncio.timeout(20):
        await counts(server, "count(up == 1)", 5)
        while await server.firing("pending", "firing") != ENDS:
            await asyncio.sleep(0.1)
    async with load(session, pool.urls[WELL], clients=3, prompt=300, tokens=60):
        # A forecast is compared after a minute with what has come.
        await watch.until(lambda: not watch.unanswered, 110)
    assert not watch.unanswered, watch.unanswered
    watch.say("every query has answered")
    assert watch.fired - AT_BOUND - BEHIND == ENDS
    for series in await server.query('{job="baton"}'):
        labels = series["metric"]
        assert {"cluster", "model", "role", "replica", "instance"} <= labels.keys(), labels
        assert not [name for name in labels if name.startswith("exported_")], labels
    ends = await server.query("baton_certificate_not_after_seconds")
    assert {s["metric"]["use"] for s in ends} == {"cluster", "https"}
    roles = sorted(s["metric"]["role"] for s in await server.query("up == 1"))
    assert roles == ["autoscaler", "decode", "prefill", "router", "router"]


async def trouble(
    pool: WatchedPool, server: Prometheus, watch: Watch, session: aiohttp.ClientSession
) -> None:
    well, strict = pool.urls[WELL], pool.urls[STRICT]
    await pool.lend()
    pool.want_too_much()
    async with (
        load(session, strict, clients=3, prompt=100, tokens=20),
        load(session, well, clients=4, prompt=450, tokens=8),
    ):
        await engines_die(pool, server, watch)
        await watch.fires(*(f"Baton{each}BudgetBurns" for each in ("Ttft", "Tpot", "Failure")))
    await workers_die(pool, server)
    async with load(session, well, clients=10, prompt=200, tokens=400):
        await watch.fires("BatonNoPrefillWorker", "BatonKvPoolFull", "BatonSloInfeasible")
        # Not before Prometheus is as old as the alert's window.
        await watch.fires("BatonWorkerFlapping", within_s=duration_seconds("30m") * SCALE)


async def the_end(pool: WatchedPool, watch: Watch) -> None:
    await watch.fires("BatonScalingBehind")
    pool.workers[1].kill()
    await watch.fires("BatonNoDecodeWorker")
    pool.scale_no_more()
    for router in pool.routers:
        router.kill()
    await watch.fires("BatonRouterDown", "BatonTargetDown", "BatonAutoscalerBlind")
