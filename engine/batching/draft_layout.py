"""The rows of a step that verifies drafts: the last token of each sequence, then its draft nodes.

    rows       [ last a0 a1 a2 | last | last c0 c1 ]     a: a chain or tree of three, b: no drafts
    sequence       a               b       c

Row ``i`` of a sequence with ``L`` tokens writes its KV to slot L - 1 + i, and draws the token that
follows the path from the last token to its node. The layout is computed on the host in numpy,
because the token ids of the drafts are known on the device only. The stepper creates a layout per
step; the batcher, the attention metadata and the verifier read it.

Shapes: B sequences, N draft nodes in total, R = B + N rows, D the depth of the deepest node.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.scheduling.sequence import Sequence
from engine.speculation.drafts import ROOT, Drafts
from engine.uploads import upload

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

MAX_CACHED_SHAPES = 64
"""A controller that has settled on its draft lengths uses the same shape for many steps."""


class DraftShape:
    """The numbers of draft nodes of B sequences, and the trees that they form, with all indices
    that follow from these. DraftShapeCache creates it and reuses it in later steps."""

    def __init__(
        self, counts: tuple[int, ...], parents: tuple[int, ...] | None, device: torch.device
    ) -> None:
        self.counts = counts
        self.is_chain = parents is None
        self.row_counts = np.array(counts, dtype=np.int64) + 1  # [B]
        self.starts = np.cumsum(self.row_counts) - self.row_counts  # [B] first row
        self.owner = np.repeat(np.arange(len(counts)), self.row_counts)  # [R] sequence
        # [R] index within the sequence; 0 is the last token
        self.offset = np.arange(len(self.owner)) - self.starts[self.owner]
        nodes = self.offset.nonzero()[0]  # [N] row of each node
        above = nodes - 1  # [N] row of each node's parent
        if parents is not None:
            above = self.starts[self.owner[nodes]] + np.array(parents, dtype=np.int64) + 1
        self.parents = _split(above - self.starts[self.owner[nodes]] - 1, counts)
        self.depth, self.paths = _paths(nodes, above, self.offset)  # [R], [R, D]

        order = np.empty(len(self.owner), dtype=np.int64)
        order[self.starts] = np.arange(len(counts))
        order[nodes] = len(counts) + np.arange(len(nodes))
        ancestors = self.starts[self.owner][:, None] + self.paths - self.owner[:, None] - 1
        ancestors = np.where(self.paths < 0, len(nodes), ancestors)

        self.device_starts = upload(self.starts, device)  # [B]
        self.device_counts = upload(self.row_counts, device)  # [B]
        self.device_owner = upload(self.owner, device)  # [R]
        self.device_offset = upload(self.offset, device)  # [R]
        self.device_depth = upload(self.depth, device)  # [R]
        # [R] place of each row's token in the concatenation of last tokens and draft nodes
        self.device_order = upload(order, device)
        # [R, D] draft nodes on the path to each row, padded with N
        self.device_ancestors = upload(ancestors, device)
        # [R] bit i: the path to the row includes row i of its sequence
        on_path = np.left_shift(1, np.maximum(self.paths, 0)) * (self.paths >= 0)
        self.ancestor_bits: IntArray = on_path.sum(1) | 1
        self.device_ancestor_bits = upload(self.ancestor_bits, device)
        self._padded_nodes: dict[int, Tensor] = {}

    @property
    def uniform(self) -> bool:
        """Whether all sequences have the same number of rows."""
        return len(set(self.counts)) == 1

    def padded_nodes(self, rows: int) -> Tensor:
        """Return the places [N] of the draft nodes where every sequence has ``rows`` rows."""
        if rows not in self._padded_nodes:
            at = self.owner * (rows - 1) + self.offset - 1
            self._padded_nodes[rows] = upload(at[self.offset > 0], self.device_owner.device)
        return self._padded_nodes[rows]

    def rows_when_padded(self, rows: int) -> Tensor:
        """Return where the rows [R] are when every sequence has ``rows`` rows."""
        return self.device_owner * rows + self.device_offset

    def visible_rows(self, sequences: IntArray, queries: int) -> BoolArray:
        """Return which rows of its own sequence each row attends to, [b, queries, queries], for
        ``sequences`` [b] padded to ``queries`` rows by repeating the last one."""
        last = (self.row_counts[sequences] - 1)[:, None]  # [b, 1]
        at = np.minimum(np.arange(queries), last)  # [b, queries] offsets
        if self.is_chain:
            chain: BoolArray = np.arange(queries) <= at[:, :, None]
            return chain
        paths = self.paths[self.starts[sequences][:, None] + at]  # [b, queries, D]
        seen = np.zeros((len(sequences), queries, queries + 1), dtype=np.bool_)
        # The padding of a path, -1, marks the last column, which is cut off.
        np.put_along_axis(seen, paths, True, axis=2)
        seen[:, :, 0] = True
        return seen[:, :, :queries]

    def padded_rows(self, sequences: IntArray, queries: int) -> IntArray:
        """Return the rows [b, queries] of ``sequences`` [b], repeating the last one of each."""
        last = (self.row_counts[sequences] - 1)[:, None]
        rows: IntArray = self.starts[sequences][:, None] + np.minimum(np.arange(queries), last)
        return rows


def _paths(nodes: IntArray, above: IntArray, offset: IntArray) -> tuple[IntArray, IntArray]:
    """Return the depth [R] of each row, 0 for a last token, and the offsets [R, D] of the rows on
    its path, from the first node down to itself, padded with -1."""
    depth = np.zeros(len(offset), dtype=np.int64)
    for row, parent in zip(nodes, above, strict=True):
        depth[row] = depth[parent] + 1
    paths = np.full((len(offset), int(depth.max(initial=0))), -1)
    for row, parent in zip(nodes, above, strict=True):
        paths[row] = paths[parent]
        paths[row, depth[row] - 1] = offset[row]
    return depth, paths


def _split(values: IntArray, counts: Seq[int]) -> list[list[int]]:
    whole, ends = values.tolist(), accumulate(counts)
    return [whole[end - count : end] for count, end in zip(counts, ends, strict=True)]


class DraftShapeCache:
    """The most recently used shapes of one engine."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shapes: OrderedDict[object, DraftShape] = OrderedDict()

    def get(self, drafts: Drafts) -> DraftShape:
        """Return the shape of ``drafts``, building it if necessary."""
        parents = None if drafts.parents is None else tuple(drafts.parents)
        key = (tuple(drafts.counts), parents)
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = DraftShape(*key, self._device)
            if len(self._shapes) > MAX_CACHED_SHAPES:
                self._shapes.popitem(last=False)
        else:
            self._shapes.move_to_end(key)
        return shape


@dataclass(frozen=True)
class DraftLayout:
    """The drafts of one step for B decoding sequences."""

    shape: DraftShape
    lengths: IntArray  # [B] tokens known
    tokens: Tensor  # [N] token ids of the draft nodes, on the device

    @classmethod
    def of(cls, sequences: Seq[Sequence], drafts: Drafts, shapes: DraftShapeCache) -> DraftLayout:
        lengths = np.array([len(s.tokens) for s in sequences], dtype=np.int64)
        return cls(shapes.get(drafts), lengths, drafts.tokens)


def accepted_nodes(parents: Seq[int], tokens: Seq[int], drawn: Seq[int]) -> list[int]:
    """Return the accepted nodes of one sequence's draft tree, from the root down.

    ``parents`` [n] and ``tokens`` [n] describe the nodes; ``drawn`` [1 + n] is what the model drew
    after the last token and after each node. A node is accepted if its parent is, and the draw
    after the parent equals its token. The output is therefore the same as without drafts (Leviathan
    et al., 2023, section 2.3, comparing with the draw itself instead of testing probabilities).
    """
    path: list[int] = []
    last = ROOT
    for node, parent in enumerate(parents):
        if parent == last and tokens[node] == drawn[last + 1]:
            path.append(node)
            last = node
    return path
