"""One worker: an engine process, and the front that serves it on the network.

    front (this process, torch-free)                        engine (its child)
    gRPC asyncio: Decode.Attach, Prefill.Run,  <--socket--> scheduler, step loop
                  Roles.SetRole
    carriers of KV: threads, sockets           <--arena-->  KV in shared memory
    Redis: lease and load, cache events

Every worker serves both roles. Its role says which pool it is registered in and how its engine
plans a step; the role can change, when the worker is lent to the other pool (``role_service``).
Replicas of Ray Serve and `baton worker` create a ``Worker``.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from redis.exceptions import RedisError

from cluster.settings.worker_settings import WorkerSettings
from cluster.worker import metrics
from cluster.worker.carriers import WorkerCarriers
from cluster.worker.event_log import CacheEventLog
from cluster.worker.loading_times import LoadingTimes
from cluster.worker.role_service import RoleService
from cluster.worker.utilisation import UtilisationMonitor
from decode_worker.service import DecodeService
from engine.ipc import messages as m
from engine.process.client import EngineClient
from kvtransfer.receiver_context import KVReceiver, PrefillChannels
from prefill_worker.service import PrefillService
from protocol.block_keys import BLOCK_TOKENS
from protocol.endpoints.grpc_endpoints import EndpointSecurity, server_options
from protocol.endpoints.metrics_server import MetricsServer
from protocol.errors import StartupError
from protocol.registry.directory import (
    Directory,
    ModelInfo,
    WorkerRecord,
    new_instance_id,
)
from protocol.registry.leases import LeaseRenewer
from protocol.registry.redis_client import connect
from protocol.security.cluster_token import AsyncTokenGuard
from protocol.security.listen_hosts import check_worker_host
from protocol.wire import wire_pb2_grpc as rpc

log = logging.getLogger("baton.worker")

Report = Callable[[str], None]


@dataclass(frozen=True)
class WorkerRegistration:
    """The values that stay the same while a worker is registered. Endpoints are ``host:port``."""

    instance: str
    model: ModelInfo
    endpoint: str
    kv_endpoint: str
    metrics_endpoint: str
    max_batch: int
    prefill_chunk: int


class Worker:
    """One worker. Its creator calls ``start``, waits (or calls ``serve_forever``), and ``stop``.

    ``report`` gets a line about each step of the start and each change of the role."""

    def __init__(
        self, settings: WorkerSettings, report: Report = lambda text: log.info("%s", text)
    ) -> None:
        settings.check()
        self.settings = settings
        self.instance = new_instance_id()
        self._report = report
        self._last_progress = ""
        self._loading_times = LoadingTimes()
        self._redis = connect(settings.redis_url)
        self._events = CacheEventLog(self._redis, settings.cluster, self.instance)
        self._engine = EngineClient(
            [sys.executable, "-m", settings.engine_module],
            settings.engine,
            self._report_progress,
            self._events,
        )
        self._security = EndpointSecurity(settings.tls)
        self._carriers = WorkerCarriers(settings, self._security)
        prefillers = PrefillChannels(settings.token, self._security)
        self._receiver = KVReceiver(
            *(self._engine, self._carriers.all, prefillers),
            *(settings.kv_codec, settings.link_bytes_s),
        )
        self._prefill = PrefillService(
            self._engine, self._carriers.all, self._receiver, self.instance
        )
        self._decode = DecodeService(self._engine, self._receiver, self.instance)
        self._roles = RoleService(
            *(settings.role, self.instance, self._engine, self._decode),
            lambda: self._lease.renew_now(),
            report,
        )
        self._server: grpc.aio.Server | None = None
        traffic = self._receiver.traffic
        self._utilisation = UtilisationMonitor(
            self._engine, traffic, settings.kv_codec, settings.link_bytes_s
        )
        sources = metrics.MetricSources(
            self.record,
            self._engine,
            traffic,
            self._request_counts,
            self._utilisation.machine,
            lambda: self._security.not_after,
            self._roles.role_changes,
            self._receiver.links.rows,
        )
        self._metrics = MetricsServer(metrics.render_page(metrics.make_registry(sources)))
        self._registered: WorkerRegistration | None = None
        self._lease = LeaseRenewer(Directory(self._redis, settings.cluster).workers, self.record)

    def _report_progress(self, what: str, fraction: float) -> None:
        """Report steps of loading, each once, with fractions rounded down to 5%."""
        self._loading_times.begin(what)
        text = f"{what} {int(fraction * 20) * 5}%" if fraction else what
        if text != self._last_progress:
            self._last_progress = text
            self._report(text)

    # ---- life -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine, listen and register. Raises StartupError."""
        check_worker_host(self.settings.host, tls=self.settings.tls is not None)
        began, self._loading_times = time.monotonic(), LoadingTimes()
        ready = await self._engine.start()
        loading = self._loading_times.text()
        await self._carriers.start(self.settings.host)
        registered = self._registered = WorkerRegistration(
            instance=self.instance,
            model=_model_info(self.settings, ready),
            kv_endpoint=self._carriers.kv_endpoint,
            endpoint=await self._listen(),
            metrics_endpoint=await self._metrics.start(
                self.settings.host, self.settings.metrics_port, self.settings.tls
            ),
            max_batch=ready.max_batch,
            prefill_chunk=ready.prefill_chunk,
        )
        try:
            await self._lease.start()
        except RedisError as error:
            raise StartupError(f"cannot register in Redis: {error}") from error
        self._events.start()
        gc.collect()
        gc.freeze()  # loaded objects stay: collections need not walk them during decoding
        self._log_ready()
        drafts = "" if ready.speculation == "off" else f", speculation {ready.speculation}"
        self._report(
            f"{self.settings.role} worker {self.instance[:8]} ready on {registered.endpoint} in"
            f" {time.monotonic() - began:.1f} s{loading}: {ready.kv_tokens} tokens of KV"
            f" cache{drafts}"
        )

    def _log_ready(self) -> None:
        """Write the ids by which `baton status` and the supervisor name this worker to its log."""
        session = self._engine.current
        engine = session.process.pid if session is not None else 0
        role, pid = self.settings.role, os.getpid()
        log.info("ready: %s worker %s, pid %d, engine pid %d", role, self.instance, pid, engine)

    async def _listen(self) -> str:
        server = grpc.aio.server(
            options=server_options(), interceptors=[AsyncTokenGuard(self.settings.token)]
        )
        rpc.add_DecodeServicer_to_server(self._decode, server)
        rpc.add_PrefillServicer_to_server(self._prefill, server)
        rpc.add_RolesServicer_to_server(self._roles, server)
        endpoint = self._security.listen(server, self.settings.host, self.settings.port)
        await server.start()
        self._server = server
        return endpoint

    async def stop(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, let running ones finish for up to ``drain_s`` seconds, and end."""
        await self._drain(drain_s)
        await self._lease.end()
        await self._decode.close()
        self._prefill.close()
        await self._receiver.close()
        if self._server is not None:
            await self._server.stop(grace=1.0)
        await self._metrics.close()
        await self._carriers.close()
        await self._engine.stop()
        await self._events.close()
        await self._redis.aclose()

    async def _drain(self, drain_s: float) -> None:
        """Wait for running requests; closing the services hands over those that remain."""
        self._roles.leave()
        self._prefill.draining = True
        self._decode.drain()
        self._lease.renew_now()  # routers learn it of prefill workers from the directory alone
        deadline = time.monotonic() + drain_s
        while (self._decode.request_count or self._prefill.calls) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)

    async def serve_forever(self) -> None:
        """Wait until cancelled. Raises StartupError when the engine cannot be restarted."""
        while self.problem() is None:
            await asyncio.sleep(0.5)
        raise StartupError(self.problem() or "")

    def problem(self) -> str | None:
        """Return why the worker cannot serve any more; None while it serves or restarts itself."""
        return self._engine.problem()

    # ---- directory --------------------------------------------------------------------------

    def record(self) -> WorkerRecord:
        """Return the directory's record of this worker; it has no load while no engine serves."""
        assert self._registered is not None
        registered, roles, session = self._registered, self._roles, self._engine.current
        beat = session.beat if session is not None else m.EngineBeat(0, 0, 0, 0)
        ready = session.ready if session is not None else None
        return WorkerRecord(
            instance=registered.instance,
            role=roles.role,
            home=roles.home,
            changing=roles.changing,
            draining=roles.changing or roles.leaving,
            endpoint=registered.endpoint,
            kv_endpoint=registered.kv_endpoint,
            metrics_endpoint=registered.metrics_endpoint,
            model=registered.model,
            pid=os.getpid(),
            engine_pid=session.process.pid if session is not None else 0,
            running=beat.running,
            waiting=beat.waiting,
            queued_tokens=session.queued_tokens if session is not None else 0,
            kv_tokens_free=beat.pages_free * BLOCK_TOKENS,
            kv_tokens_total=ready.kv_tokens if ready is not None else 0,
            step_model=beat.step_model,
            queued_prompts=session.queued_prompts if session is not None else 0,
            computed_tokens=beat.computed_tokens,
            speculation=beat.profile,
            max_batch=registered.max_batch,
            prefill_chunk=registered.prefill_chunk,
            link_bytes_s=self.settings.link_bytes_s,
            walls=self._utilisation.current(),
        )

    def _request_counts(self) -> dict[str, int]:
        return {
            "decode_jobs": self._decode.request_count,
            "prefill_calls": self._prefill.calls,
            "kv_slots_held": self._slots_held(),
        }

    def _slots_held(self) -> int:
        session = self._engine.current
        if session is None:
            return 0
        granted = session.arena.shape.inbound - len(session.inbound)
        return granted + session.beat.outbound_slots_held


def _model_info(settings: WorkerSettings, ready: m.EngineReady) -> ModelInfo:
    """Return the description of the model that routers and other workers compare."""
    return ModelInfo(
        id=settings.model_id,
        fingerprint=ready.fingerprint,
        precision=ready.kv.precision,
        max_model_len=ready.max_model_len,
        vocab_size=ready.vocab_size,
        kv_bytes_per_token=ready.kv.bytes_per_token,
    )
