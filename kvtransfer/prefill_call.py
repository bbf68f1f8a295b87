"""The receiver's end of one Prefill.Run call, and of the KV transfer that goes with it.

    start --> accepted --> (fetching) --> started --> first_token --> sent
      credits flow to the other worker meanwhile, and signs of life come back

    slot granted --credit--> frame sent --KVPull's thread--> slot filled --Ingest--> scattered

``decode_worker.handover`` and ``PeerFetch`` drive it; the other end is prefill_worker/service.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import grpc

from engine.ipc import messages as m
from engine.kv_cache.kv_format import KVPiece, split_into_pieces
from kvtransfer.frames import ExpectedFrames
from kvtransfer.receiver import CreditWindow, KVPull
from kvtransfer.receiver_context import PrefillStream, ReceiverContext
from kvtransfer.sender import TRANSFER_BYTES
from protocol.errors import PeerLost, TransferFailed
from protocol.liveness import SILENCE_S, SilenceDetector
from protocol.requests import Request, request_to_wire
from protocol.wire import wire_pb2 as pb

ACCEPT_S = 2.0
"""A worker that has not accepted the call by then counts as lost."""

_REASON_S = 0.1
"""How long a failed KV stream waits for the control call to fail, too, and give the reason."""

T = TypeVar("T")


class InboundTransfer:
    """The frames of one transfer on their way into the pages of one sequence. ``PrefillRunCall``
    creates it; it belongs to the event loop."""

    def __init__(
        self,
        context: ReceiverContext,
        handle: int,
        expected: ExpectedFrames,
        grant_credit: Callable[[], None],
    ) -> None:
        self._context = context
        self._session = context.session
        self._handle = handle
        self._expected = expected
        self._grant_credit = grant_credit
        self._pull: KVPull | None = None
        self._counted = False  # as complete or as failed
        self.window = CreditWindow(expected.total)
        self.bytes = 0  # of KV that has come

    async def run(self, endpoint: str) -> None:
        """Receive every frame and give it to the engine, which must have pages for all of them.

        Raises TransferFailed."""
        view = self._session.arena.slot
        codec, began = self._expected.codec, time.monotonic()
        self._pull = self._context.client.open(endpoint, self._expected, view, self._on_frame)
        try:
            self._request_slots()
            await self._context.client.read_to_end(self._pull)
            self._counted = True
            self._context.traffic.count_transfer(codec, time.monotonic() - began)
        except TransferFailed:
            self.count_failure()
            raise
        finally:
            self._context.slots.cancel_requests(self)
            self._context.slots.release(self._pull.unused_slots())

    def count_failure(self) -> None:
        """Count one failed transfer, unless it is complete or counted already. A caller that
        cancels ``run`` because the sender is gone calls this, too."""
        if self._pull is not None and not self._counted:
            self._counted = True
            self._context.traffic.count_failure(self._expected.codec)

    def _request_slots(self) -> None:
        for _ in range(self.window.request_slots()):
            self._context.slots.request(self, self._on_slot)

    def _on_slot(self, slot: int) -> None:
        assert self._pull is not None
        self.window.granted()
        self._pull.add_slot(slot)
        self._grant_credit()

    def _on_frame(self, slot: int, piece: KVPiece, nbytes: int) -> None:
        self.window.arrived()
        self.bytes += nbytes
        codec = self._expected.codec
        if (ready := self._session.ready) is not None:
            self._context.traffic.count_frame(ready.kv, codec, piece, nbytes)
        self._session.send(m.Ingest(self._handle, slot, piece, nbytes, codec))
        self._request_slots()


class PrefillRunCall:
    """One Prefill.Run call on ``stream``: its transfer id, its events, its credits.

    ``mark`` is called with the stages of a fetch that the other worker makes first: fetch_started,
    fetch_done."""

    def __init__(
        self, context: ReceiverContext, stream: PrefillStream, mark: Callable[[str], None]
    ) -> None:
        self._context = context
        self._stream = stream
        self._mark = mark
        self._transfer = secrets.token_bytes(TRANSFER_BYTES)
        self._frame_bytes = context.session.arena.shape.slot_bytes
        self._credits = 0
        self._credits_due = asyncio.Event()
        self._accepted = False
        self._tasks: list[asyncio.Task[None]] = []
        self._silence = SilenceDetector()
        self._events: asyncio.Queue[pb.PrefillEvent] = asyncio.Queue()
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def inbound_transfer(self, handle: int, first_block: int, end_block: int) -> InboundTransfer:
        """Create the KV side, for blocks ``first_block .. end_block`` of the sequence
        ``handle``."""
        context = self._context
        ready = context.session.ready
        assert ready is not None
        size = ready.kv.page_layer_bytes(context.codec)
        pieces = split_into_pieces(first_block, end_block, ready.kv.layers, size, self._frame_bytes)
        expected = ExpectedFrames(self._transfer, pieces, size, context.codec)
        return InboundTransfer(context, handle, expected, self._grant_credit)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Read events and send credits while the body runs, then cancel the call.

        Raises TransferFailed for everything that goes wrong with the call, PeerLost if the other
        worker died."""
        self._run_task(self._send_credits())
        self._run_task(self._read_events())
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from error
        except TimeoutError as error:
            raise TransferFailed("prefill: no progress within the deadline") from error
        except TransferFailed:
            # KV stream and control call break together when the other worker dies; the control
            # call gives the reason.
            await asyncio.wait([self._over], timeout=_REASON_S)
            if self._over.done() and isinstance(reason := self._over.exception(), PeerLost):
                raise reason from None
            raise
        finally:
            for task in self._tasks:
                task.cancel()
            self._stream.cancel()
            self._over.cancel()

    def _run_task(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    async def start(
        self,
        request: Request,
        instance: str,
        skip_blocks: int,
        *,
        cached_only: bool = False,
        fetch: pb.Fetch | None = None,
    ) -> None:
        """Ask the other worker for the KV of the request's context from block ``skip_blocks`` on,
        and return when it has accepted. Raises PeerLost when it does not answer."""
        ready = self._context.session.ready
        assert ready is not None
        start = pb.PrefillStart(
            model=ready.kv_identity,
            cached_only=cached_only,
            fetch=fetch,
            request=request_to_wire(request),
            instance=instance,
            transfer=self._transfer.hex(),
            skip_blocks=skip_blocks,
            frame_bytes=self._frame_bytes,
            codec=self._context.codec,
        )
        self._run_task(self._watch_for_silence())
        try:
            async with asyncio.timeout(ACCEPT_S):
                # A call that is over already gives its reason through ``next_event``.
                with contextlib.suppress(asyncio.InvalidStateError):
                    await self._stream.write(pb.PrefillCall(start=start))
                await self.next_event("accepted")
        except TimeoutError as error:
            raise PeerLost(f"prefill: no answer within {ACCEPT_S:g} s", at_work=False) from error
        self._accepted = True

    async def next_event(self, kind: str) -> pb.PrefillEvent:
        """Return the next event, which must be ``kind`` unless it only reports progress."""
        while True:
            event = await guarded_by(self._over, self._events.get())
            came = event.WhichOneof("body")
            if came == kind:
                return event
            if came == "fetching":
                self._mark("fetch_done" if event.fetching.done else "fetch_started")
            elif came != "sent":
                raise TransferFailed(f"prefill: {came} came, {kind} was due")

    async def wait_for_kv(
        self, receiving: asyncio.Task[None], inbound: InboundTransfer, frame_s: float
    ) -> None:
        """Return when ``receiving`` is done. Raises TransferFailed when the call ends first, or
        when the sender holds a credit for ``frame_s`` seconds and sends nothing."""
        while not receiving.done():
            await asyncio.wait(
                [receiving, self._over], timeout=0.5, return_when=asyncio.FIRST_COMPLETED
            )
            if self._over.done() and not receiving.done():
                self._over.result()  # raises
            if inbound.window.stalled_s() > frame_s:
                raise TransferFailed(f"no KV frame for {frame_s:g} s")

    # ---- signs of life ----------------------------------------------------------------------

    async def _read_events(self) -> None:
        """Read events as they come, so that silence is noticed also while no caller waits."""
        try:
            while isinstance(event := await self._stream.read(), pb.PrefillEvent):
                self._silence.heard()
                if not event.HasField("alive"):
                    self._events.put_nowait(event)
            raise TransferFailed(f"prefill: the call ended: {await self._stream.details()}")
        except grpc.aio.AioRpcError as error:
            self._end(self._failure(error))
        except TransferFailed as error:
            self._end(error)

    async def _watch_for_silence(self) -> None:
        await self._silence.wait_for_silence(SILENCE_S)
        self._end(PeerLost(f"prefill: silent for {SILENCE_S:g} s", at_work=self._accepted))

    def _end(self, error: TransferFailed) -> None:
        if not self._over.done():
            self._over.set_exception(error)

    def _failure(self, error: grpc.aio.AioRpcError) -> TransferFailed:
        text = f"prefill: {error.code().name}: {error.details()}"
        if error.code() is grpc.StatusCode.UNAVAILABLE and self._accepted:
            return PeerLost(text, at_work=True)
        return TransferFailed(text)

    # ---- credits ----------------------------------------------------------------------------

    def _grant_credit(self) -> None:
        self._credits += 1
        self._credits_due.set()

    async def _send_credits(self) -> None:
        """Send all credits of one turn of the event loop in one message. When the call is over,
        reading from it gives the reason."""
        try:
            while True:
                await self._credits_due.wait()
                self._credits_due.clear()
                granted, self._credits = self._credits, 0
                await self._stream.write(pb.PrefillCall(credits=granted))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return


async def guarded_by(guard: asyncio.Future[None], work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``; raise the error of ``guard`` as soon as that fails."""
    task = asyncio.ensure_future(work)
    try:
        both: list[asyncio.Future[Any]] = [task, guard]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if guard.done() and (error := guard.exception()) is not None:
            raise error
        return await task
    finally:
        if not task.done():
            task.cancel()
        elif not task.cancelled():
            task.exception()  # retrieved, also where the error of the guard was raised
