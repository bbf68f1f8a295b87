"""Who waits, who runs, and on which pages.

    queue --admit--> prefilling --last chunk--> decoding --finish--> gone
      |                  |                         |
      |                  | hold                    | no page left: newest preempted
      |                  v                         v
      |                held                      queue (by age)
      +--reserve--> receiving --join--> decoding

One queue, oldest first, holds both those whose context is computed here and those whose KV comes
from elsewhere: whoever is first is never passed, so nobody starves. What waits holds no page, so
no two can wait for each other.

The scheduler owns sequences, queues and rows; the block manager owns pages. Decisions about the
size of a step are the policy's.
"""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass

from engine.block_manager import BlockManager
from engine.policy import Policy, StepState
from engine.sequence import Phase, Sequence, blocks_for
from protocol.blocks import BLOCK_TOKENS


@dataclass(frozen=True)
class StepPlan:
    """Sequences of one step: those that decode, and the prompt chunks (sequence, tokens)."""

    decode: tuple[Sequence, ...]
    chunks: tuple[tuple[Sequence, int], ...]

    def __bool__(self) -> bool:
        return bool(self.decode or self.chunks)


class Scheduler:
    """Queues of one engine. ``policy`` may be replaced at any step boundary (a role flip)."""

    def __init__(self, manager: BlockManager, rows: int, chunk: int, policy: Policy) -> None:
        self.manager = manager
        self.policy = policy
        self.chunk = chunk
        self.sequences: dict[int, Sequence] = {}
        self.queue: list[Sequence] = []  # oldest (lowest handle) first
        self.joining: deque[Sequence] = deque()  # received, waiting for a row
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self._started: list[Sequence] = []
        self._reserved: list[Sequence] = []
        self._evicted: list[Sequence] = []
        self._rows = list(range(rows - 1, -1, -1))

    # ---- arrivals ---------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose context is computed here."""
        self.sequences[sequence.handle] = sequence
        self._enqueue(sequence, Phase.WAITING)

    def look_up(self, sequence: Sequence) -> int:
        """Tokens that are cached of a context whose KV comes from elsewhere. They are kept from
        eviction as long as others can go, but held only from ``reserve`` on."""
        self.sequences[sequence.handle] = sequence
        sequence.phase = Phase.LOOKED_UP
        pages = self.manager.match(sequence.extend_keys())
        self.manager.touch(pages)
        sequence.expected = len(pages)
        return len(pages) * BLOCK_TOKENS

    def reserve(self, sequence: Sequence) -> None:
        """Queue a looked-up sequence for all its pages."""
        assert sequence.phase is Phase.LOOKED_UP
        self._enqueue(sequence, Phase.RESERVING)

    def _enqueue(self, sequence: Sequence, phase: Phase) -> None:
        sequence.phase = phase
        bisect.insort(self.queue, sequence, key=lambda s: s.handle)

    def join(self, sequence: Sequence, token: int) -> None:
        """All KV of the context is in, and ``token`` is its first output: decode from here."""
        assert sequence.phase is Phase.RECEIVING
        sequence.computed = len(sequence.tokens)
        sequence.commit(self.manager)
        sequence.tokens.append(token)
        sequence.phase = Phase.WAITING_ROW
        self.joining.append(sequence)

    # ---- departures -------------------------------------------------------------------------

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence in any phase; its pages and row are free."""
        del self.sequences[sequence.handle]
        self._unqueue(sequence)
        self._free_row(sequence)
        sequence.release(self.manager)

    def hold(self, sequence: Sequence) -> None:
        """Prefill is done; keep the pages until ``finish``, but not the row."""
        self.prefilling.remove(sequence)
        self._free_row(sequence)
        sequence.phase = Phase.HELD

    def promote(self, sequence: Sequence) -> None:
        """Prefill is done; decode from the next step on."""
        self.prefilling.remove(sequence)
        sequence.phase = Phase.DECODE
        self.decoding.append(sequence)

    def _unqueue(self, sequence: Sequence) -> None:
        queues: dict[Phase, deque[Sequence] | list[Sequence]] = {
            Phase.WAITING: self.queue,
            Phase.RESERVING: self.queue,
            Phase.PREFILL: self.prefilling,
            Phase.DECODE: self.decoding,
            Phase.WAITING_ROW: self.joining,
        }
        if sequence.phase in queues:
            queues[sequence.phase].remove(sequence)

    def _free_row(self, sequence: Sequence) -> None:
        if sequence.row >= 0:
            self._rows.append(sequence.row)
            sequence.row = -1

    def take_started(self) -> list[Sequence]:
        """Sequences whose prefill was admitted since the last call."""
        taken, self._started = self._started, []
        return taken

    def take_reserved(self) -> list[Sequence]:
        """Sequences that got their pages since the last call."""
        taken, self._reserved = self._reserved, []
        return taken

    def take_evicted(self) -> list[Sequence]:
        """Sequences that were to get pages, but the cached ones they count on are gone."""
        taken, self._evicted = self._evicted, []
        return taken

    # ---- one step ---------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Give every decoding sequence the page it needs, admit what fits, size the chunks."""
        self._grow_decoding()
        self._join()
        while self.queue and self._admit(self.queue[0]):
            pass
        counts = self.policy(
            StepState(len(self.decoding), [s.remaining for s in self.prefilling], self.chunk)
        )
        chunks = [(s, n) for s, n in zip(self.prefilling, counts, strict=True) if n]
        return StepPlan(tuple(self.decoding), tuple(chunks))

    def _grow_decoding(self) -> None:
        """The token to decode next needs a slot; the newest running sequences make room."""
        for sequence in list(self.decoding):
            if sequence.phase is not Phase.DECODE:
                continue  # preempted by an older one in this loop
            if len(sequence.tokens) > len(sequence.pages) * BLOCK_TOKENS:
                self._make_room(sequence)

    def _make_room(self, sequence: Sequence) -> None:
        """One page more for ``sequence``, or its own preemption when it is the newest."""
        while not self.manager.can_allocate(1):
            running = [s for s in self.prefilling if not s.hold] + self.decoding
            victim = max(running, key=lambda s: s.handle)
            self._preempt(victim)
            if victim is sequence:
                return
        sequence.pages += self.manager.allocate(1)

    def _preempt(self, sequence: Sequence) -> None:
        """Give up pages and row; the context is recomputed when its turn comes again."""
        self._unqueue(sequence)
        self._free_row(sequence)
        sequence.release(self.manager)
        self._enqueue(sequence, Phase.WAITING)

    def _join(self) -> None:
        while self.joining and self._rows:
            sequence = self.joining.popleft()
            sequence.take_row(self._rows.pop())
            sequence.phase = Phase.DECODE
            self.decoding.append(sequence)

    def _admit(self, sequence: Sequence) -> bool:
        """Give the first of the queue its pages, and a row if it computes here; False: it waits,
        and so does everybody behind it."""
        here = sequence.phase is Phase.WAITING
        if here and not self._rows:
            return False
        # At least one token is left to compute, for there is none to decode from yet.
        usable = (len(sequence.tokens) - 1) // BLOCK_TOKENS if here else sequence.expected
        cached = self.manager.match(sequence.extend_keys()[:usable])
        missing = blocks_for(len(sequence.tokens) + 1) - len(cached)
        if not self.manager.can_allocate(missing, cached):
            return False
        self.queue.pop(0)
        if not here and len(cached) < sequence.expected:
            sequence.phase = Phase.LOOKED_UP
            self._evicted.append(sequence)
            return True
        sequence.attach_prefix(self.manager, cached)
        sequence.pages += self.manager.allocate(missing)
        if here:
            self._start(sequence)
        else:
            sequence.phase = Phase.RECEIVING
            self._reserved.append(sequence)
        return True

    def _start(self, sequence: Sequence) -> None:
        sequence.take_row(self._rows.pop())
        sequence.phase = Phase.PREFILL
        self.prefilling.append(sequence)
        if not sequence.started:
            sequence.started = True
            self._started.append(sequence)
