"""``DecodeLink``: the gRPC stream to one decode worker, which all requests of this router share.

    down --headers of the worker arrive--> attached --stream ends or falls silent--> down --> closed
                                              |
    submit, cancel --> outbox --writer: one message for all that waits-->   worker
    OutputSink.on_output() <-- reader: never waits for a client <--         worker

A ``WorkerPool`` makes one link for each decode worker. When the stream ends, each request on it
gets ``on_link_lost()`` once and is forgotten here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from typing import Any, Protocol

import grpc
import grpc.aio

from protocol.endpoints.grpc_endpoints import INSTANCE_KEY, LOOPBACK_ONLY, EndpointSecurity
from protocol.liveness import SILENCE_S, SilenceDetector
from protocol.performance.speculation_profile import SpeculationProfile, parse_speculation
from protocol.registry.directory import WorkerRecord
from protocol.security import cluster_token
from protocol.wire import wire_pb2 as pb
from protocol.wire import wire_pb2_grpc as rpc
from router.placement.ledger import DecodeLoad, QueuedPrompts
from router.workers.outbox import Outbox

log = logging.getLogger(__name__)

_CONNECT_S = 5.0
_STALE_S = 1.0  # age of a heartbeat from which the directory's load is preferred
_REASON_S = 0.2  # for the reason of an end to arrive
_RETRY_S = (0.05, 1.0)  # first and longest pause between two attempts

_SPECULATION_FIELDS = SpeculationProfile.__struct_fields__

OnLoad = Callable[[str, QueuedPrompts, int], None]
Call = grpc.aio.StreamStreamCall[pb.RouterMessage, pb.WorkerMessage]


class OutputSink(Protocol):
    """Receives what a worker sends for one request; see ``router/generation/submission.py``."""

    def on_output(self, output: pb.Output) -> bool:
        """Return False when the worker should stop."""

    def on_link_lost(self, reason: str, *, own_pause: bool) -> None:
        """No more output comes: the stream has ended. ``own_pause``: after this process itself had
        stood still, or before the request was written, so that the one is not the other's fault."""


class DecodeLink:
    """The link to one decode worker: ``start`` -> attached and down by turns -> ``close``.

    ``on_change`` is called whenever ``attached`` changes; ``on_load`` with the instance, the prompt
    tokens queued there, the prompts that they are of, and the number of this router's latest
    submits that these do not contain, whenever the worker reports them.
    """

    def __init__(
        self,
        record: WorkerRecord,
        token: str,
        on_change: Callable[[], None],
        on_load: OnLoad = lambda instance, queued, unseen: None,
        security: EndpointSecurity = LOOPBACK_ONLY,
    ) -> None:
        self.record = record
        self.attached = False
        self._metadata = (*cluster_token.token_metadata(token), (INSTANCE_KEY, record.instance))
        self._security = security
        self._on_change = on_change
        self._on_load = on_load
        self._sinks: dict[str, OutputSink] = {}  # requests at the worker, by id
        self._load: pb.Load | WorkerRecord = record
        self._last_record: WorkerRecord | None = None  # whose load was taken last
        self._speculation: SpeculationProfile | None = None
        self._own_at_report = 0
        self.routers = 1  # that are attached to the worker, as it has said
        self._draining = False
        self._heard_at = -math.inf
        self._outbox = Outbox()
        self._written = asyncio.Event()
        self._silence = SilenceDetector()
        self.failed_attempts = 0  # to attach, since the stream was up
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"decode {self.record.endpoint}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def submit(self, message: pb.Submit, sink: OutputSink) -> None:
        """Send a request. Its outputs go to ``sink`` until it ends or is cancelled."""
        assert self.attached
        self._sinks[message.request.id] = sink
        self._outbox.submit(message)
        self._written.set()

    def cancel(self, wire_id: str) -> None:
        """Tell the worker to stop. Does nothing for a request that has ended."""
        if self._sinks.pop(wire_id, None) is not None:
            self._outbox.cancel(wire_id)
            self._written.set()

    def update(self, record: WorkerRecord) -> None:
        """Take a newer record of the directory."""
        self.record = record
        is_news = record != self._last_record  # else the worker has not registered again
        if is_news and time.monotonic() - self._heard_at > _STALE_S:
            self._last_record = record
            self.report(record)

    @property
    def ready(self) -> bool:
        """Whether the worker takes new requests."""
        return self.attached and not (self._draining or self.record.draining)

    @property
    def idle(self) -> bool:
        """Whether no request of this router is at the worker."""
        return not self._sinks

    @property
    def busy(self) -> bool:
        """Whether the worker has requests of any router."""
        return bool(self._sinks) or self._load.running > 0 or self._load.waiting > 0

    @property
    def down(self) -> bool:
        """Whether the worker's engine is being replaced: requests wait there."""
        return isinstance(self._load, pb.Load) and self._load.down

    @property
    def state(self) -> str:
        """Return the state for metrics: ready, draining or down."""
        if not self.attached or self.down:
            return "down"
        return "ready" if self.ready else "draining"

    def load(self) -> DecodeLoad:
        return DecodeLoad(
            own=len(self._sinks),
            reported=self._load.running + self._load.waiting,
            own_at_report=self._own_at_report,
            kv_free=self._load.kv_tokens_free,
            kv_total=self._load.kv_tokens_total,
            speculation=self._speculation,
            kv_unused=self._load.kv_tokens_unused if isinstance(self._load, pb.Load) else 0,
        )

    def report(self, load: pb.Load | WorkerRecord) -> None:
        """Take the load that the worker reports."""
        self._load = load
        self._speculation = _reported_speculation(load)
        if isinstance(load, pb.Load):  # a record says nothing of a stream
            self.routers = load.routers
            counts = load.HasField("submits_seen")
            self._outbox.record_report(load.submits_seen if counts else None)
        unseen = sum(name in self._sinks for name in self._outbox.unseen)
        self._own_at_report = len(self._sinks) - unseen
        self._on_load(self.record.instance, QueuedPrompts.of(load), unseen)

    async def _run(self) -> None:
        try:
            await self._keep_attached()
        finally:
            self._detach("the worker is no longer used")

    async def _keep_attached(self) -> None:
        while True:  # once for each renewal of the certificates
            version = self._security.version
            async with self._security.async_channel(self.record.endpoint) as channel:
                await self._attach_again(rpc.DecodeStub(channel), version)

    async def _attach_again(self, stub: rpc.DecodeAsyncStub, version: int) -> None:
        pause = _RETRY_S[0]
        while version == self._security.version:
            try:
                reason = await self._attach(stub.Attach(metadata=self._metadata))
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                reason = _reason(error)
            except Exception as error:
                log.exception("worker %s: internal error", self.record.endpoint)
                reason = repr(error)
            self.failed_attempts += not self.attached
            if self.attached:
                level = logging.INFO if self._draining else logging.WARNING
                log.log(level, "worker %s: stream ended: %s", self.record.endpoint, reason)
                pause = _RETRY_S[0]
            self._detach(reason)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _RETRY_S[1])

    async def _attach(self, call: Call) -> str:
        """Serve one stream to its end; return or raise the reason."""
        try:
            async with asyncio.timeout(_CONNECT_S):
                await call.initial_metadata()
            if call.done():  # no headers came: it could not connect, or was refused
                return f"{(await call.code()).name} {await call.details()}"
            self.attached, self._draining = True, False
            self.failed_attempts = 0
            self._on_change()
            return await self._serve(call)
        finally:
            call.cancel()

    async def _serve(self, call: Call) -> str:
        """Serve until the stream ends or misses the worker's heartbeats; return the reason."""
        silence = self._silence = SilenceDetector()
        reading = asyncio.create_task(self._read(call, silence))
        writing = asyncio.create_task(self._write(call))
        silent = asyncio.create_task(silence.wait_for_silence(SILENCE_S))
        tasks: list[asyncio.Task[Any]] = [reading, writing, silent]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if silent.done():
                return f"silent for {SILENCE_S:g} s"
            await asyncio.wait([reading], timeout=_REASON_S)
            return reading.result() if reading.done() else "cannot be written to"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _read(self, call: Call, silence: SilenceDetector) -> str:
        while isinstance(message := await call.read(), pb.WorkerMessage):
            silence.heard()
            self._dispatch(message)
        return f"closed by the worker ({(await call.code()).name}) {await call.details()}"

    async def _write(self, call: Call) -> None:
        # A write fails when the stream has ended: the reader gets the reason.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while await self._written.wait():
                self._written.clear()
                await call.write(self._next_message())

    def _next_message(self) -> pb.RouterMessage:
        """Return what waits, up to the size limit of one message; the rest stays in the outbox."""
        message = self._outbox.next_message()
        if self._outbox:
            self._written.set()
        return message

    def _dispatch(self, message: pb.WorkerMessage) -> None:
        for output in message.outputs:
            sink = self._sinks.get(output.id)
            if sink is None:  # was cancelled while this output was on its way
                continue
            if not sink.on_output(output):
                self.cancel(output.id)
            elif output.finish != pb.FINISH_NONE:
                del self._sinks[output.id]
        if message.HasField("load"):
            self._heard_at = time.monotonic()
            self.report(message.load)
        if message.draining:
            self._draining = True

    def _detach(self, reason: str) -> None:
        unwritten = self._outbox.clear()
        self._written.clear()
        self._heard_at = -math.inf
        lost = list(self._sinks.items())
        self._sinks.clear()
        if self.attached:
            self.attached = False
            self._on_change()
        own_pause = self._silence.after_own_pause()
        for wire_id, sink in lost:
            sink.on_link_lost(reason, own_pause=own_pause or wire_id in unwritten)


def _reported_speculation(load: pb.Load | WorkerRecord) -> SpeculationProfile | None:
    """Return what drafts do at the worker; None if nothing drafts, or for impossible values."""
    if isinstance(load, WorkerRecord):
        return parse_speculation(load.speculation)
    if not load.HasField("speculation"):
        return None
    values = {name: getattr(load.speculation, name) for name in _SPECULATION_FIELDS}
    values["accept"] = tuple(values["accept"])
    return parse_speculation(SpeculationProfile(**values))


def _reason(error: grpc.aio.AioRpcError | TimeoutError) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name} {error.details()}"
    return f"no answer within {_CONNECT_S:.0f} s"
