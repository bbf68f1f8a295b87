"""The rows of a batch as kernels take them: tensors on the device instead of masks.

    decode rows   the last token of each sequence, with drafts followed by its draft nodes; in a
                  recorded step, also runs of prompt tokens (engine/batching/prompt_runs.py)
    prompt rows   chunks of prompts, back to back

``PagedBatcher`` creates them, and ``FusedLayers`` passes them to the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_ROWS = 32
"""Most decode rows of one sequence: ``ancestors`` has a bit for each of them."""

PIECE_TOKENS = 256
"""Tokens of one piece of the context in decode attention. Smaller ones fill a GPU at batch 1,
larger ones write fewer partial results: 256 tokens of fp8 KV are 64 KiB for each KV head."""


@dataclass(frozen=True)
class PieceList:
    """The pieces of all contexts of a batch, one after the other, so that a program knows which one
    to compute. The kernel that makes the inputs of the rows fills it."""

    items: Tensor  # [pieces] int64, sequence << 32 | piece
    starts: Tensor  # [S] int64, first item of each sequence
    total: Tensor  # [1] int64

    @classmethod
    def empty(cls, pieces: int, sequences: int, device: torch.device) -> PieceList:
        """Return an unwritten list for up to ``pieces`` pieces of ``sequences`` sequences."""
        numbers = torch.empty(pieces + sequences + 1, dtype=torch.int64, device=device)
        return cls(*numbers.split([pieces, sequences, 1]))


def rows_bound(rows: int) -> int:
    """Return the least power of two that is not below ``rows``."""
    return 1 << (rows - 1).bit_length()


def piece_count(tokens: int) -> int:
    """Return the number of pieces of ``tokens`` keys."""
    return -(-tokens // PIECE_TOKENS)


@dataclass(frozen=True)
class PagedRows:
    """The decode rows of a batch: S sequences with R rows in total. Row i of a sequence writes its
    KV to slot ``known + i`` of the sequence, and attends to the ``known`` tokens before, to itself,
    and to the rows on its path. A sequence with ``row_count`` 0 is computed by no program."""

    table: Tensor  # [state rows, max_pages] int64, page ids
    state_row: Tensor  # [S] int64, row of ``table``
    known: Tensor  # [S] int64, tokens before the sequence's first row
    first_row: Tensor  # [S] int64
    first_node: Tensor  # [S] int64, first draft node among those of all sequences
    row_count: Tensor  # [S] int64
    depth: Tensor  # [R] int64, 0 for a last token
    ancestors: Tensor  # [R] int64, bit j: attends to row j of its sequence
    owner: Tensor  # [R] int64, sequence of each row
    pieces: PieceList
    most_rows: int  # bound of the rows of a sequence, a power of two: kernels are made for it


@dataclass(frozen=True)
class PromptRows:
    """C prompt chunks of a batch, which are computed together. Each attends to its context and,
    causally, to itself; the KV of all K keys is in the pool, and is gathered for each layer."""

    rows: slice  # of the batch
    starts: Tensor  # [C + 1] int32, first row of each chunk, counted from the first chunk
    key_starts: Tensor  # [C + 1] int32, first key of each chunk
    key_slots: Tensor  # [K] int64, slots of the keys
    most_rows: int  # of a chunk
    most_keys: int  # of a chunk


@dataclass(frozen=True)
class PagedAttention:
    """All rows of a batch; the decode rows come first."""

    decode_rows: int
    decode: PagedRows | None
    prompts: tuple[PromptRows, ...]
