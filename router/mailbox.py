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

from protocol import wire_pb2 as pb
from protocol.errors import InvalidRequest
from protocol.logprobs import Logprobs
from protocol.request import Finish


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
