"""Draft trees of fixed shape: only the tokens at their nodes change from step to step.

A node stands for one of the most likely tokens of its depth; rank 0 is the most likely. The prior
[depth][rank] is the probability that a node is accepted once its parent is. A node's probability is
the product along its path, and a tree takes the most probable nodes (Cai et al. 2024, Medusa,
section 2.3.3). So the best tree of n nodes consists of the first n nodes of any larger best tree.
Medusa and EAGLE use these trees.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from engine.speculation.drafts import ROOT, Drafts
from engine.uploads import upload
from protocol.errors import StartupError

TreePrior: TypeAlias = Sequence[Sequence[float]]
"""[depth][rank], each between 0 and 1."""

_TYPICAL = tuple(tuple(0.6 * 0.85**depth * 0.35**rank for rank in range(6)) for depth in range(8))


@dataclass(frozen=True)
class DraftTree:
    """A tree whose nodes are sorted by probability, so that parents precede their children."""

    depths: tuple[int, ...]  # 0: children of the last token
    ranks: tuple[int, ...]
    parents: tuple[int, ...]

    @cached_property
    def deepest(self) -> tuple[int, ...]:
        """Number of depths among the first 1, 2, ... nodes."""
        return tuple(accumulate((d + 1 for d in self.depths), max))

    @cached_property
    def widest(self) -> tuple[int, ...]:
        """Number of ranks among the first 1, 2, ... nodes."""
        return tuple(accumulate((r + 1 for r in self.ranks), max))

    def node_places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return (depths, ranks) on the device: [nodes, 1] int64 each."""
        depths = torch.tensor(self.depths, device=device)
        return depths[:, None], torch.tensor(self.ranks, device=device)[:, None]


def best_tree(prior: TreePrior, nodes: int, *, spine_only: bool = False) -> DraftTree:
    """Return the tree of the ``nodes`` most probable nodes; fewer if the prior has no more. With
    ``spine_only``, only the first node of each depth has children."""
    depths: list[int] = []
    ranks: list[int] = []
    parents: list[int] = []
    # (-probability, tie breaker, depth, rank, parent, probability of the parent)
    heap = [(-prior[0][0], 0, 0, 0, ROOT, 1.0)]
    while heap and len(depths) < nodes:
        negative, _, depth, rank, parent, before = heapq.heappop(heap)
        node = len(depths)
        depths.append(depth)
        ranks.append(rank)
        parents.append(parent)
        if rank + 1 < len(prior[depth]):
            chance = before * prior[depth][rank + 1]
            heapq.heappush(heap, (-chance, 2 * node + 1, depth, rank + 1, parent, before))
        if depth + 1 < len(prior) and (rank == 0 or not spine_only):
            chance = -negative * prior[depth + 1][0]
            heapq.heappush(heap, (-chance, 2 * node + 2, depth + 1, 0, node, -negative))
    return DraftTree(tuple(depths), tuple(ranks), tuple(parents))


def pack_tree_drafts(tokens: Tensor, counts: Sequence[int], tree: DraftTree) -> Drafts:
    """Return drafts with the first ``counts[b]`` nodes of each sequence; tokens: [B, nodes]."""
    parents = [parent for count in counts for parent in tree.parents[:count]]
    nodes = tokens.shape[1]
    if all(count == nodes for count in counts):
        return Drafts(counts, tokens.flatten(), parents)
    own = np.asarray(counts, dtype=np.int64)
    at = np.flatnonzero(np.arange(nodes) < own[:, None])
    return Drafts(counts, tokens.flatten()[upload(at, tokens.device)], parents)


def read_tree_prior(settings: dict[str, Any], depths: int, source: str) -> TreePrior:
    """Return ``tree_prior`` of a head's config for ``depths`` depths, or a typical prior. Missing
    depths repeat the last one. Raises StartupError naming ``source``."""
    given = settings.get("tree_prior")
    if given is None:
        return [_TYPICAL[min(depth, len(_TYPICAL) - 1)] for depth in range(depths)]
    try:
        prior = [[min(1.0, max(0.0, float(chance))) for chance in ranks] for ranks in given]
    except (TypeError, ValueError, OverflowError) as error:
        raise StartupError(f"{source}: tree_prior is no list of lists of numbers") from error
    if not prior or not all(prior):
        raise StartupError(f"{source}: tree_prior is empty, or one of its depths is")
    return [prior[min(depth, len(prior) - 1)] for depth in range(depths)]
