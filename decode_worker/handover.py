"""One attempt to have a prompt prefilled elsewhere and its KV brought here.

    Prefill.Run --accepted--> --started--> reserve pages, open PullKV
       --first_token--> to the client at once        frames --> slots --> engine
       last frame in and first token known --> Join

The decode worker owns both RPCs. An attempt ends by joining the batch, by finishing (the first
token was the last), or by TransferFailed; its hold on the prefill worker's pages ends with it.
Whatever the prefill worker refuses, this worker can still compute itself.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import grpc

from decode_worker.incoming import Incoming
from decode_worker.prefillers import PrefillCall, Prefillers
from engine import messages as m
from engine.kv_format import Codec
from engine.pieces import cut
from engine.session import Session
from kvtransfer.codecs import TrafficCounter
from kvtransfer.frames import Expectation
from kvtransfer.sink import KVSink
from kvtransfer.slots import InboundSlots
from kvtransfer.source import TRANSFER_BYTES
from protocol import wire_pb2 as pb
from protocol.blocks import BLOCK_TOKENS
from protocol.errors import TransferFailed
from protocol.logprobs import Logprobs, logprobs_from_wire
from protocol.request import Finish, Request, to_wire

ACCEPT_S = 2.0
"""A prefill worker that has not accepted by then is passed over."""

PREFILL_S = 60.0
"""From accepted to first token, queueing included; well within the router's own deadline."""

FRAME_S = 5.0
"""Progress deadline of the KV once the prompt is computed: the longest gap between frames."""

T = TypeVar("T")


@dataclass(frozen=True)
class Links:
    """What attempts on one engine session share."""

    session: Session
    slots: InboundSlots
    sink: KVSink
    prefillers: Prefillers
    codec: Codec
    traffic: TrafficCounter


class First(NamedTuple):
    """The first token, as the prefill worker drew it."""

    token: int
    finish: Finish
    logprobs: Logprobs | None


@dataclass(frozen=True)
class Told:
    """Whom an attempt tells of its progress."""

    first: Callable[[First, int], None]  # with the cached prompt tokens
    mark: Callable[[str], None]  # an event of the timeline


class Handover:
    """One attempt for the sequence ``handle``, of which ``cached_tokens`` are here already."""

    def __init__(
        self, links: Links, handle: int, request: Request, cached_tokens: int, told: Told
    ) -> None:
        self._links = links
        self._handle = handle
        self._request = request
        self._cached = cached_tokens
        self._told = told
        self._transfer = secrets.token_bytes(TRANSFER_BYTES)
        self._frame_bytes = links.session.arena.shape.slot_bytes
        self._credits = 0
        self._credit_due = asyncio.Event()
        self.incoming = Incoming(
            links.session,
            links.slots,
            links.sink,
            handle,
            self._expectation(),
            self._grant,
            links.traffic,
        )

    def _expectation(self) -> Expectation:
        ready = self._links.session.ready
        assert ready is not None
        blocks = -(-len(self._request.context) // BLOCK_TOKENS)
        first = self._cached // BLOCK_TOKENS
        size = ready.kv.page_layer_bytes(self._links.codec)
        pieces = cut(first, blocks, ready.kv.layers, size, self._frame_bytes)
        return Expectation(self._transfer, pieces, size, self._links.codec)

    async def run(self, call: PrefillCall, candidate: pb.PrefillCandidate) -> None:
        """Bring the context's KV in over ``call`` (just opened) and join. Raises
        TransferFailed."""
        crediting = asyncio.create_task(self._send_credits(call))
        try:
            await self._open(call, candidate.instance)
            await self._carry(call, candidate.kv_endpoint)
        except grpc.aio.AioRpcError as error:
            raise TransferFailed(f"prefill: {error.code().name}: {error.details()}") from error
        except TimeoutError as error:
            raise TransferFailed("prefill: no progress within the deadline") from error
        finally:
            crediting.cancel()
            call.cancel()

    # ---- control ----------------------------------------------------------------------------

    async def _open(self, call: PrefillCall, instance: str) -> None:
        start = pb.PrefillStart(
            request=to_wire(self._request),
            instance=instance,
            transfer=self._transfer.hex(),
            skip_blocks=self._cached // BLOCK_TOKENS,
            frame_bytes=self._frame_bytes,
            codec=self._links.codec,
        )
        async with asyncio.timeout(ACCEPT_S):
            await call.write(pb.PrefillCall(start=start))
            await self._next(call, "accepted")
        self._told.mark("prefill_queued")

    async def _carry(self, call: PrefillCall, kv_endpoint: str) -> None:
        """From accepted to joined, or to the end."""
        receiving: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(PREFILL_S):
                cached = (await self._next(call, "started")).started.cached_tokens
                self._told.mark("prefill_started")
                receiving = asyncio.create_task(self.incoming.run(kv_endpoint))
                event = await _beside(self._next(call, "first_token"), receiving)
            first = self._checked(event.first_token)
            self._told.mark("first_token")
            if first.finish is Finish.NONE:
                self._told.first(first, max(cached, self._cached))
                await _beside(self._watch(receiving), receiving)
                self._told.mark("kv_ready")
                self._links.session.send(m.Join(self._handle, first.token))
        finally:
            call.cancel()  # first of all: P's pages are free whatever the rest takes
            if receiving is not None:
                receiving.cancel()
                await asyncio.wait([receiving])
        if first.finish is not Finish.NONE:
            self._told.first(first, max(cached, self._cached))

    def _checked(self, first: pb.PrefillEvent.FirstToken) -> First:
        """The first token as P says it, if it can be one."""
        ready = self._links.session.ready
        assert ready is not None
        if first.token >= ready.vocab_size:
            raise TransferFailed(f"prefill: token {first.token} of {ready.vocab_size} came")
        if first.finish not in (pb.FINISH_NONE, pb.FINISH_STOP, pb.FINISH_LENGTH):
            raise TransferFailed(f"prefill: finish {first.finish} came")
        logprobs = logprobs_from_wire(first.logprobs) if first.HasField("logprobs") else None
        if (logprobs is None) != (self._request.sampling.logprobs is None):
            raise TransferFailed("prefill: log-probabilities came or not, unlike asked for")
        return First(first.token, Finish(first.finish), logprobs)

    async def _watch(self, receiving: asyncio.Task[None]) -> None:
        """Wait for the last frame, but not for a sender that has gone quiet."""
        while not receiving.done():
            await asyncio.wait([receiving], timeout=0.5)
            if self.incoming.window.stalled_s() > FRAME_S:
                raise TransferFailed(f"no KV frame for {FRAME_S:g} s")

    @staticmethod
    async def _next(call: PrefillCall, kind: str) -> pb.PrefillEvent:
        """The next event, which must be ``kind``; that all KV was sent may come before."""
        while True:
            event = await call.read()
            if not isinstance(event, pb.PrefillEvent):
                raise TransferFailed(f"prefill: {await call.details()}, {kind} was due")
            if event.WhichOneof("body") == kind:
                return event
            if event.WhichOneof("body") != "sent":
                raise TransferFailed(f"prefill: {event.WhichOneof('body')} came, {kind} was due")

    # ---- credits ----------------------------------------------------------------------------

    def _grant(self) -> None:
        self._credits += 1
        self._credit_due.set()

    async def _send_credits(self, call: PrefillCall) -> None:
        """One message for all the credits of a turn of the loop. A call that is over says so to
        whoever reads from it."""
        try:
            while True:
                await self._credit_due.wait()
                self._credit_due.clear()
                granted, self._credits = self._credits, 0
                await call.write(pb.PrefillCall(credits=granted))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return


async def _beside(main: Coroutine[Any, Any, T], other: asyncio.Task[None]) -> T:
    """Await ``main``; when ``other`` fails first, fail with its error."""
    task = asyncio.ensure_future(main)
    try:
        await asyncio.wait([task, other], return_when=asyncio.FIRST_COMPLETED)
        if other.done() and (error := other.exception()) is not None:
            raise error
        return await task
    finally:
        if not task.done():
            task.cancel()
        elif not task.cancelled():
            task.exception()  # seen, also where the other one's error went first
