"""Ends one request on its decode worker when a deadline has passed.

The router says how long the client waits, and ends the request itself when that time is over. The
worker counts on its own clock, so that it computes nothing for a client who has given up although
the router's cancel is late or the router is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from protocol.requests import Request


class RequestExpiry:
    """Calls ``expire`` with the reason when a deadline of ``request`` passes. ``DecodeRequest`` has
    one: created -> first_token_came -> cancel."""

    def __init__(self, request: Request, expire: Callable[[str], None]) -> None:
        self._expire = expire
        self._first_token = self._timer(request.first_token_s, "first token")
        self._end = self._timer(request.deadline_s, "end of the request")

    def _timer(self, seconds: float, what: str) -> asyncio.TimerHandle | None:
        if not seconds:
            return None
        why = f"the {what} did not come within {seconds:g} s, the time that its router allows"
        return asyncio.get_running_loop().call_later(seconds, self._expire, why)

    def first_token_came(self) -> None:
        """Cancel the deadline of the first token; that of the whole request stays."""
        if self._first_token is not None:
            self._first_token.cancel()

    def cancel(self) -> None:
        """The request has ended. Idempotent."""
        self.first_token_came()
        if self._end is not None:
            self._end.cancel()
