"""The interface of draft length policies, and the step outcomes they learn from. Torch-free.

The Speculator asks its policy for lengths before each decoding step and reports the StepOutcome
afterwards. Controller is the adaptive policy; FixedDraftLength serves the
warm-up, tests and measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.scheduling.sequence import Sequence as Running
from protocol.performance.draft_choice import Vector
from protocol.performance.speculation_profile import SpeculationProfile

IDLE_STEPS = 64
"""A policy is idle if it will request no drafts for more than this many steps. It is also the
number of steps for which a proposer observes the model before it is asked again."""

FOLLOW = 1.0 / 64  # weight of one step in SpeculationAverages


@dataclass(frozen=True)
class StepOutcome:
    """The result of one decoding step. The Speculator creates it for its length policy."""

    sequences: Sequence[Running]  # [B] decoding sequences
    proposed: Sequence[int]  # [B] nodes verified for each; empty: none for any
    accepted: Sequence[Sequence[int]]  # [B] indices of the accepted nodes; empty as ``proposed``
    kv_tokens: int  # that the decode rows attended to, counted once per sequence
    draft_s: float  # seconds of proposing, catching up included
    step_s: float  # seconds of the whole step, proposing included
    passes: int  # sequential passes of the proposer
    chunked: bool  # whether the step also computed prefill chunks
    asked: Sequence[int] = ()  # [B] nodes requested for each; empty as ``proposed``
    caught_up_s: float = 0.0  # seconds of proposing spent on catching up with texts


class DraftLengthPolicy:
    """Decides the number of draft nodes of each sequence, step by step. What is defined here is
    that of a policy that learns nothing."""

    def choose_lengths(self, decoding: Sequence[Running], chunk_tokens: int) -> Sequence[int]:
        """Return the nodes to request for each of ``decoding`` [B]; empty: none for any. The step
        also computes ``chunk_tokens`` prompt tokens. Called before every step, so it must be
        cheap."""
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        """Whether no drafts will be requested for the present sequences for more than IDLE_STEPS.
        Proposers need not observe the model's steps then."""
        return False

    def skips_observation(self) -> bool:
        """Return whether the next decoding step, which has no drafts, need not be observed."""
        return False

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a decoding step, speculative or not, that was not skipped."""

    def speedups(self) -> tuple[float, float]:
        """Return the predicted and the measured speed-up of speculative over plain steps. Both are
        in tokens per second, and 1.0 without speculative steps."""
        return 1.0, 1.0

    def profile(self) -> SpeculationProfile | None:
        """Return what drafts bring and cost, for other processes; None while it is unknown."""
        return None


class FixedDraftLength(DraftLengthPolicy):
    """Requests the same number of nodes for every sequence."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes

    def choose_lengths(self, decoding: Sequence[Running], chunk_tokens: int) -> Sequence[int]:
        return [self._nodes] * len(decoding)


@dataclass
class SpeculationAverages:
    """Averages over recent speculative steps, as ratios of decayed sums."""

    _plain_s: float = 0.0  # that plain steps would have taken for the same tokens
    _took_s: float = 0.0

    @property
    def speedup(self) -> float:
        """Tokens per second relative to plain steps; 1.0 without speculative steps."""
        return self._plain_s / self._took_s if self._took_s > 0 else 1.0

    def observe(self, outcome: StepOutcome, plain_s: float) -> None:
        """Add a step; ``plain_s`` are the seconds of a plain step of the same batch."""
        batch, accepted = len(outcome.sequences), sum(map(len, outcome.accepted))
        keep = 1.0 - FOLLOW
        self._plain_s = keep * self._plain_s + plain_s * (batch + accepted) / batch
        self._took_s = keep * self._took_s + outcome.step_s


def count_drafts(outcomes: Sequence[StepOutcome], most: int) -> tuple[Vector, Vector, Vector]:
    """Return the numbers [B, most] of requested, proposed and accepted nodes at each place, over
    steps of the same B sequences."""

    def reached(counts: list[Sequence[int]]) -> Vector:
        places: Vector = (np.asarray(counts)[:, :, None] > np.arange(most)).sum(axis=0, dtype=float)
        return places

    asked = reached([o.asked for o in outcomes])
    proposed = reached([o.proposed or [0] * len(o.asked) for o in outcomes])
    places = [
        index * most + node
        for outcome in outcomes
        for index, nodes in enumerate(outcome.accepted)
        for node in nodes
    ]
    accepted = np.bincount(places, minlength=asked.size).reshape(asked.shape)
    return asked, proposed, accepted.astype(np.float64)
