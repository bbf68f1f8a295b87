"""The running estimate of what drafts bring and cost in one engine, for other processes.

The Controller adds the rates and costs behind each of its decisions. Routers, the sizing policy and
the simulator get the means as a ``SpeculationProfile`` with the engine's beats, and compute the
pace of other batches from it. Torch-free.
"""

from __future__ import annotations

import numpy as np

from protocol.performance.draft_choice import BatchCosts, Vector
from protocol.performance.speculation_profile import MAX_PLACES, SpeculationProfile

KEEP = 1.0 - 1.0 / 32  # weight of earlier decisions at each decision, some hundred steps in all
MIN_RATE = 1e-6


class ProfileEstimate:
    """Decayed means over sequences and decisions, each sequence by its own acceptance rates."""

    def __init__(self, most: int) -> None:
        self._places = min(most, MAX_PLACES)
        self._sums: Vector = np.zeros(self._places + 2)  # gains; proposed; sequences
        self._last: tuple[BatchCosts, float, float] | None = None

    def add(
        self, gains: Vector, rows: Vector, costs: BatchCosts, verify: float, overhead_s: float
    ) -> None:
        """Add a decision: the arguments of ``choose_draft_lengths``, observed over predicted
        seconds of verifying, and ``StepCostModel.overhead``. Sequences of a class with too few
        drafts to know its acceptance have no gains, and do not count."""
        known = gains[:, 0] > 0.0
        if known.any():
            mean_rows = rows[known].mean(axis=1, keepdims=True)
            counted = (gains[known, : self._places], mean_rows, np.ones_like(mean_rows))
            self._sums = KEEP * self._sums + np.hstack(counted).sum(axis=0)
            self._last = costs, verify, overhead_s

    def profile(self, row_s: float, free_rows: float) -> SpeculationProfile | None:
        """Return the means; None before any acceptance is known. ``row_s``, ``free_rows``: the
        ``hinge`` of the latency curve."""
        if self._last is None:
            return None
        costs, verify, overhead_s = self._last
        means = self._sums / self._sums[-1]
        gains = np.append(1.0, np.maximum(means[: self._places], MIN_RATE))
        proposed = float(means[-2])  # where nothing is proposed, nothing is verified
        more = int(costs.passes[self._places] - costs.passes[1])
        return SpeculationProfile(
            accept=tuple(np.minimum(gains[1:] / gains[:-1], 1.0).tolist()),
            per_pass_s=costs.per_pass,
            per_node_s=proposed * costs.per_node,
            per_sequence_s=costs.per_sequence,
            per_step_s=overhead_s,
            row_s=proposed * verify * row_s,
            free_rows=free_rows,
            passes_per_node=min(1.0, more / max(1, self._places - 1)),
            most_nodes=costs.most,
        )
