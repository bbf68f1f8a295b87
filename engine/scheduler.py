"""Who waits, who runs, and on which pages.

    waiting --admit--> prefilling --last chunk--> decoding --finish--> gone
                           |                         |
                           | hold                    | no page left: newest preempted
                           v                         v
                          held                    waiting (front)

The scheduler owns sequences, queues and rows; the block manager owns pages. Decisions about the
size of a step are the policy's.
"""

from __future__ import annotations

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
        self.waiting: deque[Sequence] = deque()
        self.reserving: deque[Sequence] = deque()  # receives that wait for pages
        self.joining: deque[Sequence] = deque()  # received, waiting for a row
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self._started: list[Sequence] = []
        self._reserved: list[Sequence] = []
        self._rows = list(range(rows - 1, -1, -1))

    # ---- arrivals ---------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose prompt is computed here."""
        self.sequences[sequence.handle] = sequence
        sequence.phase = Phase.WAITING
        self.waiting.append(sequence)

    def pin(self, sequence: Sequence) -> int:
        """Hold what is cached of a context whose KV comes from elsewhere; returns its tokens."""
        self.sequences[sequence.handle] = sequence
        pages = self.manager.match(sequence.extend_keys())
        sequence.attach_prefix(self.manager, pages)
        sequence.phase = Phase.PINNED
        return sequence.cached

    def reserve(self, sequence: Sequence) -> None:
        """Queue a pinned sequence for the pages of its missing blocks."""
        assert sequence.phase is Phase.PINNED
        sequence.phase = Phase.RECEIVING
        self.reserving.append(sequence)

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
            Phase.WAITING: self.waiting,
            Phase.PREFILL: self.prefilling,
            Phase.DECODE: self.decoding,
            Phase.RECEIVING: self.reserving,
            Phase.WAITING_ROW: self.joining,
        }
        queue = queues.get(sequence.phase)
        if queue is not None and sequence in queue:
            queue.remove(sequence)

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

    # ---- one step ---------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Admit what fits, give every decoding sequence the page it needs, size the chunks."""
        self._grow_decoding()
        self._reserve()
        self._join()
        self._admit()
        counts = self.policy(
            StepState(len(self.decoding), [s.remaining for s in self.prefilling], self.chunk)
        )
        chunks = [(s, n) for s, n in zip(self.prefilling, counts, strict=True) if n]
        return StepPlan(tuple(self.decoding), tuple(chunks))

    def _grow_decoding(self) -> None:
        """The token to decode next needs a slot; oldest sequences get pages first."""
        for sequence in list(self.decoding):
            if sequence.phase is not Phase.DECODE:
                continue  # preempted by an older one in this loop
            if len(sequence.tokens) <= len(sequence.pages) * BLOCK_TOKENS:
                continue
            while not self.manager.can_allocate(1):
                victim = self._newest_running()
                self._preempt(victim)
                if victim is sequence:
                    break
            else:
                sequence.pages += self.manager.allocate(1)

    def _newest_running(self) -> Sequence:
        running = [s for s in self.prefilling if not s.hold] + self.decoding
        return max(running, key=lambda s: s.handle)

    def _preempt(self, sequence: Sequence) -> None:
        """Give up pages and row; the context is recomputed later, oldest first."""
        self._unqueue(sequence)
        self._free_row(sequence)
        sequence.release(self.manager)
        sequence.phase = Phase.WAITING
        self.waiting.appendleft(sequence)

    def _reserve(self) -> None:
        while self.reserving:
            sequence = self.reserving[0]
            missing = blocks_for(len(sequence.tokens) + 1) - len(sequence.pages)
            if not self.manager.can_allocate(missing):
                return
            self.reserving.popleft()
            sequence.pages += self.manager.allocate(missing)
            self._reserved.append(sequence)

    def _join(self) -> None:
        while self.joining and self._rows:
            sequence = self.joining.popleft()
            sequence.take_row(self._rows.pop())
            sequence.phase = Phase.DECODE
            self.decoding.append(sequence)

    def _admit(self) -> None:
        while self.waiting and self._rows:
            sequence = self.waiting[0]
            usable = (len(sequence.tokens) - 1) // BLOCK_TOKENS  # one token is left to compute
            cached = self.manager.match(sequence.extend_keys()[:usable])
            missing = blocks_for(len(sequence.tokens) + 1) - len(cached)
            if not self.manager.can_allocate(missing, cached):
                return
            self.waiting.popleft()
            sequence.attach_prefix(self.manager, cached)
            sequence.pages += self.manager.allocate(missing)
            sequence.take_row(self._rows.pop())
            sequence.phase = Phase.PREFILL
            self.prefilling.append(sequence)
            self._started.append(sequence)
