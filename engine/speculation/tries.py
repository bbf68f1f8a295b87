"""Nodes for some of those that the choice gives none: to learn, though it may not pay.
Torch-free."""

from __future__ import annotations

import numpy as np

from engine.speculation.choice import Choice
from engine.speculation.cohort import Cohort
from engine.speculation.knowledge import Knowledge
from engine.speculation.probing import Probing

NODES = 2
"""For each sequence, where there is no better guess."""

LONG = 4
"""Steps of a try of what looked good before."""

PROMISING = 1.02
"""Speed-up from which on it is worth learning more: less would not be enough to begin."""

NEVER = 1 << 62


class Tries:
    """One at a time: ``pick`` before it, ``saw`` after each of its ``steps``, ``judge`` at
    its end."""

    def __init__(self, knowledge: Knowledge, most: int) -> None:
        self._knowledge = knowledge
        self._nodes = min(NODES, most)
        self._kinds: dict[int, Probing] = {}
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
        return LONG if any(self._kind(key).promising for key in self._handles) else 1

    def _kind(self, key: int) -> Probing:
        if key not in self._kinds:
            self._kinds[key] = Probing()
        return self._kinds[key]

    def pick(self, cohort: Cohort, counts: list[int], choice: Choice, step: int) -> list[int]:
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

    def judge(self, cohort: Cohort, choice: Choice, step: int) -> None:
        """They are promising where ``choice``, which knows of them, gives nodes to those who were
        tried, and brings enough to begin with."""
        if not self._handles:
            return
        likely: set[int] = set()
        if choice.speedup >= PROMISING:
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
