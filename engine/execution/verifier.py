"""From the logits of a step with drafts to the tokens of its sequences.

draw for every row  ->  walk down what was met  ->  state, history and KV as if drawn one by one
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.batching.batcher import RowState, slots_of
from engine.batching.draft_layout import Ints, Layout, Shape, accepted_nodes
from engine.kv_cache.kv_pool import KVPool
from engine.sampling.drawer import DraftRows, Drawer
from engine.scheduling.sequence import Sequence
from engine.speculation.proposers.proposer import Advance
from engine.structured_output.masks import Barred
from protocol.block_keys import BLOCK_TOKENS
from protocol.requests import Logprobs


class Drawn(NamedTuple):
    """What one sequence drew, in order, and the draft nodes that it accepted for it."""

    tokens: list[int]
    logprobs: list[Logprobs | None]
    nodes: Seq[int] = ()


class Drew(NamedTuple):
    """The same on the device, for a proposer. Of a plain step, the tokens [B] alone."""

    tokens: Tensor
    at: Tensor | None = None
    counts: Tensor | None = None

    def advance(
        self, drawing: Seq[Sequence], rows: Tensor, hidden: Tensor, taps: Seq[Tensor]
    ) -> Advance:
        """rows: [B] int64, rows in the state. hidden, taps: [R, hidden] each, of the rows that
        drew."""
        tokens, at, counts = self
        if at is None or counts is None:
            tokens = tokens[:, None]
            at = torch.arange(len(tokens), device=tokens.device)[:, None]
            counts = torch.ones_like(tokens[:, 0])
        joined = torch.cat(list(taps), -1) if taps else None
        return Advance(drawing, rows, counts, tokens, at, hidden, joined)


class Verifier:
    """Draws for the sequences of a step, whose decoding ones may have drafts."""

    def __init__(self, state: RowState, pool: KVPool, draw: Drawer) -> None:
        self._state = state
        self._pool = pool
        self._draw = draw

    def plain(
        self,
        drawing: list[Sequence],
        logits: Tensor,
        rows: Tensor,
        barred: Barred | None,
    ) -> tuple[list[Drawn], Drew]:
        """One token for each of ``drawing``; arguments as those of ``verify``."""
        positions = self._state.length[rows]
        tokens, logprobs = self._draw(drawing, logits, rows, positions, barred)
        self._state.last_token[rows] = tokens
        self._state.length[rows] += 1
        told = zip_longest(tokens.tolist(), logprobs)
        return [Drawn([token], [report]) for token, report in told], Drew(tokens)

    def verify(
        self,
        drawing: list[Sequence],
        logits: Tensor,
        rows: Tensor,
        barred: Barred | None,
        layout: Layout,
    ) -> tuple[list[Drawn], Drew]:
        """drawing: the decoding sequences of ``layout``, then those whose prompt ends, [B] in all.
        logits: [R, vocab] fp32, changed here. rows: [B] int64, their rows in the state."""
        shape, more = layout.shape, len(drawing) - len(layout.lengths)
        starts = np.concatenate([shape.starts, len(shape.owner) + np.arange(more)])
        nodes = self._rows_of(more, layout)
        before = self._state.length.index_select(0, rows)  # [B] index of the first token to draw
        positions = before.index_select(0, nodes.owner).add_(nodes.depth)
        drawn, logprobs = self._draw.verify(drawing, logits, rows, positions, nodes, barred)
        told = torch.cat([drawn, layout.tokens]).tolist()  # the only wait for the device
        paths = _paths(layout.shape, told[: len(drawn)], told[len(drawn) :])
        paths += [[] for _ in range(more)]
        at, counts = self._padded(paths, starts)
        tokens = drawn[at]
        self._draw.append(drawing, rows, before, tokens, counts)
        self._state.last_token.index_copy_(0, rows, tokens[:, -1])
        self._state.length.index_add_(0, rows, counts)
        self._move(paths, layout, rows)
        result = []
        for start, path in zip(starts.tolist(), paths, strict=True):
            own = [start, *(start + 1 + node for node in path)]
            reports = [logprobs[row] for row in own] if logprobs else [None] * len(own)
            result.append(Drawn([told[row] for row in own], reports, path))
        return result, Drew(tokens, at, counts)

    def _rows_of(self, more: int, layout: Layout) -> DraftRows:
        """All rows; ``more`` prompts that end have one each."""
        shape = layout.shape
        owner, depth = shape.owner_there, shape.depth_there
        ancestors = owner.new_empty(len(owner), 0)
        if self._state.sampling.history is not None:
            padded = pad(layout.tokens, (0, 1), value=-1)
            ancestors = padded[shape.way_there]  # [R, D], tokens
        if more:
            fresh = torch.arange(more, device=owner.device) + len(shape.rows)
            owner, depth = torch.cat([owner, fresh]), pad(depth, (0, more))
            ancestors = pad(ancestors, (0, 0, 0, more), value=-1)
        return DraftRows(owner, depth, ancestors)

    def _padded(self, paths: Seq[list[int]], starts: Ints) -> tuple[Tensor, Tensor]:
        """Rows on the text [B, D], the last one repeated, and how many there are [B]."""
        deepest = max(map(len, paths))
        own = [[-1, *path, *path[-1:] * (deepest - len(path))] for path in paths]
        at = [row if len(row) > deepest else [-1] * (deepest + 1) for row in own]
        counts = np.array([1 + len(path) for path in paths], dtype=np.int64)
        rows = np.array(at, dtype=np.int64) + 1 + starts[:, None]
        return self._tensor(rows), self._tensor(counts)

    def _move(self, paths: Seq[list[int]], layout: Layout, rows: Tensor) -> None:
        """KV of accepted nodes goes to where the text has them: that of chains is there."""
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

    def _tensor(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self._state.device)


def _slots(table: Tensor, at: Tensor) -> Tensor:
    return slots_of(table.gather(1, (at // BLOCK_TOKENS)[:, None])[:, 0], at)


def _paths(shape: Shape, drawn: list[int], drafts: list[int]) -> list[list[int]]:
    """Accepted nodes of each sequence with drafts."""
    paths: list[list[int]] = []
    row = node = 0
    for parents in shape.parents:
        count = len(parents)
        told = drawn[row : row + count + 1]
        paths.append(accepted_nodes(parents, drafts[node : node + count], told))
        row += count + 1
        node += count
    return paths
