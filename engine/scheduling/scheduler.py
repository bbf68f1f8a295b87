"""The scheduler: which sequences wait, which run, and on which pages and rows.

Sequences that are computed or decoded here:

    queue --admit--> prefilling --last chunk--> decoding --finish--> gone
      |                  |                         |
      |                  | hold                    | no page left: preempted
      |                  v                         v
      |                held                      queue (by order)
      +--reserve--> receiving --join--> joining --row--> decoding

Sequences that stand for cached blocks on their way to or from another worker, and compute nothing:

    export   pin what is cached --> held --finish--> gone
    import   pin what is cached, take pages for the rest --> importing --end_import--> gone

The order of a sequence is (priority class, arrival, handle): the more urgent class first, the older
request first within a class. It is the request that arrived, not the sequence: an attempt that is
repeated after a failure, here or on another worker, is as old as the first one. One queue holds
sequences whose context is computed here and sequences whose KV comes from another worker. A
sequence never overtakes an earlier one for pages or rows, so none starves in its class, and a
waiting sequence holds no page, so two cannot deadlock. When pages run out, the last sequence in the
order is preempted, so the first one always makes progress. Classes are strict: an arrival preempts
what it needs from less urgent classes, which stand still as long as more urgent ones fill the
engine.

One exception: the first sequence in the queue may wait for a prefix that a running prefill is
computing. Then later ones may overtake it, but they leave it the pages and the row that it needs.

An import takes only pages that no other sequence needs, and is ended as soon as one does. Its
completely received blocks stay in the prefix cache; its other pages are freed.

The scheduler owns sequences, queues and rows. ``BlockManager`` owns pages, and ``StepPlanner``
decides the size of a step. The engine calls ``plan`` once per step.
"""

from __future__ import annotations

import bisect
import itertools

from engine.ipc.counters import EngineCounters
from engine.kv_cache.block_manager import BlockManager
from engine.scheduling.sequence import BlocksInFlight, Order, Phase, Sequence, blocks_for
from engine.scheduling.step_policy import StepPlan, StepPlanner
from protocol.block_keys import BLOCK_TOKENS

MAX_PASSED = 8
"""Sequences waiting for a prefix in flight that may be overtaken; admission stops beyond these."""


def by_order(sequence: Sequence) -> Order:
    """Sort key: more urgent classes first, older sequences first within a class."""
    return sequence.order


class Scheduler:
    """The queues and rows of one engine. The engine creates it and feeds it sequences; each call of
    ``plan`` moves them between queues, and the ``take_*`` methods report what has moved."""

    def __init__(self, manager: BlockManager, rows: int, planner: StepPlanner) -> None:
        self.manager = manager
        self.planner = planner
        self.counters = EngineCounters()
        self.starved = False  # the first sequence in the queue lacks pages
        self._blocked = (0, 0, 0)  # sequences in the queue, free rows and pages when none fitted
        self.sequences: dict[int, Sequence] = {}  # by handle
        self.queue: list[Sequence] = []  # by order, like joining and prefilling
        self.joining: list[Sequence] = []  # received completely, waiting for a row
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []  # in the order of their start
        self.importing: list[Sequence] = []  # in the order of their arrival
        self._in_flight = BlocksInFlight()
        self._started: list[Sequence] = []
        self._reserved: list[Sequence] = []
        self._evicted: list[Sequence] = []
        self._joined: list[int] = []
        self._ended_imports: list[tuple[int, int]] = []
        self._rows = list(range(rows - 1, -1, -1))  # free rows
        self._row_leases = itertools.count(1)

    # ---- arrivals ---------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose context is computed here."""
        self.sequences[sequence.handle] = sequence
        self._enqueue(self.queue, sequence, Phase.WAITING)

    def look_up(self, sequence: Sequence) -> int:
        """Register a sequence whose KV comes from another worker; return its cached leading tokens.
        These become the last to be evicted, but are pinned only by admission after ``reserve``."""
        self.sequences[sequence.handle] = sequence
        sequence.phase = Phase.LOOKED_UP
        keys = sequence.extend_keys()
        if not sequence.needs_prompt_logprobs:
            sequence.expected_blocks = self.manager.count_cached(keys, len(keys))
        self.manager.touch(keys[: sequence.expected_blocks])
        return sequence.expected_blocks * BLOCK_TOKENS

    def reserve(self, sequence: Sequence) -> None:
        """Queue a looked-up sequence for all its pages."""
        assert sequence.phase is Phase.LOOKED_UP
        self._enqueue(self.queue, sequence, Phase.RESERVING)

    def join(self, sequence: Sequence, token: int) -> None:
        """Let a completely received sequence wait for a row; ``token`` is its first output."""
        assert sequence.phase is Phase.RECEIVING
        sequence.end_lease()
        sequence.computed = len(sequence.tokens)
        sequence.commit(self.manager)
        sequence.tokens.append(token)
        sequence.started = True  # on its prefill worker: after a preemption it only resumes
        self._enqueue(self.joining, sequence, Phase.WAITING_ROW)

    # ---- cached blocks alone ----------------------------------------------------------------

    def export(self, sequence: Sequence) -> None:
        """Pin the leading full blocks of the context that are cached, until ``finish``."""
        self._pin_cached(sequence)
        sequence.phase = Phase.HELD
        self._started.append(sequence)

    def import_(self, sequence: Sequence) -> tuple[int, int]:
        """Pin the cached leading full blocks, and allocate idle pages for as many of the missing
        ones as possible. ``end_import`` or ``finish`` frees these pages; the scheduler itself ends
        imports when another sequence needs a page. Return the number of cached leading blocks, and
        of blocks with a page."""
        self._pin_cached(sequence)
        # Each sequence that decodes may need one more page soon.
        spare = self.manager.available - len(self.decoding) - len(self.joining)
        missing = len(sequence.keys) - sequence.committed
        sequence.pages += self.manager.allocate(max(0, min(missing, spare)))
        sequence.lend_pages()
        sequence.phase = Phase.IMPORTING
        self.importing.append(sequence)
        return sequence.committed, len(sequence.pages)

    def end_import(self, sequence: Sequence) -> None:
        """Commit the completely received blocks to the prefix cache and forget the import."""
        sequence.end_lease()
        if sequence.lease is not None:
            complete = sequence.lease.complete_blocks() * BLOCK_TOKENS
            sequence.computed = max(sequence.computed, complete)
        sequence.commit(self.manager)
        self._ended_imports.append((sequence.handle, sequence.computed))
        self.finish(sequence)

    def _end_latest_import(self) -> bool:
        """Free the pages of the latest import; return whether there was one."""
        if self.importing:
            self.end_import(self.importing[-1])
            return True
        return False

    def _pin_cached(self, sequence: Sequence) -> None:
        self.sequences[sequence.handle] = sequence
        keys = sequence.extend_keys()
        sequence.take_pages(self.manager, self.manager.count_cached(keys, len(keys)), 0)

    # ---- departures -------------------------------------------------------------------------

    def hold(self, sequence: Sequence) -> None:
        """Keep the pages of a finished prefill until ``finish``, and free its row."""
        self._dequeue(sequence)
        self._free_row(sequence)
        sequence.phase = Phase.HELD

    def promote(self, sequence: Sequence) -> None:
        """Let a finished prefill decode from the next step on."""
        self._dequeue(sequence)
        sequence.phase = Phase.DECODE
        self.decoding.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence in any phase and free its pages and its row."""
        del self.sequences[sequence.handle]
        self._dequeue(sequence)
        self._free_row(sequence)
        sequence.release(self.manager)

    # ---- one step ---------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Give every decoding sequence the page it needs, admit what fits, and size the chunks."""
        self._grow_decoding()
        self._give_rows_to_joining()
        self._admit()
        return self.planner.plan(self.decoding, self.prefilling)

    def _grow_decoding(self) -> None:
        for sequence in [s for s in self.decoding if len(s.tokens) > len(s.pages) * BLOCK_TOKENS]:
            if sequence.phase is Phase.DECODE:  # not preempted by another one in this loop
                self._allocate_next_page(sequence)

    def _allocate_next_page(self, sequence: Sequence) -> None:
        """Allocate one more page. When none is available, end imports, then preempt the last
        sequence in the order, which may be ``sequence`` itself. ``finish`` or a preemption frees
        the page, together with the other pages of the sequence."""
        while not self.manager.available:
            if self._end_latest_import():
                continue
            victim = max(self._preemptible(), key=by_order)
            self._preempt(victim)
            if victim is sequence:
                return
        sequence.pages += self.manager.allocate(1)

    def _give_rows_to_joining(self) -> None:
        while self.joining:
            first = self.joining[0]
            if not self._rows:
                victims = [s for s in self._less_urgent(first) if s.row >= 0]
                if not victims:
                    return
                self._preempt(victims[-1])
            del self.joining[0]
            self._take_row(first)
            first.phase = Phase.DECODE
            self.decoding.append(first)
            self._joined.append(first.handle)

    # ---- admission --------------------------------------------------------------------------

    def _admit(self) -> None:
        """Admit sequences in the order of the queue as long as pages and rows last."""
        passed = kept = 0  # sequences that wait for a prefix in flight, and pages left for them
        self.starved, self._blocked = False, (0, 0, 0)
        while passed < len(self.queue) and passed <= MAX_PASSED:
            sequence = self.queue[passed]
            cached, missing = self._count_blocks(sequence)
            if sequence.phase is Phase.RESERVING and cached < sequence.expected_blocks:
                self._dequeue(sequence)
                sequence.phase = Phase.LOOKED_UP
                self._evicted.append(sequence)
            elif self._waits_for_prefix(sequence, cached):
                passed += 1
                kept += missing
            elif self._fits(sequence, cached, missing + kept, passed) or self._preempt_for(
                sequence, cached, missing + kept, passed
            ):
                self._start(sequence, cached, missing)
            else:
                needed = missing + kept
                self.starved = not self.manager.can_extend(sequence.keys, cached, needed)
                self._blocked = (len(self.queue), len(self._rows), self.manager.available)
                return

    @property
    def blocked(self) -> bool:
        """Whether nothing in the queue fits: nothing was added or freed since that was found."""
        queued, rows, pages = self._blocked
        unchanged = len(self.queue) == queued > 0
        return unchanged and len(self._rows) <= rows and self.manager.available <= pages

    def _count_blocks(self, sequence: Sequence) -> tuple[int, int]:
        """Return its usable cached blocks, and the pages that it needs beside them."""
        usable = sequence.expected_blocks
        if sequence.phase is Phase.WAITING:
            # Leave at least one token to compute: there is no output token to decode from yet.
            usable = (len(sequence.tokens) - 1) // BLOCK_TOKENS
            if sequence.needs_prompt_logprobs:
                usable = 0
        cached = self.manager.count_cached(sequence.extend_keys(), usable)
        return cached, blocks_for(len(sequence.tokens) + 1) - cached

    def _waits_for_prefix(self, sequence: Sequence, cached: int) -> bool:
        """Return whether a running prefill computes its next missing block."""
        usable = (cached + 1) * BLOCK_TOKENS < len(sequence.tokens)
        if sequence.phase is not Phase.WAITING or not usable or sequence.needs_prompt_logprobs:
            return False
        return self._in_flight.computes(sequence.keys[cached], sequence.order)

    def _fits(self, sequence: Sequence, cached: int, pages: int, kept_rows: int) -> bool:
        """Return whether ``pages`` beside the cached ones, and a row beyond ``kept_rows`` for a
        sequence that computes here, are free."""
        has_row = sequence.phase is Phase.RESERVING or len(self._rows) > kept_rows
        return has_row and self.manager.can_extend(sequence.keys, cached, pages)

    def _preempt_for(self, sequence: Sequence, cached: int, pages: int, kept_rows: int) -> bool:
        """End imports and preempt as few less urgent sequences as it takes for ``sequence`` to fit;
        change nothing when it would not fit even then. Return whether it fits now."""
        victims = self._less_urgent(sequence)
        imports: list[Sequence] = []
        if self.manager.can_extend(sequence.keys, cached, pages):
            victims = [v for v in victims if v.row >= 0]  # only a row is missing
        else:
            imports = self.importing
        needs_row = sequence.phase is not Phase.RESERVING
        for count in range(len(victims) + 1):
            chosen = victims[len(victims) - count :]
            rows = len(self._rows) + sum(v.row >= 0 for v in chosen)
            gained = self.manager.count_freed_by(
                [s.pages for s in chosen + imports], sequence.keys[:cached]
            )
            enough = self.manager.can_extend(sequence.keys, cached, pages - gained)
            if enough and (rows > kept_rows or not needs_row):
                for victim in reversed(chosen):
                    self._preempt(victim)
                while not self.manager.can_extend(sequence.keys, cached, pages):
                    if not self._end_latest_import():
                        break
                return True
        return False

    def _start(self, sequence: Sequence, cached: int, missing: int) -> None:
        """Move an admitted sequence from the queue to prefill, or let it receive. Its pages are
        allocated here; ``finish`` or ``_preempt`` frees them."""
        receives = sequence.phase is Phase.RESERVING
        self._dequeue(sequence)
        if not sequence.started:
            self.counters.add_lookup(len(sequence.tokens), cached * BLOCK_TOKENS)
        sequence.take_pages(self.manager, cached, missing)
        if receives:
            sequence.phase = Phase.RECEIVING
            sequence.lend_pages()
            self._reserved.append(sequence)
            return
        self._take_row(sequence)
        self._enqueue(self.prefilling, sequence, Phase.PREFILL)
        self._in_flight.add(sequence)
        if not sequence.started:
            sequence.started = True
            self._started.append(sequence)

    # ---- queues, rows and preemption --------------------------------------------------------

    def _enqueue(self, queue: list[Sequence], sequence: Sequence, phase: Phase) -> None:
        sequence.phase = phase
        self._blocked = (0, 0, 0)
        bisect.insort(queue, sequence, key=by_order)

    def _dequeue(self, sequence: Sequence) -> None:
        """Remove the sequence from the queue of its phase, if the phase has one."""
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

    def _take_row(self, sequence: Sequence) -> None:
        sequence.take_row(self._rows.pop(), next(self._row_leases))

    def _free_row(self, sequence: Sequence) -> None:
        if sequence.row >= 0:
            self._rows.append(sequence.row)
            sequence.row = -1

    def _preemptible(self) -> list[Sequence]:
        """Return the sequences that hold pages and can be recomputed without telling a peer."""
        return [s for s in self.prefilling if not s.hold] + self.decoding + self.joining

    def _less_urgent(self, sequence: Sequence) -> list[Sequence]:
        """Return the sequences that ``sequence`` may preempt to be admitted, by order."""
        urgency = sequence.order[0]
        return sorted((s for s in self._preemptible() if s.order[0] > urgency), key=by_order)

    def _preempt(self, sequence: Sequence) -> None:
        """Free pages and row; the context is recomputed after the next admission."""
        self.counters.preemptions += 1
        self._dequeue(sequence)
        self._free_row(sequence)
        sequence.release(self.manager)
        self._enqueue(self.queue, sequence, Phase.WAITING)

    # ---- what has happened since the last call ----------------------------------------------

    def take_started(self) -> list[Sequence]:
        """Return the sequences whose prefill was admitted, or that were exported."""
        taken, self._started = self._started, []
        return taken

    def take_reserved(self) -> list[Sequence]:
        """Return the sequences that got the pages for KV from another worker."""
        taken, self._reserved = self._reserved, []
        return taken

    def take_joined(self) -> list[int]:
        """Return the handles of received sequences that decode from now on."""
        taken, self._joined = self._joined, []
        return taken

    def take_evicted(self) -> list[Sequence]:
        """Return the sequences whose cached blocks were evicted before they got pages."""
        taken, self._evicted = self._evicted, []
        return taken

    def take_ended_imports(self) -> list[tuple[int, int]]:
        """Return (handle, tokens that are cached now) of the imports that have ended."""
        taken, self._ended_imports = self._ended_imports, []
        return taken
