"""Nodes for some of those that the choice gives none: to learn, though it may not pay.
Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.speculation.control.draft_choice import DraftChoice
from engine.speculation.control.sequence_knowledge import AcceptanceTracker, BatchGroup

# MERGED engine.speculation.probing
# When to try out what does not seem to pay. Torch-free.
#
#     try 1, 2, .. until the verdict --fails--> again after (cost / SHARE) steps, then ever more,
#                                               ... up to (cost / LEAST_SHARE)
#                                   --pays----> again at once: more is to be learned
#
# ``cost`` is what a try costs, in plain steps; so all tries together cost less than SHARE of the
# time, those that fail for long less and less, and those that cost nothing are as good as always
# on.
# A new text of a class that paid not long ago need not wait as long: it may be one that pays.

SHARE = 0.005
"""Of the time, that tries may cost when they begin to fail."""

NEW_SHARE = 0.02
"""Of the time, that tries of new texts may cost ..."""

RECENT_FAILURES = 8
"""... as long as no more tries have failed since the class paid."""

WAIT_GROWTH = 2.0**0.5
"""Of the wait, from one try that fails to the next."""

MIN_SHARE = 0.0005
"""... and in the end."""

MAX_WAIT_STEPS = 2048
"""Steps between two tries at most."""

CREDIT = 1.5
"""Plain steps that the first tries of a class may lose, and those after a wait."""


FIRST_CREDIT = 1.0
"""Plain steps that the very first tries may lose before anything is made of them."""


@dataclass
class ExplorationSchedule:
    """The tries of one class of requests."""

    due: int = 0  # the step from which on the next one may be
    failed: int = 0  # since it paid last
    lost: float = 0.0  # plain steps, by the tries since the last wait, less what they brought
    promising: int = 0  # tries in a row that were
    paid: bool = False  # ever
    last: int = 0  # the step of the last verdict, and
    cost: float = 0.0  # what the try cost

    def size(self, sequences: int) -> int:
        """Of so many sequences, how many take part in the next try: more where it looks good."""
        return min(sequences, max(1, sequences // 8) << min(self.promising, 8))

    def verdict(
        self, step: int, cost: float, brought: float, *, promising: bool, unknown: bool
    ) -> None:
        """After a try before ``step``, that cost and ``brought`` so many plain steps; what is not
        to be done again counts as brought. ``unknown``: it takes more tries to tell."""
        self.lost += cost - brought
        self.last, self.cost = step, cost
        unknown = unknown or (not self.failed and self.lost < FIRST_CREDIT)
        if (promising or unknown) and self.lost < CREDIT:
            self.due = step
            self.promising += promising
            return
        gap = max(self.lost - CREDIT, cost) / SHARE * WAIT_GROWTH ** min(self.failed, 64)
        self.due = step + max(1, int(min(gap, cost / MIN_SHARE, MAX_WAIT_STEPS)))
        self.failed += 1
        self.lost = 0.0
        self.promising = 0

    def pays(self) -> None:
        """The class is given nodes: what seemed to fail is forgotten."""
        self.paid = True
        self.failed = self.promising = 0
        self.lost = 0.0

    def renewed(self) -> None:
        """There is a new text of the class."""
        if self.paid and self.failed <= RECENT_FAILURES:
            self.due = min(self.due, self.last + int(self.cost / NEW_SHARE) + 1)


DEFAULT_NODES = 2
"""For each sequence, where there is no better guess."""

PROMISING_STEPS = 4
"""Steps of a try of what looked good before."""

PROMISING_SPEEDUP = 1.02
"""Speed-up from which on it is worth learning more: less would not be enough to begin."""

NEVER = 1 << 62


class Exploration:
    """One at a time: ``pick`` before it, ``saw`` after each of its ``steps``, ``judge`` at
    its end."""

    def __init__(self, knowledge: AcceptanceTracker, most: int) -> None:
        self._knowledge = knowledge
        self._nodes = min(DEFAULT_NODES, most)
        self._kinds: dict[int, ExplorationSchedule] = {}
        self._handles: dict[int, list[int]] = {}  # by kind: sequences without a verdict yet
        self._cost = self._once = self._brought = 0.0  # of their steps, in plain steps
        self._known: set[int] = set()  # handles of those that were looked at last
        self.due = 0  # the step of the next try of those that were not given nodes last time

    @property
    def under_way(self) -> bool:
        return bool(self._handles)

    @property
    def steps(self) -> int:
        """Of what is under way: more where it looks good, so that deciding costs little."""
        return PROMISING_STEPS if any(self._kind(key).promising for key in self._handles) else 1

    def _kind(self, key: int) -> ExplorationSchedule:
        if key not in self._kinds:
            self._kinds[key] = ExplorationSchedule()
        return self._kinds[key]

    def pick(
        self, cohort: BatchGroup, counts: list[int], choice: DraftChoice, step: int
    ) -> list[int]:
        """``counts`` [B], with nodes for some of those that have none."""
        self.due = NEVER
        out = list(counts)
        idle = np.asarray(counts) == 0
        new = set(cohort.handles) - self._known
        self._known = set(cohort.handles)
        for key, members in cohort.members.items():
            kind, without = self._kind(key), members[idle[members]]
            if new and any(cohort.handles[index] in new for index in members):
                kind.renewed()
            if len(without) < len(members):
                kind.pays()
            if len(without):
                self.due = min(self.due, kind.due)
            if len(without) and kind.due <= step:
                size = kind.size(len(without))
                picked = self._knowledge.least_tested(cohort, without, step)[:size].tolist()
                self._handles[key] = [cohort.handles[index] for index in picked]
                for index in picked:
                    likely = choice.counts[index] if choice.speedup >= 1.0 else 0
                    out[index] = likely or self._nodes
        return out

    def saw(self, cost: float, once: float, brought: float) -> None:
        """A step of the tries cost and brought so much more than a plain one, in plain steps.
        ``once``: what of the cost was for catching up, which is not to be done again."""
        self._cost += cost
        self._once += once
        self._brought += brought

    def judge(self, cohort: BatchGroup, choice: DraftChoice, step: int) -> None:
        """They are promising where ``choice``, which knows of them, gives nodes to those who were
        tried, and brings enough to begin with."""
        if not self._handles:
            return
        likely: set[int] = set()
        if choice.speedup >= PROMISING_SPEEDUP:
            likely = {h for h, n in zip(cohort.handles, choice.counts, strict=True) if n}
        for key, handles in self._handles.items():
            self._kind(key).verdict(
                step,
                self._cost,
                self._brought + self._once,
                promising=not likely.isdisjoint(handles),
                unknown=self._knowledge.unknown(key),
            )
        self._handles = {}
        self._cost = self._once = self._brought = 0.0
