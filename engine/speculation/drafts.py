"""What is proposed to the sequences of one step: chains or trees of tokens, packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

ROOT = -1
"""The parent of a node that follows the sequence's last token."""


@dataclass(frozen=True)
class Drafts:
    """Proposals to ``B`` sequences, packed in their order; parents come before their children.

    In ``parents`` a node's parent is its index among the nodes of its own sequence, or ROOT; the
    children of one parent are different tokens. None: chains.
    """

    counts: Sequence[int]  # [B] nodes of each sequence; 0: none
    tokens: Tensor  # [N] int64, on the model's device
    parents: Sequence[int] | None = None  # [N]

    def parents_of(self, sequence: int) -> list[int]:
        """Of the nodes of one sequence."""
        count = self.counts[sequence]
        if self.parents is None:
            return list(range(ROOT, count - 1))
        start = sum(self.counts[:sequence])
        return list(self.parents[start : start + count])


def node_depths(parents: Sequence[int]) -> list[int]:
    """Of each node of one sequence's tree: 1 for those that follow its last token."""
    out: list[int] = []
    for parent in parents:
        out.append(1 if parent == ROOT else out[parent] + 1)
    return out


def first_path(parents: Sequence[int]) -> list[int]:
    """Nodes from a root down, always to the first child: the chain within a tree."""
    path: list[int] = []
    last = ROOT
    for node, parent in enumerate(parents):
        if parent == last:
            path.append(node)
            last = node
    return path
