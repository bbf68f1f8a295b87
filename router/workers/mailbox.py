"""One request's tokens, between the reader of a stream and the request's handler.

    reader --put()--> [tokens, finish] --take()--> handler
    timers, disconnect, broken stream --fail()--> [trouble] -----^

One waits at most; what has come meanwhile is taken at once, so that a busy handler sends one chunk
for many tokens. It lives as long as the request, across the workers that the request is given to.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Iterable
from typing import NamedTuple

from protocol.errors import InvalidRequest
from protocol.requests import Finish, Logprobs, all_from_wire
from protocol.wire import wire_pb2 as pb


class Trouble(enum.Enum):
    """Why no more tokens come. The first three may be mended by another worker."""

    BROKEN = "broken"  # the stream to the worker ended
    RETRYABLE = "retryable"  # the worker says that another may succeed
    MOVED = "moved"  # the worker gives it up unharmed: it goes, or has no engine now
    FATAL = "fatal"  # the worker says that none will
    INVALID = "invalid"  # the same, for the request itself is wrong: see Batch.invalid
    OVERFLOW = "overflow"  # the client reads too slowly
    TIMEOUT = "timeout"
    GONE = "gone"  # the client hung up

    @property
    def mendable(self) -> bool:
        return self in (Trouble.BROKEN, Trouble.RETRYABLE, Trouble.MOVED)


class Batch(NamedTuple):
    tokens: list[int]
    finish: Finish
    trouble: Trouble | None
    reason: str
    logprobs: list[Logprobs]  # one for each token where they were asked for, else none
    invalid: InvalidRequest | None  # with Trouble.INVALID


class Mailbox:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tokens: list[int] = []
        self._logprobs: list[Logprobs] = []
        self._finish = Finish.NONE
        self._trouble: Trouble | None = None
        self._reason = ""
        self._invalid: InvalidRequest | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.cached_tokens: int | None = None  # as the attempt says that brought the first token
        self.prompt_logprobs: list[Logprobs] = []  # from its second token on
        self.timeline: dict[str, float] = {}  # events at the worker, seconds from Submit
        self.measured: pb.Measured | None = None
        self.deaths = 0  # of workers, under this request

    @property
    def lost(self) -> bool:
        """In trouble that no other worker can mend."""
        return self._trouble is not None and not self._trouble.mendable

    def put(self, tokens: Iterable[int], finish: Finish, logprobs: Iterable[Logprobs] = ()) -> bool:
        """False, and nothing is kept, when the handler is too far behind. ``logprobs``: one for
        each token, or none, always alike."""
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

    def fail(self, trouble: Trouble, reason: str, invalid: InvalidRequest | None = None) -> None:
        """What cannot be mended stands, whatever comes after it."""
        if not self.lost:
            self._trouble, self._reason, self._invalid = trouble, reason, invalid
            self._wake()

    async def take(self) -> Batch:
        """All there is; waits while there is nothing."""
        while not (self._tokens or self._finish or self._trouble):
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        batch = Batch(
            self._tokens,
            self._finish,
            self._trouble,
            self._reason,
            self._logprobs,
            self._invalid,
        )
        self._tokens, self._logprobs = [], []
        if not self.lost:
            self._trouble = None
        return batch

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


# MERGED router.outputs
# What a decode worker says of one request, into its mailbox. The worker is not trusted.


class Flight(NamedTuple):
    """A request that a worker has, and the log-probabilities that it asked for."""

    mailbox: Mailbox
    logprobs: bool  # beside each token
    prompt: int  # tokens of the prompt that have some: none, or all but the first

    @classmethod
    def of(cls, request: pb.Request, mailbox: Mailbox) -> Flight:
        asked = request.sampling.HasField("prompt_logprobs") and not request.emitted
        return cls(
            mailbox,
            request.sampling.HasField("logprobs"),
            len(request.prompt) - 1 if asked else 0,
        )


def deliver(output: pb.Output, flight: Flight) -> bool:
    """Put ``output`` into its mailbox. False: nothing more is wanted of the worker."""
    mailbox = flight.mailbox
    if output.tokens and mailbox.cached_tokens is None:
        mailbox.cached_tokens = output.cached_tokens  # later attempts find what it computed
    if output.timeline:
        mailbox.timeline = {mark.event: mark.seconds for mark in output.timeline}
    if output.HasField("measured"):
        mailbox.measured = output.measured
    mailbox.deaths += output.deaths
    try:
        came = output.prompt_logprobs
        prompt = all_from_wire(came, flight.prompt if came else 0)
        logprobs = all_from_wire(output.logprobs, len(output.tokens) if flight.logprobs else 0)
    except InvalidRequest as error:
        mailbox.fail(Trouble.RETRYABLE, f"the worker's answer cannot be read: {error}")
        return False
    mailbox.prompt_logprobs = prompt or mailbox.prompt_logprobs
    known = output.finish in (pb.FINISH_STOP, pb.FINISH_LENGTH)
    finish = Finish(output.finish) if known else Finish.NONE
    if not mailbox.put(output.tokens, finish, logprobs):
        mailbox.fail(Trouble.OVERFLOW, "the client reads too slowly")
        return False
    if not known and output.finish != pb.FINISH_NONE:
        _fail(output, mailbox)
    return True


def _fail(output: pb.Output, mailbox: Mailbox) -> None:
    why = output.error or "the worker gave no reason"
    if output.HasField("invalid"):
        param, code = output.invalid.param or None, output.invalid.code or None
        return mailbox.fail(Trouble.INVALID, why, InvalidRequest(why, param, code))
    mendable = Trouble.MOVED if output.moved else Trouble.RETRYABLE
    fatal = output.finish == pb.FINISH_ERROR and not output.retryable
    return mailbox.fail(Trouble.FATAL if fatal else mendable, why)
