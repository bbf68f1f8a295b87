"""One request on its decode worker, from Submit to its last token.

    placing --> decoding --> ended
       ^            |
       +------------+   transfer failed, prefill worker died: a new attempt (bounded)

Where the engine here died, or the worker goes, the router gives the request to another.

The job owns the request: it holds the tokens already sent, and starts again from them after any
failure. What has been sent stays as it is, because sampling is a function of the position.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from decode_worker.attempt import Attempt
from engine.client import EngineClient
from kvtransfer.fetch import Fetch
from kvtransfer.links import Links
from protocol import wire_pb2 as pb
from protocol.errors import InvalidRequest, PeerLost, TransferFailed, Unavailable
from protocol.liveness import MAX_DEATHS
from protocol.logprobs import Logprobs, logprobs_to_wire
from protocol.request import Finish, Request

log = logging.getLogger("baton.decode")

ENGINE_WAIT_S = 5.0
"""How long a request waits for an engine that is being replaced, before its router looks anew."""

MAX_TRANSFERS = 3
"""Hand-overs that may fail before the prompt is computed here."""

_AFTER_FIRST = {"kv_ready", "decode_started", "finished"}
"""Events that may still come when the first token is out."""

Emit = Callable[[pb.Output], None]


def invalid(name: str, error: InvalidRequest) -> pb.Output:
    """The end of a request that no worker takes."""
    what = pb.Invalid(param=error.param or "", code=error.code or "")
    return pb.Output(id=name, finish=pb.FINISH_ERROR, error=str(error), invalid=what)


class Job:
    """The Owner of its attempts, one at a time."""

    def __init__(
        self,
        request: Request,
        candidates: list[pb.PrefillCandidate],
        fetch: pb.Fetch | None,
        engine: EngineClient,
        links: Callable[[], Links],
        local_prefill_tokens: int,
        emit: Emit,
        ended: Callable[[Job], None],
        deaths: int = 0,
    ) -> None:
        self.request = request
        self._candidates = candidates[:MAX_TRANSFERS]
        self._fetch = fetch
        self._engine = engine
        self._links = links
        self._local_prefill_tokens = local_prefill_tokens
        self._emit = emit
        self._ended = ended
        self._emitted: list[int] = list(request.emitted)
        self._cached = 0
        self._prompt_logprobs: list[pb.Logprobs] = []  # until the next token
        self._deaths = deaths
        self._timeline: dict[str, float] = {}
        self._measured: pb.Measured | None = None
        self._began = time.monotonic()
        self._done = False
        self._attempt: Attempt | None = None
        self._candidate: pb.PrefillCandidate | None = None  # the one that is asked
        self._placing = self._place_anew()

    # ---- ending -----------------------------------------------------------------------------

    def cancel(self) -> None:
        """The client is gone, or the router is: forget the request everywhere."""
        if not self._done:
            self._end()

    def _end(self) -> None:
        self._done = True
        self._placing.cancel()
        if self._attempt is not None:
            self._attempt.give_up()
        self._ended(self)

    def hand_over(self, why: str) -> None:
        """Give the request up unharmed: its router goes on elsewhere with what was sent."""
        self._fail(why, retryable=True, moved=True)

    def _fail(self, why: str, *, retryable: bool, moved: bool = False) -> None:
        if not self._done:
            output = pb.Output(id=self.request.id, finish=pb.FINISH_ERROR, error=why)
            output.retryable, output.moved = retryable, moved
            output.timeline.extend(self._marks())
            self._emit(output)
            self._end()

    # ---- what the attempt says --------------------------------------------------------------

    def token(self, token: int, finish: Finish, logprobs: Logprobs | None) -> None:
        if self._done:
            return
        first = len(self._emitted) == len(self.request.emitted)
        if first:
            self.mark("first_token")
        self._emitted.append(token)
        output = pb.Output(id=self.request.id, tokens=(token,), cached_tokens=self._cached)
        if logprobs is not None:
            output.logprobs.append(logprobs_to_wire(logprobs))
        if finish is not Finish.NONE:
            self.mark("finished")
            output.finish = int(finish)  # type: ignore[assignment]
            if self._measured is not None:
                output.measured.CopyFrom(self._measured)
        if first or finish is not Finish.NONE:
            output.timeline.extend(self._marks())
        output.prompt_logprobs.extend(self._prompt_logprobs)
        self._prompt_logprobs = []
        self._emit(output)
        if finish is not Finish.NONE:
            self._end()

    def cached(self, tokens: int) -> None:
        if len(self._emitted) == len(self.request.emitted):  # else it finds what it computed itself
            self._cached = min(tokens, len(self.request.prompt))

    def measured(self, measured: pb.Measured) -> None:
        self._measured = measured

    def mark(self, event: str) -> None:
        """What belongs to the prompt counts once: not again where KV is lost and comes anew."""
        if "first_token" not in self._timeline or event in _AFTER_FIRST:
            self._timeline[event] = time.monotonic() - self._began

    def _marks(self) -> list[pb.Mark]:
        return [pb.Mark(event=e, seconds=s) for e, s in self._timeline.items()]

    def prompt_logprobs(self, logprobs: list[Logprobs]) -> None:
        self._prompt_logprobs = [logprobs_to_wire(report) for report in logprobs]

    def refused(self, error: InvalidRequest) -> None:
        if not self._done:
            self._emit(invalid(self.request.id, error))
            self._end()

    def busy(self, why: str) -> None:
        """The engine has no time for this request: the router asks another."""
        self._fail(why, retryable=True)

    def lost(self) -> None:
        """The engine died. Another takes a while to load: the router knows who is quicker."""
        self._fail("the engine died under this request", retryable=True)

    def _peer_lost(self, error: PeerLost, endpoint: str) -> None:
        """A prefill worker died or stands still; perhaps this request is why."""
        self._links().prefillers.suspect(endpoint)
        if error.at_work:
            self._deaths += 1
            self._emit(pb.Output(id=self.request.id, deaths=1))
            if self._deaths >= MAX_DEATHS:
                self._fail(f"{self._deaths} workers died under this request", retryable=False)

    def spoiled(self, why: str) -> None:
        """What was handed over is of no use: start again from the tokens already sent."""
        if self._done:
            return
        self._pass_over(why)
        self._placing.cancel()
        self._placing = self._place_anew()

    def _pass_over(self, why: str) -> None:
        """Give the attempt up, and the prefill worker that it had."""
        log.warning("request %s: %s", self.request.id, why)
        if self._candidate is not None:
            self._candidates.remove(self._candidate)
            self._candidate = None
        if self._attempt is not None:
            self._attempt.give_up()

    # ---- placing ----------------------------------------------------------------------------

    def _place_anew(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._place(), name=f"place-{self.request.id}")

    def _next_candidate(self) -> pb.PrefillCandidate | None:
        """The best one that has not just been found to stand still."""
        prefillers = self._links().prefillers
        able = [c for c in self._candidates if not prefillers.suspected(c.endpoint)]
        return able[0] if able else None

    async def _place(self) -> None:
        """Try until the sequence decodes here or has ended. Without candidates left, it is
        computed here."""
        try:
            await self._engine.session(ENGINE_WAIT_S)
            await self._fetch_once()
            while True:
                await self._engine.session(ENGINE_WAIT_S)
                self._attempt = Attempt(self, self._links(), self._engine.handle)
                request = self.request.resumed(self._emitted)
                candidate = self._candidate = self._next_candidate()
                try:
                    return await self._attempt.place(request, candidate, self._local_prefill_tokens)
                except TransferFailed as error:
                    self._pass_over(str(error))
                    if isinstance(error, PeerLost) and candidate is not None:
                        self._peer_lost(error, candidate.endpoint)
                    if self._done:
                        return None  # one death too many: nobody would own a further attempt
        except Unavailable as error:
            self.hand_over(str(error))
        except Exception:
            log.exception("request %s: a bug", self.request.id)
            self._fail("internal error", retryable=False)

    async def _fetch_once(self) -> None:
        """Bring in what another worker has cached, where the router names one. Not tried again."""
        source, self._fetch = self._fetch, None
        request = self.request.resumed(self._emitted)
        if source is not None and not request.prompt_logprobs_due:
            handle = self._engine.handle()
            await Fetch(self._links(), handle, request, source, self.mark).run()
