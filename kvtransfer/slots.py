"""Inbound slots of the arena, shared among the transfers that arrive.

A receiver grants its sender one credit for each slot it holds, so that a frame that arrives always
has a place, and memory is bounded however many transfers there are. Slots go round in turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from engine.session import Session

Grant = Callable[[int], None]
"""Called with a slot that the taker now holds."""


class InboundSlots:
    """Gives the free slots of one engine session to whoever waits. Event loop only."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._waiting: deque[tuple[object, Grant]] = deque()
        session.on_inbound_free = self._serve

    def ask(self, owner: object, grant: Grant) -> None:
        """Get one slot, now or later."""
        self._waiting.append((owner, grant))
        self._serve()

    def withdraw(self, owner: object) -> None:
        """Wait for nothing any more."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] is not owner)

    def give_back(self, slots: list[int]) -> None:
        """Slots that were granted and not used."""
        self._session.inbound += slots
        self._serve()

    def _serve(self) -> None:
        free = self._session.inbound
        while free and self._waiting:
            _, grant = self._waiting.popleft()
            grant(free.pop())
