"""EAGLE (Li et al. 2024, 2025): one layer foretells the next feature, and with it the token.

    saw        the target's features of the text go into a ring of each row
    propose    pass 1: what came since the last proposal; pass 2 ..: each on the draft before

The head knows a text from the first token that was computed here, from ``start`` on: prompts, whose
KV may come from elsewhere, are nothing that it attends to, as in its training. Of what it is not
asked about, it keeps the newest; ``start`` moves on where something is lost.

Its tree is a spine with leaves: one row of each sequence goes through each pass, the most promising
token, and beside it stand the tokens that were the next best.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.batching.row_state import RowState, kv_slots
from engine.model.decoder import DecoderModel
from engine.model.weights import CheckpointTensors
from engine.scheduling.sequence import Sequence as Running
from engine.speculation.draft_source import is_eagle3, read_head_config, refuse_pickles
from engine.speculation.drafts import Drafts
from engine.speculation.proposers.draft_runner import DraftSampler
from engine.speculation.proposers.draft_tree import best_tree, pack_tree_drafts, read_tree_prior
from engine.speculation.proposers.eagle_heads import AnyEagleHead, Eagle3Head, EagleHead
from engine.speculation.proposers.eagle_layer import EagleAttention, EagleSpans
from engine.speculation.proposers.proposer import VerifiedStep
from protocol.block_keys import BLOCK_TOKENS

MAX_NODES = 16
"""Nodes of a tree at most."""
MAX_PASSES = 8
"""Passes at most."""
RING_TOKENS = 64
"""Tokens of a text that wait to be computed, at most; a power of two above any step's tokens."""
MAX_FIRST_PASS_ROWS = 256
"""Rows of a first pass at most, as long as that leaves each sequence a few."""


class EagleProposer:
    """Proposes what the head in ``folder`` foretells. ``pages``: of the target's pool."""

    name = "eagle"
    wants_hidden = True
    caught_up_s = 0.0

    def __init__(
        self, model: DecoderModel, state: RowState, folder: Path, pages: int, most: int = MAX_NODES
    ) -> None:
        """Raises StartupError for a head that cannot be loaded or does not fit ``model``."""
        self._model, self._state = model, state
        rows, positions = len(state.length), state.block_table.shape[1] * BLOCK_TOKENS
        self._head = load_eagle_head(model, folder, pages, positions)
        self.taps = self._head.taps
        self._reach = self._head.config.max_positions
        prior = read_tree_prior(read_head_config(folder), MAX_PASSES, str(folder))
        self._tree = best_tree(prior, min(most, MAX_NODES), spine_only=True)
        self._place = self._tree.place(model.device)
        self.most = len(self._tree.ranks)
        # By row and position modulo RING: what the model made of the token before.
        kept = self._head.kept
        self._kept = torch.zeros(rows * RING_TOKENS, kept, dtype=model.dtype, device=model.device)
        self._seen = [-1] * rows  # whose the row is, by seating
        self._start = np.zeros(rows, dtype=np.int64)
        self._done = np.zeros(rows, dtype=np.int64)

    def passes(self, nodes: int) -> int:
        return self._tree.deepest[min(nodes, self.most) - 1] if nodes else 0

    def saw(self, advance: VerifiedStep) -> None:
        """``state.length`` counts the tokens that were drawn, ``sequence.tokens`` not yet."""
        rows, at = advance.rows, advance.at
        made = advance.hidden if advance.taps is None else advance.taps
        place = self._state.length.index_select(0, rows)
        if at.shape[1] == 1 and len(made) == len(rows):  # a plain step has no time to spare
            place.sub_(1).bitwise_and_(RING_TOKENS - 1).add_(rows, alpha=RING_TOKENS)
        else:
            ahead = torch.arange(at.shape[1], device=at.device)
            back = (advance.counts[:, None] - ahead).clamp_(min=1)  # from the end, [B, D]
            place = (
                place[:, None]
                .sub(back)
                .bitwise_and_(RING_TOKENS - 1)
                .add_(rows[:, None], alpha=RING_TOKENS)
            )
            place, made = place.flatten(), made[at.flatten()]
        self._kept.index_copy_(0, place, made)
        for sequence in advance.sequences:
            row = sequence.row
            if self._seen[row] != sequence.row_lease:
                self._seen[row] = sequence.row_lease
                self._start[row] = self._done[row] = len(sequence.tokens)

    def forget(self, seatings: Sequence[int]) -> None:
        """Whoever comes next to a row has another seating: there is nothing to do."""

    def propose(self, sequences: Sequence[Running], rows: Tensor, wanted: Sequence[int]) -> Drafts:
        counts = [
            min(nodes, self.most) if self._knows(sequence) else 0
            for sequence, nodes in zip(sequences, wanted, strict=True)
        ]
        asked = [i for i, count in enumerate(counts) if count]
        if not asked:
            return Drafts(counts, rows[:0])
        asked.sort(key=lambda i: -counts[i])  # so that those that go on are the first ones
        chosen = [sequences[i] for i in asked]
        for sequence in chosen:
            if sequence.row_pages != len(sequence.pages):
                self._state.seat(sequence)
        own = rows[torch.tensor(asked, device=rows.device)]
        tokens = self._compute(chosen, own, [counts[i] for i in asked])
        back = torch.from_numpy(np.argsort(asked)).to(rows.device)
        drafts = pack_tree_drafts(tokens[back], [count for count in counts if count], self._tree)
        return Drafts(counts, drafts.tokens, drafts.parents)

    def _knows(self, sequence: Running) -> bool:
        row = sequence.row
        return bool(
            self._seen[row] == sequence.row_lease and self._done[row] < len(sequence.tokens)
        )

    def _compute(self, sequences: Sequence[Running], rows: Tensor, counts: list[int]) -> Tensor:
        """Nodes of the tree [b, counts[0]], undefined beyond a sequence's own ``counts``."""
        nodes, tree, state = counts[0], self._tree, self._state
        deep = [tree.deepest[count - 1] for count in counts]
        going = [sum(d > i for d in deep) for i in range(deep[0])]
        width = tree.widest[nodes - 1]
        spans, table = self._take(sequences), state.block_table[rows]
        c = self._head.config
        reach = EagleAttention(spans, table, len(going), c.heads // c.kv_heads, self._model.dtype)
        draws = DraftSampler(sequences, rows, state.sampling)
        ahead = torch.arange(len(going), device=rows.device)[:, None]
        at = state.length[rows] - 1 + ahead  # [passes, b], of the rows that passes begin with
        block = (at // BLOCK_TOKENS).clamp_(max=table.shape[1] - 1)  # beyond, nobody goes on
        slots = kv_slots(table.gather(1, block.t()).t(), at)
        best = torch.empty(len(rows), len(going), width, dtype=torch.int64, device=rows.device)
        tokens = [t for s, d in zip(sequences, spans.done, strict=True) for t in s.tokens[d:]]
        features = self._first(tokens, spans, rows, table, reach)
        later = reach.later(going[1:])
        for i, count in enumerate(going):
            own = slice(count)
            if i:
                spine, place = best[own, i - 1, 0], slots[i, own]
                features = self._head(spine, features[own], at[i, own], place, later[i - 1])
            logits, drawn = self._head.read(features), at[i, own] + 1
            best[own, i] = draws.ranked(logits, drawn, width, self._head.tokens)
        depth, rank = self._place
        return best[:, depth[:nodes, 0], rank[:nodes, 0]]

    def _take(self, sequences: Sequence[Running]) -> EagleSpans:
        """What is to be computed of each; it is counted as done."""
        rows = np.array([s.row for s in sequences])
        length = np.array([len(s.tokens) for s in sequences], dtype=np.int64)
        most = min(RING_TOKENS, max(4, MAX_FIRST_PASS_ROWS // len(rows)))
        lost = length - self._done[rows] > most
        done = np.where(lost, length - most, self._done[rows])
        start = np.maximum(np.where(lost, done, self._start[rows]), length - self._reach)
        self._start[rows], self._done[rows] = start, length
        return EagleSpans(start, np.maximum(done, start), length)

    def _first(
        self,
        tokens: list[int],
        spans: EagleSpans,
        rows: Tensor,
        table: Tensor,
        reach: EagleAttention,
    ) -> Tensor:
        """The pass over ``tokens``, those without KV: the features [b, hidden] after the last."""
        owner = torch.from_numpy(spans.owner).to(rows.device)
        at = torch.from_numpy(spans.positions).to(rows.device)
        ring = rows[owner] * RING_TOKENS + at % RING_TOKENS
        slots = kv_slots(table[owner, at // BLOCK_TOKENS], at)
        before = self._head.features(self._kept[ring])
        known = torch.tensor(tokens, device=rows.device)
        features = self._head(known, before, at, slots, reach.first())
        if len(features) == len(rows):
            return features
        return features[torch.from_numpy(spans.ends).to(rows.device)]


def load_eagle_head(model: DecoderModel, folder: Path, pages: int, positions: int) -> AnyEagleHead:
    """Of the kind that the folder holds. Raises StartupError."""
    refuse_pickles(folder)
    names = CheckpointTensors(folder, model.dtype, model.device).names
    kind = Eagle3Head if is_eagle3(names) else EagleHead
    return kind(model, folder, pages, positions)
