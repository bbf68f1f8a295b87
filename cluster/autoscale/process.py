"""The autoscaler as a process: the loop, its metrics page, its directory entry; with or without
Ray.

start: log, Redis, metrics port --> turns --> stop: lent workers return, the lease, Redis
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
from cluster.autoscale.loans import ROLE_CHANGE_MARGIN_S, GrpcLoanExecutor
from cluster.autoscale.loop import AutoscalerLoop, AutoscalerTurn, LoopDependencies, ScalingPolicy
from cluster.autoscale.metrics import AutoscalerFigures, metrics_page
from cluster.autoscale.replica_counts import ReplicaController
from cluster.local.run_state import cluster_home_path
from cluster.observation.reader import ClusterReader, open_reader
from cluster.settings.autoscaler_settings import AutoscalerSettings
from cluster.sizing.decision import DecisionRecord
from cluster.sizing.policy import decide
from protocol.endpoints.metrics_server import MetricsServer
from protocol.errors import Unavailable
from protocol.registry.directory import AutoscalerRecord, Directory, new_instance_id
from protocol.registry.leases import LeaseRenewer
from protocol.registry.redis_client import connect

log = logging.getLogger("baton.autoscaler")

_LEAST_TTL_S = 10.0
_END_S = 8.0
_LOOK_S = 1.0
_CANCEL_S = 0.5

DecisionPrinter = Callable[[str], None]


class AutoscalerService:
    """start -> turns until stop. ``policy``: makes the decisions, by default Baton's own."""

    def __init__(
        self,
        settings: AutoscalerSettings,
        replicas: ReplicaController,
        say: DecisionPrinter = lambda text: log.info("%s", text),
        policy: ScalingPolicy = decide,
    ) -> None:
        settings.check()
        self.settings = settings
        self.instance = new_instance_id()
        self._say, self._policy, self._replicas = say, policy, replicas
        self._redis = connect(settings.redis_url)
        self._directory = Directory(self._redis, settings.cluster)
        self._loans = GrpcLoanExecutor(self._directory, settings)
        ttl_s = max(
            _LEAST_TTL_S, 3 * settings.interval_s, settings.loan_drain_s + 2 * ROLE_CHANGE_MARGIN_S
        )
        self._lease = ActingLease(self._redis, settings.cluster, ttl_s)
        path = Path(settings.log).expanduser() if settings.log else _default_log(settings.cluster)
        self.log_path = path
        self._log = DecisionLog(path, settings.cluster)
        self._presence = LeaseRenewer(self._directory.autoscalers, self._record)
        self._metrics: MetricsServer | None = None
        self._endpoint = ""
        self._model = settings.model_id
        self._printed: DecisionRecord | None = None
        self._wait_reason = ""  # the reason for waiting before the first turn
        self._task: asyncio.Task[None] | None = None
        self._figures: AutoscalerFigures | None = None

    async def start(self) -> None:
        """Return when the metrics port listens. Raises StartupError."""
        settings = self.settings
        self._log.open()
        acts = settings.mode == "act"
        source = open_reader(settings, self._redis)
        dependencies = LoopDependencies(
            source, self._replicas, self._loans, self._lease if acts else None
        )
        loop = AutoscalerLoop(settings, dependencies, self._log, self._policy, self._on_turn)
        self._figures = AutoscalerFigures(lambda: self._model, self.instance, loop.failures)
        self._figures.is_advisory = not acts
        self._metrics = MetricsServer(metrics_page(self._figures))
        self._endpoint = await self._metrics.start(
            settings.metrics_host, settings.metrics_port, settings.tls
        )
        self._task = asyncio.create_task(self._run(source, loop), name="autoscaler")

    async def _run(self, source: ClusterReader, loop: AutoscalerLoop) -> None:
        while not self._model:
            await self._find_model()
        self._presence.start_later(self.instance)
        async with source:
            await loop.run()

    async def _find_model(self) -> None:
        """Learn which model is served from any worker's record."""
        why = "no worker is registered yet"
        try:
            self._model = next((w.model.id for w in await self._directory.workers.all()), "")
        except (RedisError, OSError, TimeoutError) as error:
            why = f"Redis does not answer: {error}"
        if not self._model:
            if why != self._wait_reason:
                log.warning("waiting: %s", why)
            self._wait_reason = why
            await asyncio.sleep(_LOOK_S)

    async def stop(self) -> None:
        """Stop; may be called twice. Lent workers return to their pools, since nothing else would
        return them."""
        if self._task is not None:
            while not self._task.done():  # a client library may swallow a cancellation
                self._task.cancel()
                await asyncio.wait([self._task], timeout=_CANCEL_S)
            self._task = None
            await self._release()
        await self._presence.end()
        if self._metrics is not None:
            await self._metrics.close()
        self._log.close()
        await self._redis.aclose()

    async def _release(self) -> None:
        if self.settings.mode != "act":
            return
        try:
            async with asyncio.timeout(_END_S + self.settings.loan_drain_s):
                if await self._lease.take():
                    for why in await self._loans.end_all():
                        log.warning("a loan could not be ended: %s", why)
                    await self._lease.release()
        except (Unavailable, TimeoutError) as error:
            log.warning("loans could not be ended: %s", error or "it took too long")

    async def serve_forever(self) -> None:
        """Run until cancelled, or until the loop fails, which is a bug."""
        assert self._task is not None, "start it first"
        await asyncio.shield(self._task)

    def problem(self) -> str | None:
        """Return what is permanently wrong; None while turns continue."""
        if self._task is None or not self._task.done():
            return None
        error = None if self._task.cancelled() else self._task.exception()
        return f"the autoscaler's loop ended: {error!r}"

    def _on_turn(self, turn: AutoscalerTurn) -> None:
        assert self._figures is not None
        self._figures.take(turn)
        text = decision_log.describe_turn(
            turn.record, self._printed, turn.reading.why, self._held_reason(turn)
        )
        if text is not None:
            self._printed = turn.record
            self._say(text)

    def _held_reason(self, turn: AutoscalerTurn) -> str:
        """Return why the loop asks for no other numbers of workers; empty where it does."""
        if not self._replicas.changes:
            return "without Ray the autoscaler cannot start or stop workers"
        return "" if turn.targets_known else "the number of requested workers is unknown"

    def _record(self) -> AutoscalerRecord:
        return AutoscalerRecord(
            instance=self.instance,
            model=self._model,
            metrics_endpoint=self._endpoint,
            pid=os.getpid(),
        )


def _default_log(cluster: str) -> Path:
    """Return the path of the log where no run has a folder: beside the other files of the
    cluster."""
    return cluster_home_path(cluster) / "decisions.jsonl"
