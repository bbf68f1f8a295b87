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
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine.ipc import messages as m
from engine.process.client import EngineClient
from kvtransfer.peer_fetch import Fetch
from kvtransfer.prefill_call import Control, beside
from kvtransfer.prefill_channels import PrefillCall
from kvtransfer.receiver_context import Links
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import InvalidRequest, PeerLost, TransferFailed, Unavailable
from protocol.liveness import MAX_DEATHS
from protocol.requests import (
    Finish,
    Logprobs,
    Request,
    all_from_wire,
    logprobs_from_wire,
    logprobs_to_wire,
)
from protocol.wire import wire_pb2 as pb

# MERGED decode_worker.handover
# One attempt to have a prompt prefilled elsewhere and its KV brought here.
#
#     Prefill.Run --accepted--> --started--> reserve pages, open PullKV
#        --first_token--> to the client at once        frames --> slots --> engine
#        last frame in and first token known --> Join
#
# The decode worker owns both RPCs. An attempt ends by joining the batch, by finishing (the first
# token was the last), or by TransferFailed; its hold on the prefill worker's pages ends with it.
# Whatever the prefill worker refuses, this worker can still compute itself.

PREFILL_S = 60.0
"""From accepted to first token, queueing included; well within the router's own deadline."""

FRAME_S = 5.0
"""Progress deadline of the KV once the prompt is computed: the longest gap between frames."""


class First(NamedTuple):
    """The first token, as the prefill worker drew it."""

    token: int
    finish: Finish
    logprobs: Logprobs | None
    prompt_logprobs: list[Logprobs]


@dataclass(frozen=True)
class Told:
    """Whom an attempt tells of its progress."""

    first: Callable[[First, int], None]  # with the cached prompt tokens
    mark: Callable[[str], None]  # an event of the timeline
    measured: Callable[[pb.Measured], None]  # what it took, once all KV is here


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
        self._prefill = ""  # instance
        self._control = Control(links, told.mark)
        self._skip = cached_tokens // BLOCK_TOKENS
        blocks = -(-len(request.context) // BLOCK_TOKENS)
        self.incoming = self._control.incoming(handle, self._skip, blocks)

    async def run(self, call: PrefillCall, candidate: pb.PrefillCandidate) -> None:
        """Bring the context's KV in over ``call`` (just opened) and join. Raises
        TransferFailed."""
        self._prefill = candidate.instance
        fetch = candidate.fetch if candidate.HasField("fetch") else None
        try:
            async with self._control.over(call):
                await self._control.open(
                    call, self._request, candidate.instance, self._skip, fetch=fetch
                )
                self._told.mark("prefill_queued")
                await self._carry(call, candidate.kv_endpoint)
        except TransferFailed:
            self.incoming.broke()
            raise

    async def _carry(self, call: PrefillCall, kv_endpoint: str) -> None:
        """From accepted to joined, or to the end."""
        receiving: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(PREFILL_S):
                cached = (await self._control.next("started")).started.cached_tokens
                self._told.mark("prefill_started")
                receiving = asyncio.create_task(self._receive(kv_endpoint))
                event = await beside(self._control.next("first_token"), receiving)
            try:
                first = self._checked(event.first_token)
            except InvalidRequest as error:
                raise TransferFailed(f"prefill: {error}") from error
            self._told.mark("first_token")
            if first.finish is Finish.NONE:
                self._told.first(first, cached)
                before, began = self.incoming.bytes, time.monotonic()
                watching = self._control.watch(receiving, self.incoming, FRAME_S)
                with self._links.traffic.tails.waiting(lambda: self.incoming.bytes):
                    await beside(watching, receiving)
                self._told.mark("kv_ready")
                self._account(before, time.monotonic() - began)
                self._links.session.send(m.Join(self._handle, first.token))
        finally:
            call.cancel()  # first of all: P's pages are free whatever the rest takes
            if receiving is not None:
                receiving.cancel()
                await asyncio.wait([receiving])
        if first.finish is not Finish.NONE:
            self._told.first(first, cached)

    def _account(self, before: int, tail_s: float) -> None:
        """``before``: bytes that had come when the first token did, ``tail_s`` ago."""
        came = self.incoming.bytes
        measured = pb.Measured(prefill_instance=self._prefill, kv_bytes=came)
        measured.kv_tokens = len(self._request.context) - self._skip * BLOCK_TOKENS
        measured.tail_bytes, measured.tail_seconds = came - before, tail_s
        self._told.measured(measured)

    async def _receive(self, kv_endpoint: str) -> None:
        await self.incoming.reserve()
        await self.incoming.run(kv_endpoint)

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
        prompt = all_from_wire(first.prompt_logprobs, self._request.prompt_logprobs_due)
        return First(first.token, Finish(first.finish), logprobs, prompt)


# MERGED decode_worker.placement
# Where a prompt is computed: a pure decision.


def prefill_here(
    context: int, cached: int, prefill_worker: bool, local_prefill_tokens: int
) -> bool:
    """Whether the decode worker computes the ``context - cached`` missing tokens itself.

    It does when nobody else can, and when they are so few that the way to a prefill worker and back
    takes longer than they do.
    """
    return not prefill_worker or context - cached <= local_prefill_tokens


# MERGED decode_worker.attempt
# One attempt of a job: a sequence in one engine session, placed here or handed over.
#
#     lookup (Receive --Found-->) --> few tokens missing, or no prefill worker: Generate
#                                 \-> else: Handover (... Join)
#
# Late events of an attempt that was given up reach nobody: its handle is detached.

LOOKUP_S = 30.0
"""How long the engine may take to answer; it does so at its next step boundary."""


class Owner(Protocol):
    """The job, as its attempt sees it."""

    def token(self, token: int, finish: Finish, logprobs: Logprobs | None) -> None:
        """The next token."""

    def cached(self, tokens: int) -> None:
        """Prompt tokens that no one had to compute."""

    def mark(self, event: str) -> None:
        """An event of the timeline."""

    def measured(self, measured: pb.Measured) -> None:
        """What the hand-over took."""

    def prompt_logprobs(self, logprobs: list[Logprobs]) -> None:
        """Those of the prompt; the first token follows."""

    def refused(self, error: InvalidRequest) -> None:
        """The engine will never take this request."""

    def busy(self, why: str) -> None:
        """The engine has no time for this request; another may."""

    def lost(self) -> None:
        """The engine is gone."""

    def spoiled(self, why: str) -> None:
        """The KV that came was bad, and the sequence is gone: place it anew, elsewhere."""


class Attempt:
    """A Listener of its sequence. ``give_up`` frees the sequence, wherever it is."""

    def __init__(self, owner: Owner, links: Links, handle: Callable[[], int]) -> None:
        self._owner = owner
        self._links = links
        self._new_handle = handle
        self._handle = -1
        self._found: asyncio.Future[int] | None = None
        self._handover: Handover | None = None
        self._breaking: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._joined = False

    async def place(
        self, request: Request, candidate: pb.PrefillCandidate | None, local_prefill_tokens: int
    ) -> None:
        """Until the sequence decodes here, or has ended. Raises TransferFailed."""
        context = len(request.context)
        others = candidate is not None
        if not prefill_here(context, 0, others, local_prefill_tokens):
            assert candidate is not None
            call = self._links.prefillers.run(candidate.endpoint)  # opens while we look up
            try:
                cached = await self._look_up(request)
                if not prefill_here(context, cached, others, local_prefill_tokens):
                    return await self._hand_over(request, cached, call, candidate)
            finally:
                call.cancel()
            self.give_up()
        self._owner.mark("prefill_queued")
        self._seat()
        self._links.session.send(m.Generate(self._handle, request))
        return None

    def give_up(self) -> None:
        """Forget the sequence; its pages are free at the engine's next step boundary."""
        if self._handle >= 0:
            self._links.session.detach(self._handle)
            self._links.session.send(m.Drop(self._handle))
            self._handle = -1

    def _seat(self) -> None:
        self._handle = self._new_handle()
        self._links.session.attach(self._handle, self)

    async def _look_up(self, request: Request) -> int:
        """Tokens of the context that are cached here."""
        self._seat()
        self._found = asyncio.get_running_loop().create_future()
        self._links.session.send(m.Receive(self._handle, request))
        try:
            async with asyncio.timeout(LOOKUP_S):
                return await self._found
        except TimeoutError as error:
            raise Unavailable("the engine does not answer") from error

    async def _hand_over(
        self, request: Request, cached: int, call: PrefillCall, candidate: pb.PrefillCandidate
    ) -> None:
        told = Told(self._first, self._owner.mark, self._owner.measured)
        self._handover = Handover(self._links, self._handle, request, cached, told)
        running = asyncio.ensure_future(self._handover.run(call, candidate))
        try:
            await asyncio.wait([running, self._breaking], return_when=asyncio.FIRST_COMPLETED)
            if self._breaking.done():
                await self._breaking  # raises
            await running
            self._joined = True
        finally:
            running.cancel()
            await asyncio.wait([running])

    def _first(self, first: First, cached: int) -> None:
        self._owner.cached(cached)
        self._owner.prompt_logprobs(first.prompt_logprobs)
        self._owner.token(first.token, first.finish, first.logprobs)

    # ---- what the engine says ---------------------------------------------------------------

    def on_token(self, token: int, finish: Finish, logprobs: Logprobs | None) -> None:
        self._owner.token(token, finish, logprobs)

    def on_event(self, event: m.Event) -> None:
        if isinstance(event, m.Started):
            self._owner.mark("prefill_started")
            self._owner.cached(event.cached_tokens)
        elif isinstance(event, m.Found) and self._found is not None:
            if not self._found.done():
                self._found.set_result(event.cached_tokens)
        elif isinstance(event, m.Joined):
            self._owner.mark("decode_started")
        elif isinstance(event, m.Reserved) and self._handover is not None:
            self._handover.incoming.on_reserved()
        elif isinstance(event, m.Broken) and self._joined:
            self._owner.spoiled(event.why)  # the last frames were given together with Join
        elif isinstance(event, m.Broken):
            self._break(TransferFailed(event.why))
        elif isinstance(event, m.Refused) and event.busy:
            self._owner.busy(event.why)
        elif isinstance(event, m.Refused):
            error = InvalidRequest(event.why, event.param or None, event.code or None)
            self._owner.refused(error)
        elif isinstance(event, m.PromptLogprobs):
            self._owner.prompt_logprobs(event.logprobs)

    def _break(self, error: Exception) -> None:
        if not self._breaking.done():
            self._breaking.set_exception(error)

    def on_lost(self) -> None:
        self._handle = -1
        self._owner.lost()


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
