"""An autoscaler as a process: the loop, its page, its place in the directory. With or without Ray.

start: log, Redis, metrics port  -->  turns  -->  stop: whom it lent goes home, the lease, Redis
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

from redis.exceptions import RedisError

from cluster.autoscale import decision_log
from cluster.autoscale.acting_lease import ActingLease
from cluster.autoscale.decision_log import DecisionLog
from cluster.autoscale.loans import MARGIN_S, RoleLoans
from cluster.autoscale.loop import Loop, Policy, Turn, World
from cluster.autoscale.metrics import Figures, page
from cluster.autoscale.replica_counts import Replicas
from cluster.local.run_state import home_path
from cluster.observation.reader import Reader, opened
from cluster.settings.autoscaler_settings import AutoscalerSettings
from cluster.sizing.decision import Record
from cluster.sizing.policy import decide
from protocol.endpoints.metrics_server import MetricsServer
from protocol.errors import Unavailable
from protocol.registry.directory import AutoscalerRecord, Directory, connect, new_instance_id
from protocol.registry.leases import Presence

log = logging.getLogger("baton.autoscaler")

_LEAST_TTL_S = 10.0
_END_S = 8.0
_LOOK_S = 1.0
_CANCEL_S = 0.5

Say = Callable[[str], None]


class Autoscaler:
    """start -> turns until stop. ``policy``: who decides, by default Baton's own."""

    def __init__(
        self,
        settings: AutoscalerSettings,
        replicas: Replicas,
        say: Say = lambda text: log.info("%s", text),
        policy: Policy = decide,
    ) -> None:
        settings.check()
        self.settings = settings
        self.instance = new_instance_id()
        self._say, self._policy, self._replicas = say, policy, replicas
        self._redis = connect(settings.redis_url)
        self._directory = Directory(self._redis, settings.cluster)
        self._loans = RoleLoans(self._directory, settings)
        ttl_s = max(_LEAST_TTL_S, 3 * settings.interval_s, settings.loan_drain_s + 2 * MARGIN_S)
        self._lease = ActingLease(self._redis, settings.cluster, ttl_s)
        path = Path(settings.log).expanduser() if settings.log else _default_log(settings.cluster)
        self.log_path = path
        self._log = DecisionLog(path, settings.cluster)
        self._presence = Presence(self._directory.autoscalers, self._record)
        self._metrics: MetricsServer | None = None
        self._endpoint = ""
        self._model = settings.model_id
        self._said: Record | None = None
        self._waits = ""  # what for, before the first turn
        self._task: asyncio.Task[None] | None = None
        self._figures: Figures | None = None

    async def start(self) -> None:
        """Returns when it listens. Raises StartupError."""
        settings = self.settings
        self._log.open()
        acts = settings.mode == "act"
        source = opened(settings, self._redis)
        world = World(source, self._replicas, self._loans, self._lease if acts else None)
        loop = Loop(settings, world, self._log, self._policy, self._hear)
        self._figures = Figures(lambda: self._model, self.instance, loop.failures)
        self._figures.advises = not acts
        self._metrics = MetricsServer(page(self._figures))
        self._endpoint = await self._metrics.start(
            settings.metrics_host, settings.metrics_port, settings.tls
        )
        self._task = asyncio.create_task(self._run(source, loop), name="autoscaler")

    async def _run(self, source: Reader, loop: Loop) -> None:
        while not self._model:
            await self._look()
        self._presence.start_later(self.instance)
        async with source:
            await loop.run()

    async def _look(self) -> None:
        """Which model is served: any worker knows."""
        why = "no worker is registered yet"
        try:
            self._model = next((w.model.id for w in await self._directory.workers()), "")
        except (RedisError, OSError, TimeoutError) as error:
            why = f"Redis does not answer: {error}"
        if not self._model:
            if why != self._waits:
                log.warning("waiting: %s", why)
            self._waits = why
            await asyncio.sleep(_LOOK_S)

    async def stop(self) -> None:
        """Idempotent. Lent workers go home: nobody else would send them."""
        if self._task is not None:
            while not self._task.done():  # a client library may swallow a cancellation
                self._task.cancel()
                await asyncio.wait([self._task], timeout=_CANCEL_S)
            self._task = None
            await self._give_back()
        await self._presence.end()
        if self._metrics is not None:
            await self._metrics.close()
        self._log.close()
        await self._redis.aclose()

    async def _give_back(self) -> None:
        if self.settings.mode != "act":
            return
        try:
            async with asyncio.timeout(_END_S + self.settings.loan_drain_s):
                if await self._lease.take():
                    for why in await self._loans.end():
                        log.warning("a loan is not ended: %s", why)
                    await self._lease.give_back()
        except (Unavailable, TimeoutError) as error:
            log.warning("loans are not ended: %s", error or "it took too long")

    async def serve_forever(self) -> None:
        """Until cancelled, or until it fails, which is a bug."""
        assert self._task is not None, "start it first"
        await asyncio.shield(self._task)

    def problem(self) -> str | None:
        """What is wrong for good; None while turns go on."""
        if self._task is None or not self._task.done():
            return None
        error = None if self._task.cancelled() else self._task.exception()
        return f"the autoscaler's loop ended: {error!r}"

    def _hear(self, turn: Turn) -> None:
        assert self._figures is not None
        self._figures.take(turn)
        said = decision_log.line(turn.record, self._said, turn.reading.why, self._held(turn))
        if said is not None:
            self._said = turn.record
            self._say(said)

    def _held(self, turn: Turn) -> str:
        """Why the loop asks for no other numbers of workers; nothing, where it does."""
        if not self._replicas.changes:
            return "without Ray nobody starts or ends workers"
        return "" if turn.targets_known else "how many are asked for now is not known"

    def _record(self) -> AutoscalerRecord:
        return AutoscalerRecord(
            instance=self.instance,
            model=self._model,
            metrics_endpoint=self._endpoint,
            pid=os.getpid(),
        )


def _default_log(cluster: str) -> Path:
    """Where there is no folder of a run: beside what else there is of the cluster."""
    return home_path(cluster) / "decisions.jsonl"
