"""The Prefill RPC, on workers of either role: a call for each prompt; what it holds ends with it.

    call opens --Accepted--> (fetch what another worker has cached) --> queued in the engine
         --Started--> chunks run, KV goes to the outlet --FirstToken--> the rest of the KV
         --Sent--> caller ends the call --> pages are free

With ``cached_only`` nothing is computed: --Accepted--> --Started--> cached KV --Sent-->.

Cleanup hangs on the call's done callback, so it runs however the call ends: served, cancelled,
broken, or refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc

from engine.ipc import messages as m
from engine.kv_cache.kv_format import Codec
from engine.process.client import EngineClient
from engine.process.session import Session
from kvtransfer.peer_fetch import Fetch
from kvtransfer.receiver_context import Receiver
from kvtransfer.sender import TRANSFER_BYTES, KVSource, Outlet
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import InvalidRequest, Unavailable
from protocol.liveness import ALIVE_S
from protocol.requests import Finish, Logprobs, Request, from_wire, logprobs_to_wire
from protocol.wire import wire_pb2 as pb
from protocol.wire import wire_pb2_grpc as rpc

Context: TypeAlias = "grpc.aio.ServicerContext[pb.PrefillCall, pb.PrefillEvent]"


class _Call:
    """One prefill: engine events become messages of the call, frames go to the outlet."""

    def __init__(
        self, session: Session, handle: int, outlet: Outlet, start: pb.PrefillStart
    ) -> None:
        self.session = session
        self.handle = handle
        self._outlet = outlet
        self._start = start
        self._loop = asyncio.get_running_loop()
        self._prompt_logprobs: list[pb.Logprobs] = []  # until the first token
        self.frames = 0
        self.messages: asyncio.Queue[pb.PrefillEvent | Exception | None] = asyncio.Queue()

    def on_event(self, event: m.Event) -> None:
        if isinstance(event, m.Started):
            started = pb.PrefillEvent.Started(cached_tokens=event.cached_tokens)
            self.messages.put_nowait(pb.PrefillEvent(started=started))
            if self._start.cached_only:
                self._send_none(event.cached_tokens // BLOCK_TOKENS)
        elif isinstance(event, m.Frame):
            self._send_frame(event)
        elif isinstance(event, m.Refused):
            error = Unavailable(event.why) if event.busy else InvalidRequest(event.why, event.param)
            self.messages.put_nowait(error)
        elif isinstance(event, m.PromptLogprobs):
            self._prompt_logprobs = [logprobs_to_wire(report) for report in event.logprobs]

    def _send_none(self, cached_blocks: int) -> None:
        """Say that all was sent, when the caller has whatever is cached here."""
        if cached_blocks <= self._start.skip_blocks:
            self.messages.put_nowait(pb.PrefillEvent(sent=pb.PrefillEvent.Sent(frames=0)))

    def mark(self, event: str) -> None:
        """Progress of the fetch that goes before the prefill."""
        fetching = pb.PrefillEvent.Fetching(done=event == "fetch_done")
        self.messages.put_nowait(pb.PrefillEvent(fetching=fetching))

    def _send_frame(self, frame: m.Frame) -> None:
        def release() -> None:
            self._loop.call_soon_threadsafe(self.session.send, m.SlotsFree([frame.slot]))

        self._outlet.put(frame, release)
        self.frames += 1
        if frame.last:
            sent = pb.PrefillEvent.Sent(frames=self.frames)
            self.messages.put_nowait(pb.PrefillEvent(sent=sent))

    def on_token(self, token: int, finish: Finish, logprobs: Logprobs | None) -> None:
        first = pb.PrefillEvent.FirstToken(token=token, finish=int(finish))  # type: ignore[arg-type]
        if logprobs is not None:
            first.logprobs.CopyFrom(logprobs_to_wire(logprobs))
        first.prompt_logprobs.extend(self._prompt_logprobs)
        self.messages.put_nowait(pb.PrefillEvent(first_token=first))

    def on_lost(self) -> None:
        self.messages.put_nowait(ConnectionError("the engine died"))


class PrefillService(rpc.PrefillServicer):
    """Serves Prefill.Run on the engine of this worker."""

    def __init__(
        self, engine: EngineClient, source: KVSource, receiver: Receiver, instance: str
    ) -> None:
        self._engine = engine
        self._source = source
        self._receiver = receiver
        self._instance = instance
        self.draining = False
        self._open: set[_Call] = set()

    @property
    def calls(self) -> int:
        """Open ones, from accepted on."""
        return len(self._open)

    def close(self) -> None:
        """The worker goes: whoever still waits for a prompt had better ask another."""
        for call in self._open:
            call.messages.put_nowait(Unavailable("this worker goes"))

    async def Run(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.PrefillCall], context: Context
    ) -> AsyncIterator[pb.PrefillEvent]:
        start, request = await self._opening(request_iterator, context)
        session = self._engine.current
        if session is None or session.ready is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine is being replaced")
        codec, frame_bytes = await self._payload(start, session, context)
        handle = self._engine.handle()
        outlet = self._source.open(bytes.fromhex(start.transfer), session.arena.slot, codec)
        call = _Call(session, handle, outlet, start)
        command = m.Export if start.cached_only else m.Prefill
        work = command(handle, request, start.skip_blocks, frame_bytes, codec)
        session.attach(handle, call)
        running = [
            asyncio.create_task(self._grant(request_iterator, session, call)),
            asyncio.create_task(self._begin(call, work, start.fetch)),
        ]

        def release(_: Context) -> None:
            for task in running:
                task.cancel()
            self._open.discard(call)
            session.detach(handle)
            session.send(m.Drop(handle))
            self._source.close(outlet)

        self._open.add(call)
        context.add_done_callback(release)  # type: ignore[arg-type]
        accepted = pb.PrefillEvent.Accepted(queued_tokens=session.beat.queued_tokens)
        yield pb.PrefillEvent(accepted=accepted)
        async for event in self._relay(call, context):
            yield event

    async def _begin(self, call: _Call, work: m.Prefill | m.Export, source: pb.Fetch) -> None:
        """Fetch what is worth it, then give the work to the engine."""
        here = self._engine.current is call.session
        scores = work.request.prompt_logprobs_due > 0  # then all of it is computed
        if source.blocks and here and isinstance(work, m.Prefill) and not scores:
            handle = self._engine.handle()
            links = self._receiver.links()
            await Fetch(links, handle, work.request, source, call.mark).run()
        call.session.send(work)

    async def _opening(
        self, calls: AsyncIterator[pb.PrefillCall], context: Context
    ) -> tuple[pb.PrefillStart, Request]:
        """The first message, checked; aborts the call when it is not one we can serve."""
        start = (await anext(aiter(calls), pb.PrefillCall())).start
        if start.instance != self._instance:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another instance lives here")
        if self.draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this worker is draining")
        try:
            if len(bytes.fromhex(start.transfer)) != TRANSFER_BYTES:
                raise InvalidRequest(f"transfer must have {TRANSFER_BYTES} bytes", "transfer")
            request = from_wire(start.request)
            if start.skip_blocks * BLOCK_TOKENS > len(request.context):
                raise InvalidRequest("skip_blocks lies beyond the prompt", "skip_blocks")
        except (InvalidRequest, ValueError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return start, request

    @staticmethod
    async def _payload(
        start: pb.PrefillStart, session: Session, context: Context
    ) -> tuple[Codec, int]:
        """Codec and size of the frames; aborts the call where they, or the KV itself, are not what
        the caller can use."""
        assert session.ready is not None
        if start.model != session.ready.kv_identity:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the KV of {start.model} was asked for, {session.ready.kv_identity} is served",
            )
        kv = session.ready.kv
        if start.codec not in kv.codecs:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"codec {start.codec} does not go with the KV precision {kv.precision}",
            )
        codec = Codec(start.codec)
        frame_bytes = min(start.frame_bytes, session.arena.shape.slot_bytes)
        if frame_bytes < kv.page_layer_bytes(codec):
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"frame_bytes must be at least {kv.page_layer_bytes(codec)}, not {frame_bytes}",
            )
        return codec, frame_bytes

    @staticmethod
    async def _grant(calls: AsyncIterator[pb.PrefillCall], session: Session, call: _Call) -> None:
        """Pass the receiver's credits on, until it ends its half of the call."""
        try:
            async for message in calls:
                frames = min(message.credits, session.arena.shape.outbound)
                session.send(m.Grant(call.handle, frames))
        finally:
            call.messages.put_nowait(None)

    @staticmethod
    async def _relay(call: _Call, context: Context) -> AsyncIterator[pb.PrefillEvent]:
        """What the engine says, until the caller has ended its half; signs of life between."""
        while True:
            try:
                async with asyncio.timeout(ALIVE_S):
                    message = await call.messages.get()
            except TimeoutError:
                message = pb.PrefillEvent(alive=pb.PrefillEvent.Alive())
            if message is None:
                return
            if isinstance(message, InvalidRequest):
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(message))
            if isinstance(message, Unavailable):
                await context.abort(grpc.StatusCode.ABORTED, str(message))
            if isinstance(message, Exception):
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(message))
            yield message
