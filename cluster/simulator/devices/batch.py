"""Sequences that decode together on one worker, without an event for each step.

A step of b sequences over kv tokens takes s0 + s1*b + s2*kv, and kv grows by b*pace in it. So k
steps without a change of the batch take

    k*(s0 + s1*b + s2*kv) + s2*b*pace*k*(k - 1)/2

Who joins or leaves in the middle of a step does so at its end, as in an engine: the state is always
that at a boundary between two steps, which may lie ahead of now.
"""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

from cluster.simulator.devices.job import Job
from router.placement.step_model import StepModel

_EPSILON = 1e-9
"""Of a step: a moment so shortly after a boundary is that boundary, as floats go."""


class _Seat(NamedTuple):
    order: int
    since: int  # steps of the batch when it joined
    context: int


class Batch:
    """``at``: the boundary; ``steps`` since the beginning; ``kv``: tokens of all sequences."""

    def __init__(self, model: StepModel, pace: float = 1.0) -> None:
        self.model = model
        self.pace = pace
        self.at = 0.0
        self.steps = 0
        self.kv = 0.0
        self.busy_s = 0.0  # spent in steps
        self._seats: dict[Job, _Seat] = {}
        self._ends: list[tuple[int, int, Job]] = []  # (steps, order, who); of leavers, too
        self._orders = 0

    @property
    def rows(self) -> int:
        return len(self._seats)

    @property
    def jobs(self) -> list[Job]:
        """In the order in which they joined."""
        return list(self._seats)

    def join(self, job: Job, context: int, tokens: int) -> None:
        """From the boundary on: ``context`` tokens are there, and ``tokens`` are to come."""
        self._orders += 1
        seat = self._seats[job] = _Seat(self._orders, self.steps, context)
        steps = self.steps + max(1, math.ceil(tokens / self.pace))
        heapq.heappush(self._ends, (steps, seat.order, job))
        self.kv += context

    def leave(self, job: Job) -> int:
        """At the boundary. Returns the steps that it had."""
        seat = self._seats.pop(job)
        had = self.steps - seat.since
        self.kv -= seat.context + had * self.pace
        if not self._seats:
            self.kv = 0.0
            self._ends.clear()
        return had

    def ended(self) -> list[Job]:
        """Who has all tokens at the boundary; they leave."""
        found = []
        while self._left() == 0:
            _, _, job = heapq.heappop(self._ends)
            self.leave(job)
            found.append(job)
        return found

    def _left(self) -> int | None:
        """Steps until the next one ends."""
        while self._ends:
            end, order, job = self._ends[0]
            seat = self._seats.get(job)
            if seat is not None and seat.order == order:
                return end - self.steps
            heapq.heappop(self._ends)
        return None

    # ---- time -------------------------------------------------------------------------------

    def seconds(self, steps: int) -> float:
        """Of so many steps from the boundary on."""
        rows = len(self._seats)
        growth = self.model.kv_token * rows * self.pace * (steps - 1) / 2
        return steps * (self.model.decode_s(rows, self.kv) + growth)

    def next_end(self) -> float | None:
        """When somebody has all tokens; None: nobody is here."""
        left = self._left()
        return None if left is None else self.at + self.seconds(left)

    def settle(self, now: float) -> None:
        """On to the first boundary at or after ``now``; nobody must have ended before it."""
        if now <= self.at:
            return
        if not self._seats:
            self.at = now
            return
        left = self._left()
        assert left is not None
        self.advance(min(left, self._steps_within(now - self.at)))

    def to_next_end(self) -> None:
        left = self._left()
        assert left is not None
        self.advance(left)

    def advance(self, steps: int, added_s: float = 0.0) -> None:
        """``added_s``: what prompts in these steps take beside."""
        seconds = self.seconds(steps) + added_s
        self.at += seconds
        self.busy_s += seconds
        self.kv += len(self._seats) * self.pace * steps
        self.steps += steps

    def _steps_within(self, seconds: float) -> int:
        """Least number of steps that take at least so long: a root of the sum above."""
        first = self.model.decode_s(len(self._seats), self.kv)
        half = self.model.kv_token * len(self._seats) * self.pace / 2
        if half > 0:
            slope = first - half
            steps = 2 * seconds / (slope + math.sqrt(slope * slope + 4 * half * seconds))
        else:
            steps = seconds / first if first > 0 else 1
        return max(0, math.ceil(steps - _EPSILON))
