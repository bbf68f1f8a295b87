"""Decoding on one simulated worker in closed form, without an event for each step.

A step of b sequences over kv tokens takes s0 + s1*b + s2*kv + d seconds, and kv grows by b*tau in
it: tau tokens of each sequence, and d seconds of drafting, are the worker's choice for this batch
(``protocol/performance/speculation_profile.py``). So k steps without a change of the batch take

    k*(s0 + s1*b + s2*kv + d) + s2*b*tau*k*(k - 1)/2

A sequence that joins or leaves in the middle of a step does so at its end, as in an engine. The
state is always that at a boundary between two steps, which may lie ahead of the current time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import NamedTuple

from cluster.simulator.devices.request import SimulatedRequest
from protocol.performance.speculation_profile import SpeculationProfile, decode_pace
from protocol.performance.step_model import StepModel

_EPSILON = 1e-9
"""A time within this share of a step after a boundary counts as that boundary (float rounding)."""


_KV_STEPS = 8
"""KV sizes within 1/8 of an octave share one choice of drafts."""


class _Row(NamedTuple):
    order: int
    first_token: float  # tokens of the batch when the sequence joined
    context: int


class DraftPace:
    """The worker's choice of drafts for each batch: (tokens of a sequence in a step, seconds that
    drafting adds to it). The workers of one pool share it."""

    def __init__(self, model: StepModel, profile: SpeculationProfile | None) -> None:
        self._model = model
        self._profile = profile
        self._known: dict[tuple[int, int], tuple[float, float]] = {}

    def of(self, rows: int, kv_tokens: float) -> tuple[float, float]:
        if self._profile is None:
            return 1.0, 0.0
        octaves = round(_KV_STEPS * math.log2(max(1.0, kv_tokens)))
        found = self._known.get((rows, octaves))
        if found is None:
            kv_tokens = 2 ** (octaves / _KV_STEPS)
            pace = decode_pace(self._model, self._profile, rows, kv_tokens)
            found = pace.tokens, pace.seconds - self._model.decode_s(rows, kv_tokens)
            self._known[rows, octaves] = found
        return found


class SimulatedBatch:
    """The sequences that decode together on one worker; ``StepRunner`` creates it.

    ``at``: time of the current boundary in seconds. ``tokens``: of a sequence that was there from
    the beginning. ``kv``: KV tokens of all sequences. ``added``: KV tokens of all steps so far.
    ``busy_s``: seconds spent in steps.
    """

    def __init__(self, model: StepModel, drafts: DraftPace | None = None) -> None:
        self.model = model
        self.at = 0.0
        self.tokens = 0.0
        self.kv = 0.0
        self.added = 0.0
        self.busy_s = 0.0
        self._drafts = drafts or DraftPace(model, None)
        self._pace = 1.0, 0.0  # of the batch as it is
        self._contexts = 0  # KV tokens with which the sequences joined
        self._rows: dict[SimulatedRequest, _Row] = {}
        # (tokens at its end, order, request), with entries of sequences that have left early
        self._ends: list[tuple[float, int, SimulatedRequest]] = []
        self._orders = 0

    @property
    def rows(self) -> int:
        return len(self._rows)

    @property
    def grown(self) -> int:
        """KV tokens that the sequences have added since they joined."""
        return round(self.kv) - self._contexts

    @property
    def growth(self) -> float:
        """KV tokens that the next step adds."""
        return len(self._rows) * self._pace[0]

    @property
    def requests(self) -> list[SimulatedRequest]:
        """The sequences in the order in which they joined."""
        return list(self._rows)

    def join(self, request: SimulatedRequest, context: int, tokens: int) -> None:
        """Add a sequence at the boundary: ``context`` tokens exist and ``tokens`` are to come."""
        self._orders += 1
        row = self._rows[request] = _Row(self._orders, self.tokens, context)
        heapq.heappush(self._ends, (self.tokens + max(1, tokens), row.order, request))
        self.kv += context
        self._contexts += context
        self._pace = self._drafts.of(len(self._rows), self.kv)

    def given(self, now: float) -> Iterator[tuple[SimulatedRequest, int]]:
        """Yield the sequences and the tokens that each will have been given at the first boundary
        at or after ``now``, at the pace of the batch as it is."""
        if self._rows:
            steps = self._steps_within(now - self.at) if now > self.at else 0
            tokens = self.tokens + self._pace[0] * steps
            yield from ((r, int(tokens - row.first_token)) for r, row in self._rows.items())

    def leave(self, request: SimulatedRequest) -> int:
        """Remove a sequence at the boundary and return the number of tokens it was given."""
        row = self._rows.pop(request)
        tokens = self.tokens - row.first_token
        self.kv -= row.context + tokens
        self._contexts -= row.context
        if not self._rows:
            self.kv = self.tokens = 0.0
            self._ends.clear()
        self._pace = self._drafts.of(len(self._rows), self.kv)
        return int(tokens + _EPSILON)

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
                return max(0, math.ceil((end - self.tokens) / self._pace[0] - _EPSILON))
            heapq.heappop(self._ends)
        return None

    def seconds(self, steps: int) -> float:
        """Return the duration of the next ``steps`` steps."""
        rows, (tokens, drafting_s) = len(self._rows), self._pace
        growth = self.model.kv_token * rows * tokens * (steps - 1) / 2
        return steps * (self.model.decode_s(rows, self.kv) + drafting_s + growth)

    def next_end(self, room: float = math.inf) -> float | None:
        """Return the time at which the next sequence ends, or several fill ``room`` KV tokens; None
        for an empty batch."""
        left = self._steps_left()
        if left is None:
            return None
        if len(self._rows) > 1 and room < left * self.growth:
            left = max(0, int(room / self.growth))
        return self.at + self.seconds(left)

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

    def advance(self, steps: int, added_s: float = 0.0) -> None:
        """Run ``steps`` steps; prompts in them take ``added_s`` more seconds in all."""
        seconds = self.seconds(steps) + added_s
        self.at += seconds
        self.busy_s += seconds
        tokens = self._pace[0] * steps
        self.kv += len(self._rows) * tokens
        self.added += len(self._rows) * tokens
        self.tokens += tokens

    def _steps_within(self, seconds: float) -> int:
        """Return the least number of steps that take ``seconds``: a root of the sum above."""
        rows, (tokens, drafting_s) = len(self._rows), self._pace
        first = self.model.decode_s(rows, self.kv) + drafting_s
        half = self.model.kv_token * rows * tokens / 2
        if half > 0:
            slope = first - half
            steps = 2 * seconds / (slope + math.sqrt(slope * slope + 4 * half * seconds))
        else:
            steps = seconds / first if first > 0 else 1
        return max(0, math.ceil(steps - _EPSILON))
