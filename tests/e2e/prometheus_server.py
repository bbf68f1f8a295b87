"""The real Prometheus over a watched pool, and what it has said so far."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp

from cluster.cli.monitoring import MonitoringOptions, scrape_config
from cluster.local.ports import free_ports
from cluster.monitoring.alerts import alert_rules
from cluster.monitoring.files import RuleOptions, write_prometheus
from cluster.monitoring.rules import Windows
from tests.e2e.watched_pool import KEY, WatchedPool
from tests.system import program


class Prometheus:
    """The real one, with what `baton monitoring` writes, but for ``scale``: of the rules' windows.
    Looks once a second."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._session = session

    async def get(self, path: str, **parameters: str) -> Any:
        """``data`` of an answer of its API."""
        async with self._session.get(f"{self._url}/api/v1/{path}", params=parameters) as reply:
            answer = await reply.json()
        assert answer["status"] == "success", (parameters, answer)
        return answer["data"]

    async def query(self, expr: str) -> list[dict[str, Any]]:
        """The series that an expression has now."""
        data = await self.get("query", query=expr)
        return data["result"] if data["resultType"] == "vector" else [{"value": data["result"]}]

    async def firing(self, *states: str) -> set[tuple[str, str]]:
        """(name, severity) of alerts that fire, or that are in one of ``states``."""
        among = states or ("firing",)
        data = await self.get("alerts")
        labels = [alert["labels"] for alert in data["alerts"] if alert["state"] in among]
        return {(each["alertname"], each["severity"]) for each in labels}


@contextlib.contextmanager
def prometheus(pool: WatchedPool, folder: Path, scale: float) -> Iterator[str]:
    """Its URL, on loopback."""
    made = scrape_config(MonitoringOptions(urls=tuple(pool.urls), interval_s=1), pool.config())
    write_prometheus(folder, made, RuleOptions(windows=Windows(scale)), KEY)
    [port] = free_ports("127.0.0.1", 1)
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(10)


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
    return {(alert.name, alert.severity) for alert in alert_rules(Windows())}
