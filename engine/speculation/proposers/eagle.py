"""The EAGLE proposer (Li et al. 2024, 2025): one layer predicts the next feature and token.

    observe    stores the target's states of new tokens in a ring buffer of each row
    propose    pass 1 computes what was added since the last proposal; each later pass computes the
               draft token of the pass before

The head knows a text from position ``start`` on, the first token that was decoded here. It does not
attend to the prompt, whose KV may come from another worker, nor did it in training. Of sequences
that get no drafts it keeps the newest states; ``start`` moves on when older ones are lost.

Its tree is a spine with leaves: in each pass, each sequence has one row, the most likely token, and
the next most likely tokens are its siblings.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.batching.batcher import RowState, kv_slots
from engine.model.decoder import DecoderModel
from engine.model.weights import CheckpointTensors
from engine.scheduling.sequence import Sequence as Running
from engine.speculation.draft_source import read_head_config
from engine.speculation.drafts import Drafts
from engine.speculation.proposers.draft_sampler import DraftSampler
from engine.speculation.proposers.draft_tree import best_tree, pack_tree_drafts, read_tree_prior
from engine.speculation.proposers.eagle_heads import AnyEagleHead, Eagle3Head, EagleHead
from engine.speculation.proposers.eagle_layer import EagleAttention, EagleSpans
from engine.speculation.proposers.proposer import Proposer, VerifiedStep
from engine.uploads import upload
from protocol.block_keys import BLOCK_TOKENS

MAX_NODES = 16  # maximum number of nodes of a tree
MAX_PASSES = 8
RING_TOKENS = 64  # maximum tokens of a text without KV: a power of two above the tokens of any step
MAX_FIRST_PASS_ROWS = 256  # maximum rows of a first pass, but each sequence gets at least four


class EagleProposer(Proposer):
    """Proposes trees with the EAGLE head in ``folder``; ``pages``: size of the target's pool."""

    name = "eagle"
    wants_hidden = True

    def __init__(
        self, model: DecoderModel, state: RowState, folder: Path, pages: int, most: int = MAX_NODES
    ) -> None:
        """Load the head. Raises StartupError if it cannot be loaded or does not fit ``model``."""
        self._model, self._state = model, state
        rows, positions = len(state.length), state.block_table.shape[1] * BLOCK_TOKENS
        self._head = load_eagle_head(model, folder, pages, positions)
        self.taps = self._head.taps
        self._context = self._head.config.max_positions
        prior = read_tree_prior(read_head_config(folder), MAX_PASSES, str(folder))
        self._tree = best_tree(prior, min(most, MAX_NODES), spine_only=True)
        self._node_places = self._tree.node_places(model.device)
        self.most = len(self._tree.ranks)
        # By row and position modulo RING_TOKENS: the target's states of the token before.
        shape = (rows * RING_TOKENS, self._head.state_size)
        self._states = torch.zeros(*shape, dtype=model.dtype, device=model.device)
        # Row lease of the states. Nothing is to be forgotten: the next sequence has another.
        self._leases = [-1] * rows
        self._start = np.zeros(rows, dtype=np.int64)
        self._done = np.zeros(rows, dtype=np.int64)

    def passes(self, nodes: int) -> int:
        return self._tree.deepest[min(nodes, self.most) - 1] if nodes else 0

    def observe(self, step: VerifiedStep) -> None:
        # state.length counts the drawn tokens already, sequence.tokens does not yet
        rows, at = step.rows, step.at
        made = step.hidden if step.taps is None else step.taps
        place = self._state.length.index_select(0, rows)
        if at.shape[1] == 1 and len(made) == len(rows):  # fast path of plain steps
            place.sub_(1).bitwise_and_(RING_TOKENS - 1).add_(rows, alpha=RING_TOKENS)
        else:
            ahead = torch.arange(at.shape[1], device=at.device)
            back = (step.counts[:, None] - ahead).clamp_(min=1)  # from the end, [B, D]
            place = (
                place[:, None]
                .sub(back)
                .bitwise_and_(RING_TOKENS - 1)
                .add_(rows[:, None], alpha=RING_TOKENS)
            )
            place, made = place.flatten(), made[at.flatten()]
        self._states.index_copy_(0, place, made)
        for sequence in step.sequences:
            row = sequence.row
            if self._leases[row] != sequence.row_lease:
                self._leases[row] = sequence.row_lease
                self._start[row] = self._done[row] = len(sequence.tokens)

    def propose(self, sequences: Sequence[Running], rows: Tensor, wanted: Sequence[int]) -> Drafts:
        """Return trees for ``sequences`` [B]; see Proposer. rows: [B] int64."""
        counts = [
            min(nodes, self.most) if self._can_propose(sequence) else 0
            for sequence, nodes in zip(sequences, wanted, strict=True)
        ]
        asked = [i for i, count in enumerate(counts) if count]
        if not asked:
            return Drafts(counts, rows[:0])
        asked.sort(key=lambda i: -counts[i])  # sequences that need more passes come first
        chosen = [sequences[i] for i in asked]
        for sequence in chosen:
            if sequence.row_pages != len(sequence.pages):
                self._state.seat((sequence,))
        own = rows[upload(asked, rows.device)]
        tokens = self._compute(chosen, own, [counts[i] for i in asked])
        back = upload(np.argsort(asked), rows.device)
        drafts = pack_tree_drafts(tokens[back], [count for count in counts if count], self._tree)
        return Drafts(counts, drafts.tokens, drafts.parents)

    def _can_propose(self, sequence: Running) -> bool:
        row = sequence.row
        return bool(
            self._leases[row] == sequence.row_lease and self._done[row] < len(sequence.tokens)
        )

    def _compute(self, sequences: Sequence[Running], rows: Tensor, counts: list[int]) -> Tensor:
        """Return tokens of the tree nodes [b, counts[0]], undefined beyond a sequence's count."""
        nodes, tree, state = counts[0], self._tree, self._state
        deep = [tree.deepest[count - 1] for count in counts]
        going = [sum(d > i for d in deep) for i in range(deep[0])]
        width = tree.widest[nodes - 1]
        spans, table = self._take_pending(sequences), state.block_table[rows]
        c = self._head.config
        attention = EagleAttention(
            spans, table, len(going), c.heads // c.kv_heads, self._model.dtype
        )
        sampler = DraftSampler(sequences, rows, state.sampling)
        ahead = torch.arange(len(going), device=rows.device)[:, None]
        at = state.length[rows] - 1 + ahead  # [passes, b] positions of the rows of each pass
        block = (at // BLOCK_TOKENS).clamp_(max=table.shape[1] - 1)  # unused beyond
        slots = kv_slots(table.gather(1, block.t()).t(), at)
        best = torch.empty(len(rows), len(going), width, dtype=torch.int64, device=rows.device)
        tokens = [t for s, d in zip(sequences, spans.done, strict=True) for t in s.tokens[d:]]
        features = self._first_pass(tokens, spans, rows, table, attention)
        later = attention.later_passes(going[1:])
        for i, count in enumerate(going):
            own = slice(count)
            if i:
                spine, place = best[own, i - 1, 0], slots[i, own]
                features = self._head(spine, features[own], at[i, own], place, later[i - 1])
            logits, drawn = self._head.logits(features), at[i, own] + 1
            best[own, i] = sampler.ranked(logits, drawn, width, self._head.tokens)
        depth, rank = self._node_places
        return best[:, depth[:nodes, 0], rank[:nodes, 0]]

    def _take_pending(self, sequences: Sequence[Running]) -> EagleSpans:
        """Return the spans to compute and mark them as done."""
        rows = np.array([s.row for s in sequences])
        length = np.array([len(s.tokens) for s in sequences], dtype=np.int64)
        most = min(RING_TOKENS, max(4, MAX_FIRST_PASS_ROWS // len(rows)))
        lost = length - self._done[rows] > most
        done = np.where(lost, length - most, self._done[rows])
        start = np.maximum(np.where(lost, done, self._start[rows]), length - self._context)
        self._start[rows], self._done[rows] = start, length
        return EagleSpans(start, np.maximum(done, start), length)

    def _first_pass(
        self,
        tokens: list[int],
        spans: EagleSpans,
        rows: Tensor,
        table: Tensor,
        attention: EagleAttention,
    ) -> Tensor:
        """Compute ``tokens``, which lack KV; return features [b, hidden] after the last ones."""
        owner = upload(spans.owner, rows.device)
        at = upload(spans.positions, rows.device)
        ring = rows[owner] * RING_TOKENS + at % RING_TOKENS
        slots = kv_slots(table[owner, at // BLOCK_TOKENS], at)
        before = self._head.features(self._states[ring])
        known = upload(tokens, rows.device)
        features = self._head(known, before, at, slots, attention.first_pass())
        if len(features) == len(rows):
            return features
        return features[upload(spans.ends, rows.device)]


def load_eagle_head(model: DecoderModel, folder: Path, pages: int, positions: int) -> AnyEagleHead:
    """Load an EAGLE-3 or an older head, by its tensor names. Raises StartupError."""
    names = CheckpointTensors(folder, model.dtype, model.device).names
    # An EAGLE-3 head norms the features that its layer takes.
    normed = any(name.endswith(".hidden_norm.weight") for name in names)
    kind: type[AnyEagleHead] = Eagle3Head if normed else EagleHead
    return kind(model, folder, pages, positions)
