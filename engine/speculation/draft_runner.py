"""The passes of a draft model: over chunks of text that it has not seen, and over drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.batch import Batch, View
from engine.batcher import slots_of
from engine.kv_pool import make_pool
from engine.model import Model
from engine.reach import chunk_reach
from engine.sequence import Sequence as Running
from engine.speculation.draft_draw import Draws
from engine.speculation.draft_reach import reaches
from engine.state import RowState
from protocol.blocks import BLOCK_TOKENS


class Ready(NamedTuple):
    """A sequence that drafts are drawn for."""

    place: int  # among those asked for
    sequence: Running
    known: int  # leading tokens whose KV is there
    nodes: int  # drafts to draw


class Runner:
    """A model with a pool of its own, over the pages of ``state``."""

    def __init__(self, model: Model, state: RowState, pages: int) -> None:
        self._model = model
        self._state = state
        format_ = model.config.kv_format("exact", "wide", model.dtype.itemsize)
        self._pool = make_pool(format_, pages, model.dtype, model.device)
        self._windows = sorted(set(model.config.windows))
        self._like = torch.empty(0, dtype=model.dtype, device=model.device)

    def compute(self, chunks: Sequence[tuple[Running, int, int]]) -> None:
        """KV of ``count`` tokens after ``known`` ones, of each."""
        tokens: list[int] = []
        places, slots, starts = [], [], []
        for sequence, known, count in chunks:
            starts.append(len(tokens))
            tokens += sequence.tokens[known : known + count]
            at = torch.arange(known, known + count, device=self._state.device)
            places.append(at)
            slots.append(slots_of(self._state.block_table[sequence.row][at // BLOCK_TOKENS], at))
        views = {}
        for window in self._windows:
            reach = [
                chunk_reach(self._state.block_table[s.row], start, known, count, window, self._like)
                for (s, known, count), start in zip(chunks, starts, strict=True)
            ]
            views[window] = View(0, (), tuple(reach))
        batch = Batch(self._tokens(tokens), torch.cat(places), torch.cat(slots), views, None)
        self._model.hidden(batch, self._pool)

    def draw(self, ready: Sequence[Ready], rows: Tensor) -> Tensor:
        """Chains for all of ``ready``, the longest first: [b, nodes of the first], undefined beyond
        a sequence's own. rows: [b] int64, their rows in the state."""
        model, nodes = self._model, ready[0].nodes
        draws = Draws([r.sequence for r in ready], rows, self._state.sampling)
        table = self._state.block_table[rows]
        lengths = self._tensor([len(r.sequence.tokens) for r in ready])
        # [nodes, b]: the position of the last token, then those of the drafts
        at = lengths - 1 + torch.arange(nodes, device=lengths.device)[:, None]
        page = table.gather(1, (at.t() // BLOCK_TOKENS).clamp_(max=table.shape[1] - 1)).t()
        slots = slots_of(page, at)
        drawn = torch.empty(len(ready), nodes, dtype=torch.int64, device=lengths.device)
        going = [sum(r.nodes > i for r in ready) for i in range(nodes)]
        logits, views = self._first(ready, table, going)
        tokens = lengths
        for i, count in enumerate(going):
            if i > 0:
                batch = Batch(tokens[:count], at[i, :count], slots[i, :count], views[i], None)
                logits = model.logits(model.hidden(batch, self._pool))
            tokens = draws.draw(logits, at[i, :count] + 1)
            drawn[:count, i] = tokens
        return drawn

    def _first(
        self, ready: Sequence[Ready], table: Tensor, going: Sequence[int]
    ) -> tuple[Tensor, list[dict[int, View]]]:
        """The pass over what has come since the last one: logits [b, vocab] after the last tokens.
        And what all passes attend to."""
        tokens: list[int] = []
        at: list[int] = []
        owner: list[int] = []
        last: list[int] = []
        for i, r in enumerate(ready):
            length = len(r.sequence.tokens)
            tokens += r.sequence.tokens[r.known :]
            at += range(r.known, length)
            owner += [i] * (length - r.known)
            last.append(len(at) - 1)
        alone = len(at) == len(ready)
        own = table if alone else table[self._tensor(owner)]
        lengths = [len(r.sequence.tokens) for r in ready]
        views = self._views(table, lengths, going, alone)
        if not alone:
            views[0] = self._reaches(own, [p + 1 for p in at], 1)[0]
        places = self._tensor(at)
        page = own.gather(1, (places // BLOCK_TOKENS)[:, None])[:, 0]
        batch = Batch(self._tokens(tokens), places, slots_of(page, places), views[0], None)
        hidden = self._model.hidden(batch, self._pool)
        return self._model.logits(hidden if alone else hidden[self._tensor(last)]), views

    def _views(
        self, table: Tensor, lengths: Sequence[int], going: Sequence[int], alone: bool
    ) -> list[dict[int, View]]:
        """Of every pass. Passes over the same sequences share what they can."""
        views: list[dict[int, View]] = [] if alone else [{}]
        while len(views) < len(going):
            start = len(views)
            count = going[start]
            passes = going[start:].count(count)
            ahead = [length + start for length in lengths[:count]]
            views += self._reaches(table[:count], ahead, passes)
        return views

    def _reaches(self, table: Tensor, lengths: Sequence[int], passes: int) -> list[dict[int, View]]:
        return reaches(table, lengths, passes, self._windows, self._like.dtype)

    def _tokens(self, values: Sequence[int]) -> Tensor:
        """Of the text. The draft's vocabulary may be padded less: what it does not have, no text
        has."""
        return self._tensor(values).clamp_(max=self._model.config.vocab_size - 1)

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._state.device)
