"""Where every sequence of an engine is: in one queue at most, on one row at most. Torch-free."""

from __future__ import annotations

import bisect
import itertools

from engine.block_manager import BlockManager
from engine.counters import Counters
from engine.in_flight import InFlight
from engine.sequence import Phase, Sequence


def by_order(sequence: Sequence) -> tuple[int, int]:
    """More urgent classes first, in a class the older first."""
    return sequence.order


class Queues:
    """Queues and rows, and the moves between them that need no decision."""

    def __init__(self, manager: BlockManager, rows: int) -> None:
        self.manager = manager
        self.counters = Counters()
        self.starved = False  # the first in the queue lacks pages
        self.sequences: dict[int, Sequence] = {}
        self.queue: list[Sequence] = []  # by order, like all that follow but decoding and importing
        self.joining: list[Sequence] = []  # received, waiting for a row
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.importing: list[Sequence] = []  # in the order of their arrival
        self._in_flight = InFlight()
        self._started: list[Sequence] = []
        self._reserved: list[Sequence] = []
        self._evicted: list[Sequence] = []
        self._joined: list[int] = []
        self._adopted: list[tuple[int, int]] = []
        self._rows = list(range(rows - 1, -1, -1))
        self._seatings = itertools.count(1)

    def _enter(self, queue: list[Sequence], sequence: Sequence, phase: Phase) -> None:
        sequence.phase = phase
        bisect.insort(queue, sequence, key=by_order)

    def _leave(self, sequence: Sequence) -> None:
        """Take it from the queue of its phase, where it has one."""
        if sequence.phase is Phase.DECODE:
            self.decoding.remove(sequence)
        elif sequence.phase in (Phase.WAITING, Phase.RESERVING):
            self.queue.remove(sequence)
        elif sequence.phase is Phase.WAITING_ROW:
            self.joining.remove(sequence)
        elif sequence.phase is Phase.PREFILL:
            self.prefilling.remove(sequence)
            self._in_flight.remove(sequence)
        elif sequence.phase is Phase.IMPORTING:
            self.importing.remove(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence in any phase; its pages and row are free."""
        del self.sequences[sequence.handle]
        self._leave(sequence)
        self._free_row(sequence)
        sequence.release(self.manager)

    def _take_row(self, sequence: Sequence) -> None:
        sequence.take_row(self._rows.pop(), next(self._seatings))

    def _free_row(self, sequence: Sequence) -> None:
        if sequence.row >= 0:
            self._rows.append(sequence.row)
            sequence.row = -1

    def _preemptible(self) -> list[Sequence]:
        """Who holds pages and can start over without telling anybody."""
        return [s for s in self.prefilling if not s.hold] + self.decoding + self.joining

    def _less_urgent(self, sequence: Sequence) -> list[Sequence]:
        """Whom ``sequence`` may preempt to get in, the last in order last."""
        urgency = sequence.order[0]
        return sorted((s for s in self._preemptible() if s.order[0] > urgency), key=by_order)

    def _preempt(self, sequence: Sequence) -> None:
        """Give up pages and row; the context is recomputed when its turn comes again."""
        self.counters.preemptions += 1
        self._leave(sequence)
        self._free_row(sequence)
        sequence.release(self.manager)
        self._enter(self.queue, sequence, Phase.WAITING)

    def take_started(self) -> list[Sequence]:
        """Sequences whose prefill was admitted since the last call."""
        taken, self._started = self._started, []
        return taken

    def take_reserved(self) -> list[Sequence]:
        """Sequences that got their pages since the last call."""
        taken, self._reserved = self._reserved, []
        return taken

    def take_joined(self) -> list[int]:
        """Handles of sequences whose KV came from elsewhere, and that decode from now on."""
        taken, self._joined = self._joined, []
        return taken

    def take_evicted(self) -> list[Sequence]:
        """Sequences that were to get pages, but the cached ones they count on are gone."""
        taken, self._evicted = self._evicted, []
        return taken
