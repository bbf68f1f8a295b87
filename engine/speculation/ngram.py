"""Prompt lookup as a proposer: no model, no pass, some microseconds a sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.sequence import Sequence as Running
from engine.speculation.drafts import Drafts
from engine.speculation.lookup import Lookup
from engine.speculation.proposer import Advance

PORTION = 1024
"""Tokens of text that are indexed in a step at most: about 0.3 ms. A long prompt takes some steps,
and what is indexed of it is of use meanwhile."""


class NGram:
    """Proposes chains of what followed the same tokens earlier in prompt and output."""

    name = "ngram"
    wants_hidden = False
    caught_up_s = 0.0

    def __init__(self, most: int) -> None:
        self.most = most
        self._lookups: dict[int, Lookup] = {}  # by seating

    def passes(self, nodes: int) -> int:
        return 0

    def propose(self, sequences: Sequence[Running], rows: Tensor, wanted: Sequence[int]) -> Drafts:
        budget = PORTION
        counts, tokens = [0] * len(sequences), []
        for i, (sequence, count) in enumerate(zip(sequences, wanted, strict=True)):
            if count <= 0:
                continue
            lookup = self._lookups.get(sequence.seating)
            if lookup is None:
                lookup = self._lookups[sequence.seating] = Lookup(sequence.tokens)
            if budget > 0:
                budget -= lookup.index(budget)
            found = lookup.propose(min(count, self.most))
            counts[i] = len(found)
            tokens += found
        return Drafts(counts, torch.tensor(tokens, dtype=torch.int64, device=rows.device))

    def saw(self, advance: Advance) -> None:
        pass

    def forget(self, seatings: Sequence[int]) -> None:
        for seating in seatings:
            self._lookups.pop(seating, None)
