"""The forward passes of a draft model: chunks of text without KV, and draft tokens.

DraftModel calls DraftModelRunner on a CPU, and PagedDraftRunner where kernels run.

Attention metadata is computed for several passes at once: each pass adds a token to each of its
sequences, on pages that exist before the first pass, so all passes share one list of pages and
differ in their masks. It is computed on the host in numpy, which on few numbers takes a fraction
of torch's time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batching.attention_metadata import (
    AttentionMetadata,
    DecodeGroup,
    PackedBatch,
    chunk_attention,
    group_by_pages,
)
from engine.batching.batcher import RowState, kv_slots
from engine.kv_cache.kv_pool import make_pool
from engine.model.decoder import DecoderModel
from engine.scheduling.sequence import Sequence as Running
from engine.speculation.proposers.draft_sampler import DraftSampler
from protocol.block_keys import BLOCK_TOKENS

Ints = NDArray[np.int64]


class DraftRequest(NamedTuple):
    """A sequence whose drafts are drawn in this step."""

    place: int  # batch index
    sequence: Running
    known: int  # leading tokens whose KV is in the pool
    nodes: int  # drafts to draw


class DraftModelRunner:
    """Runs a draft model, whose KV pool has the target's page numbers, on the rows of ``state``. A
    DraftModel creates it; the runner owns the pool."""

    def __init__(self, model: DecoderModel, state: RowState, pages: int) -> None:
        self._model = model
        self._state = state
        format_ = model.config.kv_format("exact", "wide", model.dtype.itemsize)
        self._pool = make_pool(format_, pages, model.dtype, model.device)
        self._windows = sorted(set(model.config.windows))
        self._like = torch.empty(0, dtype=model.dtype, device=model.device)

    def compute(self, chunks: Sequence[tuple[Running, int, int]]) -> None:
        """Compute KV for each (sequence, known, count): ``count`` tokens after ``known`` ones."""
        tokens: list[int] = []
        places, slots = [], []
        for sequence, known, count in chunks:
            tokens += sequence.tokens[known : known + count]
            at = torch.arange(known, known + count, device=self._state.device)
            places.append(at)
            slots.append(kv_slots(self._state.block_table[sequence.row][at // BLOCK_TOKENS], at))
        views = chunk_views(chunks, self._state.block_table, self._windows, self._like)
        batch = PackedBatch(self._tokens(tokens), torch.cat(places), torch.cat(slots), views, None)
        self._model.hidden(batch, self._pool)

    def draw(self, ready: Sequence[DraftRequest], rows: Tensor) -> Tensor:
        """Draw chains for ``ready``, which is sorted by falling number of nodes. rows: [b] int64,
        rows in the state. Returns [b, nodes of the first] int64, undefined beyond the nodes of a
        sequence."""
        nodes = ready[0].nodes
        going = [sum(r.nodes > i for r in ready) for i in range(nodes)]
        sampler = DraftSampler([r.sequence for r in ready], rows, self._state.sampling)
        lengths = np.array([len(r.sequence.tokens) for r in ready])
        table = _table(ready)
        # [nodes, b]: positions of the last token, then of the drafts
        place = lengths - 1 + np.arange(nodes)[:, None]
        at, slots = self._on_device(place), self._on_device(_slots(table, place))
        fresh = lengths - np.array([r.known for r in ready])
        views = self._attention(table, lengths, going, last_tokens_only=bool(fresh.max() == 1))
        drawn = torch.empty(len(ready), nodes, dtype=torch.int64, device=at.device)
        if views[0]:
            tokens = self._tokens([r.sequence.tokens[-1] for r in ready])
            logits = self._logits(PackedBatch(tokens, at[0], slots[0], views[0], None))
        else:
            logits = self._first_logits(ready, table, fresh)
        tokens = sampler.draw(logits, at[0] + 1)
        drawn[:, 0] = tokens
        for i in range(1, nodes):
            own = slice(going[i])
            batch = PackedBatch(tokens[own], at[i, own], slots[i, own], views[i], None)
            tokens = sampler.draw(self._logits(batch), at[i, own] + 1)
            drawn[own, i] = tokens
        return drawn

    def read_later(self, drawn: Tensor) -> Callable[[], list[list[int]]]:
        """Return a function that waits for drafts [b, nodes] and returns them."""
        return drawn.tolist

    def record(self, progress: Callable[[float], None]) -> None:
        """Do nothing: only passes of kernels are recorded."""

    def _logits(self, batch: PackedBatch) -> Tensor:
        return self._model.logits(self._model.hidden(batch, self._pool))

    def _first_logits(self, ready: Sequence[DraftRequest], table: Ints, fresh: Ints) -> Tensor:
        """Return logits [b, vocab] after the last tokens. The pass computes the ``fresh`` [b] last
        tokens of each sequence. table: [b, pages]."""
        tokens = [token for r in ready for token in r.sequence.tokens[r.known :]]
        ends = np.cumsum(fresh)
        owner = np.repeat(np.arange(len(ready)), fresh)
        place = np.arange(len(tokens)) + np.array([r.known for r in ready])[owner]
        place -= (ends - fresh)[owner]
        own = table[owner]
        view = self._per_pass(DraftQueryRows(own, place + 1, 1))[0]
        at, slots = self._on_device(place), self._on_device(_slots(own, place[None])[0])
        hidden = self._model.hidden(
            PackedBatch(self._tokens(tokens), at, slots, view, None), self._pool
        )
        return self._model.logits(hidden[self._on_device(ends - 1)])

    def _attention(
        self, table: Ints, lengths: Ints, going: Sequence[int], *, last_tokens_only: bool
    ) -> list[dict[int, AttentionMetadata]]:
        """Return the metadata of each pass; the first is empty unless it computes last tokens only.
        table: [b, pages], lengths: [b], going: sequences of each pass. Consecutive passes over the
        same sequences share their metadata."""
        views: list[dict[int, AttentionMetadata]] = [] if last_tokens_only else [{}]
        while len(views) < len(going):
            start = len(views)
            own = slice(going[start])
            passes = going[start:].count(going[start])
            views += self._per_pass(DraftQueryRows(table[own], lengths[own] + start, passes))
        return views

    def _per_pass(self, rows: DraftQueryRows) -> list[dict[int, AttentionMetadata]]:
        """Return the attention metadata by window size, for each pass."""
        groups = {w: list(_groups(rows, w, self._like)) for w in self._windows}
        count = len(rows.lengths)
        return [
            {w: AttentionMetadata(count, tuple(own[i] for own in groups[w]), ()) for w in groups}
            for i in range(rows.passes)
        ]

    def _on_device(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self._like.device)

    def _tokens(self, values: Sequence[int]) -> Tensor:
        """Return text tokens as a tensor [n] int64, clamped to the draft's vocabulary. It may be
        padded less than the target's; the ids beyond are padding and not in any text."""
        tokens = torch.tensor(values, dtype=torch.int64, device=self._state.device)
        return tokens.clamp_(max=self._model.config.vocab_size - 1)


def chunk_views(
    chunks: Sequence[tuple[Running, int, int]],
    table: Tensor,
    windows: Collection[int],
    like: Tensor,
) -> dict[int, AttentionMetadata]:
    """Return the attention metadata by window of (sequence, known, count): ``count`` tokens after
    ``known`` ones. table: [rows, max_pages] page ids; masks get the type and device of ``like``."""
    starts = np.cumsum([0, *(count for _, _, count in chunks)]).tolist()
    views = {}
    for window in windows:
        own = [
            chunk_attention(table[s.row], start, known, count, window, like)
            for (s, known, count), start in zip(chunks, starts, strict=False)
        ]
        views[window] = AttentionMetadata(0, (), tuple(own))
    return views


def _table(ready: Sequence[DraftRequest]) -> Ints:
    """Return the page ids of each sequence [b, pages], padded with page 0."""
    pages = [r.sequence.pages for r in ready]
    table = np.zeros((len(ready), max(map(len, pages))), dtype=np.int64)
    for row, own in zip(table, pages, strict=True):
        row[: len(own)] = own
    return table


def _slots(table: Ints, place: Ints) -> Ints:
    """Return pool slots [n, b] of the positions ``place`` [n, b] in pages ``table`` [b, pages].
    Positions beyond the table are not used and get an arbitrary slot."""
    block = np.minimum(place // BLOCK_TOKENS, table.shape[1] - 1)
    slots: Ints = table[np.arange(len(table)), block] * BLOCK_TOKENS + place % BLOCK_TOKENS
    return slots


@dataclass(frozen=True)
class DraftQueryRows:
    """Rows with one query each, which attend to one more token in each pass."""

    table: Ints  # [b, pages] page ids of each row's sequence
    lengths: Ints  # [b] tokens attended to in the first pass (incl. own), without a window
    passes: int

    def select(self, rows: Ints) -> DraftQueryRows:
        return DraftQueryRows(self.table[rows], self.lengths[rows], self.passes)


def _groups(rows: DraftQueryRows, window: int, like: Tensor) -> Iterator[list[DecodeGroup]]:
    """Yield groups of rows with similar page counts (padding below half), as one item per pass."""
    first = np.maximum(rows.lengths - window, 0) // BLOCK_TOKENS if window else rows.lengths * 0
    pages = -(-(rows.lengths + rows.passes - 1) // BLOCK_TOKENS) - first
    for own in group_by_pages(pages):
        all_rows = len(own) == len(pages)
        at = slice(None) if all_rows else torch.from_numpy(own).to(like.device)
        width = int(pages[own].max())
        yield _group(rows.select(own), at, first[own], width, window, like)


def _group(
    rows: DraftQueryRows, at: Tensor | slice, first: Ints, width: int, window: int, like: Tensor
) -> list[DecodeGroup]:
    columns = np.minimum(first[:, None] + np.arange(width), rows.table.shape[1] - 1)
    pages = torch.from_numpy(np.take_along_axis(rows.table, columns, 1)).to(like.device)
    base = first * BLOCK_TOKENS
    slots = base[:, None] + np.arange(width * BLOCK_TOKENS)  # [b, span]
    ends = (rows.lengths + np.arange(rows.passes)[:, None])[:, :, None]  # [passes, b, 1]
    hidden = slots >= ends
    if window:
        hidden |= slots < ends - window
    masks = np.zeros((*hidden.shape[:2], 1, 1, hidden.shape[2]), dtype=np.float32)
    masks[:, :, 0, 0][hidden] = float("-inf")
    own = torch.from_numpy(masks).to(like)
    start = torch.from_numpy(base).to(like.device)
    return [DecodeGroup(at, pages, start, mask) for mask in own.unbind()]
