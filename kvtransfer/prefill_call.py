"""The control call of one transfer (``Prefill.Run``), as its receiver drives it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import grpc

from engine.kv_cache.kv_format import cut
from kvtransfer.frames import Expectation
from kvtransfer.inbound_transfer import Incoming
from kvtransfer.prefill_channels import PrefillCall
from kvtransfer.receiver_context import Links
from kvtransfer.sender import TRANSFER_BYTES
from protocol.errors import PeerLost, TransferFailed
from protocol.liveness import SILENCE_S, Silence
from protocol.requests import Request, to_wire
from protocol.wire import wire_pb2 as pb

ACCEPT_S = 2.0
"""A worker that has not accepted by then is passed over."""

_WHY_S = 0.1  # for the reason of a failure to arrive

T = TypeVar("T")


class Control:
    """One transfer: its id, its messages, its credits."""

    def __init__(self, links: Links, mark: Callable[[str], None]) -> None:
        self._links = links
        self._mark = mark  # told what happens at the other worker
        self._transfer = secrets.token_bytes(TRANSFER_BYTES)
        self._frame_bytes = links.session.arena.shape.slot_bytes
        self._credits = 0
        self._credit_due = asyncio.Event()
        self._accepted = False
        self._tasks: list[asyncio.Task[None]] = []
        self._silence = Silence()
        self._events: asyncio.Queue[pb.PrefillEvent] = asyncio.Queue()
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def incoming(self, handle: int, first_block: int, end_block: int) -> Incoming:
        """The KV side, for these blocks of the sequence ``handle``."""
        links = self._links
        ready = links.session.ready
        assert ready is not None
        size = ready.kv.page_layer_bytes(links.codec)
        pieces = cut(first_block, end_block, ready.kv.layers, size, self._frame_bytes)
        expectation = Expectation(self._transfer, pieces, size, links.codec)
        return Incoming(
            links.session,
            links.slots,
            links.sink,
            handle,
            expectation,
            self._grant,
            links.traffic,
        )

    @contextlib.asynccontextmanager
    async def over(self, call: PrefillCall) -> AsyncIterator[None]:
        """Use ``call``, and end it. Raises TransferFailed for whatever goes wrong with it."""
        self._begin(self._send_credits(call))
        self._begin(self._listen(call))
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from error
        except TimeoutError as error:
            raise TransferFailed("prefill: no progress within the deadline") from error
        except TransferFailed:
            # KV and control break together when the other end dies; control says why.
            await asyncio.wait([self._over], timeout=_WHY_S)
            self._raise_if_lost()
            raise
        finally:
            for task in self._tasks:
                task.cancel()
            call.cancel()
            self._over.cancel()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    def _raise_if_lost(self) -> None:
        if self._over.done() and isinstance(error := self._over.exception(), PeerLost):
            raise error

    async def open(
        self,
        call: PrefillCall,
        request: Request,
        instance: str,
        skip_blocks: int,
        *,
        cached_only: bool = False,
        fetch: pb.Fetch | None = None,
    ) -> None:
        """Until the other worker has accepted."""
        ready = self._links.session.ready
        assert ready is not None
        start = pb.PrefillStart(
            model=ready.kv_identity,
            cached_only=cached_only,
            fetch=fetch,
            request=to_wire(request),
            instance=instance,
            transfer=self._transfer.hex(),
            skip_blocks=skip_blocks,
            frame_bytes=self._frame_bytes,
            codec=self._links.codec,
        )
        self._begin(self._watch())
        try:
            async with asyncio.timeout(ACCEPT_S):
                with contextlib.suppress(asyncio.InvalidStateError):  # over already: for a reason
                    await call.write(pb.PrefillCall(start=start))
                await self.next("accepted")
        except TimeoutError as error:
            raise PeerLost(f"prefill: no answer within {ACCEPT_S:g} s", at_work=False) from error
        self._accepted = True

    async def next(self, kind: str) -> pb.PrefillEvent:
        """The next event, which must be ``kind``; others may only tell of progress."""
        while True:
            event = await beside(self._events.get(), self._over)
            came = event.WhichOneof("body")
            if came == kind:
                return event
            if came == "fetching":
                self._mark("fetch_done" if event.fetching.done else "fetch_started")
            elif came != "sent":
                raise TransferFailed(f"prefill: {came} came, {kind} was due")

    # ---- signs of life ----------------------------------------------------------------------

    async def _listen(self, call: PrefillCall) -> None:
        """Take events as they come: whoever waits for one, silence is noticed."""
        try:
            while isinstance(event := await call.read(), pb.PrefillEvent):
                self._silence.heard()
                if not event.HasField("alive"):
                    self._events.put_nowait(event)
            raise TransferFailed(f"prefill: the call ended: {await call.details()}")
        except grpc.aio.AioRpcError as error:
            self._end(self._failure(error))
        except TransferFailed as error:
            self._end(error)

    async def _watch(self) -> None:
        await self._silence.lasts(SILENCE_S)
        self._end(PeerLost(f"prefill: silent for {SILENCE_S:g} s", at_work=self._accepted))

    def _end(self, error: TransferFailed) -> None:
        if not self._over.done():
            self._over.set_exception(error)

    def _failure(self, error: grpc.aio.AioRpcError) -> TransferFailed:
        text = f"prefill: {error.code().name}: {error.details()}"
        if error.code() is grpc.StatusCode.UNAVAILABLE and self._accepted:
            return PeerLost(text, at_work=True)
        return TransferFailed(text)

    async def watch(
        self, receiving: asyncio.Task[None], incoming: Incoming, frame_s: float
    ) -> None:
        """Wait for the last frame, but not for a sender that has gone quiet for ``frame_s``, or
        whose call is over."""
        while not receiving.done():
            await asyncio.wait(
                [receiving, self._over], timeout=0.5, return_when=asyncio.FIRST_COMPLETED
            )
            if self._over.done() and not receiving.done():
                self._over.result()  # raises
            if incoming.window.stalled_s() > frame_s:
                raise TransferFailed(f"no KV frame for {frame_s:g} s")

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


async def beside(main: Coroutine[Any, Any, T], other: asyncio.Future[None]) -> T:
    """Await ``main``; when ``other`` fails first, fail with its error."""
    task = asyncio.ensure_future(main)
    try:
        both: list[asyncio.Future[Any]] = [task, other]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if other.done() and (error := other.exception()) is not None:
            raise error
        return await task
    finally:
        if not task.done():
            task.cancel()
        elif not task.cancelled():
            task.exception()  # seen, also where the other one's error went first
