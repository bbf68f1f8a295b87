"""The rows of a step that verifies drafts: each sequence's last token, then its draft nodes.

    rows       [ last a0 a1 a2 | last | last c0 c1 ]     a: a chain or tree of three, b: no drafts
    sequence       a               b       c

Row ``i`` of a sequence of ``L`` tokens writes its KV to slot L - 1 + i and draws the token after
the path from the last token to its node. All of it is laid out on the host, in numpy: what tokens
the drafts are is known to the device alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from engine.sequence import Sequence as Running
from engine.speculation.drafts import ROOT, Drafts

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Layout:
    """Where everything is in a step of ``B`` decoding sequences with drafts; ``R`` decode rows."""

    lengths: Ints  # [B] tokens known
    rows: Ints  # [B] decode rows of each
    drafts: Drafts

    @cached_property
    def starts(self) -> Ints:
        """First row of each sequence: [B]."""
        return np.cumsum(self.rows) - self.rows

    @cached_property
    def owner(self) -> Ints:
        """Whose row it is: [R]."""
        return np.repeat(np.arange(len(self.rows)), self.rows)

    @cached_property
    def within(self) -> Ints:
        """Which row of its sequence it is; 0: the last token: [R]."""
        return np.arange(len(self.owner)) - self.starts[self.owner]

    @cached_property
    def parents(self) -> Ints | None:
        """Row of each row's parent, within its sequence; of the last token -1: [R]. None: every
        row follows the one before."""
        if self.drafts.parents is None:
            return None
        out = np.full(len(self.owner), -1)
        out[self.within > 0] = np.asarray(self.drafts.parents, dtype=np.int64) + 1
        return out

    @cached_property
    def depth(self) -> Ints:
        """Tokens from the last one to the row's node: [R]."""
        if self.parents is None:
            return self.within
        depth = np.zeros(len(self.owner), dtype=np.int64)
        for row in np.flatnonzero(self.within):
            depth[row] = depth[row - self.within[row] + self.parents[row]] + 1
        return depth

    @cached_property
    def paths(self) -> Ints:
        """Rows within its sequence from each row's root down to itself, without the last token's,
        padded with -1: [R, D]."""
        deepest = int(self.depth.max(initial=0))
        if self.parents is None:
            steps = np.arange(1, deepest + 1)
            return np.where(steps <= self.depth[:, None], steps, -1)
        out = np.full((len(self.owner), deepest), -1)
        for row in np.flatnonzero(self.within):
            parent = row - self.within[row] + self.parents[row]
            out[row] = out[parent]
            out[row, self.depth[row] - 1] = self.within[row]
        return out

    def sees(self, sequences: Ints, queries: int) -> Bools:
        """Which rows of its own sequence a row attends to: [b, queries, queries]. Beyond a
        sequence's rows, its last one stands again."""
        last = (self.rows[sequences] - 1)[:, None]  # [b, 1]
        at = np.minimum(np.arange(queries), last)  # [b, queries], rows within
        if self.parents is None:
            chain: Bools = np.arange(queries) <= at[:, :, None]
            return chain
        paths = self.paths[self.starts[sequences][:, None] + at]  # [b, queries, D]
        seen = np.zeros((len(sequences), queries, queries + 1), dtype=np.bool_)
        # The padding of a path, -1, is the last place: it is cut off.
        np.put_along_axis(seen, paths, True, axis=2)
        seen[:, :, 0] = True
        return seen[:, :, :queries]

    def rows_of(self, sequences: Ints, queries: int) -> Ints:
        """Decode rows of some sequences, ``queries`` of each: [b, queries]."""
        last = (self.rows[sequences] - 1)[:, None]
        rows: Ints = self.starts[sequences][:, None] + np.minimum(np.arange(queries), last)
        return rows


def lay_out(sequences: Sequence[Running], drafts: Drafts) -> Layout:
    """The rows of ``sequences`` and of what is proposed to them."""
    lengths = np.array([len(s.tokens) for s in sequences], dtype=np.int64)
    return Layout(lengths, np.asarray(drafts.counts, dtype=np.int64) + 1, drafts)


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
