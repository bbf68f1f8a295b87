"""The rows of a step with prompts, divided into runs: at most RUN_ROWS consecutive tokens each.

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
from engine.kernels.recording import RUN_ROWS
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
    def of(cls, plan: StepPlan) -> RunRows:
        """Return the rows of a plan without drafts, whose sequences have their pages."""
        spans = [(s, len(s.tokens) - 1, len(s.tokens)) for s in plan.decode]
        spans += [(s, s.computed, s.computed + count) for s, count in plan.chunks]
        known, count, span = _divide([end - first for _, first, end in spans])
        known = known + _array([first for _, first, _ in spans])[span]
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
            pieces=-(-(known + count) // PIECE_TOKENS),
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


def pool_slots(sequence: Sequence, first: int, end: int) -> IntArray:
    """Return the pool slots [end - first] of the tokens ``first .. end`` of a sequence."""
    page = first // BLOCK_TOKENS
    pages = _array(sequence.pages[page : blocks_for(end)])
    every = (pages[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).ravel()
    slots: IntArray = every[first - page * BLOCK_TOKENS : end - page * BLOCK_TOKENS]
    return slots


def _divide(counts: Seq[int]) -> tuple[IntArray, IntArray, IntArray]:
    """Divide spans of ``counts`` tokens into runs; return for each run its first token in the span,
    its tokens, and its span."""
    rows = _array(counts)
    runs = -(-rows // RUN_ROWS)
    span = np.repeat(np.arange(len(rows)), runs)
    first = (np.arange(len(span)) - (np.cumsum(runs) - runs)[span]) * RUN_ROWS
    return first, np.minimum(rows[span] - first, RUN_ROWS), span


def _array(values: Seq[int]) -> IntArray:
    return np.array(values, dtype=np.int64)
