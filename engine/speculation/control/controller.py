"""How much to propose, decided from what was accepted and what it took. No tuning.

    wanted  -> the choice of the best counts (choice.py), from gains (knowledge.py) and costs
               (costs.py); none, unless they are better than plain steps by more than the estimates
               may err; now and then a try of what does not seem to pay (tries.py), or a plain step
    observe -> gains, costs

Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from engine.scheduling.draft_pages import MAX_DRAFT_NODES
from engine.scheduling.sequence import Sequence as Running
from engine.speculation.control.draft_choice import (
    BatchCosts,
    DraftChoice,
    LatencyCurve,
    choose_draft_lengths,
)
from engine.speculation.control.draft_lengths import IDLE_STEPS, SpeculationAverages, StepOutcome
from engine.speculation.control.exploration import Exploration
from engine.speculation.control.sequence_knowledge import AcceptanceTracker, BatchGroup
from engine.speculation.control.step_costs import StepCostModel

MARGIN, MAX_MARGIN = 0.02, 0.04
"""What speculation has to bring before it begins: as much as the estimates may err, within these.
Once it is on it goes on as long as it brings anything: what it does not bring is learned then."""

DECISION_STEPS, STEADY_DECISION_STEPS = 8, 16
"""Steps between two decisions: while speculating, and when the last two came to the same."""

IDLE_SAMPLE_STEPS = 4
"""Of plain steps one of so many is looked at, while nothing pays: looking costs, too."""

PLAIN_GAP, MAX_PLAIN_GAP = 8, 128
"""Steps of speculation between two plain ones, which tell whether it still pays: at first, and in
the end."""


class Controller:
    """Lengths of the drafts of one engine, of ``most`` nodes for a sequence at most. ``passes``:
    the forward passes of the proposer for so many nodes (Proposer.passes)."""

    def __init__(self, costs: StepCostModel, most: int, passes: Callable[[int], int]) -> None:
        self._costs = costs
        self._most = most
        self._passes = np.array([0] + [max(1, passes(n)) for n in range(1, most + 1)])
        self._knowledge = AcceptanceTracker(most)
        self._tries = Exploration(self._knowledge, most)
        self._measured = SpeculationAverages()
        self._step = 0  # that decoded, so far
        self._decided = 0  # the step of the last decision
        self._again = 0  # and of the next one
        self._counts: list[int] = []  # what it came to; empty: none to any
        self._chunk = 0  # tokens of the chunk beside it
        self._idle_batch = 0  # for which it found that nothing pays; 0: something did
        self._pays = False  # whether it came to something
        self._plain_at = self._plain_gap = PLAIN_GAP
        self.predicted_speedup = 1.0
        self._make_ready()

    def _make_ready(self) -> None:
        """The first choice of a process takes milliseconds; no step shall wait for them."""
        gains = np.full((2, self._most), 0.5)
        verify = np.ones(2 * self._most + 1)
        choose_draft_lengths(gains, gains, BatchCosts(1.0, verify, self._passes))

    # ---- figures ----------------------------------------------------------------------------

    @property
    def measured_speedup(self) -> float:
        return self._measured.speedup

    @property
    def acceptance(self) -> float:
        """Of the proposed nodes, of late."""
        return self._measured.acceptance

    def speedups(self) -> tuple[float, float]:
        """Predicted and measured, of the steps that speculate; 1.0 where there are none."""
        return self.predicted_speedup, self.measured_speedup

    # ---- before a step ----------------------------------------------------------------------

    def wanted(self, decoding: Sequence[Running], chunk_tokens: int) -> Sequence[int]:
        """Nodes for each of ``decoding`` [B]; empty: none for any."""
        if self._step >= self._again or (self._counts and self._changed(decoding, chunk_tokens)):
            self._counts = self._decide(decoding, chunk_tokens) if decoding else []
        if not self._counts:
            return ()
        rooms = [s.request.length_limit - len(s.tokens) - 1 for s in decoding]
        return [max(0, min(n, room)) for n, room in zip(self._counts, rooms, strict=True)]

    def _changed(self, decoding: Sequence[Running], chunk_tokens: int) -> bool:
        """Whether the last decision does not do any more. Those who go on keep their counts for
        some steps when others come and go; those who come get as many as the others."""
        if chunk_tokens.bit_length() != self._chunk.bit_length() or not decoding:
            return True
        cohort = self._knowledge.cohort
        assert cohort is not None
        if cohort.still(decoding):
            return False
        known = dict(zip(cohort.handles, self._counts, strict=True))
        counts = [known.get(s.handle, -1) for s in decoding]
        if self._step >= self._decided + DECISION_STEPS // 2 or max(counts) < 0:
            return True
        mean = round(sum(self._counts) / len(self._counts))
        self._counts = [mean if n < 0 else n for n in counts]
        self._knowledge.about(decoding, self._step)
        return False

    def _decide(self, decoding: Sequence[Running], chunk_tokens: int) -> list[int]:
        curve = self._costs.curve()
        self._again = self._step + STEADY_DECISION_STEPS
        if curve is None or self._nothing_new(decoding):
            return []
        if not self._costs.pace(len(decoding)).known:  # a plain step to compare with, first
            self._again = self._step + 1
            return []
        self._decided, self._chunk = self._step, chunk_tokens
        cohort = self._knowledge.about(decoding, self._step)
        prices = self._prices(curve, decoding, chunk_tokens)
        choice = choose_draft_lengths(*self._knowledge.expected(cohort, self._step), prices)
        self._tries.judge(cohort, choice, self._step)
        margin = 0.0 if self._pays else self._margin(cohort, choice)
        pays = self._pays = choice.speedup > 1.0 + margin
        self.predicted_speedup = choice.speedup if pays else 1.0
        counts = self._or_plain(choice.counts) if pays else [0] * len(decoding)
        if not pays:
            self._plain_gap = PLAIN_GAP
            self._plain_at = self._step + PLAIN_GAP
        if counts:
            counts = self._tries.pick(cohort, counts, choice, self._step)
        self._idle_batch = 0 if pays or any(counts) else len(decoding)
        self._again = self._next(pays and bool(counts), steady=counts == self._counts)
        return counts if any(counts) else []

    def _or_plain(self, counts: list[int]) -> list[int]:
        """``counts``, or none when it is time for a plain step."""
        if self._step < self._plain_at:
            return counts
        self._plain_gap = min(2 * self._plain_gap, MAX_PLAIN_GAP)
        self._plain_at = self._step + self._plain_gap
        return []

    def _next(self, pays: bool, steady: bool) -> int:
        """The step of the next decision."""
        if self._tries.under_way:
            return self._step + self._tries.steps
        if not (pays or self._idle_batch):
            return self._step + 1
        again = self._step + (DECISION_STEPS if pays and not steady else STEADY_DECISION_STEPS)
        return min(again, max(self._tries.due, self._step + 1))

    def _nothing_new(self, decoding: Sequence[Running]) -> bool:
        """Whether the last decision, that nothing pays, would come out the same."""
        cohort = self._knowledge.cohort
        if self._idle_batch != len(decoding) or cohort is None or not cohort.still(decoding):
            return False
        self._again = min(self._again, self._tries.due)
        return self._tries.due > self._step

    def _prices(
        self, curve: LatencyCurve, decoding: Sequence[Running], chunk_tokens: int
    ) -> BatchCosts:
        batch, costs = len(decoding), self._costs
        kv_tokens = sum([s.computed for s in decoding])
        return BatchCosts(
            plain=costs.plain(curve, batch, kv_tokens),
            verify=costs.verify(curve, batch, batch * self._most, chunk_tokens, kv_tokens),
            passes=self._passes,
            a_pass=costs.proposing.a_pass,
            row=costs.proposing.row,
            caught_up=costs.catching_up.a_step,
            most=MAX_DRAFT_NODES,
        )

    def _margin(self, cohort: BatchGroup, choice: DraftChoice) -> float:
        """What the choice has to bring: the standard error of its speed-up, as a share."""
        batch = len(cohort.handles)
        variance = self._knowledge.variance(cohort, (choice.tokens - batch) / batch)
        of_tokens = math.sqrt(variance) / choice.tokens
        error = math.hypot(of_tokens, self._costs.pace(batch).error)
        return min(max(MARGIN, error), MAX_MARGIN)

    # ---- after a step -----------------------------------------------------------------------

    def passes_by(self) -> bool:
        """Whether nothing needs to be known of a plain step; it is counted then."""
        if not self._idle_batch or (self._step + 1) % IDLE_SAMPLE_STEPS == 0:
            return False
        self._step += 1
        return True

    @property
    def resting(self) -> bool:
        """Whether the next try is far away."""
        return self._idle_batch > 0 and self._tries.due > self._step + IDLE_STEPS

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a step that decoded."""
        self._step += 1
        batch = len(outcome.sequences)
        nodes = sum(outcome.proposed)
        if not outcome.chunked:
            self._costs.observe(
                batch, batch + nodes, outcome.kv_tokens, outcome.step_s, outcome.draft_s
            )
        if outcome.asked:
            proposing_s = outcome.draft_s - outcome.caught_up_s
            self._costs.proposing.observe(outcome.passes, nodes, proposing_s)
            asked = sum(1 for count in outcome.asked if count)
            self._costs.catching_up.observe(asked, outcome.caught_up_s)
            self._knowledge.see(outcome)
            self._compare(outcome)

    def _compare(self, outcome: StepOutcome) -> None:
        """With a plain step over the same batch."""
        curve, batch = self._costs.curve(), len(outcome.sequences)
        if curve is None:
            return
        plain = self._costs.plain(curve, batch, outcome.kv_tokens)
        if self._tries.under_way:
            more = self._costs.more(curve, outcome, plain)
            brought = sum(map(len, outcome.accepted)) / batch
            self._tries.saw(more / plain, outcome.caught_up_s / plain, brought)
        if self.predicted_speedup > 1.0 and not outcome.chunked:
            self._measured.observe(outcome, plain)
