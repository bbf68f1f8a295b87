"""Flow control of KV transfers: one credit for each inbound slot that a transfer holds.

    slot requested --granted--> credit at the sender --frame--> arrived --scattered--> slot free

A sender may send as many frames as it has credits, so an arriving frame always has a slot in the
engine's shared memory, and the memory is bounded however many transfers there are. Used by
``InboundTransfer``, on the event loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from engine.process.session import EngineSession

CREDITS_AT_START = 2
"""Frames under way before the first one has come: until then the prompt may still wait to be
computed, and slots that its transfer holds would be missing for others."""

CREDITS_WHILE_FLOWING = 4
"""Frames under way once the first one has come."""


class CreditWindow:
    """Credits of one transfer of ``total`` frames, and how long its sender has been silent."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._clock = clock
        self._requested = 0
        self._granted = 0
        self._arrived = 0
        self._last_progress = clock()

    def request_slots(self) -> int:
        """Return how many slots to request now, and count them as requested."""
        size = CREDITS_WHILE_FLOWING if self._arrived else CREDITS_AT_START
        count = min(self._total - self._requested, size - (self._requested - self._arrived))
        self._requested += count
        return count

    def granted(self) -> None:
        """Record that the sender has one credit more."""
        if self._granted == self._arrived:
            self._last_progress = self._clock()
        self._granted += 1

    def arrived(self) -> None:
        """Record that a frame has come."""
        self._arrived += 1
        self._last_progress = self._clock()

    def stalled_s(self) -> float:
        """Return the seconds for which the sender has held a credit and sent nothing."""
        return 0.0 if self._granted == self._arrived else self._clock() - self._last_progress


class InboundSlots:
    """Shares the free inbound slots of one engine session among its transfers, first come, first
    served. ``KVReceiver`` creates one for each session."""

    def __init__(self, session: EngineSession) -> None:
        self._session = session
        self._waiting: deque[tuple[object, Callable[[int], None]]] = deque()
        session.on_inbound_free = self._serve

    def request(self, owner: object, on_granted: Callable[[int], None]) -> None:
        """Call ``on_granted`` with a slot that ``owner`` then holds, now or later."""
        self._waiting.append((owner, on_granted))
        self._serve()

    def cancel_requests(self, owner: object) -> None:
        """Grant no further slot to ``owner``."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] is not owner)

    def release(self, slots: list[int]) -> None:
        """Take back slots that were granted and not used."""
        self._session.inbound += slots
        self._serve()

    def _serve(self) -> None:
        free = self._session.inbound
        while free and self._waiting:
            _, on_granted = self._waiting.popleft()
            on_granted(free.pop())
