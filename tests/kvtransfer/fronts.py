"""Fronts without engines: the real control call, the real carriers, fake engines behind them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from engine.ipc import messages as m
from kvtransfer.carrier import Carrier
from kvtransfer.carriers.grpc_carrier import GrpcCarrier
from kvtransfer.carriers.local_carrier import LocalCarrier
from kvtransfer.carriers.nccl_carrier import NcclCarrier
from kvtransfer.carriers.tcp_carrier import TcpCarrier
from kvtransfer.carriers.tcp_connection import TcpSecurity
from kvtransfer.inbound import InboundTransfer
from kvtransfer.prefill_call import PrefillRunCall
from kvtransfer.receiver_context import KVReceiver, PrefillChannels
from prefill_worker.service import PrefillService
from protocol.block_keys import BLOCK_TOKENS
from protocol.endpoints.grpc_endpoints import LOOPBACK_ONLY, EndpointSecurity, server_options
from protocol.requests import Finish, Logprobs, Request
from protocol.security.cluster_token import AsyncTokenGuard
from protocol.security.tls import TlsFiles
from protocol.wire import wire_pb2_grpc as rpc
from tests.engine.conftest import request
from tests.kvtransfer.fake_engine import FakeEngine

TOKEN = "t" * 32
FRAME_S = 2.0
CARRIERS = ("grpc", "tcp", "local")


class FakeClient:
    """Stands for an ``EngineClient``."""

    def __init__(self, engine: FakeEngine) -> None:
        self.current: Any = engine
        self._handles = itertools.count(1)

    def handle(self) -> int:
        return next(self._handles)


def make_carrier(
    name: str,
    token: str = TOKEN,
    security: EndpointSecurity = LOOPBACK_ONLY,
    files: TlsFiles | None = None,
) -> Carrier:
    if name == "grpc":
        return GrpcCarrier(token, security)
    if name == "local":
        return LocalCarrier(token)
    if name == "nccl":
        return NcclCarrier(trusted=True)
    assert name == "tcp"
    return TcpCarrier(token, TcpSecurity(security, files))


class Front:
    """One worker's front: both ends of every carrier, and a fake engine."""

    def __init__(
        self,
        carriers: Sequence[Carrier],
        slots: int = 8,
        security: EndpointSecurity = LOOPBACK_ONLY,
        instance: str = "p",
    ) -> None:
        self.instance = instance
        self.engine = FakeEngine(slots)
        self.client = FakeClient(self.engine)
        self.carriers = list(carriers)
        self._security = security
        channels = PrefillChannels(TOKEN, security)
        self.receiver = KVReceiver(self.client, self.carriers, channels, "auto")  # type: ignore[arg-type]
        self.service = PrefillService(self.client, self.carriers, self.receiver, instance)  # type: ignore[arg-type]
        self.endpoint = ""

    async def start(self, host: str = "127.0.0.1") -> None:
        for carrier in self.carriers:
            await carrier.start(host)
        self._server = grpc.aio.server(
            options=server_options(), interceptors=[AsyncTokenGuard(TOKEN)]
        )
        rpc.add_PrefillServicer_to_server(self.service, self._server)
        self.endpoint = self._security.listen(self._server, host, 0)
        await self._server.start()

    async def stop(self) -> None:
        await self.receiver.close()
        await self._server.stop(grace=0.2)
        for carrier in self.carriers:
            await carrier.close()
        self.engine.end()

    def replace_engine(self, slots: int = 8) -> None:
        """The engine dies, and another one serves."""
        old, self.engine = self.engine, FakeEngine(slots)
        self.client.current = self.engine
        old.end()

    async def all_slots_free(self, within_s: float = 3.0) -> None:
        """Wait until every slot of this front has come back."""
        shape = self.engine.arena.shape
        async with asyncio.timeout(within_s):
            while (
                sorted(self.engine.outbound) != shape.outbound_slots()
                or sorted(self.engine.inbound) != shape.inbound_slots()
            ):
                await asyncio.sleep(0.01)


@dataclass
class Receiving:
    """One transfer into a front. It is the listener of its sequence there."""

    front: Front
    handle: int
    blocks: int
    cached_only: bool
    inbound: InboundTransfer | None = None
    carrier: str = ""
    failures: list[str] = field(default_factory=list)
    running: asyncio.Event = field(default_factory=asyncio.Event)
    on_call: Callable[[PrefillRunCall], None] = lambda call: None

    def on_event(self, event: m.Event) -> None:
        if isinstance(event, m.SlotRead):
            assert self.inbound is not None
            self.inbound.on_slot_read(event.sequence)
        elif isinstance(event, m.ReceiveFailed):
            self.failures.append(event.why)
            assert self.inbound is not None
            self.inbound.on_receive_failed(event)

    def on_token(self, token: int, finish: Finish, logprobs: Logprobs | None) -> None:
        raise AssertionError("nothing is computed here")

    def on_lost(self) -> None:
        self.failures.append("the engine died")

    async def run(self, endpoint: str, instance: str = "p", frame_s: float = FRAME_S) -> None:
        """Receive all KV of a prompt of ``blocks`` blocks. Raises TransferFailed."""
        context = self.front.receiver.context()
        context.session.attach(self.handle, self)
        stream = context.channels.open_call(endpoint)
        call = PrefillRunCall(context, stream, lambda event: None)
        self.on_call(call)
        try:
            async with call.running():
                ask = a_request(self.handle, self.blocks)
                await call.start(ask, instance, endpoint, cached_only=self.cached_only)
                self.carrier = call.carrier
                await call.next_event("started")
                self.inbound = call.inbound_transfer(self.handle, 0, self.blocks)
                await self._receive(call, self.inbound, frame_s)
        finally:
            context.session.detach(self.handle)
            stream.cancel()

    async def _receive(
        self, call: PrefillRunCall, inbound: InboundTransfer, frame_s: float
    ) -> None:
        receiving = asyncio.create_task(inbound.run(frame_s))
        self.running.set()
        try:
            if not self.cached_only:
                await call.guard(call.next_event("first_token"))
            with inbound.waiting_alone():
                await call.guard(receiving)
        finally:
            call.end()
            receiving.cancel()
            await asyncio.wait([receiving])

    @property
    def complete(self) -> bool:
        """Whether every frame of the prompt was written."""
        written = self.front.engine.written[self.handle]
        return sum(piece.blocks for piece in written.values()) == self.blocks


def a_request(handle: int, blocks: int) -> Request:
    return request(f"r{handle}", [5] * (blocks * BLOCK_TOKENS))


def receiving(front: Front, blocks: int = 40, *, cached_only: bool = False) -> Receiving:
    return Receiving(front, front.client.handle(), blocks, cached_only)


@contextlib.asynccontextmanager
async def started(*fronts: Front, host: str = "127.0.0.1") -> AsyncIterator[None]:
    try:
        for front in fronts:
            await front.start(host)
        yield
    finally:
        for front in fronts:
            await front.stop()
