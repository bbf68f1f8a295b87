"""Which pages and tokens a row attends to, with a sliding window or without.

A window of ``w`` lets a token at position p attend to p - w + 1 .. p; 0 stands for no window.
Pages wholly before the window are not even read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.batch import Chunk, DecodeGroup
from protocol.blocks import BLOCK_TOKENS


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
