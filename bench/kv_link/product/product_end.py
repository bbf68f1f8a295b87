"""The product's own path: a worker's front and its engine process at each end.

    receiver: ``PrefillRunCall``, ``InboundTransfer``, carriers      engine: the copy thread, a pool
    sender:   ``PrefillService``, carriers                           engine: the same

Only the model and the scheduler are left out (``pool_engine``). A run is timed from when the prompt
is computed and pages are there, so that credits may be granted, until the sequence has joined.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar, cast

import grpc

from bench.kv_link.product.filled_slots import FilledSlotsClient
from bench.kv_link.product.pool_engine import CHECK, PACED, POOLS, ready_of
from bench.kv_link.product.shapes import SHAPES
from bench.lib.settings import worker_settings
from cluster.worker.carriers import WorkerCarriers
from engine.ipc import messages as m
from engine.process.client import EngineClient
from kvtransfer.carrier import Carrier
from kvtransfer.credits import InboundSlots
from kvtransfer.links import LinkTable
from kvtransfer.prefill_call import PrefillRunCall
from kvtransfer.receiver_context import KVReceiver, PrefillChannels, ReceiverContext
from kvtransfer.traffic import TrafficCounter
from prefill_worker.service import PrefillService
from protocol.block_keys import BLOCK_TOKENS
from protocol.endpoints.grpc_endpoints import EndpointSecurity, server_options
from protocol.requests import Finish, Logprobs, Request
from protocol.sampling_params import SamplingParams
from protocol.security.cluster_token import AsyncTokenGuard
from protocol.security.tls import TlsFiles
from protocol.wire import wire_pb2_grpc as rpc

START_S = 60.0
RUN_S = 50.0
FRAME_S = 5.0
CARRIERS = ("local", "nixl", "nccl", "tcp")
"""Those to measure, beside gRPC. ``nccl`` is its code over gloo where there is no GPU."""

INSTANCE = "sender"
TOKEN = "token-of-the-benchmark"

T = TypeVar("T")


class ProductEnd:
    """Runs one ``LinkWorker`` on an event loop of its own."""

    def __init__(self, sending: bool) -> None:
        self._sending = sending
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._worker: LinkWorker | None = None

    def open(self, options: dict[str, Any]) -> dict[str, Any]:
        """Start the worker. ``options``: "shape", the paths of ``TlsFiles`` as "tls", and whether
        the worker has an "engine" process."""
        tls = TlsFiles(**options["tls"]) if options.get("tls") else None
        self._worker = LinkWorker(
            options["shape"], tls, sending=self._sending, has_engine=options["engine"]
        )
        self._wait_for(self._worker.start(), START_S)
        return {"endpoint": self._worker.endpoint, "carriers": self._worker.carriers}

    def connect(self, other: dict[str, Any]) -> None:
        assert self._worker is not None
        self._worker.sender_endpoint = other["endpoint"]

    def run(self, job: dict[str, Any]) -> dict[str, Any] | None:
        """Receive one transfer; the sender's end only serves. ``job``: "carrier", "codec", and
        "mode", the id of the request."""
        if self._sending:
            return None
        assert self._worker is not None
        return self._wait_for(self._worker.receive(job), RUN_S)

    def digest(self, job: dict[str, Any]) -> int:
        """Return 0: a run in the mode CHECK compares the pools."""
        return 0

    def close(self) -> None:
        if self._worker is not None:
            with contextlib.suppress(TimeoutError):
                self._wait_for(self._worker.close(), 3.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(1.0)

    def _wait_for(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=seconds)


class LinkWorker:
    """The parts of a ``Worker`` that move KV. Event loop only, except for the constructor."""

    def __init__(
        self, shape: str, tls: TlsFiles | None, *, sending: bool, has_engine: bool
    ) -> None:
        self._shape = SHAPES[shape]
        self._settings = worker_settings(
            "prefill" if sending else "decode",
            token=TOKEN,
            host="127.0.0.1",
            trusted_fabric=True,
            kv_carriers=CARRIERS,
            tls=tls,
            model_path=shape,
        )
        self._security = EndpointSecurity(tls)
        self._engine = (
            self._make_client()
            if has_engine
            else cast(
                "EngineClient",
                FilledSlotsClient(self._shape, ready_of(shape), sending=sending),
            )
        )
        self._carriers = WorkerCarriers(self._settings, self._security)
        self._channels = PrefillChannels(TOKEN, self._security)
        self._links: dict[str, LinkTable] = {}
        self._traffic = TrafficCounter()
        self._server: grpc.aio.Server | None = None
        self.endpoint = ""
        self.sender_endpoint = ""

    def _make_client(self) -> EngineClient:
        program = [sys.executable, "-m", "bench.kv_link.product.pool_engine"]
        return EngineClient(program, self._settings.engine, lambda what, fraction: None)

    @property
    def carriers(self) -> list[str]:
        return [carrier.name for carrier in self._carriers.all]

    async def start(self) -> None:
        await self._engine.start()
        await self._carriers.start(self._settings.host)
        receiver = KVReceiver(self._engine, self._carriers.all, self._channels, "auto")
        service = PrefillService(self._engine, self._carriers.all, receiver, INSTANCE)
        server = grpc.aio.server(options=server_options(), interceptors=[AsyncTokenGuard(TOKEN)])
        rpc.add_PrefillServicer_to_server(service, server)
        self.endpoint = self._security.listen(server, self._settings.host, 0)
        await server.start()
        self._server = server
        assert self._engine.current is not None
        self._slots = InboundSlots(self._engine.current)

    async def close(self) -> None:
        await self._channels.close()
        if self._server is not None:
            await self._server.stop(grace=None)
        await self._carriers.close()
        await self._engine.stop()

    # ---- the receiver -----------------------------------------------------------------------

    async def receive(self, job: dict[str, Any]) -> dict[str, Any]:
        """Receive KV of about ``job["bytes"]`` raw bytes by one carrier. Raises TransferFailed."""
        blocks, mode = self._shape.blocks_for(job["bytes"]), job["mode"]
        if mode == PACED:
            blocks = job["blocks"]
        request = Request(
            id=mode,
            prompt=(1,) * (blocks * BLOCK_TOKENS),
            sampling=SamplingParams(max_tokens=2),
            cache_root=bytes(16),
        )
        session, handle = self._engine.current, self._engine.handle()
        assert session is not None
        receiving = _Receiving()
        session.attach(handle, receiving)
        session.send(m.Receive(handle, request))
        try:
            return await self._receive(job, request, handle, receiving)
        finally:
            session.send(m.Drop(handle))
            session.detach(handle)

    async def _receive(
        self, job: dict[str, Any], request: Request, handle: int, receiving: _Receiving
    ) -> dict[str, Any]:
        context = self._context(job["carrier"], job["codec"])
        session = context.session
        call = PrefillRunCall(
            context, self._channels.open_call(self.sender_endpoint), lambda event: None
        )
        async with call.running():
            await call.start(request, INSTANCE, self.sender_endpoint)
            blocks = len(request.prompt) // BLOCK_TOKENS
            inbound = call.inbound_transfer(handle, 0, blocks)
            receiving.on_slot_read = inbound.on_slot_read
            await call.next_event("started")
            session.send(m.Reserve(handle))
            await receiving.reserved
            flowing = None
            if request.id == PACED:
                flowing = asyncio.create_task(inbound.run(FRAME_S))
            first = (await call.next_event("first_token")).first_token
            began, before = time.perf_counter(), inbound.bytes
            with inbound.waiting_alone():  # which measures the link, as a hand-over does
                await (flowing or inbound.run(FRAME_S))
            session.send(m.Join(handle, first.token, inbound.frames))
            token = await receiving.joined
            seconds = time.perf_counter() - began
        if request.id == CHECK and token != first.token:
            raise RuntimeError(f"{job['carrier']}: the KV that came is not the KV that was sent")
        return {
            "seconds": seconds,
            "bytes": blocks * self._shape.block_bytes if request.id == POOLS else inbound.bytes,
            "frames": inbound.frames,
            "tail_bytes": inbound.bytes - before,
        }

    def _context(self, name: str, codec: Any) -> ReceiverContext:
        carrier: Carrier = {c.name: c for c in self._carriers.all}[name]
        links = self._links.setdefault(name, LinkTable([name]))
        session = self._engine.current
        assert session is not None
        return ReceiverContext(
            *(session, self._slots, {name: carrier}, links, self._channels, codec),
            self._traffic,
        )


class _Receiving:
    """The ``SequenceListener`` of one sequence at the receiver."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.reserved: asyncio.Future[None] = loop.create_future()
        self.joined: asyncio.Future[int] = loop.create_future()
        self.on_slot_read: Any = lambda sequence: None

    def on_event(self, event: m.Event) -> None:
        if isinstance(event, m.Reserved):
            self.reserved.set_result(None)
        elif isinstance(event, m.SlotRead):
            self.on_slot_read(event.sequence)
        elif isinstance(event, m.ReceiveFailed):
            self.joined.set_exception(RuntimeError(event.why))

    def on_token(self, token: int, finish: Finish, logprobs: Logprobs | None) -> None:
        self.joined.set_result(token)

    def on_lost(self) -> None:
        for future in (self.reserved, self.joined):
            if not future.done():
                future.set_exception(RuntimeError("the engine died"))
