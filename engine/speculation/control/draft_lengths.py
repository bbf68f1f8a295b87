"""The interface of draft length policies, and the step outcomes they learn from. Torch-free.

The Speculator asks its policy for lengths before each decoding step and reports the StepOutcome
afterwards. Controller is the adaptive policy; FixedDraftLength serves tests and measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.scheduling.sequence import Sequence as Running
from protocol.performance.draft_choice import Vector

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
    rows: int  # of the model's pass: decoding sequences, nodes and tokens of prefill chunks
    kv_tokens: int  # that the decode rows attended to, counted once per sequence
    draft_s: float  # seconds of proposing, catching up included
    step_s: float  # seconds of the whole step, proposing included
    passes: int  # sequential passes of the proposer
    chunked: bool  # whether the step also computed prefill chunks
    asked: Sequence[int] = ()  # [B] nodes requested for each; empty as ``proposed``
    caught_up_s: float = 0.0  # seconds of proposing spent on catching up with texts


class DraftLengthPolicy(Protocol):
    """Decides the number of draft nodes of each sequence, step by step."""

    def choose_lengths(self, decoding: Sequence[Running], chunk_tokens: int) -> Sequence[int]:
        """Return the nodes to request for each of ``decoding`` [B]; empty: none for any. The step
        also computes ``chunk_tokens`` prompt tokens. Called before every step, so it must be
        cheap."""

    def skips_observation(self) -> bool:
        """Return whether the next decoding step, which has no drafts, need not be observed."""

    @property
    def idle(self) -> bool:
        """Whether no drafts will be requested for the present sequences for more than IDLE_STEPS.
        Proposers need not observe the model's steps then."""

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a decoding step, speculative or not, that was not skipped."""

    def speedups(self) -> tuple[float, float]:
        """Return the predicted and the measured speed-up of speculative over plain steps. Both are
        in tokens per second, and 1.0 without speculative steps."""


class ObserveEveryStep:
    """Base of policies that are never idle and observe every step."""

    idle = False

    def skips_observation(self) -> bool:
        return False


class FixedDraftLength(ObserveEveryStep):
    """Requests the same number of nodes for every sequence: for tests and measurements."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes

    def choose_lengths(self, decoding: Sequence[Running], chunk_tokens: int) -> Sequence[int]:
        return [self._nodes] * len(decoding)

    def observe(self, outcome: StepOutcome) -> None:
        pass

    def speedups(self) -> tuple[float, float]:
        return 1.0, 1.0


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


class AcceptanceSamples:
    """Buffered draft results of steps over the same B sequences, until ``take``."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._clear()

    def _clear(self) -> None:
        self._asked: list[Sequence[int]] = []
        self._proposed: list[Sequence[int]] = []
        self._accepted: list[int] = []  # sequence * most + node

    def __bool__(self) -> bool:
        return bool(self._asked)

    def add(self, outcome: StepOutcome) -> None:
        self._asked.append(outcome.asked)
        self._proposed.append(outcome.proposed or [0] * len(outcome.asked))
        for index, nodes in enumerate(outcome.accepted):
            if nodes:
                self._accepted += [index * self._most + node for node in nodes]

    def take(self) -> tuple[Vector, Vector, Vector]:
        """Return and clear counts of requested, proposed and accepted nodes: [B, most] each."""
        places = np.arange(self._most)
        asked = (np.asarray(self._asked)[:, :, None] > places).sum(axis=0, dtype=np.float64)
        proposed = (np.asarray(self._proposed)[:, :, None] > places).sum(axis=0, dtype=np.float64)
        accepted = np.bincount(self._accepted, minlength=asked.size).reshape(asked.shape)
        self._clear()
        return asked, proposed, accepted.astype(np.float64)
