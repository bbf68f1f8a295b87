"""What the rows of a draft model attend to, for several passes at once.

Every pass adds a token to each of its sequences, on pages that are there before the first one: one
list of pages and one mask for each pass are all that changes. They are laid out on the host, in
numpy, where an operation on few numbers takes a fraction of torch's time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import DecodeGroup, View
from engine.reach import alike
from protocol.blocks import BLOCK_TOKENS

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Rows of one query each, one more token of text in each pass."""

    table: Ints  # [b, pages] page ids of each row's sequence
    lengths: Ints  # [b] tokens attended to in the first pass, itself included, without a window
    passes: int

    def of(self, rows: Ints) -> Rows:
        return Rows(self.table[rows], self.lengths[rows], self.passes)


def reaches(
    rows: Rows, windows: Collection[int], dtype: torch.dtype, device: torch.device
) -> list[dict[int, View]]:
    """Views by window, for each pass."""
    groups = {w: list(_groups(rows, w, dtype, device)) for w in windows}
    count = len(rows.lengths)
    return [
        {w: View(count, tuple(group[i] for group in groups[w]), ()) for w in windows}
        for i in range(rows.passes)
    ]


def _groups(
    rows: Rows, window: int, dtype: torch.dtype, device: torch.device
) -> Iterator[list[DecodeGroup]]:
    """Rows that read about as many pages, together, so that padding stays below half; each for
    every pass."""
    first = np.maximum(rows.lengths - window, 0) // BLOCK_TOKENS if window else rows.lengths * 0
    pages = -(-(rows.lengths + rows.passes - 1) // BLOCK_TOKENS) - first
    for own in alike(pages):
        everybody = len(own) == len(pages)
        at = slice(None) if everybody else torch.from_numpy(own).to(device)
        width = int(pages[own].max())
        yield _group(rows.of(own), at, first[own], width, window, dtype, device)


def _group(
    rows: Rows,
    at: torch.Tensor | slice,
    first: Ints,
    width: int,
    window: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[DecodeGroup]:
    columns = np.minimum(first[:, None] + np.arange(width), rows.table.shape[1] - 1)
    pages = torch.from_numpy(np.take_along_axis(rows.table, columns, 1)).to(device)
    base = first * BLOCK_TOKENS
    slots = base[:, None] + np.arange(width * BLOCK_TOKENS)  # [b, span]
    ends = (rows.lengths + np.arange(rows.passes)[:, None])[:, :, None]  # [passes, b, 1]
    hidden = slots >= ends
    if window:
        hidden |= slots < ends - window
    masks = np.zeros((*hidden.shape[:2], 1, 1, hidden.shape[2]), dtype=np.float32)
    masks[:, :, 0, 0][hidden] = float("-inf")
    own = torch.from_numpy(masks).to(device, dtype)
    start = torch.from_numpy(base).to(device)
    return [DecodeGroup(at, pages, start, mask) for mask in own.unbind()]
