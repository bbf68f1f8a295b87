"""What a grammar leaves of what is proposed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.sequence import Sequence as Running
from engine.speculation.drafts import ROOT, Drafts, first_path


def fitting(drafts: Drafts, sequences: Sequence[Running]) -> Drafts:
    """Sequences with a grammar keep the first path of their tree, as far as the grammar takes it:
    beyond, nothing could be met."""
    tokens = drafts.tokens.tolist()
    counts: list[int] = []
    parents: list[int] = []
    kept: list[int] = []
    start = 0
    for index, sequence in enumerate(sequences):
        own = drafts.parents_of(index)
        count, nodes = len(own), list(range(len(own)))
        if sequence.grammar is not None and count:
            nodes = first_path(own)
            path = [tokens[start + node] for node in nodes]
            nodes = nodes[: sequence.grammar.fitting(path)]
            own = list(range(ROOT, len(nodes) - 1))
        kept += [start + node for node in nodes]
        parents += own
        counts.append(len(nodes))
        start += count
    at = torch.tensor(kept, dtype=torch.int64, device=drafts.tokens.device)
    return Drafts(counts, drafts.tokens[at], None if drafts.parents is None else parents)
