"""Ends one request on its decode worker when no token has come for too long.

The router says how long the client waits for each token, and ends the request itself when that time
is over. The worker counts on its own clock, so that it computes nothing for a client who has given
up although the router's cancel is late or the router is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from protocol.requests import Request


class RequestExpiry:
    """Calls ``expire`` with the reason when no token of ``request`` has come in time.
    ``DecodeRequest`` has one: created -> first_token_came -> cancel.

    ``count_tokens`` returns how many have come. The timer asks only when it fires, so that a token
    costs nothing: the limit between two tokens is found at least once, at most twice its time after
    the last one.
    """

    def __init__(
        self, request: Request, expire: Callable[[str], None], count_tokens: Callable[[], int]
    ) -> None:
        self._request = request
        self._expire = expire
        self._count_tokens = count_tokens
        self._seen = count_tokens()
        self._timer: asyncio.TimerHandle | None = None
        self._wait("first", request.first_token_s)

    def _wait(self, which: str, seconds: float) -> None:
        if seconds:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(seconds, self._look, which, seconds)

    def _look(self, which: str, seconds: float) -> None:
        seen, self._seen = self._seen, self._count_tokens()
        if self._seen > seen:
            self._wait("next", self._request.token_timeout_s)
            return
        self._expire(
            f"the {which} token did not come within {seconds:g} s, the time that its router allows"
        )

    def first_token_came(self) -> None:
        """Replace the limit on the first token by the one between two tokens."""
        self.cancel()
        self._seen = self._count_tokens()
        self._wait("next", self._request.token_timeout_s)

    def cancel(self) -> None:
        """The request has ended. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
