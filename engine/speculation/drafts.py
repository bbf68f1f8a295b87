"""Draft tokens of one step: chains or trees of tokens, packed for all sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

ROOT = -1  # the parent of a node that follows the sequence's last token


@dataclass(frozen=True)
class Drafts:
    """Draft tokens of ``B`` sequences, packed in batch order; parents precede their children.
    ``parents`` holds for each node the index of its parent among the nodes of its own sequence, or
    ROOT. Siblings are different tokens. ``parents=None`` means that all drafts are chains."""

    counts: Sequence[int]  # [B] nodes of each sequence; 0: none
    tokens: Tensor  # [N] int64, on the model's device
    parents: Sequence[int] | None = None  # [N]

    def parents_of(self, sequence: int) -> list[int]:
        """Return the parents of the nodes of one sequence."""
        count = self.counts[sequence]
        if self.parents is None:
            return list(range(ROOT, count - 1))
        start = sum(self.counts[:sequence])
        return list(self.parents[start : start + count])


def first_path(parents: Sequence[int]) -> list[int]:
    """Return the nodes of the path that starts at ROOT and always takes the first child."""
    path: list[int] = []
    last = ROOT
    for node, parent in enumerate(parents):
        if parent == last:
            path.append(node)
            last = node
    return path
