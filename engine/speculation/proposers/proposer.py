"""What proposes tokens: the interface of the draft model, prompt lookup, Medusa and EAGLE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from engine.scheduling.sequence import Sequence as Running
from engine.speculation.drafts import Drafts


@dataclass(frozen=True)
class VerifiedStep:
    """What the model has computed for the sequences of a step that drew tokens, ``D`` at most.

    A path row is a row of the step that turned out to be on the text: that of the sequence's last
    token, then those of its accepted drafts. ``hidden[at[b, i]]`` is what the model made of the
    token at position ``length - counts[b] - 1 + i``, and ``tokens[b, i]`` what it drew from there
    (the next one of the text). Beyond ``counts[b]`` both repeat the last one.

    ``length`` is the state's, which already counts the tokens drawn; ``sequence.tokens`` does not
    have them yet.
    """

    sequences: Sequence[Running]  # [B]
    rows: Tensor  # [B] int64, their rows in the state
    counts: Tensor  # [B] int64, tokens drawn for each: 1 + accepted
    tokens: Tensor  # [B, D] int64
    at: Tensor  # [B, D] int64, rows of ``hidden``
    hidden: Tensor  # [T, hidden], the last layer's output before the final norm
    taps: Tensor | None = None  # [T, n * hidden], the inputs of n layers, where they are wanted


class Proposer(Protocol):
    """Proposes to the decoding sequences of one engine. It may raise anything: it is dropped then,
    and decoding goes on without it. Its state of a sequence is found by ``sequence.row_lease``, the
    number of its stay on its row: a preempted sequence comes back with another one."""

    name: str  # ngram, draft, medusa, eagle
    most: int  # nodes that it proposes to a sequence at most
    wants_hidden: bool  # whether ``saw`` is to be called
    caught_up_s: float  # seconds of the last ``propose`` that went into texts it had to catch up on

    def passes(self, nodes: int) -> int:
        """Forward passes of its own, one after the other, that ``nodes`` nodes take."""

    def propose(self, sequences: Sequence[Running], rows: Tensor, wanted: Sequence[int]) -> Drafts:
        """At most ``wanted`` [B] nodes for each of the decoding ``sequences`` [B], the most
        promising first (parents before children); 0 where it has nothing to say, or must catch up
        first. rows: [B] int64, their rows in the state. All pages are there that the nodes need:
        node i of a sequence will be computed in slot ``len(sequence.tokens) + i``."""

    def saw(self, advance: VerifiedStep) -> None:
        """The model's pass, in every step in which tokens were drawn: the state's ``length`` counts
        them, ``sequence.tokens`` gets them after this call."""

    def forget(self, seatings: Sequence[int]) -> None:
        """These stays are over; their sequences have ended or were preempted. Called before
        ``propose``, not at once; a stay that is merely not asked about is not named."""


@runtime_checkable
class LayerTapProposer(Proposer, Protocol):
    """A proposer that wants to see the inputs of some of the model's layers as well."""

    taps: tuple[int, ...]  # these layers, in ascending order; empty: none
