"""Decoding on one simulated worker in closed form, without an event for each step.

A step of b sequences over kv tokens takes s0 + s1*b + s2*kv seconds, and kv grows by b*pace in it.
So k steps without a change of the batch take

    k*(s0 + s1*b + s2*kv) + s2*b*pace*k*(k - 1)/2

A sequence that joins or leaves in the middle of a step does so at its end, as in an engine. The
state is always that at a boundary between two steps, which may lie ahead of the current time.
"""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

from cluster.simulator.devices.request import SimulatedRequest
from protocol.performance.step_model import StepModel

_EPSILON = 1e-9
"""A time within this share of a step after a boundary counts as that boundary (float rounding)."""


class _Row(NamedTuple):
    order: int
    first_step: int  # steps of the batch when the sequence joined
    context: int


class SimulatedBatch:
    """The sequences that decode together on one worker; ``StepRunner`` creates it.

    ``at``: time of the current boundary in seconds. ``steps``: steps since the beginning. ``kv``:
    KV tokens of all sequences. ``busy_s``: seconds spent in steps.
    """

    def __init__(self, model: StepModel, pace: float = 1.0) -> None:
        self.model = model
        self.pace = pace
        self.at = 0.0
        self.steps = 0
        self.kv = 0.0
        self.busy_s = 0.0
        self._rows: dict[SimulatedRequest, _Row] = {}
        # (last step, order, request), with entries of sequences that have left early
        self._ends: list[tuple[int, int, SimulatedRequest]] = []
        self._orders = 0

    @property
    def rows(self) -> int:
        return len(self._rows)

    @property
    def requests(self) -> list[SimulatedRequest]:
        """The sequences in the order in which they joined."""
        return list(self._rows)

    def join(self, request: SimulatedRequest, context: int, tokens: int) -> None:
        """Add a sequence at the boundary: ``context`` tokens exist and ``tokens`` are to come."""
        self._orders += 1
        row = self._rows[request] = _Row(self._orders, self.steps, context)
        last_step = self.steps + max(1, math.ceil(tokens / self.pace))
        heapq.heappush(self._ends, (last_step, row.order, request))
        self.kv += context

    def leave(self, request: SimulatedRequest) -> int:
        """Remove a sequence at the boundary and return the number of steps it took part in."""
        row = self._rows.pop(request)
        steps = self.steps - row.first_step
        self.kv -= row.context + steps * self.pace
        if not self._rows:
            self.kv = 0.0
            self._ends.clear()
        return steps

    def pop_finished(self) -> list[SimulatedRequest]:
        """Remove and return the sequences that have all their tokens at the boundary."""
        found = []
        while self._steps_left() == 0:
            _, _, request = heapq.heappop(self._ends)
            self.leave(request)
            found.append(request)
        return found

    def _steps_left(self) -> int | None:
        """Return the steps until the next sequence ends; None for an empty batch."""
        while self._ends:
            end, order, request = self._ends[0]
            row = self._rows.get(request)
            if row is not None and row.order == order:
                return end - self.steps
            heapq.heappop(self._ends)
        return None

    def seconds(self, steps: int) -> float:
        """Return the duration of the next ``steps`` steps."""
        rows = len(self._rows)
        growth = self.model.kv_token * rows * self.pace * (steps - 1) / 2
        return steps * (self.model.decode_s(rows, self.kv) + growth)

    def next_end(self) -> float | None:
        """Return the time at which the next sequence ends; None for an empty batch."""
        left = self._steps_left()
        return None if left is None else self.at + self.seconds(left)

    def settle(self, now: float) -> None:
        """Advance to the first boundary at or after ``now``; no sequence may end before it."""
        if now <= self.at:
            return
        if not self._rows:
            self.at = now
            return
        left = self._steps_left()
        assert left is not None
        self.advance(min(left, self._steps_within(now - self.at)))

    def to_next_end(self) -> None:
        left = self._steps_left()
        assert left is not None
        self.advance(left)

    def advance(self, steps: int, added_s: float = 0.0) -> None:
        """Run ``steps`` steps; prompts in them take ``added_s`` more seconds in all."""
        seconds = self.seconds(steps) + added_s
        self.at += seconds
        self.busy_s += seconds
        self.kv += len(self._rows) * self.pace * steps
        self.steps += steps

    def _steps_within(self, seconds: float) -> int:
        """Return the least number of steps that take ``seconds``: a root of the sum above."""
        first = self.model.decode_s(len(self._rows), self.kv)
        half = self.model.kv_token * len(self._rows) * self.pace / 2
        if half > 0:
            slope = first - half
            steps = 2 * seconds / (slope + math.sqrt(slope * slope + 4 * half * seconds))
        else:
            steps = seconds / first if first > 0 else 1
        return max(0, math.ceil(steps - _EPSILON))
