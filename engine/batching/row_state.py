"""Per-row state of running sequences as tensors, so that a step costs no Python per sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.sampling.sampling_table import SamplingTable
from engine.scheduling.sequence import Sequence
from protocol.block_keys import BLOCK_TOKENS


class RowState:
    """The tables of one engine. A row belongs to a sequence from its admission until the scheduler
    frees the row. The batcher, the verifier and the proposers read and update the tables."""

    def __init__(self, rows: int, max_pages: int, sampling: SamplingTable) -> None:
        self.device = device = sampling.device
        self.sampling = sampling
        self.block_table = torch.zeros(  # [rows, max_pages] page ids
            (rows, max_pages), dtype=torch.int64, device=device
        )
        # [rows] tokens known; the KV of all but the last is in the pool
        self.length = torch.zeros(rows, dtype=torch.int64, device=device)
        self.last_token = torch.zeros(rows, dtype=torch.int64, device=device)  # [rows]

    def seat(self, sequence: Sequence) -> None:
        """Update the row of ``sequence``: all of it for a new sequence, else its new pages."""
        row = sequence.row
        if sequence.row_pages < 0:
            self.length[row] = len(sequence.tokens)
            self.last_token[row] = sequence.tokens[-1]
            self.sampling.set_row(sequence)
            sequence.row_pages = 0
        known = sequence.row_pages
        if known < len(sequence.pages):
            fresh = torch.tensor(sequence.pages[known:], device=self.device)
            self.block_table[row, known : len(sequence.pages)] = fresh
            sequence.row_pages = len(sequence.pages)


def kv_slots(pages: Tensor, positions: Tensor) -> Tensor:
    """Return the pool slots [n] of ``positions`` [n], each on its page ``pages`` [n]."""
    return pages * BLOCK_TOKENS + positions % BLOCK_TOKENS
