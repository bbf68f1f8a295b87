"""A pool without Ray: an embedded Redis, routers and workers, each a process.

start -> (kill, stop, restart processes) -> close, after which no process and no port is left
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import aiohttp
import psutil

from cluster.local.ports import free_ports
from cluster.local.redis_server import EmbeddedRedis
from protocol.registry.directory import Directory, WorkerRecord
from protocol.registry.redis_client import connect

_POLL_S = 0.1
_BEAT_S = 0.6  # a little more than between two heartbeats


class Standalone:
    """A running pool; the benchmark or the test that creates it also starts and closes it.

    ``folder`` takes the logs and must have a short path. ``worker_options`` and ``router_options``
    are options of the command line, with ``--routing-policy`` of ``bench.lib.routing_policies``;
    ``each_router`` gives every router options of its own instead. ``redis`` is a server that has
    not been started, in place of the default one. ``environment`` holds further variables
    of all processes.
    """

    def __init__(
        self,
        folder: Path,
        roles: Sequence[str] = ("prefill", "prefill", "decode", "decode"),
        worker_options: Sequence[str] = (),
        router_options: Sequence[str] = (),
        routers: int = 1,
        redis: EmbeddedRedis | None = None,
        each_router: Sequence[Sequence[str]] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.redis = redis or EmbeddedRedis(folder)
        self._log_path = folder / "pool.log"
        self._log = self._log_path.open("ab")
        self._worker_options = worker_options
        self._router_options = list(each_router) or [router_options] * routers
        self._env = {
            **os.environ,
            **environment,
            "OMP_NUM_THREADS": "1",
            "BATON_TOKEN": secrets.token_hex(16),
            "BATON_SECRET": secrets.token_hex(16),
            "BATON_REDIS_URL": self.redis.url,  # it may hold a password: not for `ps`
        }
        self._ports = free_ports("127.0.0.1", len(self._router_options))
        self.roles = list(roles)
        self.workers: list[subprocess.Popen[bytes]] = []
        self.routers: list[subprocess.Popen[bytes]] = []
        self._mending: asyncio.Task[None] | None = None

    @property
    def token(self) -> str:
        """Return the token of the cluster, with which routers and workers call each other."""
        return self._env["BATON_TOKEN"]

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self._ports]

    @property
    def url(self) -> str:
        return self.urls[0]

    async def start(self) -> None:
        """Return when every worker serves and the routers are attached to the decode workers."""
        self.redis.start()
        self.workers = [self._worker(role) for role in self.roles]
        self.routers = [self._router(i) for i in range(len(self._ports))]
        self._mending = asyncio.create_task(self._mend())
        await self.whole()

    async def close(self) -> None:
        if self._mending is not None:
            self._mending.cancel()
            await asyncio.wait([self._mending])
        alive = [*self.workers, *self.routers]
        for process in alive:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()  # its engine ends with it
        for process in alive:
            process.wait()
        self.redis.stop()
        self._log.close()

    def said(self, text: str) -> int:
        """Count how often the processes of the pool have logged ``text``."""
        return self._log_path.read_text(errors="replace").count(text)

    def left(self) -> list[psutil.Process]:
        """Return the processes whose environment has this pool's token."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("BATON_TOKEN") == self._env["BATON_TOKEN"]:
                    found.append(process)
        return found

    def restart_router(self, i: int = 0) -> None:
        """Kill a router with SIGKILL and start it again on its port."""
        self.routers[i].kill()
        self.routers[i].wait()
        self.routers[i] = self._router(i)

    def _router(self, i: int) -> subprocess.Popen[bytes]:
        return self._baton("router", "--port", str(self._ports[i]), *self._router_options[i])

    def _worker(self, role: str) -> subprocess.Popen[bytes]:
        return self._baton("worker", "--role", role, "--threads", "1", *self._worker_options)

    def _baton(self, command: str, *options: str) -> subprocess.Popen[bytes]:
        comparing = "--routing-policy" in options
        program = "bench.lib.routing_policies" if comparing else "cluster.cli.main"
        return subprocess.Popen(
            [sys.executable, "-m", program, command, *options],
            env=self._env,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    async def _mend(self) -> None:
        """Restart workers that have ended, as Ray or an init system does."""
        while True:
            for i, process in enumerate(self.workers):
                if process.poll() is not None:
                    self.workers[i] = self._worker(self.roles[i])
            await asyncio.sleep(_POLL_S)

    # ---- state of the pool ------------------------------------------------------------------

    async def records(self) -> list[WorkerRecord]:
        """Return the workers in the directory whose front and engine processes run here."""
        client = connect(self.redis.url)
        try:
            listed = await Directory(client, "default").workers.all()
        finally:
            await client.aclose()
        pids = {p.pid for p in self.workers if p.poll() is None}
        return [r for r in listed if r.pid in pids and psutil.pid_exists(r.engine_pid)]

    async def whole(self, within_s: float = 60.0) -> None:
        """Wait until every worker serves and is attached, and none drains or lacks an engine."""
        async with asyncio.timeout(within_s), aiohttp.ClientSession() as session:
            while not await self._is_whole(session):
                await asyncio.sleep(_POLL_S)
            await asyncio.sleep(_BEAT_S)  # by then the router knows of engines that are back

    async def _is_whole(self, session: aiohttp.ClientSession) -> bool:
        serving = [r for r in await self.records() if r.engine_pid and not r.draining]
        if sorted(r.role for r in serving) != sorted(self.roles):
            return False
        return await self.attached(session) == self.roles.count("decode")

    async def attached(self, session: aiohttp.ClientSession) -> int:
        """Return the least number of decode workers that are attached to a router."""
        return min([await _attached(session, url) for url in self.urls])


async def _attached(session: aiohttp.ClientSession, url: str) -> int:
    try:
        async with session.get(f"{url}/ready") as response:
            return int((await response.json()).get("decode_workers", 0))
    except aiohttp.ClientError:
        return 0
