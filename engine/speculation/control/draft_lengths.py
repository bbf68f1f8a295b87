"""Who decides how much is proposed, and what it learns from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.scheduling.sequence import Sequence as Running
from engine.speculation.control.draft_choice import Vector

IDLE_STEPS = 64
"""Steps that a proposer gets to see before it is asked again, where it was not asked for long."""


@dataclass(frozen=True)
class StepOutcome:
    """One step that decoded, as it turned out."""

    sequences: Sequence[Running]  # [B] that decoded
    proposed: Sequence[int]  # [B] nodes verified for each; empty: none for any
    accepted: Sequence[Sequence[int]]  # [B] indices of the accepted nodes; empty as ``proposed``
    rows: int  # of the model's pass: decoding sequences, nodes and tokens of chunks
    kv_tokens: int  # that the decode rows attended to, each sequence's once
    draft_s: float  # seconds that proposing took, catching up included
    step_s: float  # seconds of the whole step, proposing included
    passes: int  # of the proposer, one after the other
    chunked: bool  # whether prompts were computed beside
    asked: Sequence[int] = ()  # [B] nodes that were wanted for each; empty as ``proposed``
    caught_up_s: float = 0.0  # seconds of proposing that catching up with texts took


class DraftLengthPolicy(Protocol):
    """Decides the nodes of each sequence, step by step."""

    def wanted(self, decoding: Sequence[Running], chunk_tokens: int) -> Sequence[int]:
        """Nodes to propose to each of ``decoding``, in a step that computes ``chunk_tokens`` of
        prompts beside; empty: none to any. Called before every step, so it must cost little."""

    def passes_by(self) -> bool:
        """Called before a step that decodes and for which nothing is wanted: whether nothing needs
        to be known of it. It is not observed then."""

    @property
    def resting(self) -> bool:
        """Whether nothing is going to be wanted for the sequences there are, for more than REST
        steps: proposers need not see what the model computes."""

    def observe(self, outcome: StepOutcome) -> None:
        """Called after every other step that decoded, speculating or not."""

    def speedups(self) -> tuple[float, float]:
        """Predicted and measured: tokens per second of the steps that speculate, over those of
        plain ones; 1.0 where there are none."""


class ObserveEveryStep:
    """Of lengths that want to know of every step."""

    resting = False

    def passes_by(self) -> bool:
        return False


class FixedDraftLength(ObserveEveryStep):
    """Always as many: for tests and measurements."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes

    def wanted(self, decoding: Sequence[Running], chunk_tokens: int) -> Sequence[int]:
        return [self._nodes] * len(decoding)

    def observe(self, outcome: StepOutcome) -> None:
        pass

    def speedups(self) -> tuple[float, float]:
        return 1.0, 1.0


# MERGED engine.speculation.outcomes
# Outcomes of steps, as numbers to learn from. Torch-free.

FOLLOW = 1.0 / 64
"""Weight of a step in the measured figures."""


@dataclass
class SpeculationAverages:
    """Figures of the steps that speculated of late, as ratios of decayed sums."""

    _plain_s: float = 0.0  # that plain steps would have taken for the same tokens
    _took_s: float = 0.0
    _proposed: float = 0.0
    _accepted: float = 0.0

    @property
    def speedup(self) -> float:
        """Tokens per second, over those of plain steps; 1.0 where nothing speculated."""
        return self._plain_s / self._took_s if self._took_s > 0 else 1.0

    @property
    def acceptance(self) -> float:
        """Of the proposed nodes."""
        return self._accepted / self._proposed if self._proposed > 0 else 0.0

    def observe(self, outcome: StepOutcome, plain_s: float) -> None:
        """``plain_s``: of a plain step of this batch."""
        batch, accepted = len(outcome.sequences), sum(map(len, outcome.accepted))
        keep = 1.0 - FOLLOW
        self._plain_s = keep * self._plain_s + plain_s * (batch + accepted) / batch
        self._took_s = keep * self._took_s + outcome.step_s
        self._proposed = keep * self._proposed + sum(outcome.proposed)
        self._accepted = keep * self._accepted + accepted


class AcceptanceSamples:
    """What became of the drafts of steps over the same B sequences, until it is ``taken``."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._clear()

    def _clear(self) -> None:
        self._asked: list[Sequence[int]] = []
        self._proposed: list[Sequence[int]] = []
        self._met: list[int] = []  # sequence * most + node

    def __bool__(self) -> bool:
        return bool(self._asked)

    def add(self, outcome: StepOutcome) -> None:
        self._asked.append(outcome.asked)
        self._proposed.append(outcome.proposed or [0] * len(outcome.asked))
        for index, nodes in enumerate(outcome.accepted):
            if nodes:
                self._met += [index * self._most + node for node in nodes]

    def take(self) -> tuple[Vector, Vector, Vector]:
        """[B, most] each: how often each node was asked for, proposed, accepted."""
        places = np.arange(self._most)
        asked = (np.asarray(self._asked)[:, :, None] > places).sum(axis=0, dtype=np.float64)
        proposed = (np.asarray(self._proposed)[:, :, None] > places).sum(axis=0, dtype=np.float64)
        met = np.bincount(self._met, minlength=asked.size).reshape(asked.shape)
        self._clear()
        return asked, proposed, met.astype(np.float64)
