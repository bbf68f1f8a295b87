"""The adaptive draft length policy of one engine, which needs no tuning. Torch-free.

choose_lengths  chooses the best lengths (protocol/performance/draft_choice.py) from acceptance
                rates (acceptance_tracker.py) and costs (step_costs.py). There are none unless they
                beat plain steps by more than the estimates may err. Now and then it adds a
                trial of drafts that do not seem to pay (exploration.py), or a plain step.
observe         updates acceptance rates and costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from engine.scheduling.draft_pages import MAX_DRAFT_NODES
from engine.scheduling.sequence import Sequence as Running
from engine.speculation.control.acceptance_tracker import AcceptanceTracker, BatchGroup
from engine.speculation.control.draft_lengths import (
    IDLE_STEPS,
    DraftLengthPolicy,
    SpeculationAverages,
    StepOutcome,
)
from engine.speculation.control.exploration import Exploration
from engine.speculation.control.profile_estimate import ProfileEstimate
from engine.speculation.control.step_costs import StepCostModel
from protocol.performance.draft_choice import BatchCosts, DraftChoice, choose_draft_lengths
from protocol.performance.speculation_profile import SpeculationProfile

MARGIN, MAX_MARGIN = 0.02, 0.04
"""Bounds of the predicted gain required to start speculating, which is the estimates' standard
error. Once started, speculation continues while it gains anything: it is measured then."""

DECISION_STEPS, STEADY_DECISION_STEPS = 8, 16
"""Steps between two decisions while speculating, and when the last two were equal."""

IDLE_SAMPLE_STEPS = 4
"""While nothing pays, one of this many plain steps is observed, because observing costs time."""

PLAIN_GAP, MAX_PLAIN_GAP = 8, 128
"""Speculative steps between two plain ones, which show whether speculation still pays; the gap
doubles from the first value to the second."""


class Controller(DraftLengthPolicy):
    """Chooses draft lengths for one engine, up to ``most`` nodes for each sequence. ``passes``
    returns the proposer's forward passes for a number of nodes (Proposer.passes)."""

    def __init__(self, costs: StepCostModel, most: int, passes: Callable[[int], int]) -> None:
        self._costs = costs
        self._most = most
        self._looks_up = passes(1) == 0  # drafts are copied, not computed
        self._passes = np.array([0] + [max(1, passes(n)) for n in range(1, most + 1)])
        self._tracker = AcceptanceTracker(most)
        self._exploration = Exploration(self._tracker, most)
        self._averages = SpeculationAverages()
        self._estimate = ProfileEstimate(most)
        self._step = 0  # decoding steps so far
        self._decided_at = 0  # the step of the last decision
        self._next_decision = 0  # the step of the next decision
        self._counts: list[int] = []  # lengths of the last decision; empty: none for any
        self._chunk = 0  # prefill tokens at the last decision
        self._idle_batch = 0  # batch size for which nothing paid; 0: something did
        self._pays = False  # whether the last decision was to speculate
        self._plain_at = self._plain_gap = PLAIN_GAP
        self.predicted_speedup = 1.0
        self._warm_up()

    def _warm_up(self) -> None:
        """Run a first choice, which takes milliseconds, before any step waits for it."""
        gains = np.full((2, self._most), 0.5)
        verify = np.ones(2 * self._most + 1)
        choose_draft_lengths(gains, gains, BatchCosts(1.0, verify, self._passes))

    def speedups(self) -> tuple[float, float]:
        """Return the predicted and the measured speed-up; 1.0 without speculative steps."""
        return self.predicted_speedup, self._averages.speedup

    def profile(self) -> SpeculationProfile | None:
        """Return what drafts bring and cost here; None before any acceptance is known."""
        return self._estimate.profile(*self._costs.curve.hinge)

    def choose_lengths(self, decoding: Sequence[Running], chunk_tokens: int) -> Sequence[int]:
        """Return the nodes to request for each of ``decoding`` [B]; empty: none for any."""
        if self._step >= self._next_decision or (
            self._counts and self._changed(decoding, chunk_tokens)
        ):
            self._counts = self._decide(decoding, chunk_tokens) if decoding else []
        if not self._counts:
            return ()
        limits = [s.request.length_limit - len(s.tokens) - 1 for s in decoding]
        return [max(0, min(n, limit)) for n, limit in zip(self._counts, limits, strict=True)]

    def _changed(self, decoding: Sequence[Running], chunk_tokens: int) -> bool:
        """Return whether the last decision no longer applies. When sequences join or leave, the
        others keep their lengths for some steps, and new ones get the mean length."""
        if chunk_tokens.bit_length() != self._chunk.bit_length() or not decoding:
            return True
        batch = self._tracker.batch
        assert batch is not None
        if batch.matches(decoding):
            return False
        known = dict(zip(batch.handles, self._counts, strict=True))
        counts = [known.get(s.handle, -1) for s in decoding]
        if self._step >= self._decided_at + DECISION_STEPS // 2 or max(counts) < 0:
            return True
        mean = round(sum(self._counts) / len(self._counts))
        self._counts = [mean if n < 0 else n for n in counts]
        self._tracker.group(decoding, self._step)
        return False

    def _decide(self, decoding: Sequence[Running], chunk_tokens: int) -> list[int]:
        self._next_decision = self._step + STEADY_DECISION_STEPS
        if self._still_idle(decoding):
            return []
        if not self._costs.filter(len(decoding)).ready:  # needs plain steps to compare with
            self._next_decision = self._step + 1
            return []
        self._decided_at, self._chunk = self._step, chunk_tokens
        batch = self._tracker.group(decoding, self._step)
        kv_tokens = sum([s.computed for s in decoding])
        costs = self._batch_costs(len(decoding), chunk_tokens, kv_tokens)
        gains, rows = self._tracker.expected(batch, self._step)
        choice = choose_draft_lengths(gains, rows, costs)
        verify = self._costs.filter(len(decoding)).verify
        overhead_s = self._costs.overhead(len(decoding), kv_tokens)
        self._estimate.add(gains, rows, costs, verify, overhead_s)
        self._exploration.judge(batch, choice, self._step)
        margin = 0.0 if self._pays else self._margin(batch, choice)
        pays = self._pays = choice.speedup > 1.0 + margin
        self.predicted_speedup = choice.speedup if pays else 1.0
        counts = self._counts_or_plain_step(choice.counts) if pays else [0] * len(decoding)
        if not pays:
            self._plain_gap = PLAIN_GAP
            self._plain_at = self._step + PLAIN_GAP
        if counts:
            free = self._looks_up or self._costs.catching_up.is_free
            whole = costs.padded is not None and free
            counts = self._exploration.pick(batch, counts, choice, self._step, whole=whole)
        self._idle_batch = 0 if pays or any(counts) else len(decoding)
        self._next_decision = self._next_decision_step(
            pays and bool(counts), steady=counts == self._counts
        )
        return counts if any(counts) else []

    def _counts_or_plain_step(self, counts: list[int]) -> list[int]:
        """Return ``counts``, or an empty list when a plain step is due."""
        if self._step < self._plain_at:
            return counts
        self._plain_gap = min(2 * self._plain_gap, MAX_PLAIN_GAP)
        self._plain_at = self._step + self._plain_gap
        return []

    def _next_decision_step(self, pays: bool, steady: bool) -> int:
        if self._exploration.under_way:
            return self._step + self._exploration.steps
        if not (pays or self._idle_batch):
            return self._step + 1
        again = self._step + (DECISION_STEPS if pays and not steady else STEADY_DECISION_STEPS)
        return min(again, max(self._exploration.due, self._step + 1))

    def _still_idle(self, decoding: Sequence[Running]) -> bool:
        """Return whether the last decision, that nothing pays, still holds."""
        batch = self._tracker.batch
        if self._idle_batch != len(decoding) or batch is None or not batch.matches(decoding):
            return False
        self._next_decision = min(self._next_decision, self._exploration.due)
        return self._exploration.due > self._step

    def _batch_costs(self, batch: int, chunk_tokens: int, kv_tokens: int) -> BatchCosts:
        costs = self._costs
        return BatchCosts(
            plain=costs.plain(batch, kv_tokens),
            verify=costs.verify(batch, batch * self._most, chunk_tokens, kv_tokens),
            passes=self._passes,
            per_pass=costs.proposing.per_pass,
            per_node=costs.proposing.per_node,
            per_sequence=costs.catching_up.per_sequence,
            most=MAX_DRAFT_NODES,
            # A step that also computes a chunk gets no drafts if it is recorded.
            padded=None if chunk_tokens else costs.padded(batch, self._most, kv_tokens),
        )

    def _margin(self, group: BatchGroup, choice: DraftChoice) -> float:
        """Return the required gain of a choice: the relative standard error of its speed-up."""
        batch = len(group.handles)
        variance = self._tracker.variance(group, (choice.tokens - batch) / batch)
        of_tokens = math.sqrt(variance) / choice.tokens
        error = math.hypot(of_tokens, self._costs.filter(batch).error)
        return min(max(MARGIN, error), MAX_MARGIN)

    def skips_observation(self) -> bool:
        """Return whether the next plain step need not be observed; it is counted here then."""
        if not self._idle_batch or (self._step + 1) % IDLE_SAMPLE_STEPS == 0:
            return False
        self._step += 1
        return True

    @property
    def idle(self) -> bool:
        """Whether nothing pays and the next trial is more than IDLE_STEPS away."""
        return self._idle_batch > 0 and self._exploration.due > self._step + IDLE_STEPS

    def observe(self, outcome: StepOutcome) -> None:
        """Update costs and acceptance rates with a decoding step."""
        self._step += 1
        if not outcome.chunked:
            self._costs.observe(outcome)
        if outcome.asked:
            proposing_s = outcome.draft_s - outcome.caught_up_s
            nodes = sum(outcome.proposed)
            self._costs.proposing.observe(outcome.passes, nodes, proposing_s)
            asked = sum(1 for count in outcome.asked if count)
            self._costs.catching_up.observe(asked, outcome.caught_up_s)
            self._tracker.observe(outcome)
            self._compare_with_plain(outcome)

    def _compare_with_plain(self, outcome: StepOutcome) -> None:
        batch = len(outcome.sequences)
        plain = self._costs.plain(batch, outcome.kv_tokens)
        if self._exploration.under_way:
            more = self._costs.extra_seconds(outcome, plain)
            brought = sum(map(len, outcome.accepted)) / batch
            self._exploration.observe(more / plain, outcome.caught_up_s / plain, brought)
        if self.predicted_speedup > 1.0 and not outcome.chunked:
            self._averages.observe(outcome, plain)
