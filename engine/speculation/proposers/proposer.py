"""The interface of proposers: draft model, prompt lookup, Medusa and EAGLE implement it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.scheduling.sequence import Sequence as Running
from engine.speculation.drafts import Drafts


@dataclass(frozen=True)
class VerifiedStep:
    """Hidden states of a step for the sequences that drew tokens in it, ``D`` tokens at most.

    A path row is a row of the step whose token became part of the text: the row of the sequence's
    last token, then the rows of its accepted drafts. ``hidden[at[b, i]]`` is the hidden state of
    the token at position ``length - counts[b] - 1 + i``, and ``tokens[b, i]`` is the token drawn
    from it (the next one of the text). Beyond ``counts[b]`` both repeat the last one.

    ``length`` is the row state's, which already counts the drawn tokens; ``sequence.tokens`` does
    not contain them yet.
    """

    sequences: Sequence[Running]  # [B]
    rows: Tensor  # [B] int64, their rows in the state
    counts: Tensor  # [B] int64, tokens drawn for each: 1 + accepted
    tokens: Tensor  # [B, D] int64
    at: Tensor  # [B, D] int64, rows of ``hidden``
    hidden: Tensor  # [T, hidden], the last layer's output before the final norm
    taps: Tensor | None = None  # [T, n * hidden], the inputs of n layers, if requested


class Proposer:
    """Proposes draft tokens for the decoding sequences of one engine. It may raise any exception:
    it is dropped then, and decoding goes on without it. It stores its state of a sequence by
    ``sequence.row_lease``, which numbers the sequence's stay on its row; a preempted sequence
    returns with another one. What is defined here is that of a proposer without a model."""

    name: str  # ngram, draft, medusa, eagle
    most: int  # maximum number of nodes for a sequence
    wants_hidden: bool = False  # whether ``observe`` must be called
    taps: Sequence[int] = ()  # layers of the model whose inputs it needs, in ascending order

    @property
    def caught_up_s(self) -> float:
        """Seconds of the last ``propose`` spent on catching up with texts, once they are spent."""
        return 0.0

    def passes(self, nodes: int) -> int:
        """Return the number of its own sequential forward passes for ``nodes`` nodes."""
        return 0

    def propose(self, sequences: Sequence[Running], rows: Tensor, wanted: Sequence[int]) -> Drafts:
        """Return at most ``wanted`` [B] nodes for each of the decoding ``sequences`` [B]. The most
        promising nodes come first, and parents before children. A sequence gets 0 nodes if there is
        no prediction or its text must be caught up with first. rows: [B] int64, rows of the
        sequences in the state. The pages for the nodes are allocated: node i of a sequence will be
        computed in slot ``len(sequence.tokens) + i``."""
        raise NotImplementedError

    def observe(self, step: VerifiedStep) -> None:
        """Read the hidden states of a step that drew tokens. The state's ``length`` already counts
        these tokens; ``sequence.tokens`` gets them later."""

    def forget(self, leases: Sequence[int]) -> None:
        """Free the state of row leases whose sequences have ended or were preempted. Called before
        ``propose``, not at once. Leases of sequences without a request for drafts are not
        included."""

    def record_graphs(self, progress: Callable[[float], None]) -> None:
        """Record its passes as CUDA graphs before the first proposal, if it has any, and report the
        share that is done. On a CPU nothing is recorded."""
