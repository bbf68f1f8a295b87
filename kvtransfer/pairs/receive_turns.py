"""The order in which a decode worker asks prefill workers for frames by pairs.

    filled --> waiting --ask--> asked --done--> gone

Requests are at one transfer, and so at one prefill worker, at a time. ``CollectiveThread`` explains
why engines that wait for each other cannot form a circle then. Within its turn a transfer may have
several requests under way, so that the next frame follows without a round trip.

Pure bookkeeping, no clock and no lock: it belongs to the event loop of one front.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable


class ReceiveTurns:
    """The frames that one engine is to receive by pairs. ``depth`` requests may be under way, and a
    transfer gets ``burst`` frames while another one waits."""

    def __init__(self, depth: int = 16, burst: int = 32) -> None:
        self._depth = depth
        self._burst = burst
        self._waiting: OrderedDict[bytes, deque[int]] = OrderedDict()  # the next turn first
        self._current: bytes | None = None
        self._given = 0  # frames asked for in this turn
        self._asked: set[int] = set()  # of the current transfer

    def add(self, transfer: bytes, sequences: Iterable[int]) -> None:
        """These frames of a transfer lie in slots of its prefill worker."""
        self._waiting.setdefault(transfer, deque()).extend(sequences)

    def ask(self) -> tuple[bytes, list[int]] | None:
        """Return a transfer and the frames to be requested from it now, or None."""
        if not self._asked:
            self._next_turn()
        if self._current is None:
            return None
        waiting = self._waiting.get(self._current, deque())
        alone = len(self._waiting) <= 1
        room = self._depth - len(self._asked)
        if not alone:
            room = min(room, self._burst - self._given)
        frames = [waiting.popleft() for _ in range(min(room, len(waiting)))]
        if not frames:
            return None
        self._given += len(frames)
        self._asked.update(frames)
        if not waiting:
            del self._waiting[self._current]
        return self._current, frames

    def done(self, transfer: bytes, sequence: int) -> None:
        """A request was answered: the frame is here, or will never come."""
        if transfer == self._current:
            self._asked.discard(sequence)

    def forget(self, transfer: bytes) -> None:
        """Request no further frame of a transfer. Requests under way still count until done."""
        self._waiting.pop(transfer, None)

    @property
    def under_way(self) -> int:
        return len(self._asked)

    def _next_turn(self) -> None:
        """Give the turn to the transfer that has waited longest. Nothing is under way."""
        if self._current is not None and self._current in self._waiting:
            self._waiting.move_to_end(self._current)
        self._current = next(iter(self._waiting), None)
        self._given = 0
