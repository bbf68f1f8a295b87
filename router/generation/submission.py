"""One submission of a choice to a decode worker, and the queue in which its tokens wait.

    DecodeLink reader --Submission.on_output()--> TokenQueue --take()--> ChoiceStream
    timers, disconnect, broken link --------interrupt()--^

A ``ChoiceStream`` owns one ``TokenQueue`` for its whole life and makes a new ``Submission`` for
each worker that it tries. The reader of a ``DecodeLink`` puts tokens in and never waits.

The events of a submission give the times of its request, as pure functions:

    arrived -> routed -> prefill_queued -> prefill_started -> first_token -> kv_ready
            -> decode_started -> finished

    route | queue (from routed) | prefill | first_emit     together: the time to first token
    wire, scatter                                          after it, where KV was handed over

The first token does not wait for KV: ``wire`` and ``scatter`` lie before the second token. Events
at a decode worker are measured on its own clock, from when it had the request; the way there is
therefore part of ``first_emit``, with the way back.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from protocol.errors import InvalidRequest
from protocol.requests import Finish, Logprobs, Request, logprobs_list_from_wire
from protocol.retry_budget import DEATH_LIMIT, RetryBudget
from protocol.wire import wire_pb2 as pb
from router.generation.placer import PlacedRequest, Placer
from router.placement.cost import Placement
from router.placement.snapshot import Objectives


class Interruption(enum.Enum):
    """Why no more tokens come. The first four allow another submission."""

    LINK_LOST = "link lost"  # the stream to the worker ended
    PAUSED = "paused"  # the stream ended after this router itself had stood still
    RETRYABLE = "retryable"  # the worker reports that another worker may succeed
    MOVED = "moved"  # the worker hands the request back unharmed: it drains, or has no engine
    FATAL = "fatal"  # the worker reports that no worker will succeed
    INVALID = "invalid"  # the request itself is wrong: see TokenBatch.invalid
    OVERFLOW = "overflow"  # the client reads too slowly
    TIMEOUT = "timeout"
    DISCONNECTED = "disconnected"  # the client hung up
    REFUSED = "refused"  # it has waited in the router's queue in vain

    @property
    def can_resubmit(self) -> bool:
        return self.is_death or self in (Interruption.PAUSED, Interruption.MOVED)

    @property
    def is_death(self) -> bool:
        """Whether the request may be what killed the worker, or its engine."""
        return self in (Interruption.LINK_LOST, Interruption.RETRYABLE)


class TokenBatch(NamedTuple):
    """Everything that waited in the queue at one ``take()``."""

    tokens: list[int]
    finish: Finish
    interruption: Interruption | None
    reason: str
    logprobs: list[Logprobs]  # one for each token where they were requested, else empty
    invalid: InvalidRequest | None  # with Interruption.INVALID


class TokenQueue:
    """Tokens of one choice between the reader of a link and the task that serves the choice.

    ``take()`` returns all that has arrived, so that a busy task sends one chunk for many tokens.
    ``limit`` is the number of tokens that may wait: beyond it the client is too slow.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tokens: list[int] = []
        self._logprobs: list[Logprobs] = []
        self._finish = Finish.NONE
        self._interruption: Interruption | None = None
        self._reason = ""
        self._invalid: InvalidRequest | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.cached_tokens: int | None = None  # from the submission that brought the first token
        self.prompt_logprobs: list[Logprobs] = []  # from the prompt's second token on
        self.deaths = RetryBudget(DEATH_LIMIT)  # of workers that had this request

    @property
    def failed(self) -> bool:
        """Whether the queue was interrupted by something that no other worker can mend."""
        return self._interruption is not None and not self._interruption.can_resubmit

    @property
    def has_tokens(self) -> bool:
        """Whether tokens wait to be taken."""
        return bool(self._tokens)

    def put(self, tokens: Iterable[int], finish: Finish, logprobs: Iterable[Logprobs] = ()) -> bool:
        """Append tokens; return False and keep none of them when too many wait already.

        ``logprobs`` has one item for each token, or none, the same for all calls. A message that
        finds the queue empty always fits.
        """
        before = len(self._tokens)
        self._tokens.extend(tokens)
        if before and len(self._tokens) > self._limit:
            del self._tokens[before:]
            return False
        self._logprobs.extend(logprobs)
        assert len(self._logprobs) in (0, len(self._tokens))
        self._finish = finish
        self._wake()
        return True

    def interrupt(
        self, cause: Interruption, reason: str, invalid: InvalidRequest | None = None
    ) -> None:
        """Report that no more tokens come. A final cause is not replaced by a later one."""
        if not self.failed:
            self._interruption, self._reason, self._invalid = cause, reason, invalid
            self._wake()

    async def take(self) -> TokenBatch:
        """Return all that has arrived; wait while there is nothing. For one task at a time."""
        while not (self._tokens or self._finish or self._interruption):
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        tokens, logprobs, interruption = self._tokens, self._logprobs, self._interruption
        self._tokens, self._logprobs = [], []
        if interruption is not None and interruption.can_resubmit:
            self._interruption = None
        return TokenBatch(tokens, self._finish, interruption, self._reason, logprobs, self._invalid)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Submission:
    """One attempt to serve a choice at one decode worker. Creating it submits the request.

    submitted --first tokens--> running --finish--> finished (its times are learned from)
        |                          |
        +--------------------------+--> released: cancelled if it still runs; may be repeated

    It owns the work at the worker and the ticket in the router's ledger until ``release()``.
    ``request`` has an id of its own: the worker may still be forgetting the previous submission.
    """

    def __init__(
        self, placer: Placer, placed: PlacedRequest, request: Request, queue: TokenQueue
    ) -> None:
        self.placed = placed
        self.first_token_s: float | None = None  # seconds since submission
        self.timeline: dict[str, float] = {}  # events at the worker, seconds since Submit
        self.measured: pb.Measured | None = None
        self.submitted = time.perf_counter()
        self._estimates = placer.estimates
        self._request = request
        self._queue = queue
        message = placer.submit_message(placed, request)
        message.deaths = queue.deaths.count(time.monotonic())
        self._ticket = placer.open_ticket(placed, request.id)
        self._open = True
        placed.link.submit(message, self)

    @property
    def chosen(self) -> Placement:
        return self.placed.choice.chosen

    @property
    def prefill_instance(self) -> str:
        """The worker that was chosen to compute the prompt."""
        return self.chosen.prefill or self.chosen.decode

    def on_output(self, output: pb.Output) -> bool:
        """Take what the worker sent for this request; the worker is not trusted.

        Called by the link. Returns False when the worker should stop.
        """
        queue, tokens, finish = self._queue, output.tokens, output.finish
        if tokens and queue.cached_tokens is None:
            queue.cached_tokens = output.cached_tokens  # later attempts find what it computed
            self.timeline = _events(output.timeline)
        if finish != pb.FINISH_NONE:
            self._take_report(output)
        if output.deaths:
            queue.deaths.record(time.monotonic(), output.deaths)
        try:
            logprobs = self._take_logprobs(output)
        except InvalidRequest as error:
            reason = f"the worker's answer is invalid: {error}"
            queue.interrupt(Interruption.RETRYABLE, reason)
            return False
        has_ended = finish in (pb.FINISH_STOP, pb.FINISH_LENGTH)
        if not queue.put(tokens, Finish(finish) if has_ended else Finish.NONE, logprobs):
            queue.interrupt(Interruption.OVERFLOW, "the client reads too slowly")
            return False
        if not has_ended and finish != pb.FINISH_NONE:
            self._on_error(output)
        return True

    def _take_report(self, output: pb.Output) -> None:
        """Take what comes with the last message of a request; events, also with the first one."""
        if output.timeline:
            self.timeline = _events(output.timeline)
        if output.HasField("measured"):
            self.measured = output.measured

    def _take_logprobs(self, output: pb.Output) -> list[Logprobs]:
        """Return the log-probabilities of the tokens. Raises InvalidRequest for other ones than
        were requested."""
        request = self._request
        if output.prompt_logprobs:
            self._queue.prompt_logprobs = logprobs_list_from_wire(
                output.prompt_logprobs, request.prompt_logprobs_due
            )
        due = 0 if request.sampling.logprobs is None else len(output.tokens)
        if not (due or output.logprobs):  # as a rule
            return []
        return logprobs_list_from_wire(output.logprobs, due)

    def _on_error(self, output: pb.Output) -> None:
        reason = output.error or "the worker gave no reason"
        if output.HasField("invalid"):
            param, code = output.invalid.param or None, output.invalid.code or None
            invalid = InvalidRequest(reason, param, code)
            self._queue.interrupt(Interruption.INVALID, reason, invalid)
        elif output.expired:
            self._queue.interrupt(Interruption.TIMEOUT, reason)
        elif output.finish == pb.FINISH_ERROR and not output.retryable:
            self._queue.interrupt(Interruption.FATAL, reason)
        else:  # an unknown finish, too, may be one that another worker does not send
            cause = Interruption.MOVED if output.moved else Interruption.RETRYABLE
            self._queue.interrupt(cause, reason)

    def on_link_lost(self, reason: str, *, own_pause: bool) -> None:
        """The stream to the worker has ended. Called by the link."""
        self._queue.interrupt(Interruption.PAUSED if own_pause else Interruption.LINK_LOST, reason)

    def record_tokens(self) -> None:
        """Record that tokens have been taken from the queue."""
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter() - self.submitted
            self._learn_from_first_token(self.first_token_s)
        self._ticket.on_tokens()

    def record_finish(self) -> None:
        """Record the last token, so that later predictions learn from the measured transfer. One
        from a worker that was not named is ignored: each name takes memory."""
        choice, measured = self.placed.choice, self.measured
        named = {placement.prefill for placement in (choice.chosen, *choice.others)}
        if measured is not None and measured.prefill_instance in named:
            self._estimates.record_transfer(self.chosen.decode, measured)

    def _learn_from_first_token(self, first_token_s: float) -> None:
        """Compare the prediction with what the worker's events say of queue and prefill; the rest
        of the time was the way. Without events all of it counts as queue and prefill."""
        p, estimates, marks = self.chosen.p, self._estimates, self.timeline
        computing_s = first_token_s
        if "prefill_queued" in marks and "first_token" in marks:
            computing_s = max(0.0, marks["first_token"] - marks["prefill_queued"])
            estimates.record_path(p.instance, self.chosen.decode, first_token_s - computing_s)
        estimates.record_first_token(p.instance, p.ttft_s, computing_s, self.placed.neighbours)

    def release(self) -> None:
        """Cancel the work if it still runs and close the ticket. May be called again."""
        if self._open:
            self._open = False
            self.placed.link.cancel(self._request.id)
            self._ticket.release()


WORKER_EVENTS = (
    *("prefill_queued", "prefill_started", "first_token", "kv_ready", "decode_started"),
    "finished",
)

MAX_EVENT_S = 1e6
"""Seconds after which no event of a request happens; a worker that reports a later one is wrong."""


def _events(marks: Iterable[pb.Mark]) -> dict[str, float]:
    """Return the events that a worker reports, without the ones with a time that cannot be."""
    return {mark.event: mark.seconds for mark in marks if 0 <= mark.seconds <= MAX_EVENT_S}


SLOS = ("ttft", "tpot", "all")


def event_timeline(arrived: float, submissions: Sequence[Submission]) -> dict[str, float]:
    """Return the seconds from ``arrived`` (time.perf_counter) of each event that happened.

    They come from the submission that brought the first token. Without a hand-over there is no
    kv_ready and no decode_started.
    """
    events = {"arrived": 0.0}
    submission = _first_to_answer(submissions) or (submissions[-1] if submissions else None)
    if submission is not None:
        routed = events["routed"] = submission.submitted - arrived
        marks = submission.timeline
        events |= {name: routed + marks[name] for name in WORKER_EVENTS if name in marks}
    return {name: round(seconds, 6) for name, seconds in events.items()}


def ttft_stages(
    arrived: float, first_s: float, submissions: Sequence[Submission]
) -> dict[str, float]:
    """Return the seconds of each stage of a request.

    ``first_s``: seconds from its arrival to its first token. Empty where the worker sent no times.
    """
    submission = _first_to_answer(submissions)
    if submission is None or "first_token" not in submission.timeline:
        return {}
    marks = submission.timeline
    route, first = submission.submitted - arrived, marks["first_token"]
    started = min(first, marks.get("prefill_started", first))
    found = {
        "route": route,
        "queue": started,
        "prefill": first - started,
        "first_emit": first_s - route - first,
    }
    if "kv_ready" in marks:
        found["wire"] = marks["kv_ready"] - first
        if "decode_started" in marks:
            found["scatter"] = marks["decode_started"] - marks["kv_ready"]
    return {name: max(0.0, seconds) for name, seconds in found.items()}


def _first_to_answer(submissions: Sequence[Submission]) -> Submission | None:
    """The submission that brought the first token; those that failed before count as routing."""
    return next((s for s in submissions if s.first_token_s is not None), None)


class RequestTimes(NamedTuple):
    """Measured times of a request in seconds, from its arrival."""

    whole_s: float = 0.0  # to its end
    ttft_s: float | None = None  # to its first token; None: there was none
    tpot_s: float | None = None  # mean of each token after the first; None: there was none


def slo_verdicts(status: str, times: RequestTimes, goals: Objectives) -> dict[str, bool]:
    """Return whether each objective was met; objectives that do not count are left out.

    ``status``: ok, cancelled, or the HTTP status of its error.

    first token came            ttft: met or missed                  tpot: by the tokens after it
    none came, for too long     ttft: missed, though the client gave up
    ended well                  all: met, if each of the others is
    ended by an error (5xx)     all: missed
    given up, or refused        all: missed, if one of the others is by then; else unknown
    client's error (4xx)        only what came before counts
    """
    found = {}
    if times.ttft_s is not None:
        found["ttft"] = times.ttft_s <= goals.ttft_s
    elif status == "504" or (_expected_token(status) and times.whole_s > goals.ttft_s):
        found["ttft"] = False
    if times.tpot_s is not None:
        found["tpot"] = times.tpot_s <= goals.tpot_s
    if status == "ok" and not found:
        return {}  # only the prompt was requested
    met_all = all(found.values())
    if status == "ok" or status.startswith("5") or not met_all:
        found["all"] = status == "ok" and met_all
    return found


def _expected_token(status: str) -> bool:
    """Whether a quick cluster would have sent a token. A response without one (ok) has none due."""
    return status in ("cancelled", "429") or status.startswith("5")
