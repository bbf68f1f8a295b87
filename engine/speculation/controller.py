"""How much to propose, decided from what was accepted and what it took. No tuning.

    wanted  -> choice of the best counts (choice.py), from gains (gains.py) and costs (costs.py);
               none, unless they are better than plain steps by more than the estimates may err;
               now and then a try of what does not seem to pay (probing.py), or a plain step
    observe -> gains, costs

Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from engine.sequence import Sequence as Running
from engine.speculation import probing
from engine.speculation.choice import Choice, Prices, Vector, choose
from engine.speculation.cohort import Cohort, Indices, Kind, gather
from engine.speculation.costs import Costs
from engine.speculation.curve import Curve
from engine.speculation.gains import Luck
from engine.speculation.lengths import Outcome
from engine.speculation.outcomes import Measured, counted

MARGIN = 0.02
"""What speculation has to bring at least."""

BEGIN = 4
"""Plain steps at the beginning, to compare with."""

ENOUGH = 3.0
"""Drafts of a class before which nothing is said of it."""

AGAIN = 8
"""Steps between two decisions while speculating ..."""

AGAIN_OFF = 16
"""... and while not."""

FORGET_STEPS = 512.0
"""Steps after which a class is a third as sure of what it knew."""

PLAIN_GAP, LONGEST_PLAIN_GAP = 32, 512
"""Steps of speculation between two plain ones, which tell whether it still pays: at first, and in
the end."""


class Controller:
    """Lengths of the drafts of one engine, of ``most`` nodes for a sequence at most. ``passes``:
    the forward passes of the proposer for so many nodes (Proposer.passes)."""

    def __init__(self, costs: Costs, most: int, passes: Callable[[int], int]) -> None:
        self._costs = costs
        self._most = most
        self._passes = np.array([0] + [max(1, passes(n)) for n in range(1, most + 1)])
        self._kinds: dict[int, Kind] = {}
        self._luck = Luck(most)
        self._measured = Measured()
        self._cohort: Cohort | None = None
        self._step = 0  # that decoded, so far
        self._again = BEGIN  # the step of the next decision
        self._counts: list[int] = []  # of the last one; empty: none to any
        self._chunk = 0  # size of the chunk for which it was made
        self._tried: dict[int, list[int]] = {}  # by kind: handles whose try has no verdict yet
        self._try_cost = 0.0  # in plain steps
        self._plain_at = self._plain_gap = PLAIN_GAP
        self.predicted_speedup = 1.0

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
        rooms = (s.request.length_limit - len(s.tokens) - 1 for s in decoding)
        return [
            min(n, room) if room > 0 else 0 for n, room in zip(self._counts, rooms, strict=True)
        ]

    def _changed(self, decoding: Sequence[Running], chunk_tokens: int) -> bool:
        cohort = self._cohort
        return (
            cohort is None
            or not decoding
            or not cohort.still(decoding)
            or chunk_tokens.bit_length() != self._chunk.bit_length()
        )

    def _decide(self, decoding: Sequence[Running], chunk_tokens: int) -> list[int]:
        curve = self._costs.curve()
        self._again = self._step + AGAIN_OFF
        if curve is None:
            return []
        self._chunk = chunk_tokens
        cohort = self._cohort = self._of(decoding)
        kv_tokens = sum([s.computed for s in decoding])
        prices = self._prices(curve, len(decoding), chunk_tokens, kv_tokens)
        choice = choose(*self._expected(cohort), prices)
        pays = choice.speedup >= 1.0 + self._margin(cohort, choice)
        self._judge(cohort, choice)
        counts = choice.counts if pays else [0] * len(decoding)
        self.predicted_speedup = choice.speedup if pays else 1.0
        tries = self._try(cohort, counts)
        if pays:
            self._again = self._step + AGAIN
            if not tries and self._step >= self._plain_at:
                return self._plain_step()
        else:
            self._plain_gap = PLAIN_GAP
            self._plain_at = self._step + AGAIN_OFF + PLAIN_GAP
        for index in tries:
            counts[index] = min(probing.NODES, self._most)
        if self._tried:
            self._again = self._step + 1
        return counts if any(counts) else []

    def _plain_step(self) -> list[int]:
        self._plain_gap = min(2 * self._plain_gap, LONGEST_PLAIN_GAP)
        self._plain_at = self._step + self._plain_gap
        self._again = self._step + 1
        return []

    def _of(self, decoding: Sequence[Running]) -> Cohort:
        """The cohort of these, and what is known of their classes up to date."""
        cohort = self._cohort
        if cohort is None or not cohort.still(decoding):
            cohort = gather(decoding, self._luck)
        for kind in map(self._kind, cohort.members):
            kind.gains.forget(math.exp((kind.forgot - self._step) / FORGET_STEPS))
            kind.forgot = self._step
            kind.gains.refresh()
        return cohort

    def _kind(self, key: int) -> Kind:
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = Kind(self._most)
            kind.forgot = self._step
        return kind

    def _expected(self, cohort: Cohort) -> tuple[Vector, Vector]:
        """[B, most] each: gains and rows of every node; nothing of a class that is not known."""
        gains = np.zeros((len(cohort.handles), self._most))
        rows = np.ones_like(gains)
        for key, members in cohort.members.items():
            known = self._kind(key).gains
            if known.drafts >= ENOUGH:
                exponents = self._luck.exponents(cohort.places[members], known, self._step)
                gains[members] = known.powers[exponents]
                rows[members] = known.rows[exponents]
        return gains, rows

    def _prices(self, curve: Curve, batch: int, chunk_tokens: int, kv_tokens: int) -> Prices:
        costs = self._costs
        return Prices(
            plain=costs.plain(curve, batch, kv_tokens),
            verify=costs.verify(curve, batch, batch * self._most, chunk_tokens, kv_tokens),
            passes=self._passes,
            a_pass=costs.proposing.a_pass,
            row=costs.proposing.row,
        )

    def _margin(self, cohort: Cohort, choice: Choice) -> float:
        """Standard error of the expected tokens, as a share. How many of a chain are accepted is
        as good as geometrically distributed: of mean E, its variance is E (1 + E)."""
        batch = len(cohort.handles)
        mean = (choice.tokens - batch) / batch
        variance = 0.0
        for key, members in cohort.members.items():
            drafts = self._kind(key).gains.drafts
            if drafts >= ENOUGH:
                variance += len(members) ** 2 * mean * (1.0 + mean) / drafts
        return max(MARGIN, math.sqrt(variance) / choice.tokens)

    # ---- tries ------------------------------------------------------------------------------

    def _judge(self, cohort: Cohort, choice: Choice) -> None:
        """Of tries: those who were tried out would be given nodes, or too little is known yet."""
        if not self._tried:
            return
        likely = set()
        if choice.speedup >= 1.0:
            likely = {h for h, n in zip(cohort.handles, choice.counts, strict=True) if n}
        for key, handles in self._tried.items():
            kind = self._kind(key)
            open_ = kind.gains.drafts < ENOUGH or not likely.isdisjoint(handles)
            kind.probing.verdict(self._step, self._try_cost, open_)
        self._tried = {}

    def _try(self, cohort: Cohort, counts: list[int]) -> list[int]:
        """Indices of sequences that are given nodes to learn from, though it may not pay."""
        chosen: list[int] = []
        idle = np.asarray(counts) == 0
        for key, members in cohort.members.items():
            due = self._kind(key).probing.due
            without = members[idle[members]]
            if not len(without):
                continue
            if due > self._step:
                self._again = min(self._again, due)
                continue
            picked = self._least_tested(cohort, without)[: probing.tried(len(without))]
            self._tried[key] = [cohort.handles[i] for i in picked]
            chosen += picked.tolist()
        return chosen

    def _least_tested(self, cohort: Cohort, indices: Indices) -> Indices:
        """Those that have been begun with first, then the new ones: a proposer may have to catch up
        with a text before it can propose."""
        tested = self._luck.tested(cohort.places[indices], self._step)
        rank = np.where((tested > 0.1) & (tested < ENOUGH), -1.0, tested)
        return indices[np.argsort(rank, kind="stable")]

    # ---- after a step -----------------------------------------------------------------------

    def observe(self, outcome: Outcome) -> None:
        """Learn from a step that decoded."""
        self._step += 1
        batch = len(outcome.sequences)
        nodes = sum(outcome.proposed)
        if not outcome.chunked:
            self._costs.observe(
                batch, batch + nodes, outcome.kv_tokens, outcome.step_s, outcome.draft_s
            )
        if outcome.asked:
            self._learn(outcome, batch, nodes)

    def _learn(self, outcome: Outcome, batch: int, nodes: int) -> None:
        costs, curve = self._costs, self._costs.curve()
        costs.proposing.observe(outcome.passes, nodes, outcome.draft_s)
        if curve is not None:
            plain = costs.plain(curve, batch, outcome.kv_tokens)
            if self._tried:
                dearer = costs.verify(curve, batch, nodes, 0, outcome.kv_tokens)
                self._try_cost = (dearer[-1] - plain + outcome.draft_s) / plain
            elif not outcome.chunked:
                self._measured.observe(outcome, plain)
        cohort = self._cohort
        if cohort is None or not cohort.still(outcome.sequences):
            cohort = gather(outcome.sequences, self._luck)
        who, asked, proposed, accepted = counted(outcome, self._most)
        self._luck.observe(cohort.places[who], asked, accepted.sum(axis=1), self._step)
        for key, members in cohort.members.items():
            of = slice(None) if len(cohort.members) == 1 else np.isin(who, members)
            news = (x[of].sum(axis=0) for x in (asked, proposed, accepted))
            self._kind(key).gains.observe(*news)
