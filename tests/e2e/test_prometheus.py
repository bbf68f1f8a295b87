"""The real Prometheus over a real pool: every query of every panel and every rule answers with
data, nothing fires in calm, and each alert fires when its cause is brought about.

Windows of rules are SCALE of what they are in earnest, and so is what an alert waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import yaml

from cluster.monitoring.alerts import alerts
from cluster.monitoring.windows import Windows, seconds
from tests.e2e.watched_pool import STRICT, WELL, Prometheus, WatchedPool, prometheus
from tests.system import needs
from tests.test_docs import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

SCALE = 1 / 20
"""5 minutes are 15 s."""

MOST_DEATHS = 12
"""Of one kind, by which an alert must have fired: a slow machine takes its time between them."""

ENDS = {("BatonCertificateEnds", "ticket"), ("BatonCertificateEnds", "page")}
"""Of the pool's certificate, which is for a day."""

DASHBOARDS = sorted((ROOT / "deploy/grafana").glob("*.json"))
VARIABLES = {"$__rate_interval": "8s", "$__interval": "2s", "$__range": "30s", "$cluster": ".*"}


def panels() -> dict[str, str]:
    """Every query of every panel, as Grafana would send it."""
    found = {}
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                found[f"{path.stem}: {panel['title']} {target['refId']}"] = asked(target["expr"])
    return found


def marks() -> dict[str, str]:
    """What annotates the panels: nothing, until something happens."""
    return {
        f"{path.stem}: {note['name']}": asked(note["expr"])
        for path in DASHBOARDS
        for note in json.loads(path.read_text())["annotations"]["list"]
    }


def asked(expr: str) -> str:
    for name, value in {**VARIABLES, "$model": "baton-demo"}.items():
        expr = expr.replace(name, value)
    assert "$" not in expr, expr
    return expr


def rules(folder: Path) -> dict[str, str]:
    """Every recording rule's series."""
    found = {}
    for rule in yaml.safe_load((folder / "rules/recording.yml").read_text())["groups"][0]["rules"]:
        labels = ",".join(f'{name}="{value}"' for name, value in rule.get("labels", {}).items())
        found[f"rule: {rule['record']}{{{labels}}}"] = f"{rule['record']}{{{labels}}}"
    return found


class Watch:
    """What Prometheus has said since this began: alerts that fired, queries that answered."""

    def __init__(self, server: Prometheus, queries: dict[str, str]) -> None:
        self._server = server
        self.unanswered = dict(queries)
        self.fired: set[tuple[str, str]] = set()
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        print(f"  {time.monotonic() - self._began:5.1f} s  {text}")

    async def look(self) -> None:
        for firing in sorted(await self._server.firing() - self.fired):
            self.say(f"{firing[0]} ({firing[1]})")
            self.fired.add(firing)
        for name, expr in list(self.unanswered.items()):
            if any(_is_number(s["value"][1]) for s in await self._server.query(expr)):
                del self.unanswered[name]

    async def until(self, what: Callable[[], bool], within_s: float) -> None:
        """Look until it is so, or this long."""
        end = time.monotonic() + within_s
        while not what() and time.monotonic() < end:
            await self.look()
            await asyncio.sleep(0.3)

    def has_seen(self, *names: str) -> bool:
        """All of these alerts, of every severity."""
        return {pair for pair in every_alert() if pair[0] in names} <= self.fired

    async def fires(self, *names: str, within_s: float = 40.0) -> None:
        await self.until(lambda: self.has_seen(*names), within_s)
        assert self.has_seen(*names), (names, self.fired)


def _is_number(text: str) -> bool:
    return text != "NaN"


def every_alert() -> set[tuple[str, str]]:
    return {(alert.name, alert.severity) for alert in alerts(Windows())}


# ---- load ---------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def load(
    session: aiohttp.ClientSession, url: str, clients: int, prompt: int, tokens: int
) -> AsyncIterator[None]:
    """Clients that ask again and again, for texts that begin alike; whatever they get."""
    tasks = [asyncio.create_task(_client(session, url, i, prompt, tokens)) for i in range(clients)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _client(
    session: aiohttp.ClientSession, url: str, number: int, prompt: int, tokens: int
) -> None:
    draw = random.Random(number)
    while True:
        text = [7] * 64 + [draw.randrange(3, 4096) for _ in range(prompt - 64)]
        body: dict[str, Any] = {"model": "baton-demo", "prompt": text, "max_tokens": tokens}
        body |= {"temperature": 0, "ignore_eos": True}
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with session.post(f"{url}/v1/completions", json=body) as reply:
                if reply.status != 200:
                    await asyncio.sleep(0.2)
                await reply.read()


# ---- what befalls the pool ----------------------------------------------------------------------


def engine_of(pool: WatchedPool, worker: int) -> psutil.Process:
    children = psutil.Process(pool.workers[worker].pid).children(recursive=True)
    return next(p for p in children if "cluster.engine_main" in p.cmdline())


async def counts(server: Prometheus, expr: str, least: float, within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not [s for s in await server.query(expr) if float(s["value"][1]) >= least]:
            await asyncio.sleep(0.2)


async def engines_die(pool: WatchedPool, server: Prometheus, watch: Watch) -> None:
    """Of the prefill worker, with prompts under way; Redis stands still meanwhile."""
    assert pool.redis.pid is not None
    os.kill(pool.redis.pid, signal.SIGSTOP)
    for deaths in range(1, MOST_DEATHS):
        await at_work(server)
        engine_of(pool, 0).kill()
        await counts(server, 'baton_engine_restarts_total{role="prefill"}', deaths)
        await watch.look()
        if watch.has_seen("BatonEngineRestarts", "BatonTransfersFail"):
            break
    await watch.fires("BatonEngineRestarts", "BatonTransfersFail", "BatonIndexStale")
    os.kill(pool.redis.pid, signal.SIGCONT)


async def workers_die(pool: WatchedPool, server: Prometheus) -> None:
    """The prefill worker; another one is started each time, until three in a row came within the
    window of the alert. The last one stays dead."""
    came = [psutil.Process(pool.workers[0].pid).create_time()]
    while len(came) < 3 or time.time() - came[-3] > 0.7 * seconds("30m") * SCALE:
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
    assert watch.fired == every_alert()
    assert not watch.unanswered, watch.unanswered
    with capsys.disabled():
        print(
            f"\nanswered: {len(shown)} queries of panels, {len(recorded)} recording rules,"
            f" {len(marked)} annotations; fired: {len(watch.fired)} alerts"
        )


async def calm(
    pool: WatchedPool, server: Prometheus, watch: Watch, session: aiohttp.ClientSession
) -> None:
    async with asyncio.timeout(20):
        while await server.firing() != ENDS:
            await asyncio.sleep(0.1)  # it was there before the pool
    async with load(session, pool.urls[WELL], clients=3, prompt=300, tokens=60):
        await watch.until(lambda: not watch.unanswered, 25)
    assert not watch.unanswered, watch.unanswered
    watch.say("every query has answered")
    assert watch.fired == ENDS
    for series in await server.query('{job="baton"}'):
        labels = series["metric"]
        assert {"cluster", "model", "role", "replica", "instance"} <= labels.keys(), labels
        assert not [name for name in labels if name.startswith("exported_")], labels
    ends = await server.query("baton_certificate_not_after_seconds")
    assert {s["metric"]["use"] for s in ends} == {"cluster", "https"}
    roles = sorted(s["metric"]["role"] for s in await server.query("up == 1"))
    assert roles == ["decode", "prefill", "router", "router"]


async def trouble(
    pool: WatchedPool, server: Prometheus, watch: Watch, session: aiohttp.ClientSession
) -> None:
    well, strict = pool.urls[WELL], pool.urls[STRICT]
    async with (
        load(session, strict, clients=3, prompt=100, tokens=20),
        load(session, well, clients=4, prompt=450, tokens=8),
    ):
        await engines_die(pool, server, watch)
        await watch.fires(*(f"Baton{each}BudgetBurns" for each in ("Ttft", "Tpot", "Failure")))
    await workers_die(pool, server)
    async with load(session, well, clients=10, prompt=200, tokens=400):
        await watch.fires("BatonWorkerFlapping", "BatonNoPrefillWorker", "BatonKvPoolFull")


async def the_end(pool: WatchedPool, watch: Watch) -> None:
    pool.workers[1].kill()
    await watch.fires("BatonNoDecodeWorker")
    for router in pool.routers:
        router.kill()
    await watch.fires("BatonRouterDown", "BatonTargetDown")
