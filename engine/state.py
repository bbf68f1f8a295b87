"""Per-row state of running sequences as tensors, so that a step costs no Python per sequence.

block_table  [rows, max_pages] int64    pages of the sequence in this row
length       [rows] int64               tokens known (KV of all but the last is in the pool)
last_token   [rows] int64
sampling     see engine/sampling/table.py
"""

from __future__ import annotations

import torch

from engine.sampling.table import SamplingTable
from engine.sequence import Sequence


class RowState:
    """The tables. A row belongs to a sequence from its admission until the scheduler frees it."""

    def __init__(self, rows: int, max_pages: int, sampling: SamplingTable) -> None:
        self.device = device = sampling.device
        self.sampling = sampling
        self.block_table = torch.zeros((rows, max_pages), dtype=torch.int64, device=device)
        self.length = torch.zeros(rows, dtype=torch.int64, device=device)
        self.last_token = torch.zeros(rows, dtype=torch.int64, device=device)

    def seat(self, sequence: Sequence) -> None:
        """Bring the row of ``sequence`` up to date: all of it when it is new, else new pages."""
        row = sequence.row
        if sequence.seated_pages < 0:
            self.length[row] = len(sequence.tokens)
            self.last_token[row] = sequence.tokens[-1]
            self.sampling.seat(sequence)
            sequence.seated_pages = 0
        known = sequence.seated_pages
        if known < len(sequence.pages):
            fresh = torch.tensor(sequence.pages[known:], device=self.device)
            self.block_table[row, known : len(sequence.pages)] = fresh
            sequence.seated_pages = len(sequence.pages)
