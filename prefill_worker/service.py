"""The Prefill RPC, served by workers of both roles: one call for each prompt.

    call opens --Accepted--> (fetch what another worker has cached) --> queued in the engine
         --Started--> chunks run (Computed), KV goes to the carrier --FirstToken--> the rest of it
         --Sent--> the caller ends the call --> pages are free

With ``cached_only`` nothing is computed: --Accepted--> --Started--> cached KV --Sent-->.

The caller offers carriers, and the first one that this worker has, too, is used. Its end here gets
every filled slot, and gives it back when it was carried; a caller that lets a slot wait for longer
than FRAME_SEND_S loses its call.

The pages of a prompt are freed by the call's done callback (``release`` in ``Run``), so they are
freed however the call ends: served, cancelled, broken or refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import TypeAlias

import grpc
import msgspec

from engine.ipc import messages as m
from engine.kv_cache.kv_format import Codec
from engine.process.client import EngineClient
from engine.process.session import EngineSession
from kvtransfer.carrier import (
    CARRIER_STALLED,
    FRAME_SEND_S,
    Carrier,
)
from kvtransfer.frames import TRANSFER_BYTES
from kvtransfer.peer_fetch import PeerFetch
from kvtransfer.receiver_context import KVReceiver
from prefill_worker.served_call import AgreedFrames, ServedCall
from protocol.errors import InvalidRequest, TransferFailed, Unavailable
from protocol.liveness import ALIVE_S
from protocol.requests import Request, request_from_wire
from protocol.wire import wire_pb2 as pb
from protocol.wire import wire_pb2_grpc as rpc

Context: TypeAlias = "grpc.aio.ServicerContext[pb.PrefillCall, pb.PrefillEvent]"


FIRST_MESSAGE_S = 40.0
"""How long a caller may hold a call open before it says what it wants. A worker that fetches
connects first, and then looks its own cache up."""

MAX_OFFERS = 16
"""Carriers of a caller that are looked at; further ones are ignored."""


class PrefillService(rpc.PrefillServicer):
    """Serves Prefill.Run on the engine of this worker. ``Worker`` creates one, whatever its
    role."""

    def __init__(
        self,
        engine: EngineClient,
        carriers: Sequence[Carrier],
        receiver: KVReceiver,
        instance: str,
    ) -> None:
        self._engine = engine
        self._carriers = {carrier.name: carrier for carrier in carriers}
        self._receiver = receiver
        self._instance = instance
        self.draining = False
        self._open: set[ServedCall] = set()

    @property
    def calls(self) -> int:
        """Number of open calls, from accepted on."""
        return len(self._open)

    def close(self) -> None:
        """Fail the open calls because the worker goes; their callers ask another worker."""
        for call in self._open:
            call.messages.put_nowait(Unavailable("this worker is stopping"))

    async def Run(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.PrefillCall], context: Context
    ) -> AsyncIterator[pb.PrefillEvent]:
        start, request = await self._read_start(request_iterator, context)
        session = self._engine.current
        if session is None or session.ready is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine is being replaced")
        await self._check_model(start, session, context)
        frames = await self._choose_carrier(start, session, context)
        handle = self._engine.handle()
        call = ServedCall(session, handle, frames, start)
        sent = (handle, request, frames.frame_bytes, frames.codec)
        work = m.Export(*sent) if start.cached_only else m.Prefill(*sent, start.uncached_tokens)
        session.attach(handle, call)
        running = [
            asyncio.create_task(self._read_calls(request_iterator, call)),
            asyncio.create_task(self._begin(call, work, start.fetch)),
        ]

        def release(_: Context) -> None:
            for task in running:
                task.cancel()
            self._open.discard(call)
            call.close()

        self._open.add(call)
        context.add_done_callback(release)  # type: ignore[arg-type]
        accepted = pb.PrefillEvent.Accepted(
            queued_tokens=session.queued_tokens,
            carrier=frames.carrier.name,
            address=frames.address,
        )
        yield pb.PrefillEvent(accepted=accepted)
        async for event in self._messages(call, context):
            yield event

    async def _begin(self, call: ServedCall, work: m.Prefill | m.Export, source: pb.Fetch) -> None:
        """Fetch what ``source`` has cached, if it names a worker, then give the work to the
        engine."""
        same_engine = self._engine.current is call.session
        scored = work.request.prompt_logprobs_due > 0  # then the whole prompt is computed
        if source.blocks and same_engine and isinstance(work, m.Prefill) and not scored:
            handle = self._engine.handle()
            context = self._receiver.context()
            began = time.monotonic()
            await PeerFetch(context, handle, work.request, source, call.mark).run()
            since_s = time.monotonic() - began  # it is as old as before, and due as soon
            waited_s = work.request.waited_s + since_s
            aged = work.request.resumed(work.request.emitted, waited_s).after(since_s)
            work = msgspec.structs.replace(work, request=aged)
        call.begin(work)

    async def _read_start(
        self, calls: AsyncIterator[pb.PrefillCall], context: Context
    ) -> tuple[pb.PrefillStart, Request]:
        """Return the first message and its request; abort the call if this worker cannot serve
        them. It comes within FIRST_MESSAGE_S, or the call is aborted."""
        try:
            async with asyncio.timeout(FIRST_MESSAGE_S):
                start = (await anext(aiter(calls), pb.PrefillCall())).start
        except TimeoutError:
            why = f"no start of the prefill came within {FIRST_MESSAGE_S:g} s"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, why)
        if start.instance != self._instance:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, "another worker is running at this address"
            )
        if self.draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this worker is draining")
        try:
            if len(bytes.fromhex(start.transfer)) != TRANSFER_BYTES:
                raise InvalidRequest(f"transfer must have {TRANSFER_BYTES} bytes", "transfer")
            request = request_from_wire(start.request)
        except (InvalidRequest, ValueError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return start, request

    @staticmethod
    async def _check_model(
        start: pb.PrefillStart, session: EngineSession, context: Context
    ) -> None:
        """Abort the call if the caller cannot use this worker's KV."""
        assert session.ready is not None
        if start.model != session.ready.kv_identity:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the KV of {start.model[:80]} was requested, but this worker serves that of"
                f" {session.ready.kv_identity}",
            )

    async def _choose_carrier(
        self, start: pb.PrefillStart, session: EngineSession, context: Context
    ) -> AgreedFrames:
        """Return the first carrier offered that this worker has, with the frames asked for; abort
        the call if there is none, or if this worker cannot make such frames."""
        for offer in start.carriers[:MAX_OFFERS]:
            carrier = self._carriers.get(offer.name)
            address = carrier.accept(offer, session) if carrier is not None else None
            if carrier is not None and address is not None:
                codec, frame_bytes = await self._check_payload(offer, session, context)
                return AgreedFrames(carrier, offer, address, codec, frame_bytes)
        names = [repr(offer.name[:20]) for offer in start.carriers[:MAX_OFFERS]]
        offered = ", ".join(names) or "none"
        await context.abort(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"no common carrier: offered were {offered}, here are {', '.join(self._carriers)}",
        )
        raise AssertionError("abort raises")

    @staticmethod
    async def _check_payload(
        offer: pb.CarrierOffer, session: EngineSession, context: Context
    ) -> tuple[Codec, int]:
        """Return codec and payload bytes of the frames; abort the call for frames that this worker
        cannot make."""
        assert session.ready is not None
        kv = session.ready.kv
        if offer.codec not in kv.codecs:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"codec {offer.codec} is not possible with the KV precision {kv.precision}",
            )
        codec = Codec(offer.codec)
        least, most = kv.block_layer_bytes(codec), session.arena.shape.slot_bytes
        if not least <= offer.frame_bytes <= most:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"frame_bytes must be at least {least} and at most {most}, not {offer.frame_bytes}",
            )
        return codec, offer.frame_bytes

    @staticmethod
    async def _read_calls(calls: AsyncIterator[pb.PrefillCall], call: ServedCall) -> None:
        """Give the receiver's credits to the engine, and the slots that it has read to the carrier,
        until it ends its half of the call."""
        try:
            async for message in calls:
                call.take(message)
        except TransferFailed as error:
            call.messages.put_nowait(InvalidRequest(str(error)))
        finally:
            call.messages.put_nowait(None)

    @staticmethod
    async def _messages(call: ServedCall, context: Context) -> AsyncIterator[pb.PrefillEvent]:
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
            if call.stalled_s > FRAME_SEND_S:
                why = f"the caller read no KV for {FRAME_SEND_S:g} s"
                await context.abort(CARRIER_STALLED, why)
            if isinstance(message, InvalidRequest):
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(message))
            if isinstance(message, Unavailable | TransferFailed):
                await context.abort(grpc.StatusCode.ABORTED, str(message))
            if isinstance(message, Exception):
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(message))
            yield message
