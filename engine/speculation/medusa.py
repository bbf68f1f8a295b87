"""Medusa (Cai et al. 2024): heads that foretell several tokens from the target's last feature.

One pass proposes a whole tree: its tokens of depth d are the most promising ones of head d. All
that is kept of a sequence is the target's last output for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.model import Model
from engine.sequence import Sequence as Running
from engine.speculation.draft_draw import Draws
from engine.speculation.drafts import Drafts
from engine.speculation.heads_layout import read_settings
from engine.speculation.heads_medusa import MedusaHeads
from engine.speculation.heads_tree import best_tree, pack, read_prior
from engine.speculation.proposer import Advance
from engine.state import RowState

MOST = 32
"""Nodes of a tree at most."""


class Medusa:
    """Proposes what the heads in ``folder`` foretell."""

    name = "medusa"
    wants_hidden = True
    caught_up_s = 0.0

    def __init__(self, model: Model, state: RowState, folder: Path, most: int = MOST) -> None:
        """Raises StartupError for heads that cannot be loaded or do not fit ``model``."""
        self._model = model
        self._state = state
        self._heads = MedusaHeads(model, folder)
        prior = read_prior(read_settings(folder), self._heads.heads, str(folder))
        self._tree = best_tree(prior, min(most, MOST))
        self._place = self._tree.place(model.device)
        self.most = len(self._tree.ranks)
        rows, hidden = len(state.length), model.config.hidden_size
        # What the model made of the token before the last one: [rows, hidden].
        self._hidden = torch.zeros(rows, hidden, dtype=model.dtype, device=model.device)
        self._seen = [-1] * rows  # whose it is, by seating

    def passes(self, nodes: int) -> int:
        return 1 if nodes else 0

    def propose(self, sequences: Sequence[Running], rows: Tensor, wanted: Sequence[int]) -> Drafts:
        counts = [
            min(nodes, self.most) if self._seen[s.row] == s.seating else 0
            for s, nodes in zip(sequences, wanted, strict=True)
        ]
        asked = [i for i, count in enumerate(counts) if count]
        if not asked:
            return Drafts(counts, rows[:0])
        if len(asked) < len(counts):
            rows = rows[torch.tensor(asked, device=rows.device)]
        most = max(counts)
        tokens = self._tokens([sequences[i] for i in asked], rows, most)
        drafts = pack(tokens, [counts[i] for i in asked], self._tree)
        return Drafts(counts, drafts.tokens, drafts.parents)

    def _tokens(self, sequences: Sequence[Running], rows: Tensor, nodes: int) -> Tensor:
        """Of the first ``nodes`` nodes of the tree: [B, nodes]."""
        depths, width = self._tree.deepest[nodes - 1], self._tree.widest[nodes - 1]
        features = self._model.weights.final_norm(self._hidden[rows])
        logits = self._heads(features, depths)  # [depths * B, vocab]
        ahead = torch.arange(depths, device=rows.device)[:, None]
        positions = (self._state.length[rows] + ahead).flatten()
        draws = Draws(sequences, rows.repeat(depths), self._state.sampling)
        best = draws.ranked(logits, positions, width).view(depths, len(rows), width)
        depth, rank = self._place
        at = torch.arange(len(rows), device=rows.device)
        return best[depth[:nodes], at, rank[:nodes]].t()  # [B, nodes]

    def saw(self, advance: Advance) -> None:
        self._hidden.index_copy_(0, advance.rows, advance.hidden[advance.at[:, -1]])
        for sequence in advance.sequences:
            self._seen[sequence.row] = sequence.seating

    def forget(self, seatings: Sequence[int]) -> None:
        """Whoever comes next to a row has another seating: there is nothing to do."""
