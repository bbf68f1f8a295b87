"""Per-row state of running sequences as tensors, so that a step costs no Python per sequence.

block_table  [rows, max_pages] int64    pages of the sequence in this row
length       [rows] int64               tokens known (KV of all but the last is in the pool)
last_token   [rows] int64
temperature, top_p [rows] float32       key [rows] int64: see engine/sampler.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.sampler import SamplingRows, row_key
from engine.sequence import Sequence


class RowState:
    """The tables. A row belongs to a sequence from its admission until the scheduler frees it."""

    def __init__(self, rows: int, max_pages: int, device: torch.device) -> None:
        self.device = device
        self.block_table = torch.zeros((rows, max_pages), dtype=torch.int64, device=device)
        self.length = torch.zeros(rows, dtype=torch.int64, device=device)
        self.last_token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(rows, device=device)
        self.top_p = torch.ones(rows, device=device)
        self.key = torch.zeros(rows, dtype=torch.int64, device=device)

    def seat(self, sequence: Sequence) -> None:
        """Bring the row of ``sequence`` up to date: all of it when it is new, else new pages."""
        row = sequence.row
        if sequence.seated_pages < 0:
            sampling = sequence.request.sampling
            self.length[row] = len(sequence.tokens)
            self.last_token[row] = sequence.tokens[-1]
            self.temperature[row] = sampling.temperature
            self.top_p[row] = sampling.top_p
            self.key[row] = row_key(sampling.seed, sampling.choice)
            sequence.seated_pages = 0
        known = sequence.seated_pages
        if known < len(sequence.pages):
            fresh = torch.tensor(sequence.pages[known:], device=self.device)
            self.block_table[row, known : len(sequence.pages)] = fresh
            sequence.seated_pages = len(sequence.pages)

    def sampling(self, rows: Tensor) -> SamplingRows:
        """Parameters to draw the next token of each of ``rows`` [R]."""
        return SamplingRows(
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            keys=self.key[rows],
            positions=self.length[rows],
        )
