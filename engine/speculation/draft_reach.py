"""What the rows of a draft model attend to, for several passes at once.

Every pass adds a token to each of its sequences, on pages that are there before the first one: one
list of pages and one mask for each pass are all that changes, and are made together.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from engine.batch import DecodeGroup, View
from protocol.blocks import BLOCK_TOKENS


def reaches(
    table: Tensor, lengths: Sequence[int], passes: int, windows: Collection[int], dtype: torch.dtype
) -> list[dict[int, View]]:
    """Views by window for each of ``passes`` passes over ``b`` rows, one query each.

    table: [b, max_pages] page ids, of each row's sequence. lengths: [b] tokens that a row attends
    to in the first pass, itself included, without a window; one more in each pass that follows.
    """
    groups = {window: _groups(table, lengths, passes, window, dtype) for window in windows}
    return [
        {window: View(len(lengths), tuple(g[i] for g in groups[window]), ()) for window in windows}
        for i in range(passes)
    ]


def _groups(
    table: Tensor, lengths: Sequence[int], passes: int, window: int, dtype: torch.dtype
) -> list[list[DecodeGroup]]:
    """Rows that read about as many pages, together: padding stays below half. By group, then by
    pass."""
    first = [max(0, n - window) // BLOCK_TOKENS if window else 0 for n in lengths]
    pages = [-(-(n + passes - 1) // BLOCK_TOKENS) - f for n, f in zip(lengths, first, strict=True)]
    if max(pages) <= 2 * min(pages):
        return [_group(table, slice(None), lengths, first, passes, max(pages), window, dtype)]
    kinds: dict[int, list[int]] = {}
    for row, count in enumerate(pages):
        kinds.setdefault((count - 1).bit_length(), []).append(row)
    return [
        _group(
            table[(at := torch.tensor(rows, device=table.device))],
            at,
            [lengths[row] for row in rows],
            [first[row] for row in rows],
            passes,
            max(pages[row] for row in rows),
            window,
            dtype,
        )
        for rows in kinds.values()
    ]


def _group(
    table: Tensor,
    rows: Tensor | slice,
    lengths: Sequence[int],
    first: Sequence[int],
    passes: int,
    width: int,
    window: int,
    dtype: torch.dtype,
) -> list[DecodeGroup]:
    device = table.device
    start = torch.tensor(first, device=device)[:, None]
    columns = start + torch.arange(width, device=device)
    pages = table.gather(1, columns.clamp_(max=table.shape[1] - 1))
    base = start[:, 0] * BLOCK_TOKENS
    at = start * BLOCK_TOKENS + torch.arange(width * BLOCK_TOKENS, device=device)  # [b, span]
    ends = torch.tensor(lengths, device=device) + torch.arange(passes, device=device)[:, None]
    beyond = at >= ends[:, :, None]  # [passes, b, span]
    if window:
        beyond |= at < ends[:, :, None] - window
    masks = torch.zeros(beyond.shape, dtype=dtype, device=device)
    masks.masked_fill_(beyond, float("-inf"))
    return [DecodeGroup(rows, pages, base, mask[:, None, None, :]) for mask in masks.unbind()]
