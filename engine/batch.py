"""The packed batch of one step: every row is a token, and there is no padding between sequences.

    tokens     [t0 t1 t2 | a a a a a a | b b b]
                decode     chunk        chunk

Decode rows come first, one token each; then prefill chunks, back to back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.blocks import BLOCK_TOKENS


@dataclass(frozen=True)
class DecodeGroup:
    """Decode rows of similar length, attended to together."""

    rows: Tensor | slice  # which decode rows of the batch: [r] or all of them
    pages: Tensor  # [r * width] page ids, row by row, padded with page 0
    width: int  # pages per row
    mask: Tensor  # [r, 1, 1, width * page_tokens], 0 where attended, -inf beyond the end

    def grow(self, lengths: Tensor) -> None:
        """Every row has one token more to attend to, on the pages it had: lengths [rows]."""
        last = lengths[self.rows] - 1
        self.mask[:, 0, 0].scatter_(1, last[:, None], 0.0)


@dataclass(frozen=True)
class Chunk:
    """One prefill chunk: ``count`` tokens of a sequence after ``context`` computed ones."""

    start: int  # first row in the batch
    count: int
    context: int
    pages: Tensor | None  # [n] pages of context and chunk; None without context
    mask: Tensor | None  # [count, context + count], 0 or -inf; None without context


@dataclass(frozen=True)
class Batch:
    """Inputs of one forward pass over ``T`` tokens."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64: where each token's KV goes
    decode_rows: int
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]
    logit_rows: Tensor | None  # [R] rows whose logits are wanted; None: all


def decode_groups(
    block_table: Tensor, lengths: Tensor, dtype: torch.dtype
) -> tuple[DecodeGroup, ...]:
    """Group decode rows by context length, so that attention pads little.

    block_table: [R, max_pages] page ids. lengths: [R] tokens to attend to, the new one included.
    A group holds rows whose page counts share a power of two, so the padding stays below half, and
    the Python work grows with the number of groups, not with the batch.
    """
    pages = (lengths + (BLOCK_TOKENS - 1)) // BLOCK_TOKENS  # [R]
    longest, shortest = int(pages.max()), int(pages.min())
    if longest <= 2 * shortest:
        return (_group(block_table, lengths, slice(None), longest, dtype),)
    # bit_length(p - 1): 1 -> 0, 2 -> 1, 3..4 -> 2, 5..8 -> 3
    kind = torch.ceil(torch.log2(pages.double())).long()
    groups = []
    for value in torch.unique(kind).tolist():
        rows = (kind == value).nonzero().squeeze(1)
        width = int(pages[rows].max())
        groups.append(_group(block_table[rows], lengths[rows], rows, width, dtype))
    return tuple(groups)


def _group(
    table: Tensor, lengths: Tensor, rows: Tensor | slice, width: int, dtype: torch.dtype
) -> DecodeGroup:
    reach = torch.arange(width * BLOCK_TOKENS, device=table.device)
    mask = torch.zeros((len(lengths), len(reach)), dtype=dtype, device=table.device)
    mask.masked_fill_(reach >= lengths[:, None], float("-inf"))
    return DecodeGroup(rows, table[:, :width].reshape(-1), width, mask[:, None, None, :])


def chunk_mask(context: int, count: int, like: Tensor) -> Tensor:
    """Causal mask of ``count`` queries after ``context`` keys: [count, context + count]."""
    mask = like.new_full((count, context + count), float("-inf"))
    return mask.triu_(context + 1)
