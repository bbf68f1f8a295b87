"""The passes of a draft model: over chunks of text that it has not seen, and over drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch, View
from engine.batcher import slots_of
from engine.kv_pool import make_pool
from engine.model import Model
from engine.reach import chunk_reach
from engine.sequence import Sequence as Running
from engine.speculation.draft_draw import Draws
from engine.speculation.draft_reach import Ints, Rows, reaches
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
        nodes = ready[0].nodes
        going = [sum(r.nodes > i for r in ready) for i in range(nodes)]
        draws = Draws([r.sequence for r in ready], rows, self._state.sampling)
        lengths = np.array([len(r.sequence.tokens) for r in ready])
        table = _table(ready)
        # [nodes, b]: of the last token, then of the drafts
        place = lengths - 1 + np.arange(nodes)[:, None]
        at, slots = self._on_device(place), self._on_device(_slots(table, place))
        fresh = lengths - np.array([r.known for r in ready])
        views = self._views(table, lengths, going, alone=bool(fresh.max() == 1))
        drawn = torch.empty(len(ready), nodes, dtype=torch.int64, device=at.device)
        if views[0]:
            tokens = self._tokens([r.sequence.tokens[-1] for r in ready])
            logits = self._logits(Batch(tokens, at[0], slots[0], views[0], None))
        else:
            logits = self._first(ready, table, fresh)
        tokens = draws.draw(logits, at[0] + 1)
        drawn[:, 0] = tokens
        for i in range(1, nodes):
            own = slice(going[i])
            batch = Batch(tokens[own], at[i, own], slots[i, own], views[i], None)
            tokens = draws.draw(self._logits(batch), at[i, own] + 1)
            drawn[own, i] = tokens
        return drawn

    def _logits(self, batch: Batch) -> Tensor:
        return self._model.logits(self._model.hidden(batch, self._pool))

    def _first(self, ready: Sequence[Ready], table: Ints, fresh: Ints) -> Tensor:
        """Logits [b, vocab] after the last tokens, from a pass over the ``fresh`` [b] tokens of
        each that have come since the last one."""
        tokens = [token for r in ready for token in r.sequence.tokens[r.known :]]
        ends = np.cumsum(fresh)
        owner = np.repeat(np.arange(len(ready)), fresh)
        place = np.arange(len(tokens)) + np.array([r.known for r in ready])[owner]
        place -= (ends - fresh)[owner]
        own = table[owner]
        view = self._reaches(Rows(own, place + 1, 1))[0]
        at, slots = self._on_device(place), self._on_device(_slots(own, place[None])[0])
        hidden = self._model.hidden(Batch(self._tokens(tokens), at, slots, view, None), self._pool)
        return self._model.logits(hidden[self._on_device(ends - 1)])

    def _views(
        self, table: Ints, lengths: Ints, going: Sequence[int], *, alone: bool
    ) -> list[dict[int, View]]:
        """Of every pass, the first one empty if it is not over last tokens ``alone``. Passes over
        the same sequences share what they can."""
        views: list[dict[int, View]] = [] if alone else [{}]
        while len(views) < len(going):
            start = len(views)
            own = slice(going[start])
            passes = going[start:].count(going[start])
            views += self._reaches(Rows(table[own], lengths[own] + start, passes))
        return views

    def _reaches(self, rows: Rows) -> list[dict[int, View]]:
        return reaches(rows, self._windows, self._like.dtype, self._like.device)

    def _on_device(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self._like.device)

    def _tokens(self, values: Sequence[int]) -> Tensor:
        """Of the text. The draft's vocabulary may be padded less: what it does not have, no text
        has."""
        return self._tensor(values).clamp_(max=self._model.config.vocab_size - 1)

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._state.device)


def _table(ready: Sequence[Ready]) -> Ints:
    """Pages of each sequence: [b, pages], padded with page 0."""
    pages = [r.sequence.pages for r in ready]
    table = np.zeros((len(ready), max(map(len, pages))), dtype=np.int64)
    for row, own in zip(table, pages, strict=True):
        row[: len(own)] = own
    return table


def _slots(table: Ints, place: Ints) -> Ints:
    """Pool slots of the positions ``place`` [n, b] of b sequences; of those beyond the table, which
    nobody goes to, any."""
    block = np.minimum(place // BLOCK_TOKENS, table.shape[1] - 1)
    slots: Ints = table[np.arange(len(table)), block] * BLOCK_TOKENS + place % BLOCK_TOKENS
    return slots
