"""The verifier: turns the logits of a step, with drafts or without, into the tokens drawn.

    draw a token for every row -> find the accepted path of each sequence
    -> update state, history and KV as if the tokens had been drawn one by one

The stepper calls it once per step. Shapes: B sequences that draw, R rows of logits, D accepted
tokens at most.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.batching.batcher import RowState, kv_slots
from engine.batching.draft_layout import DraftLayout, DraftShape, IntArray, accepted_nodes
from engine.kv_cache.kv_pool import KVPool
from engine.sampling.sampler import Sampler
from engine.sampling.sampling_metadata import DraftRows
from engine.scheduling.sequence import Sequence
from engine.speculation.proposers.proposer import VerifiedStep
from engine.structured_output.masks import ForbiddenTokens
from protocol.block_keys import BLOCK_TOKENS
from protocol.requests import Logprobs


class DrawnTokens(NamedTuple):
    """The tokens that one sequence drew in a step, in order."""

    tokens: list[int]
    logprobs: list[Logprobs | None]
    nodes: Seq[int] = ()  # accepted draft nodes


class DrawnOnDevice(NamedTuple):
    """The tokens of all sequences on the device, for a proposer. A step without drafts has only
    the tokens [B]."""

    tokens: Tensor  # [B, 1 + D], the last one repeated
    at: Tensor | None = None  # [B, 1 + D] row of the logits of each token
    counts: Tensor | None = None  # [B] tokens drawn

    def advance(
        self, drawing: Seq[Sequence], rows: Tensor, hidden: Tensor, taps: Seq[Tensor]
    ) -> VerifiedStep:
        """Return the proposer's input. ``rows`` [B] int64 are rows of the RowState; ``hidden`` and
        each of ``taps`` [R, hidden] belong to the rows that have logits."""
        tokens, at, counts = self
        if at is None or counts is None:
            tokens = tokens[:, None]
            at = torch.arange(len(tokens), device=tokens.device)[:, None]
            counts = torch.ones_like(tokens[:, 0])
        joined = torch.cat(list(taps), -1) if taps else None
        return VerifiedStep(drawing, rows, counts, tokens, at, hidden, joined)


class Verifier:
    """Draws and verifies the tokens of one engine's steps."""

    def __init__(self, state: RowState, pool: KVPool, draw: Sampler) -> None:
        self._state = state
        self._pool = pool
        self._draw = draw

    def draw_one_each(
        self,
        drawing: list[Sequence],
        logits: Tensor,
        rows: Tensor,
        barred: ForbiddenTokens | None,
        *,
        advanced: bool = False,
    ) -> tuple[list[DrawnTokens], DrawnOnDevice]:
        """Draw one token for each of ``drawing`` [B]. ``logits`` [B, vocab] fp32 are changed in
        place; ``rows`` [B] int64 are rows of the RowState. With ``advanced`` the state has a token
        of this step already, which is replaced."""
        positions = self._state.length[rows] - int(advanced)
        draw = self._draw(drawing, logits, rows, positions, barred)
        pairs = zip_longest(*draw.read())  # the only wait for the device
        tokens = draw.tokens
        self._state.last_token[rows] = tokens
        if not advanced:
            self._state.length[rows] += 1
        return [DrawnTokens([token], [report]) for token, report in pairs], DrawnOnDevice(tokens)

    def verify(
        self,
        drawing: list[Sequence],
        logits: Tensor,
        rows: Tensor,
        barred: ForbiddenTokens | None,
        layout: DraftLayout,
    ) -> tuple[list[DrawnTokens], DrawnOnDevice]:
        """Draw for each row, and accept the drafts that equal the draws. ``drawing`` [B] holds the
        decoding sequences of ``layout``, then those whose prompt ends in this step. ``logits``
        [R, vocab] fp32 are changed in place; ``rows`` [B] int64 are rows of the RowState."""
        shape, more = layout.shape, len(drawing) - len(layout.lengths)
        starts = np.concatenate([shape.starts, len(shape.owner) + np.arange(more)])
        nodes = self._draft_rows(more, layout)
        before = self._state.length.index_select(0, rows)  # [B] index of the first token to draw
        positions = before.index_select(0, nodes.owner).add_(nodes.depth)
        draw = self._draw.verify(drawing, logits, rows, positions, nodes, barred)
        host, logprobs = draw.read(layout.tokens)  # the only wait for the device
        drawn = draw.tokens
        paths = _accepted_paths(layout.shape, host[: len(drawn)], host[len(drawn) :])
        paths += [[] for _ in range(more)]
        at, counts = self._accepted_rows(paths, starts)
        tokens = drawn[at]  # [B, 1 + D]
        self._draw.append(drawing, rows, before, tokens, counts)
        self._state.last_token.index_copy_(0, rows, tokens[:, -1])
        self._state.length.index_add_(0, rows, counts)
        self._move_kv(paths, layout, rows)
        result = []
        for start, path in zip(starts.tolist(), paths, strict=True):
            own = [start, *(start + 1 + node for node in path)]
            reports = [logprobs[row] for row in own] if logprobs else [None] * len(own)
            result.append(DrawnTokens([host[row] for row in own], reports, path))
        return result, DrawnOnDevice(tokens, at, counts)

    def _draft_rows(self, more: int, layout: DraftLayout) -> DraftRows:
        """Return all R rows; the last ``more`` are those of prompts that end."""
        shape = layout.shape
        owner, depth, counts = shape.device_owner, shape.device_depth, shape.row_counts
        ancestors = owner.new_empty(len(owner), 0)
        if self._state.sampling.history is not None:
            padded = pad(layout.tokens, (0, 1), value=-1)
            ancestors = padded[shape.device_ancestors]  # [R, D] token ids
        if more:
            fresh = torch.arange(more, device=owner.device) + len(shape.counts)
            owner, depth = torch.cat([owner, fresh]), pad(depth, (0, more))
            counts = np.concatenate([counts, np.ones(more, dtype=np.int64)])
            ancestors = pad(ancestors, (0, 0, 0, more), value=-1)
        return DraftRows(owner, counts, depth, ancestors)

    def _accepted_rows(self, paths: Seq[list[int]], starts: IntArray) -> tuple[Tensor, Tensor]:
        """Return the rows of the tokens drawn [B, 1 + D], the last one repeated, and how many there
        are [B]."""
        deepest = max(map(len, paths))
        own = [[-1, *path, *path[-1:] * (deepest - len(path))] for path in paths]
        at = [row if len(row) > deepest else [-1] * (deepest + 1) for row in own]
        counts = np.array([1 + len(path) for path in paths], dtype=np.int64)
        rows = np.array(at, dtype=np.int64) + 1 + starts[:, None]
        return self._tensor(rows), self._tensor(counts)

    def _move_kv(self, paths: Seq[list[int]], layout: DraftLayout, rows: Tensor) -> None:
        """Move the KV of accepted nodes to the slots of their positions; that of a chain is there
        already. ``rows``: [B]."""
        moves = [
            (sequence, layout.lengths[sequence] + node, layout.lengths[sequence] + place)
            for sequence, path in enumerate(paths)
            for place, node in enumerate(path)
            if node != place
        ]
        if moves:
            owner, source, target = self._tensor(np.array(moves, dtype=np.int64)).unbind(1)
            table = self._state.block_table[rows[owner]]  # [n, max_pages]
            self._pool.move(_slots(table, source), _slots(table, target))

    def _tensor(self, values: IntArray) -> Tensor:
        return torch.from_numpy(values).to(self._state.device)


def _slots(table: Tensor, at: Tensor) -> Tensor:
    """Return the slots [n] of positions ``at`` [n] on the pages of ``table`` [n, max_pages]."""
    return kv_slots(table.gather(1, (at // BLOCK_TOKENS)[:, None])[:, 0], at)


def _accepted_paths(shape: DraftShape, drawn: list[int], drafts: list[int]) -> list[list[int]]:
    """Return the accepted nodes of each sequence of ``shape``."""
    paths: list[list[int]] = []
    row = node = 0
    for parents in shape.parents:
        count = len(parents)
        own = drawn[row : row + count + 1]
        paths.append(accepted_nodes(parents, drafts[node : node + count], own))
        row += count + 1
        node += count
    return paths
