"""The rows of a step that verifies drafts: each sequence's last token, then its draft nodes.

    rows       [ last a0 a1 a2 | last | last c0 c1 ]     a: a chain or tree of three, b: no drafts
    sequence       a               b       c

Row ``i`` of a sequence of ``L`` tokens writes its KV to slot L - 1 + i and draws the token after
the path from the last token to its node. All of it is laid out on the host, in numpy: what tokens
the drafts are is known to the device alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.scheduling.sequence import Sequence as Running
from engine.speculation.drafts import ROOT, Drafts

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

MOST_SHAPES = 64
"""Shapes that are kept: a controller that is sure of its lengths goes on with one."""


class Shape:
    """How many draft nodes ``B`` sequences have, and how they hang together; ``R`` rows. The same
    for many steps, so that what follows from it is worked out once."""

    def __init__(
        self, counts: tuple[int, ...], parents: tuple[int, ...] | None, device: torch.device
    ) -> None:
        self.counts = counts
        self.chains = parents is None
        self.rows = np.array(counts, dtype=np.int64) + 1  # of each sequence: [B]
        self.starts = np.cumsum(self.rows) - self.rows  # first row of each: [B]
        self.owner = np.repeat(np.arange(len(counts)), self.rows)  # whose row it is: [R]
        # Which row of its sequence it is; 0: the last token's: [R].
        self.within = np.arange(len(self.owner)) - self.starts[self.owner]
        nodes = self.within.nonzero()[0]
        above = nodes - 1  # row of each node's parent
        if parents is not None:
            above = self.starts[self.owner[nodes]] + np.array(parents, dtype=np.int64) + 1
        self.parents = _split(above - self.starts[self.owner[nodes]] - 1, counts)
        self.depth, self.paths = _paths(nodes, above, self.within)

        def on_device(values: Ints) -> Tensor:
            return torch.from_numpy(values).to(device)

        # Where each row's token is among the last tokens and then all draft nodes: [R].
        order = np.empty(len(self.owner), dtype=np.int64)
        order[self.starts] = np.arange(len(counts))
        order[nodes] = len(counts) + np.arange(len(nodes))
        self.order_there = on_device(order)
        self.owner_there = on_device(self.owner)
        self.within_there = on_device(self.within)
        self.depth_there = on_device(self.depth)
        # Draft nodes on the way to each row: [R, D]; where there is none, one beyond them all.
        way = self.starts[self.owner][:, None] + self.paths - self.owner[:, None] - 1
        self.way_there = on_device(np.where(self.paths < 0, len(nodes), way))

    @property
    def uniform(self) -> bool:
        """All sequences have as many rows."""
        return len(set(self.counts)) == 1

    def sees(self, sequences: Ints, queries: int) -> Bools:
        """Which rows of its own sequence a row attends to: [b, queries, queries]. Beyond a
        sequence's rows, its last one stands again."""
        last = (self.rows[sequences] - 1)[:, None]  # [b, 1]
        at = np.minimum(np.arange(queries), last)  # [b, queries], rows within
        if self.chains:
            chain: Bools = np.arange(queries) <= at[:, :, None]
            return chain
        paths = self.paths[self.starts[sequences][:, None] + at]  # [b, queries, D]
        seen = np.zeros((len(sequences), queries, queries + 1), dtype=np.bool_)
        # The padding of a path, -1, is the last place: it is cut off.
        np.put_along_axis(seen, paths, True, axis=2)
        seen[:, :, 0] = True
        return seen[:, :, :queries]

    def rows_of(self, sequences: Ints, queries: int) -> Ints:
        """Rows of some sequences, ``queries`` of each: [b, queries]."""
        last = (self.rows[sequences] - 1)[:, None]
        rows: Ints = self.starts[sequences][:, None] + np.minimum(np.arange(queries), last)
        return rows


def _paths(nodes: Ints, above: Ints, within: Ints) -> tuple[Ints, Ints]:
    """Of each row its depth, 0 for the last token's: [R], and the rows within its sequence from the
    root down to itself, without the last token's, padded with -1: [R, D]."""
    depth = np.zeros(len(within), dtype=np.int64)
    for row, parent in zip(nodes, above, strict=True):
        depth[row] = depth[parent] + 1
    paths = np.full((len(within), int(depth.max(initial=0))), -1)
    for row, parent in zip(nodes, above, strict=True):
        paths[row] = paths[parent]
        paths[row, depth[row] - 1] = within[row]
    return depth, paths


def _split(values: Ints, counts: Sequence[int]) -> list[list[int]]:
    whole, ends = values.tolist(), accumulate(counts)
    return [whole[end - count : end] for count, end in zip(counts, ends, strict=True)]


class Shapes:
    """The shapes of one engine, the last ones kept."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: OrderedDict[object, Shape] = OrderedDict()

    def of(self, drafts: Drafts) -> Shape:
        parents = None if drafts.parents is None else tuple(drafts.parents)
        key = (tuple(drafts.counts), parents)
        shape = self._kept.get(key)
        if shape is None:
            shape = self._kept[key] = Shape(*key, self._device)
            if len(self._kept) > MOST_SHAPES:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        return shape


@dataclass(frozen=True)
class Layout:
    """Where everything is in a step of ``B`` decoding sequences with drafts."""

    shape: Shape
    lengths: Ints  # [B] tokens known
    tokens: Tensor  # [N] draft nodes

    @classmethod
    def of(cls, sequences: Sequence[Running], drafts: Drafts, shapes: Shapes) -> Layout:
        lengths = np.array([len(s.tokens) for s in sequences], dtype=np.int64)
        return cls(shapes.of(drafts), lengths, drafts.tokens)


def accepted_nodes(
    parents: Sequence[int], tokens: Sequence[int], drawn: Sequence[int]
) -> list[int]:
    """Nodes of one sequence's tree that are on its text, from the root down.

    tokens: what the nodes are. drawn: what the model drew after the last token, then after each
    node. A node is accepted where its parent is, and the parent's draw is its token: the text is
    what it would be without drafts (Leviathan et al., 2023, section 2.3, with the draw itself in
    the place of a test against probabilities).
    """
    path: list[int] = []
    last = ROOT
    for node, parent in enumerate(parents):
        if parent == last and tokens[node] == drawn[last + 1]:
            path.append(node)
            last = node
    return path
