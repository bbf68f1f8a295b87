"""Exploration: drafts for sequences to which the choice gives none, to learn their acceptance.

    trial 1, 2, .. until the verdict --fails--> next one after (cost / SHARE) steps, then growing,
                                                up to (cost / MIN_SHARE)
                                     --pays---> next one at once: there is more to learn

``cost`` is the cost of a trial in plain steps, so all trials together cost less than SHARE of the
time; trials that keep failing cost ever less, and trials that cost nothing run almost always. A new
text of a class that paid recently waits less, as it may pay again. Torch-free.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from engine.speculation.control.acceptance_tracker import AcceptanceTracker, BatchGroup
from protocol.performance.draft_choice import DraftChoice

SHARE = 0.005  # share of the time for trials when they begin to fail
MIN_SHARE = 0.0005  # share of the time for trials that have failed for long

NEW_SHARE = 0.02
"""Share of the time for trials of new texts, while at most RECENT_FAILURES trials have failed since
the class paid."""

RECENT_FAILURES = 8

WAIT_GROWTH = 2.0**0.5  # growth of the wait from one failed trial to the next
MAX_WAIT_STEPS = 2048  # maximum number of steps between two trials
CREDIT = 1.5  # plain steps that the trials between two waits may lose

FIRST_CREDIT = 1.0
"""Plain steps that the very first trials of a class may lose before they are judged."""

DEFAULT_NODES = 2  # nodes for each sequence of a trial without a better estimate
PROMISING_STEPS = 4  # steps of a trial of a class whose last trial was promising

PROMISING_SPEEDUP = 1.02
"""Speed-up from which a trial is promising: less would not be enough to start speculating."""

NEVER = 1 << 62


@dataclass
class ExplorationSchedule:
    """When to run the next trial of one class of requests."""

    due: int = 0  # first step at which the next trial may run
    failed: int = 0  # failed trials since the class last paid
    lost: float = 0.0  # plain steps lost by the trials since the last wait
    promising: int = 0  # consecutive promising trials
    paid: bool = False  # whether the class has ever paid
    last: int = 0  # step of the last verdict
    cost: float = 0.0  # cost of the trial of the last verdict, in plain steps

    def trial_size(self, sequences: int) -> int:
        """Return how many of ``sequences`` join the next trial: more after promising ones."""
        return min(sequences, max(1, sequences // 8) << min(self.promising, 8))

    def record_verdict(
        self, step: int, cost: float, brought: float, *, promising: bool, unknown: bool
    ) -> None:
        """Record a trial that ended before ``step``; cost and gain are in plain steps. One-time
        costs count as gains. ``unknown`` means that the class has too few drafts to judge."""
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

    def record_paying(self) -> None:
        """Forget failures, because the choice gives drafts to the class."""
        self.paid = True
        self.failed = self.promising = 0
        self.lost = 0.0

    def record_new_text(self) -> None:
        """Shorten the wait for a new sequence of a class that paid recently."""
        if self.paid and self.failed <= RECENT_FAILURES:
            self.due = min(self.due, self.last + int(self.cost / NEW_SHARE) + 1)


class Exploration:
    """Runs one trial at a time: ``pick``, then ``observe`` after each step, then ``judge``."""

    def __init__(self, tracker: AcceptanceTracker, most: int) -> None:
        self._tracker = tracker
        self._nodes = min(DEFAULT_NODES, most)
        self._schedules = defaultdict[int, ExplorationSchedule](ExplorationSchedule)
        self._handles: dict[int, list[int]] = {}  # by class: sequences of the trial under way
        self._cost = self._once = self._brought = 0.0  # of its steps, in plain steps
        self._known: set[int] = set()  # handles of the last batch
        self.due = 0  # step of the next trial of the sequences without drafts

    @property
    def under_way(self) -> bool:
        return bool(self._handles)

    @property
    def steps(self) -> int:
        """Steps of the trial under way; promising ones run longer, to save decisions."""
        return PROMISING_STEPS if any(self._schedules[k].promising for k in self._handles) else 1

    def pick(
        self,
        batch: BatchGroup,
        counts: list[int],
        choice: DraftChoice,
        step: int,
        *,
        whole: bool = False,
    ) -> list[int]:
        """Return ``counts`` [B] with added nodes for sequences that join a trial; ``whole``: all of
        its class join, because drafts for all cost as much as for one."""
        self.due = NEVER
        out = list(counts)
        idle = np.asarray(counts) == 0
        new = set(batch.handles) - self._known
        self._known = set(batch.handles)
        for key, members in batch.members.items():
            schedule, without = self._schedules[key], members[idle[members]]
            if new and any(batch.handles[index] in new for index in members):
                schedule.record_new_text()
            if len(without) < len(members):
                schedule.record_paying()
            if len(without):
                self.due = min(self.due, schedule.due)
            if len(without) and schedule.due <= step:
                size = len(without) if whole else schedule.trial_size(len(without))
                picked = self._tracker.least_tested(batch, without, step)[:size].tolist()
                self._handles[key] = [batch.handles[index] for index in picked]
                for index in picked:
                    likely = choice.counts[index] if choice.speedup >= 1.0 else 0
                    out[index] = likely or self._nodes
        return out

    def observe(self, cost: float, once: float, brought: float) -> None:
        """Add a step of the trial: extra cost and gain over a plain step, in plain steps. ``once``
        is the part of the cost spent on catching up, which does not recur."""
        self._cost += cost
        self._once += once
        self._brought += brought

    def judge(self, batch: BatchGroup, choice: DraftChoice, step: int) -> None:
        """End the trial under way. It is promising if ``choice`` gives its sequences drafts, with
        enough speed-up to start speculating."""
        if not self._handles:
            return
        likely: set[int] = set()
        if choice.speedup >= PROMISING_SPEEDUP:
            likely = {h for h, n in zip(batch.handles, choice.counts, strict=True) if n}
        for key, handles in self._handles.items():
            self._schedules[key].record_verdict(
                step,
                self._cost,
                self._brought + self._once,
                promising=not likely.isdisjoint(handles),
                unknown=self._tracker.is_unknown(key),
            )
        self._handles = {}
        self._cost = self._once = self._brought = 0.0
