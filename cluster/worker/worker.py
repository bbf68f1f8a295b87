"""One worker: an engine process and the front that speaks for it. Runs with or without Ray.

    front (this process, torch-free)                        engine (its child)
    gRPC asyncio: Decode.Attach, Prefill.Run,  <--socket--> scheduler, step loop
                  Roles.SetRole
    gRPC threads: KV/Pull                      <--arena-->  KV in shared memory
    Redis: lease and load, cache events

Both roles are served by every worker; the role says which of them it is registered for and how its
engine plans a step. It is state (``role_service.py``): a worker can be lent to the other pool.
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

from cluster.settings.worker_settings import WorkerSettings, engine_of
from cluster.worker import metrics
from cluster.worker.event_log import EventLog
from cluster.worker.role_service import Roles
from cluster.worker.utilisation import WallWatch
from decode_worker.service import DecodeService
from engine.ipc import messages as m
from engine.process.client import EngineClient
from kvtransfer.prefill_channels import Prefillers
from kvtransfer.receiver import KVSink
from kvtransfer.receiver_context import Receiver
from kvtransfer.sender import KVSource
from prefill_worker.service import PrefillService
from protocol.block_keys import BLOCK_TOKENS
from protocol.endpoints.grpc_endpoints import Security, server_options
from protocol.endpoints.metrics_server import MetricsServer
from protocol.errors import StartupError
from protocol.registry.directory import (
    Directory,
    ModelInfo,
    RedisError,
    WorkerRecord,
    connect,
    new_instance_id,
)
from protocol.registry.leases import Presence
from protocol.security.cluster_token import AsyncTokenGuard, check_bind
from protocol.wire import wire_pb2_grpc as rpc

# MERGED cluster.worker_record
# A worker as the directory shows it, put together from those who know.


@dataclass(frozen=True)
class Registered:
    """What does not change while a worker is registered. Endpoints are ``host:port``."""

    instance: str
    model: ModelInfo
    endpoint: str
    kv_endpoint: str
    metrics_endpoint: str


def model_info(settings: WorkerSettings, ready: m.Ready) -> ModelInfo:
    """What the others must know of the model."""
    return ModelInfo(
        id=settings.model_id,
        fingerprint=ready.fingerprint,
        precision=ready.kv.precision,
        max_model_len=ready.max_model_len,
        vocab_size=ready.vocab_size,
        kv_bytes_per_token=ready.kv.bytes_per_token,
    )


def worker_record(
    registered: Registered,
    settings: WorkerSettings,
    roles: Roles,
    engine: EngineClient,
    walls: WallWatch,
) -> WorkerRecord:
    """As it is now; without an engine its load is none."""
    session = engine.current
    beat = session.beat if session is not None else m.Beat(0, 0, 0, 0)
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
        queued_tokens=beat.queued_tokens,
        kv_tokens_free=beat.pages_free * BLOCK_TOKENS,
        kv_tokens_total=ready.kv_tokens if ready is not None else 0,
        step_model=beat.step_model,
        pace=beat.pace,
        max_batch=settings.max_batch,
        prefill_chunk=settings.prefill_chunk,
        link_bytes_s=1e9 * (settings.link_gb_per_s or 0.0),
        walls=walls.now(),
    )


log = logging.getLogger("baton.worker")

Say = Callable[[str], None]


class Worker:
    """Life of one worker: ``start``, then ``serve_forever`` or the caller's own wait, ``stop``."""

    def __init__(self, settings: WorkerSettings, say: Say = lambda text: log.info("%s", text)):
        settings.check()
        self.settings = settings
        self.instance = new_instance_id()
        self._say = say
        self._said = ""
        spec = engine_of(settings)
        self._redis = connect(settings.redis_url)
        self._events = EventLog(self._redis, settings.cluster, self.instance)
        self._engine = EngineClient(
            [sys.executable, "-m", settings.engine], spec, self._progress, self._events
        )
        self._security = Security(settings.tls)
        self._source = KVSource(settings.token, self._security)
        self._sink = KVSink(settings.token, self._security)
        prefillers = Prefillers(settings.token, self._security)
        self._receiver = Receiver(self._engine, self._sink, prefillers, settings.kv_codec)
        self._prefill = PrefillService(self._engine, self._source, self._receiver, self.instance)
        self._decode = DecodeService(
            self._engine, self._receiver, settings.local_prefill_tokens, self.instance
        )
        self._roles = Roles(
            *(settings.role, self.instance, self._engine, self._decode),
            lambda: self._presence.renew_now(),
            say,
        )
        self._server: grpc.aio.Server | None = None
        traffic, link = self._receiver.traffic, 1e9 * (settings.link_gb_per_s or 0.0)
        self._walls = WallWatch(self._engine, traffic, settings.kv_codec, link)
        sources = metrics.Sources(
            self.record,
            self._engine,
            traffic,
            self._requests,
            self._walls.machine,
            lambda: self._security.not_after,
            self._roles.flips,
        )
        self._metrics = MetricsServer(metrics.page(metrics.registry(sources)))
        self._registered: Registered | None = None
        self._presence = Presence(Directory(self._redis, settings.cluster).leases, self.record)

    def _progress(self, what: str, fraction: float) -> None:
        """Pass loading steps on, each once; fractions in twentieths."""
        text = f"{what} {int(fraction * 20) * 5}%" if fraction else what
        if text != self._said:
            self._said = text
            self._say(text)

    # ---- life -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the engine, listen, register. Raises StartupError."""
        check_bind(self.settings.host, tls=self.settings.tls is not None)
        began = time.monotonic()
        ready = await self._engine.start()
        registered = self._registered = Registered(
            instance=self.instance,
            model=model_info(self.settings, ready),
            kv_endpoint=self._source.start(self.settings.host, self.settings.kv_port),
            endpoint=await self._listen(),
            metrics_endpoint=await self._metrics.start(
                self.settings.host, self.settings.metrics_port, self.settings.tls
            ),
        )
        try:
            await self._presence.start()
        except RedisError as error:
            raise StartupError(f"cannot register in Redis: {error}") from error
        self._events.start()
        gc.collect()
        gc.freeze()  # what is loaded stays: collections need not walk it while tokens wait
        drafts = "" if ready.speculation == "off" else f", speculation {ready.speculation}"
        self._say(
            f"{self.settings.role} worker {self.instance[:8]} ready on {registered.endpoint} in"
            f" {time.monotonic() - began:.1f} s: {ready.kv_tokens} tokens of KV cache{drafts}"
        )

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
        """Take nothing new, let running requests finish for up to ``drain_s``, then go."""
        await self._drain(drain_s)
        await self._presence.end()
        await self._decode.close()
        self._prefill.close()
        await self._receiver.close()
        if self._server is not None:
            await self._server.stop(grace=1.0)
        await self._metrics.close()
        await asyncio.to_thread(self._source.stop)
        self._sink.close()
        await self._engine.stop()
        await self._events.close()
        await self._redis.aclose()

    async def _drain(self, drain_s: float) -> None:
        """What still runs when the time is over is handed over."""
        self._roles.leave()
        self._prefill.draining = True
        self._decode.drain()
        self._presence.renew_now()  # routers learn of a prefill worker from the directory alone
        deadline = time.monotonic() + drain_s
        while (self._decode.jobs or self._prefill.calls) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)

    async def serve_forever(self) -> None:
        """Until cancelled. Raises StartupError when the engine will not come back."""
        while self.problem() is None:
            await asyncio.sleep(0.5)
        raise StartupError(self.problem() or "")

    def problem(self) -> str | None:
        """What is wrong for good; None while the worker serves or is about to again."""
        return self._engine.problem()

    # ---- directory --------------------------------------------------------------------------

    def record(self) -> WorkerRecord:
        """This worker as the directory shows it."""
        assert self._registered is not None
        return worker_record(
            self._registered, self.settings, self._roles, self._engine, self._walls
        )

    def _requests(self) -> dict[str, int]:
        return {"decode_jobs": self._decode.jobs, "prefill_calls": self._prefill.calls}
