"""One request on its decode worker, from Submit to its last token.

    placing --(here: Generate | elsewhere: Receive, Handover, Join)--> decoding --> ended
       ^                                                                  |
       +---- transfer failed, prefill worker died, engine died -----------+   (bounded)

The job owns the request: it holds the tokens already sent, and starts again from them after any
failure. What has been sent stays as it is, because sampling is a function of the position.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import grpc

from decode_worker.handover import Handover, Links, Told
from decode_worker.placement import prefill_here
from engine import messages as m
from engine.client import EngineClient
from protocol import wire_pb2 as pb
from protocol.errors import BatonError, InvalidRequest, TransferFailed, Unavailable
from protocol.request import Finish, Request

log = logging.getLogger("baton.decode")

ENGINE_WAIT_S = 60.0
"""How long a request waits for an engine that is being replaced."""

PIN_S = 30.0
"""How long the engine may take to answer; it does so at its next step boundary."""

MAX_STARTS = 5
"""Attempts in all, whatever ended the earlier ones."""

Emit = Callable[[pb.Output], None]


class Job:
    """A Listener of its sequence. Events and tokens come on the event loop."""

    def __init__(
        self,
        request: Request,
        candidates: list[pb.PrefillCandidate],
        engine: EngineClient,
        links: Callable[[], Links],
        local_prefill_tokens: int,
        emit: Emit,
        ended: Callable[[Job], None],
    ) -> None:
        self.request = request
        self._candidates = candidates
        self._engine = engine
        self._links_now = links
        self._local_prefill_tokens = local_prefill_tokens
        self._emit = emit
        self._ended = ended
        self._emitted: list[int] = list(request.emitted)
        self._cached = 0
        self._starts = 0
        self._handle = -1
        self._links: Links | None = None
        self._handover: Handover | None = None
        self._pinned: asyncio.Future[int] | None = None
        self._timeline: dict[str, float] = {}
        self._began = time.monotonic()
        self._done = False
        self._task = asyncio.create_task(self._place(), name=f"place-{request.id}")

    # ---- ending -----------------------------------------------------------------------------

    def cancel(self) -> None:
        """The client is gone, or the router is: forget the request everywhere."""
        if not self._done:
            self._end()

    def _end(self) -> None:
        self._done = True
        self._task.cancel()
        self._let_go()
        self._ended(self)

    def _let_go(self) -> None:
        """Give up the sequence in the engine, if there is one."""
        if self._links is not None:
            self._links.session.detach(self._handle)
            self._links.session.send(m.Drop(self._handle))
            self._links = None

    def _fail(self, why: str, *, retryable: bool) -> None:
        if not self._done:
            self._emit(
                pb.Output(
                    id=self.request.id,
                    finish=pb.FINISH_ERROR,
                    error=why,
                    retryable=retryable,
                    timeline=self._marks(),
                )
            )
            self._end()

    # ---- what the engine says ---------------------------------------------------------------

    def on_token(self, token: int, finish: Finish) -> None:
        if len(self._emitted) == len(self.request.emitted):
            self._mark("first_token")
        self._send(token, finish)

    def _send(self, token: int, finish: Finish) -> None:
        if self._done:
            return
        self._emitted.append(token)
        output = pb.Output(id=self.request.id, tokens=(token,), cached_tokens=self._cached)
        if finish is not Finish.NONE:
            self._mark("finished")
            output.finish = int(finish)  # type: ignore[assignment]
            output.timeline.extend(self._marks())
        self._emit(output)
        if finish is not Finish.NONE:
            self._end()

    def on_event(self, event: m.Event) -> None:
        if isinstance(event, m.Started):
            self._mark("prefill_started")
            self._cached = min(event.cached_tokens, len(self.request.prompt))
        elif isinstance(event, m.Pinned) and self._pinned is not None:
            if not self._pinned.done():
                self._pinned.set_result(event.cached_tokens)
        elif isinstance(event, m.Reserved) and self._handover is not None:
            self._handover.on_reserved()
        elif isinstance(event, m.Refused):
            self._fail(event.why, retryable=False)

    def on_lost(self) -> None:
        """The engine died: start again from the tokens already sent."""
        if self._done:
            return
        log.warning("request %s: engine lost, starting again", self.request.id)
        self._links = None
        self._task.cancel()
        self._task = asyncio.create_task(self._place(), name=f"place-{self.request.id}")

    # ---- placing ----------------------------------------------------------------------------

    async def _place(self) -> None:
        """Try until the sequence decodes here, the request has ended, or it is tried enough."""
        try:
            while self._starts < MAX_STARTS:
                self._starts += 1
                try:
                    return await self._start()
                except TransferFailed as error:
                    log.warning("request %s: %s", self.request.id, error)
                    self._candidates = self._candidates[1:]
                    self._let_go()
            self._fail(f"gave up after {MAX_STARTS} attempts", retryable=True)
        except InvalidRequest as error:
            self._fail(str(error), retryable=False)
        except (BatonError, grpc.RpcError, OSError) as error:
            self._fail(str(error), retryable=True)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("request %s: a bug", self.request.id)
            self._fail("internal error", retryable=False)

    async def _start(self) -> None:
        """One attempt, here or elsewhere."""
        await self._engine.session(ENGINE_WAIT_S)
        links = self._links_now()
        request = self.request.resumed(self._emitted)
        context = len(request.context)
        here = prefill_here(context, 0, len(self._candidates), self._local_prefill_tokens)
        if not here:
            self._seat(links)
            cached = await self._pin(links, request)
            here = prefill_here(context, cached, len(self._candidates), self._local_prefill_tokens)
            if not here:
                return await self._elsewhere(links, request, cached)
            self._let_go()
        self._mark("prefill_queued")
        self._seat(links)
        links.session.send(m.Generate(self._handle, request))
        return None

    def _seat(self, links: Links) -> None:
        self._handle = self._engine.handle()
        self._links = links
        links.session.attach(self._handle, self)

    async def _pin(self, links: Links, request: Request) -> int:
        """Hold what is cached here; its tokens."""
        self._pinned = asyncio.get_running_loop().create_future()
        links.session.send(m.Receive(self._handle, request))
        try:
            async with asyncio.timeout(PIN_S):
                return await self._pinned
        except TimeoutError as error:
            raise Unavailable("the engine does not answer") from error

    async def _elsewhere(self, links: Links, request: Request, cached: int) -> None:
        told = Told(self._first, self._mark)
        self._handover = Handover(links, self._handle, request, cached, told)
        try:
            await self._handover.run(self._candidates[0])
        finally:
            self._handover = None

    def _first(self, token: int, finish: Finish, cached: int) -> None:
        """The first token, from the prefill worker. When it is the last as well, the job ends only
        after the attempt has: the attempt must not be cancelled by its own news."""
        self._cached = min(cached, len(self.request.prompt))
        if finish is Finish.NONE:
            self._send(token, finish)
        else:
            asyncio.get_running_loop().call_soon(self._send, token, finish)

    # ---- timeline ---------------------------------------------------------------------------

    def _mark(self, event: str) -> None:
        self._timeline[event] = time.monotonic() - self._began

    def _marks(self) -> list[pb.Mark]:
        return [pb.Mark(event=e, seconds=s) for e, s in self._timeline.items()]
