"""Who decides how much is proposed, and what it learns from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.sequence import Sequence as Running

REST = 64
"""Steps that a proposer gets to see before it is asked again, where it was not asked for long."""


@dataclass(frozen=True)
class Outcome:
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


class Lengths(Protocol):
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

    def observe(self, outcome: Outcome) -> None:
        """Called after every other step that decoded, speculating or not."""

    def speedups(self) -> tuple[float, float]:
        """Predicted and measured: tokens per second of the steps that speculate, over those of
        plain ones; 1.0 where there are none."""


class EveryStep:
    """Of lengths that want to know of every step."""

    resting = False

    def passes_by(self) -> bool:
        return False


class FixedLength(EveryStep):
    """Always as many: for tests and measurements."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes

    def wanted(self, decoding: Sequence[Running], chunk_tokens: int) -> Sequence[int]:
        return [self._nodes] * len(decoding)

    def observe(self, outcome: Outcome) -> None:
        pass

    def speedups(self) -> tuple[float, float]:
        return 1.0, 1.0
