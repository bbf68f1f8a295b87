"""``EventSender``: sends the events of one stream, and keeps the stream alive between them.

    open(opening) --> ticking --send(events)--> ... --send(last, more=False)--> close()
                        |
                        +-- the head, where no event came within HEAD_DELAY_S
                        +-- a keep-alive after every_s without an event

One timer serves the whole stream: an event only adds to a count, which the next tick reads. So a
keep-alive comes after at least ``every_s`` less two periods of the timer, and at most ``every_s``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Message, Send

HEAD_DELAY_S = 1.0
"""Seconds from admission to the head of a stream without events. An error that comes earlier has
its HTTP status; a client that waits longer learns that its request was taken."""

STUCK_S = 30.0
"""Seconds for which one event may wait for a client that neither reads nor hangs up. The server's
own limit (``UnreadTimeoutProtocol``) comes first where the client reads nothing at all."""


class EventSender:
    """The way of one response's events to its client. Created and closed by ``GenerationResponse``.

    ``send_body`` is ``send`` without what only the head passes through. ``head`` returns the ASGI
    message with status and headers, ``keep_alive`` the bytes of an event without meaning.
    ``on_stuck`` is called once, when an event has waited for ``STUCK_S``.
    """

    def __init__(
        self,
        send: Send,
        send_body: Send,
        head: Callable[[], Message],
        keep_alive: Callable[[], bytes],
        every_s: float,
        on_stuck: Callable[[], None],
    ) -> None:
        self.has_started = False  # the head has been sent
        self._send = send
        self._send_body = send_body
        self._head = head
        self._keep_alive = keep_alive
        self._every_s = every_s
        self._period_s = min(every_s, STUCK_S) / 2
        self._on_stuck = on_stuck
        self._loop = asyncio.get_running_loop()
        self._sent = self._seen = 0  # messages, and how many there were at the last tick
        self._is_sending = False
        self._seen_s = self._loop.time()  # the last tick that found a new message
        self._blocked_s: float | None = None  # the first tick that found the same send unfinished
        self._timer: asyncio.TimerHandle | None = None
        self._beat: asyncio.Task[None] | None = None  # sends the head alone, or a keep-alive

    async def open(self, opening: bytes) -> None:
        """Begin the stream, with the events that are due at once: as a rule, none."""
        self._arm(min(HEAD_DELAY_S, self._period_s))
        if opening:
            await self.send(opening)

    async def send(self, events: bytes, *, more: bool = True) -> None:
        """Send whole events; ``more``: others follow. Waits while the client does not read."""
        if self._beat is not None:
            await self._beat
        self._is_sending = True
        if not self.has_started:
            self.has_started = True
            await self._send(self._head())
        await self._send_body({"type": "http.response.body", "body": events, "more_body": more})
        self._is_sending = False
        self._sent += 1

    def close(self) -> None:
        """Stop the timer. May be called at any time, and again."""
        if self._timer is not None:
            self._timer.cancel()
        if self._beat is not None:
            self._beat.cancel()

    def _arm(self, seconds: float) -> None:
        self._timer = self._loop.call_later(seconds, self._tick)

    def _tick(self) -> None:
        """Look what was sent since the last tick."""
        now = self._loop.time()
        blocked_s, self._blocked_s = self._blocked_s, None
        if self._sent != self._seen:
            self._seen, self._seen_s = self._sent, now
        elif self._is_sending or self._beat:
            self._blocked_s = now if blocked_s is None else blocked_s
            if now - self._blocked_s >= STUCK_S:
                self._on_stuck()
                return
        elif not self.has_started or now - self._seen_s > self._every_s - 2 * self._period_s:
            self._beat = self._loop.create_task(self._send_beat(self._next_beat()))
        self._arm(self._period_s)

    def _next_beat(self) -> Message:
        """Called by the tick itself: keep-alives that count (``sequence_number``) come in order."""
        if self.has_started:
            return {"type": "http.response.body", "body": self._keep_alive(), "more_body": True}
        self.has_started = True
        return self._head()

    async def _send_beat(self, message: Message) -> None:
        try:
            await self._send(message)
            self._sent += 1
        finally:
            self._beat = None
