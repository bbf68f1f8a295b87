"""The receiver's end of one Prefill.Run call, and of the KV transfer that goes with it.

    start --> accepted --> (fetching) --> started --> (computed ...) --> first_token --> sent
                  |          credits flow to the other worker meanwhile, and signs of life come back
                  +--> the carrier connects; frames come once the ``InboundTransfer`` runs

``decode_worker.handover`` and ``PeerFetch`` drive it; the other end is prefill_worker/service.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import grpc

from engine.kv_cache.kv_format import Codec, split_into_pieces
from kvtransfer.call_writer import CallWriter
from kvtransfer.carrier import (
    CARRIER_STALLED,
    Carrier,
    InboundLink,
    InboundRequest,
    PairMessageLink,
)
from kvtransfer.frames import TRANSFER_BYTES, ExpectedFrames
from kvtransfer.inbound import InboundTransfer
from kvtransfer.receiver_context import PrefillStream, ReceiverContext
from protocol.errors import CarrierFailed, PeerLost, PeerRefused, TransferFailed
from protocol.liveness import SILENCE_S, SilenceDetector
from protocol.requests import Request, request_to_wire
from protocol.wire import wire_pb2 as pb

ACCEPT_S = 2.0
"""A worker that has not accepted the call by then counts as lost."""

MAX_UNREAD = 16
"""Events that may wait for ``next_event``; a call has about six in all."""

_REASON_S = 0.2
"""How long a failed link waits for the control call to fail, too, and give the reason."""

T = TypeVar("T")


class PrefillRunCall:
    """One Prefill.Run call on ``stream``: its transfer id, its events, its credits, its link.

    ``mark`` is called with the stages of a fetch that the other worker makes first: fetch_started,
    fetch_done. ``on_computed`` is called with the leading tokens of the context that the other
    worker has computed, as it computes them."""

    def __init__(
        self, context: ReceiverContext, stream: PrefillStream, mark: Callable[[str], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        self.on_computed: Callable[[int], None] = lambda tokens: None
        self._context = context
        self._stream = stream
        self._mark = mark
        self._loop = loop
        self._transfer = secrets.token_bytes(TRANSFER_BYTES)
        self._instance = ""
        self._offer: pb.CarrierOffer | None = None  # the one that was taken
        self._carrier: Carrier | None = None
        self._link: InboundLink | None = None
        self._inbound: InboundTransfer | None = None
        self._due: int | None = 0  # tokens whose frames are due; None: all
        self._writer = CallWriter(stream)
        self._accepted = False
        self._tasks: list[asyncio.Task[None]] = []
        self._silence = SilenceDetector()
        self._events: asyncio.Queue[pb.PrefillEvent] = asyncio.Queue()
        self._over: asyncio.Future[None] = loop.create_future()  # fails with the call or the link
        self._control_over: asyncio.Future[None] = loop.create_future()  # with the call alone

    @property
    def carrier(self) -> str:
        """Name of the carrier that was chosen."""
        assert self._carrier is not None
        return self._carrier.name

    def inbound_transfer(self, handle: int, first_block: int, end_block: int) -> InboundTransfer:
        """Create the KV side, for blocks ``first_block .. end_block`` of the sequence ``handle``.
        The call must have been accepted."""
        ready, offer = self._context.session.ready, self._offer
        assert ready is not None and offer is not None
        assert self._carrier is not None and self._link is not None
        self._writer.skip(first_block)
        codec = Codec(offer.codec)
        size = ready.kv.block_layer_bytes(codec)
        blocks = first_block, end_block
        pieces = split_into_pieces(*blocks, ready.kv.layers, size, offer.frame_bytes)
        sizes = [piece.bytes(size) for piece in pieces]
        self._inbound = InboundTransfer(
            *(self._context, self._instance, handle, self._carrier, self._link),
            ExpectedFrames(self._transfer, pieces, sizes, codec),
            self._writer.grant,
            self._over,
        )
        self._inbound.frames_due(self._due)
        return self._inbound

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Read events and send credits while the body runs, then cancel the call.

        Raises TransferFailed for everything that goes wrong with the call, PeerLost if the other
        worker died, CarrierFailed if only the link failed, which is avoided then."""
        self._run_task(self._writer.run())
        self._run_task(self._read_events())
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from error
        except TimeoutError as error:
            raise TransferFailed("prefill: no progress within the deadline") from error
        except TransferFailed as error:
            self._raise_if_lost()
            if isinstance(error, CarrierFailed) and self._carrier is not None:
                self._context.links.failed(self._instance, self._carrier.name, str(error))
            raise
        finally:
            for task in self._tasks:
                task.cancel()
            self._stream.cancel()
            for future in (self._over, self._control_over):
                if not future.cancel() and not future.cancelled():
                    future.exception()  # retrieved
            if self._link is not None:
                await self._link.close()

    def end(self) -> None:
        """End the call, with which the other worker frees the pages of the prompt. Idempotent."""
        self._stream.cancel()

    def _raise_if_lost(self) -> None:
        """Raise PeerLost or PeerRefused if the other worker died or goes."""
        over = self._control_over
        if over.done() and isinstance(reason := over.exception(), (PeerLost, PeerRefused)):
            raise reason from None

    def _run_task(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    # ---- the start --------------------------------------------------------------------------

    async def start(
        self,
        request: Request,
        instance: str,
        endpoint: str,
        *,
        cached_only: bool = False,
        fetch: pb.Fetch | None = None,
        uncached_tokens: int = 0,
    ) -> None:
        """Ask the other worker, whose control service is at ``endpoint``, for the KV of the
        request's context. Return when it has accepted; the link connects from then on. Raises
        PeerLost when it does not answer."""
        ready = self._context.session.ready
        assert ready is not None
        self._instance = instance
        offers = self._context.carrier_offers(instance, endpoint)
        start = pb.PrefillStart(
            model=ready.kv_identity,
            cached_only=cached_only,
            fetch=fetch,
            uncached_tokens=uncached_tokens,
            request=request_to_wire(request),
            instance=instance,
            transfer=self._transfer.hex(),
            carriers=offers,
        )
        self._run_task(self._watch_for_silence())
        try:
            async with asyncio.timeout(ACCEPT_S):
                # A call that is over already gives its reason through ``next_event``.
                with contextlib.suppress(asyncio.InvalidStateError):
                    await self._stream.write(pb.PrefillCall(start=start))
                accepted = (await self.next_event("accepted")).accepted
        except TimeoutError as error:
            raise PeerLost(f"prefill: no answer within {ACCEPT_S:g} s", at_work=False) from error
        self._accepted = True
        self._connect(accepted, offers, endpoint)

    def _connect(
        self, accepted: pb.PrefillEvent.Accepted, offers: list[pb.CarrierOffer], endpoint: str
    ) -> None:
        """Connect the carrier that the other worker has taken. Raises TransferFailed."""
        offered = {offer.name: offer for offer in offers}
        if accepted.carrier not in offered:
            raise TransferFailed(
                f"prefill: chose the carrier {accepted.carrier[:80]!r}, offered were"
                f" {list(offered)}"
            )
        self._offer = offered[accepted.carrier]
        self._carrier = self._context.carriers[accepted.carrier]
        self._context.links.choose(self._instance, accepted.carrier, list(offered))
        self._link = self._carrier.connect(
            InboundRequest(
                transfer=self._transfer,
                instance=self._instance,
                endpoint=endpoint,
                address=accepted.address,
                session=self._context.session,
                connections=self._context.connections(self._instance, accepted.carrier),
                say=self._writer.say,
                failed=self._link_failed,
            )
        )

    # ---- events -----------------------------------------------------------------------------

    async def next_event(self, kind: str) -> pb.PrefillEvent:
        """Return the next event, which must be ``kind`` unless it only reports progress."""
        while True:
            event = await self.guard(self._events.get())
            came = event.WhichOneof("body")
            if came == kind:
                return event
            if came == "fetching":
                self._mark("fetch_done" if event.fetching.done else "fetch_started")
            elif came != "sent":
                raise TransferFailed(f"prefill: received {came}, expected {kind}")

    async def guard(self, work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
        """Return the result of ``work``; raise the error of the call or the link as soon as one of
        them fails."""
        return await guarded_by(self._over, work)

    async def _read_events(self) -> None:
        """Read events as they come, so that silence is noticed also while no caller waits."""
        try:
            while isinstance(event := await self._stream.read(), pb.PrefillEvent):
                self._silence.heard()
                self._take(event)
            raise TransferFailed(f"prefill: the call ended: {await self._stream.details()}")
        except grpc.aio.AioRpcError as error:
            self._end(self._failure(error))
        except TransferFailed as error:
            self._end(error)

    def _take(self, event: pb.PrefillEvent) -> None:
        """Handle an event, or queue it for ``next_event``. Raises TransferFailed."""
        kind = event.WhichOneof("body")
        if kind == "filled":
            if self._link is None:
                raise TransferFailed("prefill: slots were filled before a carrier was chosen")
            self._link.on_filled(event.filled.slots)
        elif kind == "pair":
            link: object = self._link
            if not isinstance(link, PairMessageLink):
                raise TransferFailed("prefill: a message about pairs, which the carrier has not")
            link.on_pair_message(event.pair)
        elif kind == "computed":
            self._frames_due(event.computed.tokens)
            self.on_computed(event.computed.tokens)
        elif kind != "alive":
            if kind == "started":
                self._frames_due(event.started.cached_tokens)
            elif kind == "first_token":
                self._frames_due(None)
            if self._events.qsize() >= MAX_UNREAD:
                raise TransferFailed(f"prefill: more than {MAX_UNREAD} events wait to be read")
            self._events.put_nowait(event)

    def _frames_due(self, tokens: int | None) -> None:
        self._due = tokens
        if self._inbound is not None:
            self._inbound.frames_due(tokens)

    async def _watch_for_silence(self) -> None:
        await self._silence.wait_for_silence(SILENCE_S)
        self._end(PeerLost(f"prefill: silent for {SILENCE_S:g} s", at_work=self._accepted))

    def _link_failed(self, error: TransferFailed) -> None:
        """The link or one of its frames failed. Called by any thread."""
        self._loop.call_soon_threadsafe(self._on_link_failed, error)

    def _on_link_failed(self, error: TransferFailed) -> None:
        # The link and the control call break together when the other worker dies, and the control
        # call gives the reason, but not once it is cancelled, which is the first thing done then.
        wait_s = _REASON_S if isinstance(error, CarrierFailed) else 0.0
        self._loop.call_later(wait_s, self._fail, error, [self._over])

    def _end(self, error: TransferFailed) -> None:
        self._fail(error, [self._over, self._control_over])

    @staticmethod
    def _fail(error: TransferFailed, futures: list[asyncio.Future[None]]) -> None:
        for future in futures:
            if not future.done():
                future.set_exception(error)

    def _failure(self, error: grpc.aio.AioRpcError) -> TransferFailed:
        text = f"prefill: {error.code().name}: {error.details()}"
        if error.code() is grpc.StatusCode.UNAVAILABLE and self._accepted:
            if self._silence.after_own_pause():  # that says nothing about the other worker
                return TransferFailed(f"{text}, after this worker itself had been suspended")
            return PeerLost(text, at_work=True)
        if error.code() is grpc.StatusCode.INTERNAL and self._accepted:
            # gRPC says so when a write meets the end of the call, whose reason it then drops. It
            # was the engine's death or a drain: the worker is passed over, and no death is counted.
            return PeerLost(text, at_work=False)
        if error.code() is CARRIER_STALLED and not self._silence.after_own_pause():
            return CarrierFailed(text)  # this worker was ready for frames, and none has arrived
        return PeerRefused(text)


async def guarded_by(
    guard: asyncio.Future[None], work: Coroutine[Any, Any, T] | asyncio.Future[T]
) -> T:
    """Return the result of ``work``; raise the error of ``guard`` as soon as that fails. It cancels
    a coroutine then; a future belongs to the caller."""
    task, own = asyncio.ensure_future(work), not isinstance(work, asyncio.Future)
    try:
        both: list[asyncio.Future[Any]] = [task, guard]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and (error := guard.exception()) is not None:
            raise error
        return await task
    finally:
        if not task.done():
            if own:
                task.cancel()
        elif not task.cancelled():
            task.exception()  # retrieved, also where the error of the guard was raised
