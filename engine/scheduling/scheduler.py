"""Who waits, who runs, and on which pages.

    queue --admit--> prefilling --last chunk--> decoding --finish--> gone
      |                  |                         |
      |                  | hold                    | no page left: preempted
      |                  v                         v
      |                held                      queue (by order)
      +--reserve--> receiving --join--> decoding

Everybody's place is its order: the more urgent class first, in a class the older. One queue holds
both those whose context is computed here and those whose KV comes from elsewhere. Nobody is passed
for pages or rows, so that nobody starves in its class; what waits holds no page, so that no two
can wait for each other. Where pages run out, the last in order gives up its own: the first in order
always goes on. Classes are strict: an arrival preempts what it needs of less urgent ones, and as
long as the more urgent ones fill the engine, the others stand still.

Who is first in the queue may wait for a prefix that a prefill is just computing; only then may the
next ones pass, and they leave it the pages and the row that it needs.

The scheduler owns sequences, queues and rows; the block manager owns pages. Decisions about the
size of a step are the policy's.
"""

from __future__ import annotations

import bisect
import itertools

from engine.ipc.counters import Counters
from engine.kv_cache.block_manager import BlockManager
from engine.scheduling.sequence import Phase, Sequence, blocks_for
from engine.scheduling.step_policy import StepPlan as StepPlan
from engine.scheduling.step_policy import StepPlanner
from protocol.block_keys import BLOCK_TOKENS

# MERGED engine.in_flight
# Blocks that are being computed: who needs one of them waits for it. Torch-free.


class InFlight:
    """Keys that running prefills will commit. Block keys chain, so one look-up tells whether a
    prefix is on its way. A prefill that ends takes its keys along however it ends: nobody waits for
    what never comes."""

    def __init__(self) -> None:
        self._owner: dict[bytes, Sequence] = {}

    def add(self, sequence: Sequence) -> None:
        """``sequence`` starts to compute its blocks; those it has in the cache are none of them."""
        for key in sequence.keys[sequence.committed :]:
            self._owner.setdefault(key, sequence)

    def remove(self, sequence: Sequence) -> None:
        """It no longer computes: finished, preempted or dropped. Harmless for any other."""
        for key in sequence.keys:
            if self._owner.get(key) is sequence:
                del self._owner[key]

    def computes(self, key: bytes, order: tuple[int, int]) -> bool:
        """Whether a prefill at least as urgent as ``order`` computes the block. A less urgent one
        may itself have to wait, so that nobody waits for it."""
        owner = self._owner.get(key)
        return owner is not None and owner.order[0] <= order[0]


# MERGED engine.queues
# Where every sequence of an engine is: in one queue at most, on one row at most. Torch-free.


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


# MERGED engine.exchange
# Cached blocks on their way to another worker, or from one. Nothing is computed here.
#
#     export   pin what is cached --> held --finish--> gone
#     import   pin what is cached, take pages for the rest --> importing --adopt--> gone
#
# An import takes pages that nobody needs, and gives them back as soon as somebody does. Adopted or
# given back, the blocks that have come whole stay in the prefix cache, where the next sequence with
# this prefix finds them; those that have not are free.


class Exchange(Queues):
    """The moves of sequences that stand for cached blocks alone."""

    def export(self, sequence: Sequence) -> None:
        """Hold the leading full blocks of the context that are cached, until ``finish``."""
        self._pin_cached(sequence)
        sequence.phase = Phase.HELD
        self._started.append(sequence)

    def import_(self, sequence: Sequence) -> tuple[int, int]:
        """Hold what is cached, and pages for what is missing of the full blocks, as many as there
        are. Returns the leading blocks that are cached, and those that have a page."""
        self._pin_cached(sequence)
        # Who runs may need a page each before long.
        spare = self.manager.available - len(self.decoding) - len(self.joining)
        missing = len(sequence.keys) - sequence.committed
        sequence.pages += self.manager.allocate(max(0, min(missing, spare)))
        sequence.phase = Phase.IMPORTING
        self.importing.append(sequence)
        return sequence.committed, len(sequence.pages)

    def adopt(self, sequence: Sequence) -> None:
        """Forget an import; what has come whole can be found from now on."""
        sequence.commit(self.manager)
        self._adopted.append((sequence.handle, sequence.computed))
        self.finish(sequence)

    def take_adopted(self) -> list[tuple[int, int]]:
        """Handles of the imports that have ended since the last call, each with the tokens that
        are cached now."""
        taken, self._adopted = self._adopted, []
        return taken

    def _reclaim(self) -> bool:
        """Have the pages of the latest import back; whether there was one."""
        if self.importing:
            self.adopt(self.importing[-1])
            return True
        return False

    def _pin_cached(self, sequence: Sequence) -> None:
        self.sequences[sequence.handle] = sequence
        keys = sequence.extend_keys()
        sequence.take_pages(self.manager, self.manager.cached(keys, len(keys)), 0)


MAX_PASSED = 8
"""Sequences that wait for a prefix in flight and are passed: looking for others ends there."""


class Scheduler(Exchange):
    """The turns of one engine's sequences: who moves to which queue, and when."""

    def __init__(self, manager: BlockManager, rows: int, planner: StepPlanner) -> None:
        super().__init__(manager, rows)
        self.planner = planner

    # ---- arrivals ---------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose context is computed here."""
        self.sequences[sequence.handle] = sequence
        self._enter(self.queue, sequence, Phase.WAITING)

    def look_up(self, sequence: Sequence) -> int:
        """Tokens that are cached of a context whose KV comes from elsewhere. They are kept from
        eviction as long as others can go, but held only from ``reserve`` on."""
        self.sequences[sequence.handle] = sequence
        sequence.phase = Phase.LOOKED_UP
        keys = sequence.extend_keys()
        sequence.expected = 0 if sequence.scores else self.manager.cached(keys, len(keys))
        self.manager.touch(keys[: sequence.expected])
        return sequence.expected * BLOCK_TOKENS

    def reserve(self, sequence: Sequence) -> None:
        """Queue a looked-up sequence for all its pages."""
        assert sequence.phase is Phase.LOOKED_UP
        self._enter(self.queue, sequence, Phase.RESERVING)

    def join(self, sequence: Sequence, token: int) -> None:
        """All KV of the context is in, and ``token`` is its first output: decode from here."""
        assert sequence.phase is Phase.RECEIVING
        sequence.computed = len(sequence.tokens)
        sequence.commit(self.manager)
        sequence.tokens.append(token)
        sequence.started = True  # elsewhere: if it is preempted, it goes on and does not start
        self._enter(self.joining, sequence, Phase.WAITING_ROW)

    # ---- departures -------------------------------------------------------------------------

    def hold(self, sequence: Sequence) -> None:
        """Prefill is done; keep the pages until ``finish``, but not the row."""
        self._leave(sequence)
        self._free_row(sequence)
        sequence.phase = Phase.HELD

    def promote(self, sequence: Sequence) -> None:
        """Prefill is done; decode from the next step on."""
        self._leave(sequence)
        sequence.phase = Phase.DECODE
        self.decoding.append(sequence)

    # ---- one step ---------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Give every decoding sequence the page it needs, admit what fits, size the chunks."""
        self._grow_decoding()
        self._seat_joining()
        self._admit()
        return self.planner.plan(self.decoding, self.prefilling)

    def _grow_decoding(self) -> None:
        """The token to decode next needs a slot; the last in order make room."""
        for sequence in [s for s in self.decoding if len(s.tokens) > len(s.pages) * BLOCK_TOKENS]:
            if sequence.phase is Phase.DECODE:  # not preempted by another one in this loop
                self._make_room(sequence)

    def _make_room(self, sequence: Sequence) -> None:
        """One page more for ``sequence``, or its own preemption when it is the last in order."""
        while not self.manager.available:
            if self._reclaim():
                continue
            victim = max(self._preemptible(), key=by_order)
            self._preempt(victim)
            if victim is sequence:
                return
        sequence.pages += self.manager.allocate(1)

    def _seat_joining(self) -> None:
        """A row for those whose KV is in."""
        while self.joining:
            first = self.joining[0]
            if not self._rows:
                seated = [s for s in self._less_urgent(first) if s.row >= 0]
                if not seated:
                    return
                self._preempt(seated[-1])
            del self.joining[0]
            self._take_row(first)
            first.phase = Phase.DECODE
            self.decoding.append(first)
            self._joined.append(first.handle)

    # ---- admission --------------------------------------------------------------------------

    def _admit(self) -> None:
        """Pages, and a row to those that compute here, in the order of the queue."""
        passed = kept = 0  # sequences that wait for a prefix in flight, and pages left for them
        self.starved = False
        while passed < len(self.queue) and passed <= MAX_PASSED:
            sequence = self.queue[passed]
            cached, missing = self._needs(sequence)
            if sequence.phase is Phase.RESERVING and cached < sequence.expected:
                self._leave(sequence)
                sequence.phase = Phase.LOOKED_UP
                self._evicted.append(sequence)
            elif self._waits_for_prefix(sequence, cached):
                passed += 1
                kept += missing
            elif self._fits(sequence, cached, missing + kept, passed) or self._make_way(
                sequence, cached, missing + kept, passed
            ):
                self._start(sequence, cached, missing)
            else:
                needed = missing + kept
                self.starved = not self.manager.can_extend(sequence.keys, cached, needed)
                return

    def _needs(self, sequence: Sequence) -> tuple[int, int]:
        """Blocks that it finds cached, and pages that it needs beside them."""
        usable = sequence.expected
        if sequence.phase is Phase.WAITING:
            # At least one token is left to compute, for there is none to decode from yet.
            usable = 0 if sequence.scores else (len(sequence.tokens) - 1) // BLOCK_TOKENS
        cached = self.manager.cached(sequence.extend_keys(), usable)
        return cached, blocks_for(len(sequence.tokens) + 1) - cached

    def _waits_for_prefix(self, sequence: Sequence, cached: int) -> bool:
        """Whether its next missing block is being computed, and would be computed twice."""
        usable = (cached + 1) * BLOCK_TOKENS < len(sequence.tokens)
        if sequence.phase is not Phase.WAITING or not usable or sequence.scores:
            return False
        return self._in_flight.computes(sequence.keys[cached], sequence.order)

    def _fits(self, sequence: Sequence, cached: int, pages: int, rows: int) -> bool:
        """Whether ``pages`` beside the cached ones can be had, and a row when ``rows`` are kept."""
        seated = sequence.phase is Phase.RESERVING or len(self._rows) > rows
        return seated and self.manager.can_extend(sequence.keys, cached, pages)

    def _make_way(self, sequence: Sequence, cached: int, pages: int, rows: int) -> bool:
        """Reclaim what imports hold, and then preempt less urgent ones, until it fits; nobody when
        it would not fit even then."""
        victims = self._less_urgent(sequence)
        imports: list[Sequence] = []
        if self.manager.can_extend(sequence.keys, cached, pages):
            victims = [v for v in victims if v.row >= 0]  # only a row is missing
        else:
            imports = self.importing
        receives = sequence.phase is Phase.RESERVING
        for count in range(len(victims) + 1):
            chosen = victims[len(victims) - count :]
            seats = len(self._rows) + sum(v.row >= 0 for v in chosen)
            gained = self.manager.freed_by(
                [s.pages for s in chosen + imports], sequence.keys[:cached]
            )
            enough = self.manager.can_extend(sequence.keys, cached, pages - gained)
            if enough and (receives or seats > rows):
                for victim in reversed(chosen):
                    self._preempt(victim)
                while not self.manager.can_extend(sequence.keys, cached, pages) and self._reclaim():
                    pass
                return True
        return False

    def _start(self, sequence: Sequence, cached: int, missing: int) -> None:
        """It leaves the queue with what it needs."""
        receives = sequence.phase is Phase.RESERVING
        self._leave(sequence)
        if not sequence.started:
            self.counters.looked_up(len(sequence.tokens), cached * BLOCK_TOKENS)
        sequence.take_pages(self.manager, cached, missing)
        if receives:
            sequence.phase = Phase.RECEIVING
            self._reserved.append(sequence)
            return
        self._take_row(sequence)
        self._enter(self.prefilling, sequence, Phase.PREFILL)
        self._in_flight.add(sequence)
        if not sequence.started:
            sequence.started = True
            self._started.append(sequence)
