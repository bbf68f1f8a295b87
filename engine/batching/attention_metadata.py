"""Which pages and tokens a row attends to, with a sliding window or without.

A window of ``w`` lets a token at position p attend to p - w + 1 .. p; 0 stands for no window.
Pages wholly before the window are not even read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batching.batch import Chunk, DecodeGroup
from engine.batching.draft_layout import Bools, Ints, Layout
from protocol.block_keys import BLOCK_TOKENS


def decode_groups(
    block_table: Tensor, lengths: Tensor, window: int, dtype: torch.dtype
) -> tuple[DecodeGroup, ...]:
    """Group decode rows by the pages they read, so that attention pads little.

    block_table: [R, max_pages] page ids. lengths: [R] tokens known, the new one included.
    A group holds rows whose page counts share a power of two, so the padding stays below half, and
    the Python work grows with the number of groups, not with the batch.
    """
    first = (lengths - window).clamp(min=0) // BLOCK_TOKENS if window else lengths * 0  # [R]
    pages = (lengths + (BLOCK_TOKENS - 1)) // BLOCK_TOKENS - first  # [R]
    longest, shortest = int(pages.max()), int(pages.min())
    if longest <= 2 * shortest:
        return (_group(block_table, lengths, first, slice(None), longest, window, dtype),)
    # bit_length(p - 1): 1 -> 0, 2 -> 1, 3..4 -> 2, 5..8 -> 3
    kind = torch.ceil(torch.log2(pages.double())).long()
    groups = []
    for value in torch.unique(kind).tolist():
        rows = (kind == value).nonzero().squeeze(1)
        width = int(pages[rows].max())
        group = _group(block_table[rows], lengths[rows], first[rows], rows, width, window, dtype)
        groups.append(group)
    return tuple(groups)


def _group(
    table: Tensor,
    lengths: Tensor,
    first: Tensor,
    rows: Tensor | slice,
    width: int,
    window: int,
    dtype: torch.dtype,
) -> DecodeGroup:
    columns = first[:, None] + torch.arange(width, device=table.device)  # [r, width]
    pages = table.gather(1, columns.clamp_(max=table.shape[1] - 1))
    base = first * BLOCK_TOKENS
    at = base[:, None] + torch.arange(width * BLOCK_TOKENS, device=table.device)
    hidden = at >= lengths[:, None]
    if window:
        hidden |= at < lengths[:, None] - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=table.device)
    mask.masked_fill_(hidden, float("-inf"))
    return DecodeGroup(rows, pages, base, mask[:, None, None, :])


def grow_(group: DecodeGroup, lengths: Tensor, window: int) -> None:
    """Every row has one token more, on the pages it had; with a window, one token leaves it.
    lengths: [R] of all decode rows."""
    mask = group.mask[:, 0, 0]
    newest = (lengths[group.rows] - 1 - group.base)[:, None]
    mask.scatter_(1, newest, 0.0)
    if window:
        left = newest - window
        at = left.clamp(min=0)
        before = mask.gather(1, at)
        mask.scatter_(1, at, before.masked_fill_(left >= 0, float("-inf")))


def chunk_reach(
    table: Tensor, start: int, context: int, count: int, window: int, like: Tensor
) -> Chunk:
    """The chunk of ``count`` tokens after ``context`` ones of a sequence with the pages ``table``
    [max_pages]; its first row in the batch is ``start``."""
    if context == 0 and (not window or count <= window):
        return Chunk(start, count, None, count, None)
    first = max(0, context + 1 - window) // BLOCK_TOKENS if window else 0
    span = context + count - first * BLOCK_TOKENS
    mask = like.new_full((count, span), float("-inf"))
    mask.triu_(context - first * BLOCK_TOKENS + 1)
    if window:
        # Query i at span position q = context - base + i attends to keys above q - window.
        beyond = like.new_full((count, span), float("-inf"))
        mask += beyond.tril_(context - first * BLOCK_TOKENS - window)
    last = -(-(context + count) // BLOCK_TOKENS)
    return Chunk(start, count, table[first:last] if context else None, span, mask)


def verify_groups(
    block_table: Tensor, layout: Layout, window: int, dtype: torch.dtype, shared: int
) -> tuple[DecodeGroup, ...]:
    """Groups of sequences with drafts: by the pages they read, as ``decode_groups``, and those
    without drafts apart, so that attention pads little.

    block_table: [B, max_pages] page ids. shared: query heads that share a key.
    """
    rows, lengths = layout.shape.rows, layout.lengths
    first = np.maximum(lengths - window, 0) // BLOCK_TOKENS if window else lengths * 0
    pages = -(-(lengths - 1 + rows) // BLOCK_TOKENS) - first  # [B]
    parts = [
        Part(block_table, layout, first[s], s, int(pages[s].max())) for s in alike(pages, rows > 1)
    ]
    return tuple(_verify_group(part, window, dtype, shared) for part in parts)


def alike(pages: Ints, apart: Bools | None = None) -> list[Ints]:
    """Indices of sequences to be attended to together, as in ``decode_groups``, on the host.
    pages, apart: [b]; sequences that differ in ``apart`` are not together."""
    apart = np.zeros(len(pages), dtype=np.bool_) if apart is None else apart
    if pages.max() <= 2 * pages.min() and (apart == apart[0]).all():
        return [np.arange(len(pages))]
    kind = np.ceil(np.log2(pages)).astype(np.int64) * 2 + apart
    return [np.flatnonzero(kind == value) for value in np.unique(kind)]


@dataclass(frozen=True)
class Part:
    """Sequences of a layout that are attended to together."""

    table: Tensor  # [B, max_pages] page ids, of all sequences
    layout: Layout
    first: Ints  # [b] first page in reach
    sequences: Ints  # [b]
    width: int  # pages

    @property
    def everybody(self) -> bool:
        return len(self.sequences) == len(self.layout.lengths)


def _verify_group(part: Part, window: int, dtype: torch.dtype, shared: int) -> DecodeGroup:
    shape, device = part.layout.shape, part.table.device
    queries = int(shape.rows[part.sequences].max())
    rows = shape.rows_of(part.sequences, queries)  # [b, queries]
    mask = _mask(part, queries, rows, window).repeat(shared, axis=1)
    table = part.table
    if not part.everybody:
        table = table[torch.from_numpy(part.sequences).to(device)]
    pages = table[:, : part.width]
    if part.first.any():
        place = torch.from_numpy(part.first[:, None] + np.arange(part.width)).to(device)
        pages = table.gather(1, place.clamp_(max=table.shape[1] - 1))
    unpadded = part.everybody and shape.uniform
    return DecodeGroup(
        rows=slice(None) if unpadded else torch.from_numpy(rows.ravel()).to(device),
        pages=pages,
        base=torch.from_numpy(part.first * BLOCK_TOKENS).to(device),
        mask=torch.from_numpy(mask).to(device, dtype)[:, None],
        queries=queries,
    )


def _mask(part: Part, queries: int, rows: Ints, window: int) -> NDArray[np.float32]:
    """[b, queries, span]: the text, and of the drafts the way to the row's own node."""
    shape, sequences = part.layout.shape, part.sequences
    last = part.layout.lengths[sequences] - 1  # slot of the last token
    columns = last - part.first * BLOCK_TOKENS
    spans = np.arange(part.width * BLOCK_TOKENS)
    if shape.chains and not window:
        upto = columns[:, None] + shape.within[rows]  # [b, queries]
        return _hiding(spans > upto[:, :, None])
    attended = np.repeat(spans < columns[:, None, None], queries, axis=1)
    seen = shape.sees(sequences, queries)
    seen &= (np.arange(queries) < shape.rows[sequences][:, None])[:, None, :]  # who stands again
    if window:
        positions = last[:, None] + shape.depth[rows]  # [b, queries]
        slots = (part.first * BLOCK_TOKENS)[:, None, None] + spans
        attended &= slots > positions[:, :, None] - window
        seen &= positions[:, None, :] > positions[:, :, None] - window
    group, query, row = np.nonzero(seen)
    attended[group, query, columns[group] + row] = True
    return _hiding(~attended)


def _hiding(hidden: Bools) -> NDArray[np.float32]:
    out = np.zeros(hidden.shape, dtype=np.float32)
    out[hidden] = -np.inf
    return out
