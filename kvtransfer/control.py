"""The control call of one transfer (``Prefill.Run``), as its receiver drives it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import grpc

from engine.pieces import cut
from kvtransfer.frames import Expectation
from kvtransfer.incoming import Incoming
from kvtransfer.links import Links
from kvtransfer.prefillers import PrefillCall
from kvtransfer.source import TRANSFER_BYTES
from protocol import wire_pb2 as pb
from protocol.errors import TransferFailed
from protocol.request import Request, to_wire

ACCEPT_S = 2.0
"""A worker that has not accepted by then is passed over."""

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
        crediting = asyncio.create_task(self._send_credits(call))
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise TransferFailed(f"prefill: {error.code().name}: {error.details()}") from error
        except TimeoutError as error:
            raise TransferFailed("prefill: no progress within the deadline") from error
        finally:
            crediting.cancel()
            call.cancel()

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
        async with asyncio.timeout(ACCEPT_S):
            with contextlib.suppress(asyncio.InvalidStateError):  # over already: reading says why
                await call.write(pb.PrefillCall(start=start))
            await self.next(call, "accepted")

    async def next(self, call: PrefillCall, kind: str) -> pb.PrefillEvent:
        """The next event, which must be ``kind``; others may only tell of progress."""
        while True:
            event = await call.read()
            if not isinstance(event, pb.PrefillEvent):
                raise TransferFailed(f"prefill: {await call.details()}, {kind} was due")
            came = event.WhichOneof("body")
            if came == kind:
                return event
            if came == "fetching":
                self._mark("fetch_done" if event.fetching.done else "fetch_started")
            elif came != "sent":
                raise TransferFailed(f"prefill: {came} came, {kind} was due")

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


async def watch(receiving: asyncio.Task[None], incoming: Incoming, frame_s: float) -> None:
    """Wait for the last frame, but not for a sender that has gone quiet for ``frame_s``."""
    while not receiving.done():
        await asyncio.wait([receiving], timeout=0.5)
        if incoming.window.stalled_s() > frame_s:
            raise TransferFailed(f"no KV frame for {frame_s:g} s")


async def beside(main: Coroutine[Any, Any, T], other: asyncio.Task[None]) -> T:
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
