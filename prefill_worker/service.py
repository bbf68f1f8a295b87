"""The Prefill RPC, served by workers of both roles: one call for each prompt.

    call opens --Accepted--> (fetch what another worker has cached) --> queued in the engine
         --Started--> chunks run, KV goes to the OutboundTransfer --FirstToken--> the rest of the KV
         --Sent--> the caller ends the call --> pages are free

With ``cached_only`` nothing is computed: --Accepted--> --Started--> cached KV --Sent-->.

The pages of a prompt are freed by the call's done callback (``release`` in ``Run``), so they are
freed however the call ends: served, cancelled, broken or refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc

from engine.ipc import messages as m
from engine.kv_cache.kv_format import Codec
from engine.process.client import EngineClient
from engine.process.session import EngineSession
from kvtransfer.peer_fetch import PeerFetch
from kvtransfer.receiver_context import KVReceiver
from kvtransfer.sender import TRANSFER_BYTES, KVServer, OutboundTransfer
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import InvalidRequest, Unavailable
from protocol.liveness import ALIVE_S
from protocol.requests import Finish, Logprobs, Request, logprobs_to_wire, request_from_wire
from protocol.wire import wire_pb2 as pb
from protocol.wire import wire_pb2_grpc as rpc

Context: TypeAlias = "grpc.aio.ServicerContext[pb.PrefillCall, pb.PrefillEvent]"


class _ServedCall:
    """One Prefill.Run call: the SequenceListener of its sequence. It turns engine events into
    messages of the call, and puts frames into the outbound transfer."""

    def __init__(
        self,
        session: EngineSession,
        handle: int,
        outbound: OutboundTransfer,
        start: pb.PrefillStart,
    ) -> None:
        self.session = session
        self.handle = handle
        self._outbound = outbound
        self._start = start
        self._loop = asyncio.get_running_loop()
        self._prompt_logprobs: list[pb.Logprobs] = []  # until the first token
        self.frames = 0
        # None: the caller has ended its half of the call.
        self.messages: asyncio.Queue[pb.PrefillEvent | Exception | None] = asyncio.Queue()

    def on_event(self, event: m.Event) -> None:
        if isinstance(event, m.Started):
            started = pb.PrefillEvent.Started(cached_tokens=event.cached_tokens)
            self.messages.put_nowait(pb.PrefillEvent(started=started))
            if self._start.cached_only:
                self._end_if_all_is_cached(event.cached_tokens // BLOCK_TOKENS)
        elif isinstance(event, m.KVFrame):
            self._send_frame(event)
        elif isinstance(event, m.RequestRefused):
            error = Unavailable(event.why) if event.busy else InvalidRequest(event.why, event.param)
            self.messages.put_nowait(error)
        elif isinstance(event, m.PromptLogprobs):
            self._prompt_logprobs = [logprobs_to_wire(report) for report in event.logprobs]

    def _end_if_all_is_cached(self, cached_blocks: int) -> None:
        """Report that everything was sent if the caller has all blocks that are cached here."""
        if cached_blocks <= self._start.skip_blocks:
            self.messages.put_nowait(pb.PrefillEvent(sent=pb.PrefillEvent.Sent(frames=0)))

    def mark(self, event: str) -> None:
        """Report a stage of the fetch that precedes the prefill."""
        fetching = pb.PrefillEvent.Fetching(done=event == "fetch_done")
        self.messages.put_nowait(pb.PrefillEvent(fetching=fetching))

    def _send_frame(self, frame: m.KVFrame) -> None:
        def release() -> None:
            self._loop.call_soon_threadsafe(self.session.send, m.SlotsFree([frame.slot]))

        self._outbound.put(frame, release)
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
    """Serves Prefill.Run on the engine of this worker. ``Worker`` creates one, whatever its
    role."""

    def __init__(
        self, engine: EngineClient, kv_server: KVServer, receiver: KVReceiver, instance: str
    ) -> None:
        self._engine = engine
        self._kv_server = kv_server
        self._receiver = receiver
        self._instance = instance
        self.draining = False
        self._open: set[_ServedCall] = set()

    @property
    def calls(self) -> int:
        """Number of open calls, from accepted on."""
        return len(self._open)

    def close(self) -> None:
        """Fail the open calls because the worker goes; their callers ask another worker."""
        for call in self._open:
            call.messages.put_nowait(Unavailable("this worker goes"))

    async def Run(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.PrefillCall], context: Context
    ) -> AsyncIterator[pb.PrefillEvent]:
        start, request = await self._read_start(request_iterator, context)
        session = self._engine.current
        if session is None or session.ready is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine is being replaced")
        codec, frame_bytes = await self._check_payload(start, session, context)
        handle = self._engine.handle()
        transfer = bytes.fromhex(start.transfer)
        outbound = self._kv_server.open(transfer, session.arena.slot, codec)
        call = _ServedCall(session, handle, outbound, start)
        command = m.Export if start.cached_only else m.Prefill
        work = command(handle, request, start.skip_blocks, frame_bytes, codec)
        session.attach(handle, call)
        running = [
            asyncio.create_task(self._pass_credits_on(request_iterator, session, call)),
            asyncio.create_task(self._begin(call, work, start.fetch)),
        ]

        def release(_: Context) -> None:
            for task in running:
                task.cancel()
            self._open.discard(call)
            session.detach(handle)
            session.send(m.Drop(handle))  # frees the pages
            self._kv_server.close(outbound)

        self._open.add(call)
        context.add_done_callback(release)  # type: ignore[arg-type]
        accepted = pb.PrefillEvent.Accepted(queued_tokens=session.beat.queued_tokens)
        yield pb.PrefillEvent(accepted=accepted)
        async for event in self._messages(call, context):
            yield event

    async def _begin(self, call: _ServedCall, work: m.Prefill | m.Export, source: pb.Fetch) -> None:
        """Fetch what ``source`` has cached, if it names a worker, then give the work to the
        engine."""
        same_engine = self._engine.current is call.session
        scored = work.request.prompt_logprobs_due > 0  # then the whole prompt is computed
        if source.blocks and same_engine and isinstance(work, m.Prefill) and not scored:
            handle = self._engine.handle()
            context = self._receiver.context()
            await PeerFetch(context, handle, work.request, source, call.mark).run()
        call.session.send(work)

    async def _read_start(
        self, calls: AsyncIterator[pb.PrefillCall], context: Context
    ) -> tuple[pb.PrefillStart, Request]:
        """Return the first message and its request; abort the call if this worker cannot serve
        them."""
        start = (await anext(aiter(calls), pb.PrefillCall())).start
        if start.instance != self._instance:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another instance lives here")
        if self.draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this worker is draining")
        try:
            if len(bytes.fromhex(start.transfer)) != TRANSFER_BYTES:
                raise InvalidRequest(f"transfer must have {TRANSFER_BYTES} bytes", "transfer")
            request = request_from_wire(start.request)
            if start.skip_blocks * BLOCK_TOKENS > len(request.context):
                raise InvalidRequest("skip_blocks lies beyond the prompt", "skip_blocks")
        except (InvalidRequest, ValueError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return start, request

    @staticmethod
    async def _check_payload(
        start: pb.PrefillStart, session: EngineSession, context: Context
    ) -> tuple[Codec, int]:
        """Return codec and payload bytes of the frames; abort the call if the caller cannot use
        this worker's KV, or asks for frames that this worker cannot make."""
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
    async def _pass_credits_on(
        calls: AsyncIterator[pb.PrefillCall], session: EngineSession, call: _ServedCall
    ) -> None:
        """Give the receiver's credits to the engine until the caller ends its half of the call."""
        try:
            async for message in calls:
                frames = min(message.credits, session.arena.shape.outbound)
                session.send(m.Grant(call.handle, frames))
        finally:
            call.messages.put_nowait(None)

    @staticmethod
    async def _messages(call: _ServedCall, context: Context) -> AsyncIterator[pb.PrefillEvent]:
        """Yield the messages of the call until the caller has ended its half, with a sign of life
        at least every ALIVE_S; abort the call on an error."""
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
