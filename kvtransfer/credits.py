"""Flow control: how the inbound slots of a worker are shared by the transfers into it.

A slot that a transfer holds is a credit: the sender may fill it. Transfers with frames that are due
come first, and the one of them that holds the fewest slots gets the next one. No transfer holds
more than half of the slots, because its sender may come to a stop. One that waits for its prompt to
be computed holds one slot, so that its first frame needs no round trip, and all of these together
hold half of the slots at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from engine.process.session import EngineSession


class CreditWindow:
    """Credits of one transfer of ``total`` frames, and how long its sender has been silent."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = total
        self.granted = 0
        self.arrived = 0
        self.due = 0  # frames whose KV is computed
        self._clock = clock
        self._last_progress = clock()

    @property
    def held(self) -> int:
        """Credits that the sender has not used yet."""
        return self.granted - self.arrived

    @property
    def flowing(self) -> bool:
        """Whether a frame is due that has not come."""
        return self.due > self.arrived

    def begin(self) -> None:
        """Count waits from now on: this worker has the pages. It may not have had them for long
        after frames were due, which was neither the sender's fault nor one of the slots."""
        self._last_progress = self._clock()

    def set_due(self, frames: int) -> None:
        """Record that the first ``frames`` frames can be sent. The number never falls."""
        frames = min(frames, self.total)
        if frames > self.due:
            if not self.flowing:
                self._last_progress = self._clock()
            self.due = frames

    def grant(self, frames: int = 1) -> None:
        """Record that the sender has so many credits more."""
        if not self.held:
            self._last_progress = self._clock()
        self.granted += frames

    def arrive(self) -> None:
        """Record that a frame has come."""
        self.arrived += 1
        self.progress()

    def progress(self) -> None:
        """Count waits from now on: a frame has come, or was read here."""
        self._last_progress = self._clock()

    def stalled_s(self) -> float:
        """Return for how many seconds a due frame, for which the sender has a credit, has not
        come."""
        return self._since_progress() if self.flowing and self.held else 0.0

    def starved_s(self) -> float:
        """Return for how many seconds a frame has been due without a credit for it."""
        return self._since_progress() if self.flowing and not self.held else 0.0

    def idle_s(self) -> float:
        """Return the seconds since the last frame came or was read."""
        return self._since_progress()

    def _since_progress(self) -> float:
        return self._clock() - self._last_progress


def choose_transfer(windows: Iterable[CreditWindow], slots: int) -> CreditWindow | None:
    """Return the transfer that gets the next of ``slots`` slots, or None if none may have more.
    ``windows`` are in order of age."""
    open_ = [window for window in windows if window.granted < window.total]
    flowing = [window for window in open_ if window.flowing]
    most = max(1, slots // 2)
    short = [w for w in flowing if w.held < min(most, w.due - w.arrived)]
    if short:
        return min(short, key=lambda window: window.held)
    idle = [window for window in open_ if not window.flowing]
    if sum(window.held for window in idle) < slots // 2:
        return next((window for window in idle if not window.held), None)
    return None


class InboundSlots:
    """Shares the free inbound slots of one engine session among the transfers into it.
    ``KVReceiver`` creates one for each session. Event loop only."""

    def __init__(self, session: EngineSession) -> None:
        self._session = session
        self._total = session.arena.shape.inbound
        self._transfers: dict[CreditWindow, Callable[[int], None]] = {}  # in order of age
        session.on_inbound_free = self.serve

    def add(self, window: CreditWindow, on_granted: Callable[[int], None]) -> None:
        """Call ``on_granted`` with each slot that the transfer of ``window`` may use, now or later,
        until ``remove``."""
        self._transfers[window] = on_granted
        self.serve()

    def remove(self, window: CreditWindow) -> None:
        """Grant no further slot to this transfer."""
        self._transfers.pop(window, None)

    def release(self, slots: list[int]) -> None:
        """Take back slots that were granted and not used."""
        self._session.inbound += slots
        self.serve()

    def serve(self) -> None:
        """Grant what can be granted: slots are free again, or a window has changed."""
        free = self._session.inbound
        while free and (window := choose_transfer(self._transfers, self._total)) is not None:
            window.grant()
            self._transfers[window](free.pop())
