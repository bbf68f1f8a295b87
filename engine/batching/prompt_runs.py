"""The rows of a step with prompts, divided into runs of consecutive tokens, here of up to 16.

    rows   [ d | e | a a a a a a a a a a a a a a a a | a a a | b b b ]
    runs     d   e   16 tokens of a                    3 of a  3 of b

To attention a run is a sequence of its own, which knows all tokens before the run and has a chain
of further ones. The KV of all rows is in the pool before attention reads it, so a run may attend to
the runs before it, and a step with prompts needs no other kernel than one that verifies drafts. All
numbers are computed on the host. ``PromptGraphs`` writes them to the memory of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from engine.batching.draft_layout import IntArray
from engine.kernels.paged_rows import PIECE_TOKENS
from engine.scheduling.sequence import Sequence, blocks_for
from engine.scheduling.step_policy import StepPlan
from protocol.block_keys import BLOCK_TOKENS


@dataclass(frozen=True)
class RunRows:
    """The T rows of a step and its S runs. ``of`` creates it from a plan."""

    tokens: IntArray  # [T]
    positions: IntArray  # [T]
    slots: IntArray  # [T], pool slot for each token's KV
    owner: IntArray  # [T], run of each row
    depth: IntArray  # [T], index in its run
    state_row: IntArray  # [S]
    known: IntArray  # [S], tokens before the run
    first_row: IntArray  # [S]
    row_count: IntArray  # [S]
    pieces: IntArray  # [S], pieces of the run's context
    logit_rows: IntArray  # [R], rows that draw: all that decode, and the last one of each prompt
    drawing: IntArray  # [R], state rows of these

    @classmethod
    def of(cls, plan: StepPlan, most: int) -> RunRows:
        """Return the rows of a plan without drafts, whose sequences have their pages, in runs of up
        to ``most`` tokens."""
        spans = _spans(plan)
        known, count, span = _divide(spans, most)
        first_row = np.cumsum(count) - count
        owner = np.repeat(np.arange(len(count)), count)
        depth = np.arange(len(owner)) - first_row[owner]
        ends = np.cumsum([end - first for _, first, end in spans]) - 1
        drawing = [i for i, (s, _, end) in enumerate(spans) if end == len(s.tokens)]
        rows = _array([s.row for s, _, _ in spans])
        return cls(
            tokens=np.concatenate([_array(s.tokens[a:b]) for s, a, b in spans]),
            positions=known[owner] + depth,
            slots=np.concatenate([pool_slots(*own) for own in spans]),
            owner=owner,
            depth=depth,
            state_row=rows[span],
            known=known,
            first_row=first_row,
            row_count=count,
            pieces=_pieces(known, count),
            logit_rows=ends[drawing],
            drawing=rows[drawing],
        )

    @property
    def ancestors(self) -> IntArray:
        """The bits [T] of the rows in its run to which each row attends: itself and all before."""
        bits: IntArray = np.left_shift(2, self.depth) - 1
        return bits

    def piece_items(self) -> tuple[IntArray, IntArray]:
        """Return the items of ``PieceList`` [sum of ``pieces``], and the first one of each run."""
        starts = np.cumsum(self.pieces) - self.pieces
        run = np.repeat(np.arange(len(self.pieces)), self.pieces)
        return run << 32 | (np.arange(len(run)) - starts[run]), starts


def count_pieces(plan: StepPlan, most: int) -> int:
    """Return the pieces of all contexts of the runs that ``RunRows.of`` returns."""
    known, count, _ = _divide(_spans(plan), most)
    return int(_pieces(known, count).sum())


def pool_slots(sequence: Sequence, first: int, end: int) -> IntArray:
    """Return the pool slots [end - first] of the tokens ``first .. end`` of a sequence."""
    page = first // BLOCK_TOKENS
    pages = _array(sequence.pages[page : blocks_for(end)])
    every = (pages[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).ravel()
    slots: IntArray = every[first - page * BLOCK_TOKENS : end - page * BLOCK_TOKENS]
    return slots


def _spans(plan: StepPlan) -> list[tuple[Sequence, int, int]]:
    """Return the sequences of a plan with the first and the end of the tokens to compute."""
    spans = [(s, len(s.tokens) - 1, len(s.tokens)) for s in plan.decode]
    return spans + [(s, s.computed, s.computed + count) for s, count in plan.chunks]


def _divide(
    spans: Seq[tuple[Sequence, int, int]], most: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Divide spans into runs of up to ``most`` tokens; return for each run its first token in the
    sequence, its tokens, and its span."""
    first, end = _array([a for _, a, _ in spans]), _array([b for _, _, b in spans])
    runs = -(-(end - first) // most)
    span = np.repeat(np.arange(len(spans)), runs)
    known = first[span] + (np.arange(len(span)) - (np.cumsum(runs) - runs)[span]) * most
    return known, np.minimum(end[span] - known, most), span


def _pieces(known: IntArray, count: IntArray) -> IntArray:
    """Return the pieces of the contexts of runs of ``count`` tokens with ``known`` before them."""
    pieces: IntArray = -(-(known + count) // PIECE_TOKENS)
    return pieces


def _array(values: Seq[int]) -> IntArray:
    return np.array(values, dtype=np.int64)
